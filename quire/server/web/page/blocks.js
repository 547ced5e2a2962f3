// The block map: a canvas of cells. A cell is a block, or neighbours together where there are too many to draw.
import { ask } from "./net.js";
import { byId, make, num, plural, setText } from "./dom.js";

const STATES = [
  ["in_use", "held by one", "in use by one request"],
  ["shared", "shared", "in use by two requests or more"],
  ["pinned", "pinned", "kept by a pin, held by no request"],
  ["cached", "cached", "held by nobody, findable until taken"],
  ["free", "free", "contents worthless"],
];
const GAP = 1;
const FADED = 0.25; // what is not held by the request that is pointed at
const LOOK_MS = 150; // between two questions about what is under the pointer

const canvas = byId("map");
const detail = byId("detail");
let model = null; // the name of the model shown
let blocks = null; // as the last snapshot has them
let cells = []; // of each: blocks by state
let place = { pitch: 10, columns: 1 };
let pointed = -1; // the cell that is looked at; -1: none
let timer = 0;
let asking = false;
let marked = null; // the id of a request
let held = new Set(); // cells with blocks of it

const expand = (found) => {
  const all = [];
  for (const [count, cached, in_use, shared, pinned] of found.cells) {
    for (let i = 0; i < count; i += 1) {
      const first = all.length * found.blocks_per_cell;
      const size = Math.min(found.blocks_per_cell, found.num_blocks - first);
      all.push({ size, cached, in_use, shared, pinned, free: size - cached - in_use - shared - pinned });
    }
  }
  return all;
};

const colours = () => {
  const style = getComputedStyle(canvas);
  return Object.fromEntries(STATES.map(([state]) => [state, style.getPropertyValue("--" + state.replace("_", "-"))]));
};

const layOut = () => {
  const width = canvas.parentElement.clientWidth;
  const wanted = Math.sqrt((width * Math.max(180, Math.min(300, width * 0.4))) / Math.max(cells.length, 1));
  const pitch = Math.max(5, Math.min(20, Math.floor(wanted)));
  const columns = Math.max(1, Math.floor(width / pitch));
  const height = Math.max(1, Math.ceil(cells.length / columns)) * pitch;
  const scale = window.devicePixelRatio || 1;
  place = { pitch, columns };
  canvas.style.height = height + "px";
  canvas.style.width = columns * pitch + "px";
  canvas.width = Math.round(columns * pitch * scale);
  canvas.height = Math.round(height * scale);
  return scale;
};

const draw = () => {
  const scale = layOut();
  const paint = canvas.getContext("2d");
  const colour = colours();
  const { pitch, columns } = place;
  paint.scale(scale, scale);
  const side = pitch - GAP;
  cells.forEach((cell, index) => {
    const x = (index % columns) * pitch;
    paint.globalAlpha = marked === null || held.has(index) ? 1 : FADED;
    let y = Math.floor(index / columns) * pitch + side; // filled from below
    for (const [state] of STATES) {
      const height = (side * cell[state]) / cell.size;
      if (!height) continue;
      paint.fillStyle = colour[state];
      paint.fillRect(x, y - height, side, height);
      y -= height;
    }
  });
  paint.globalAlpha = 1;
  if (pointed >= 0 && pointed < cells.length) {
    paint.strokeStyle = getComputedStyle(canvas).getPropertyValue("--ink");
    paint.lineWidth = 2;
    paint.strokeRect((pointed % columns) * pitch, Math.floor(pointed / columns) * pitch, side, side);
  }
};

const say = (found) => {
  const last = found.first + found.num_blocks - 1;
  const where = found.num_blocks === 1 ? "Block " + num(found.first) : "Blocks " + num(found.first) + " to " + num(last);
  const what = STATES.filter(([state]) => found.counts[state])
    .map(([state, word]) => (found.num_blocks === 1 ? word : num(found.counts[state]) + " " + word));
  const parts = [what.join(", "), plural(found.num_tokens, "token")];
  const holders = found.holders.map((one) => (one.num_blocks === 1 ? one.id : one.id + " ×" + num(one.num_blocks)));
  if (found.num_other_holders) holders.push(plural(found.num_other_holders, "request") + " of other keys");
  if (found.max_holders) parts.push(plural(found.max_holders, "reference") + (found.num_blocks === 1 ? "" : " at most"));
  if (found.num_pins) parts.push(plural(found.num_pins, "pin"));
  setText(detail, where + ": " + parts.join(" · ") + (holders.length ? ". Held by " + holders.join(", ") : ""));
};

