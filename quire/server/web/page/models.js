// The models of the server, what they hold, and for an admin to load, unload and pin them.
import { post } from "./net.js";
import { byId, bytes, make, plural, setText } from "./dom.js";

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
    node: make("li", {}), state: make("span", { class: "badge" }), facts: make("p", { class: "note" }),
    meter: make("div", { class: "share", role: "img", "aria-label": "loaded" }, make("i", {})),
    note: make("p", { class: "note", role: "status" }), buttons: make("div", { class: "row" }), what: {}, busy: false,
  };
  for (const [what, text] of [["load", "Load"], ["unload", "Unload"], ["pin", "Pin"], ["unpin", "Unpin"]]) {
    const button = make("button", { type: "button", "aria-label": text + " " + name }, text);
    button.addEventListener("click", order(row, what, name));
    row.what[what] = button;
    row.buttons.append(button);
  }
  row.node.append(make("div", { class: "line" }, make("b", {}, name), row.state, row.buttons), row.meter, row.facts, row.note);
  return row;
};

const showModel = (one, isAdmin) => {
  const row = rows.get(one.name) || makeRow(one.name);
  rows.set(one.name, row);
  setText(row.state, one.state + (one.is_pinned ? ", pinned" : ""));
  row.state.className = "badge " + one.state;
  row.meter.hidden = one.progress === null || one.state !== "loading";
  row.meter.firstChild.style.width = 100 * (one.progress || 0) + "%";
  const facts = [];
  if (one.engine) {
    facts.push(one.engine.backend + " on " + one.engine.device + ", " + one.engine.dtype);
    facts.push("weights " + bytes(one.engine.weight_bytes) + ", KV " + bytes(one.engine.kv_bytes));
    facts.push("context " + one.engine.max_model_len.toLocaleString("en"));
  } else if (one.num_bytes && one.state !== "ready") {
    facts.push((one.state === "loading" ? "about " : "weights ") + bytes(one.num_bytes));
  }
  if (one.aliases.length) facts.push("also called " + one.aliases.join(", "));
  if (one.num_waiting) facts.push(plural(one.num_waiting, "request") + (one.num_waiting === 1 ? " waits for it" : " wait for it"));
  if (one.engine && one.engine.num_restarts) facts.push(plural(one.engine.num_restarts, "restart"));
  setText(row.facts, facts.join(" · "));
  row.buttons.hidden = !isAdmin;
  const isIn = one.state === "ready" || one.state === "loading";
  row.what.load.hidden = isIn;
  row.what.unload.hidden = !isIn;
  row.what.pin.hidden = one.is_pinned;
  row.what.unpin.hidden = !one.is_pinned;
  for (const button of Object.values(row.what)) button.disabled = row.busy;
  return row.node;
};

export const showModels = (snapshot) => {
  const nodes = snapshot.models.map((one) => showModel(one, snapshot.is_admin));
  const list = byId("models");
  if (nodes.length !== list.children.length || nodes.some((node, i) => list.children[i] !== node)) list.replaceChildren(...nodes);
  const budget = snapshot.budget_bytes === null ? "" : " of " + bytes(snapshot.budget_bytes) + " for all models";
  setText(byId("memory"), bytes(snapshot.held_bytes) + " held" + budget);
};
