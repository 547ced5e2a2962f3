// Running and waiting requests, and those that ended lately with their cache result. Pointing at a running request,
// or focusing it, marks its blocks on the map.
import { markRequest } from "./blocks.js";
import { button, byId, make, meter, num, percent, plural, seconds, setChildren, setText, short } from "./dom.js";
import { post } from "./net.js";

const NUM_CELLS = 7; // beside the id and the button
// Why the match ended: in short, and in full.
const WHY = {
  complete: ["all reused", "All of it was reused, except the last token, which is always computed."],
  diverged: ["prompt differs", "A cached prompt starts the same and then differs."],
  evicted: ["evicted", "The rest was cached, and was evicted for newer content."],
  too_short: ["part of a block", "The rest does not fill a block."],
  no_state: ["no state", "Keys and values are cached further, but the last state of the recurrent layers is here."],
  no_window: ["no window", "Keys and values are cached further, but not those of the layers with a window."],
  in_flight: ["being computed", "Another request was computing the rest at that time."],
  not_found: ["not cached yet", "No cached prompt continues like this one."],
  off: ["cache off", "The cache was off, or the request needed every prompt token computed."],
};
const running = new Map(); // rows by id and how often it occurs: clients may use an id twice
const finished = new Map(); // rows by id and time

const cancel = async (id, node) => {
  node.disabled = true;
  setText(node, "…");
  try {
    await post("v1/requests/" + encodeURIComponent(id) + "/cancel", {});
  } catch (error) {
    node.disabled = false;
    setText(node, "×");
    byId("requests-note").hidden = false;
    setText(byId("requests-note"), error.message);
    byId("requests-note").dataset.until = String(Date.now() + 5000);
  }
};

const makeRow = (id) => {
  const row = make("tr", { tabindex: "0" }, make("th", { scope: "row" }));
  for (let i = 0; i < NUM_CELLS; i += 1) row.append(make("td", i ? { class: "n" } : {}));
  const stop = button("×", { class: "remove", title: "Cancel this request" }, () => cancel(id, stop));
  stop.setAttribute("aria-label", "Cancel " + id);
  row.append(make("td", {}, stop));
  row.addEventListener("pointerenter", () => markRequest(id));
  row.addEventListener("pointerleave", () => markRequest(null));
  row.addEventListener("focus", () => markRequest(id));
  row.addEventListener("blur", () => markRequest(null));
  return row;
};

const fill = (row, one) => {
  row.className = one.is_running ? "running" : "waiting";
  const [name, ...cells] = row.children;
  name.title = one.id + ", " + one.endpoint + ", key " + one.key;
  setText(name, one.num_samples > 1 ? one.id + " ×" + one.num_samples : one.id);
  const texts = [one.is_running ? one.tier : one.tier + ", waits", num(one.prompt_tokens), num(one.cached_tokens),
    num(one.completion_tokens), short(one.tokens_per_s), num(one.num_blocks), seconds(one.age_s)];
  texts.forEach((text, i) => setText(cells[i], text));
};

const makeFinished = (one) => {
  const time = new Date(one.finished_at * 1000).toLocaleTimeString("en", { hour12: false });
  const share = make("td", { class: "hit" }, meter(one.cached_tokens / Math.max(1, one.prompt_tokens), "Share of the prompt from the cache"),
    make("span", {}, percent(one.cached_tokens, one.prompt_tokens)));
  share.title = num(one.cached_tokens) + " of " + num(one.prompt_tokens) + " prompt tokens";
  const [why, explanation] = WHY[one.cache_reason] || ["did not run", "It ended before it ran."];
  const end = one.error && one.finish === "error" ? one.error : one.finish;
  const row = make("tr", { class: one.finish === "error" ? "failed" : "" }, make("th", { scope: "row" }, time),
    make("td", { class: "n" }, num(one.prompt_tokens)), share, make("td", { class: "why" }, why),
    make("td", { class: "n" }, num(one.completion_tokens)), make("td", { class: "n" }, seconds(one.ttft_s)), make("td", {}, end));
  const samples = one.num_samples > 1 ? ", " + one.num_samples + " samples" : "";
  row.title = one.id + ", " + one.endpoint + ", key " + one.key + ", " + one.tier + samples + ", " + seconds(one.duration_s);
  row.children[3].title = explanation;
  return row;
};

// Rows for these, old ones kept; those no longer wanted are dropped.
const keep = (rows, wanted) => {
  const keys = new Set(wanted.map(([key]) => key));
  for (const [key, row] of rows) {
    if (keys.has(key)) continue;
    rows.delete(key);
    if (row.matches(":hover, :focus")) markRequest(null);
  }
  return wanted.map(([, row]) => row);
};

const showTiers = (tiers) => {
  const label = tiers.length ? [make("li", {}, "waiting:")] : [];
  byId("tiers").replaceChildren(...label, ...tiers.map((one) => make("li", { class: one.num_waiting ? "some" : "" },
    one.tier + " ", make("b", {}, num(one.num_waiting)), one.num_waiting ? ", oldest " + seconds(one.oldest_age_s) : "")));
};

const noteOf = ({ engine, num_waiting: numWaiting }) => {
  if (!engine && numWaiting) return plural(numWaiting, "request") + (numWaiting === 1 ? " waits" : " wait") + " for the model to load.";
  if (!engine) return "The model is not loaded.";
  if (engine.num_other_requests) return plural(engine.num_other_requests, "more request") + " of other keys or not shown.";
  return engine.requests.length ? "" : "No request is running or waiting.";
};

const showRunning = (found) => {
  const seen = new Map();
  const wanted = found.map((one) => {
    const turn = (seen.get(one.id) || 0) + 1;
    seen.set(one.id, turn);
    const key = one.id + " " + turn;
    const row = running.get(key) || makeRow(one.id);
    running.set(key, row);
    fill(row, one);
    return [key, row];
  });
  setChildren(byId("requests"), keep(running, wanted));
  byId("running").hidden = !found.length;
};

const showFinished = (found) => {
  const wanted = found.map((one) => {
    const key = one.id + " " + one.finished_at;
    const row = finished.get(key) || makeFinished(one);
    finished.set(key, row);
    return [key, row];
  });
  setChildren(byId("finished"), keep(finished, wanted));
  byId("recent").hidden = !found.length;
};

export const showRequests = (model) => {
  const { engine } = model;
  showRunning(engine ? engine.requests : []);
  showFinished(engine ? engine.finished : []);
  const note = byId("requests-note");
  if (!(Number(note.dataset.until) > Date.now())) {
    setText(note, noteOf(model));
    note.hidden = !note.textContent;
  }
  showTiers(engine ? engine.tiers : []);
};
