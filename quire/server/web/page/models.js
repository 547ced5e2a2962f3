// The models of the server and the memory they hold; an admin can load, unload and pin them.
import { button, byId, bytes, make, meter, percent, plural, setChildren, setShare, setText } from "./dom.js";
import { post } from "./net.js";

const rows = new Map(); // by name

const order = (row, what, name) => async () => {
  row.busy = true;
  setText(row.note, what + " …");
  try {
    await post("v1/models/" + what, { model: name });
    setText(row.note, "");
  } catch (error) {
    setText(row.note, error.message);
  }
  row.busy = false;
};

const makeRow = (name) => {
  const row = {
    node: make("li", {}), state: make("span", { class: "badge" }), facts: make("p", { class: "note" }), meter: meter(0, "Loading progress"),
    replicas: make("ul", { class: "replicas", "aria-label": "Replicas of " + name }),
    note: make("p", { class: "note", role: "status" }), buttons: make("div", { class: "row" }), what: {}, busy: false,
  };
  for (const [what, text] of [["load", "Load"], ["unload", "Unload"], ["pin", "Pin"], ["unpin", "Unpin"]]) {
    row.what[what] = button(text, { class: "small" }, order(row, what, name));
    row.what[what].setAttribute("aria-label", text + " " + name);
    row.buttons.append(row.what[what]);
  }
  row.node.append(make("div", { class: "line" }, make("b", {}, name), row.state, row.buttons), row.meter, row.facts, row.replicas, row.note);
  return row;
};

const factsOf = (one) => {
  const facts = [];
  if (one.engine) {
    facts.push(one.engine.backend + " on " + one.engine.device + ", " + one.engine.dtype);
    facts.push("weights " + bytes(one.engine.weight_bytes) + ", KV " + bytes(one.engine.kv_bytes));
    facts.push("context " + one.engine.max_model_len.toLocaleString("en"));
  } else if (one.num_bytes && one.state !== "ready") {
    facts.push((one.state === "loading" ? "about " : "weights ") + bytes(one.num_bytes));
  }
  if (one.aliases.length) facts.push("aliases " + one.aliases.join(", "));
  if (one.num_waiting) facts.push(plural(one.num_waiting, "waiting request"));
  if (one.engine && one.engine.num_restarts) facts.push(plural(one.engine.num_restarts, "restart"));
  if (one.error && one.state === "failed") facts.push(one.error);
  return facts;
};

// Of a cluster: where requests go, and what each replica reuses.
const replicaText = (one) => one.name + ": " + plural(one.num_requests, "request") + ", " + one.num_routed.toLocaleString("en") + " so far, "
  + percent(one.num_hit_tokens, one.num_queried_tokens) + " of prompt tokens reused, " + percent(one.num_blocks - one.num_free_blocks, one.num_blocks)
  + " of blocks held" + (one.is_accepting ? "" : ", stopping");

const showReplicas = (row, replicas) => {
  row.replicas.hidden = !replicas.length;
  while (row.replicas.children.length > replicas.length) row.replicas.lastChild.remove();
  replicas.forEach((one, i) => {
    if (!row.replicas.children[i]) row.replicas.append(make("li", { class: "note" }));
    setText(row.replicas.children[i], replicaText(one));
  });
};

const showModel = (one, isAdmin) => {
  const row = rows.get(one.name) || makeRow(one.name);
  rows.set(one.name, row);
  setText(row.state, (one.state === "unloaded" ? "not loaded" : one.state) + (one.is_pinned ? ", pinned" : ""));
  row.state.className = "badge " + one.state;
  row.meter.hidden = one.progress === null || one.state !== "loading";
  setShare(row.meter, one.progress);
  setText(row.facts, factsOf(one).join(" · "));
  showReplicas(row, (one.engine && one.engine.replicas) || []);
  row.buttons.hidden = !isAdmin;
  const isIn = one.state === "ready" || one.state === "loading";
  row.what.load.hidden = isIn;
  row.what.unload.hidden = !isIn;
  row.what.pin.hidden = one.is_pinned;
  row.what.unpin.hidden = !one.is_pinned;
  for (const node of Object.values(row.what)) node.disabled = row.busy;
  return row.node;
};

export const showModels = (snapshot, onAdmin) => {
  setChildren(byId("models"), snapshot.models.map((one) => showModel(one, snapshot.is_admin)));
  const budget = snapshot.budget_bytes === null ? "" : " of " + bytes(snapshot.budget_bytes) + " for all models";
  setText(byId("memory"), bytes(snapshot.held_bytes) + " in use" + budget);
  const note = byId("models-note");
  note.hidden = snapshot.is_admin;
  if (!note.children.length) {
    note.append("An admin key is needed to load and unload models. ", button("Use an admin key", { class: "small" }, () => note.onAdmin()));
  }
  note.onAdmin = onAdmin;
};
