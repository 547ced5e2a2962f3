// Who runs and who waits. Pointing at a request, or focusing it, marks its blocks on the map.
import { markRequest } from "./blocks.js";
import { byId, make, num, plural, seconds, setText, short } from "./dom.js";

const NUM_CELLS = 7; // beside the name
const rows = new Map(); // by id and how often it has come: clients may choose ids twice

const makeRow = (id) => {
  const row = make("tr", { tabindex: "0" }, make("th", { scope: "row" }));
  for (let i = 0; i < NUM_CELLS; i += 1) row.append(make("td", i ? { class: "n" } : {}));
  const mark = () => markRequest(id);
  const leave = () => markRequest(null);
  row.addEventListener("pointerenter", mark);
  row.addEventListener("pointerleave", leave);
  row.addEventListener("focus", mark);
  row.addEventListener("blur", leave);
  return row;
};

const fill = (row, one) => {
  row.className = one.is_running ? "running" : "waiting";
  const [name, ...cells] = row.children;
  name.title = one.endpoint + ", key " + one.key;
  setText(name, one.num_samples > 1 ? one.id + " ×" + one.num_samples : one.id);
  const texts = [one.is_running ? one.tier : one.tier + ", waits", num(one.prompt_tokens), num(one.cached_tokens),
    num(one.completion_tokens), short(one.tokens_per_s), num(one.num_blocks), seconds(one.age_s)];
  cells.forEach((cell, i) => setText(cell, texts[i]));
};

const showTiers = (tiers) => {
  const label = tiers.length ? [make("li", {}, "waiting:")] : [];
  byId("tiers").replaceChildren(...label, ...tiers.map((one) => make("li", { class: one.num_waiting ? "some" : "" },
    one.tier + " ", make("b", {}, num(one.num_waiting)), one.num_waiting ? " oldest " + seconds(one.oldest_age_s) : "")));
};

// What to say below the table.
const noteOf = (model) => {
  const { engine } = model;
  if (!engine) return model.num_waiting ? plural(model.num_waiting, "request") + (model.num_waiting === 1 ? " waits" : " wait") + " for the model to load." : "The model is " + model.state + ".";
  if (engine.num_other_requests) return plural(engine.num_other_requests, "request") + " more, of other keys or further back.";
  return engine.requests.length ? "" : "Nothing runs, and nothing waits.";
};

export const showRequests = (model) => {
  const { engine } = model;
  const found = engine ? engine.requests : [];
  const seen = new Map();
  const wanted = found.map((one) => {
    const turn = (seen.get(one.id) || 0) + 1;
    seen.set(one.id, turn);
    const key = one.id + " " + turn;
    const row = rows.get(key) || makeRow(one.id);
    rows.set(key, row);
    fill(row, one);
    return [key, row];
  });
  const body = byId("requests");
  const keys = new Set(wanted.map(([key]) => key));
  for (const [key, row] of rows) {
    if (!keys.has(key)) {
      rows.delete(key);
      if (row.matches(":hover, :focus")) markRequest(null);
    }
  }
  const nodes = wanted.map(([, row]) => row);
  if (nodes.length !== body.children.length || nodes.some((node, i) => body.children[i] !== node)) body.replaceChildren(...nodes);
  setText(byId("requests-note"), noteOf(model));
  showTiers(engine ? engine.tiers : []);
};
