// Window blocks and recurrent states, by state. A model without them shows nothing.
import { byId, bytes, make, num, plural, setText } from "./dom.js";

const POOLS = [
  ["windows", "window blocks", "keys and values of the layers with a window"],
  ["states", "states", "recurrent states: those of running requests, and snapshots from which prompts continue"],
];
const STATES = [
  ["in_use", "in use"],
  ["cached", "cached"],
  ["free", "free"],
];

const row = (name, label) => make("li", { id: "pool-" + name }, label + ": ",
  ...STATES.map(([state, word]) => make("span", {},
    make("i", { class: "swatch " + state }), word + " ", make("b", { id: "pool-" + name + "-" + state }), " ")));

export const showPools = (engine) => {
  const list = byId("pools");
  if (!list.children.length) list.append(...POOLS.map(([name, label]) => row(name, label)));
  let numShown = 0;
  for (const [name, , what] of POOLS) {
    const pool = engine ? engine[name] : null;
    const node = byId("pool-" + name);
    node.hidden = !pool;
    if (!pool) continue;
    numShown += 1;
    for (const [state] of STATES) setText(byId("pool-" + name + "-" + state), num(pool[state]));
    node.title = what + (pool.num_bytes ? "; " + bytes(pool.num_bytes) : "") + "; " + plural(pool.num_evictions, "eviction");
  }
  list.hidden = !numShown;
};