const look = async () => {
  if (pointed < 0 || asking || !blocks) return;
  asking = true;
  const cell = pointed;
  const query = new URLSearchParams({
    model, first: String(cell * blocks.blocks_per_cell + 1), count: String(cells[cell].size),
  });
  try {
    const answer = await ask("v1/watch/blocks?" + query);
    const found = await answer.json();
    if (cell === pointed) say(found);
  } catch (error) {
    setText(detail, error.message);
  } finally {
    asking = false;
    if (cell !== pointed && pointed >= 0) look();
  }
};

const point = (cell) => {
  if (cell === pointed) return;
  pointed = cell;
  draw();
  clearTimeout(timer);
  if (cell < 0) setText(detail, hint());
  else timer = setTimeout(look, LOOK_MS);
};

const findHeld = async () => {
  const id = marked;
  let ranges = [];
  try {
    ranges = (await (await ask("v1/watch/held?" + new URLSearchParams({ model, id }))).json()).ranges;
  } catch {
    // it has just ended, and holds nothing
  }
  if (id !== marked || !blocks) return;
  held = new Set();
  let count = 0;
  for (const [first, size] of ranges) {
    count += size;
    for (let block = first; block < first + size; block += 1) held.add(Math.floor((block - 1) / blocks.blocks_per_cell));
  }
  draw();
  if (pointed < 0) setText(detail, id + " holds " + plural(count, "block") + ".");
};

// Show the blocks of this request and fade the others; null: show all alike.
export const markRequest = (id) => {
  marked = id;
  held = new Set();
  if (id === null) {
    draw();
    setText(detail, hint());
  } else {
    findHeld();
  }
};

const cellAt = (event) => {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / place.pitch);
  const cell = Math.floor((event.clientY - box.top) / place.pitch) * place.columns + column;
  return column >= 0 && column < place.columns && cell >= 0 && cell < cells.length ? cell : -1;
};

const hint = () => "Point at a block, or walk with the arrow keys, to see who holds it.";

export const showBlocks = (name, found) => {
  if (model !== name) pointed = -1;
  model = name;
  blocks = found;
  cells = found ? expand(found) : [];
  if (pointed >= cells.length) pointed = -1;
  draw();
  const legend = byId("legend");
  if (!legend.children.length) {
    for (const [state, word, what] of STATES) {
      const count = make("b", { id: "count-" + state });
      legend.append(make("li", { title: what }, make("i", { class: "swatch " + state }), word + " ", count));
    }
  }
  for (const [state] of STATES) setText(byId("count-" + state), found ? num(found.counts[state]) : "–");
  if (!found) return setText(byId("map-note"), "no map yet");
  const size = found.blocks_per_cell === 1 ? "one cell a block" : plural(found.blocks_per_cell, "block") + " a cell";
  const most = found.max_holders > 1 ? " · up to " + found.max_holders + " hold one" : "";
  const pending = found.num_pending ? " · " + num(found.num_pending) + " not looked at yet" : "";
  setText(byId("map-note"), plural(found.num_blocks, "block") + " of " + found.block_size + " tokens · " + size + most + pending);
  const label = STATES.map(([state, word]) => num(found.counts[state]) + " " + word).join(", ");
  canvas.setAttribute("aria-label", "Block map: " + label);
  if (pointed >= 0) look();
  else if (marked !== null) findHeld();
  else setText(detail, hint());
};

canvas.addEventListener("pointermove", (event) => point(cellAt(event)));
canvas.addEventListener("pointerdown", (event) => point(cellAt(event)));
canvas.addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse") point(-1);
});
canvas.addEventListener("blur", () => point(-1));
canvas.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: place.columns, ArrowUp: -place.columns };
  if (event.key === "Escape") point(-1);
  if (!(event.key in steps) || !cells.length) return;
  event.preventDefault();
  point(Math.max(0, Math.min(cells.length - 1, pointed < 0 ? 0 : pointed + steps[event.key])));
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
