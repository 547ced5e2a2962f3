// The block map: a canvas of cells. It shows the whole pool, or only the blocks in use, one a cell and with the number of
// requests that hold them. Of a pool too large to draw each block it first shows those in use.
import { byId, make, num, plural, setText } from "./dom.js";
import { ask } from "./net.js";

const STATES = [
  ["shared", "shared", "held by two or more requests"],
  ["in_use", "in use", "held by one request"],
  ["pinned", "pinned", "kept by a pin, held by no request"],
  ["cached", "cached", "held by no request; reused by the next prompt that starts the same, until it is evicted"],
  ["free", "free", "empty"],
];
const GAP = 1;
const MIN_PITCH = 3, BLOCK_PITCH = 8, MAX_PITCH = 26; // pixels; a block drawn alone has BLOCK_PITCH or more
const COUNT_PITCH = 13; // from here on the number of holders fits
const FADED = 0.25; // blocks not held by the request that is pointed at
const HINT = "Point at a block, or use the arrow keys, to see its state. Point at a request to mark its blocks.";

const canvas = byId("map");
const detail = byId("detail");
let model = null; // the name of the model shown
let blocks = null; // of the last snapshot
let cells = []; // { first, size, holders, and blocks by state }
let wantsZoom = null; // what the user has chosen; null: nothing yet
let isZoomed = false; // the map shows blocks in use only
let place = { pitch: 10, columns: 1 };
let pointed = -1; // the cell that is looked at; -1: none
let marked = null; // the id of a request
let held = []; // ranges of blocks of it: [first, count]

const poolCells = (found) => {
  const all = [];
  for (const [count, cached, in_use, shared, pinned] of found.cells) {
    for (let i = 0; i < count; i += 1) {
      const first = all.length * found.blocks_per_cell + 1;
      const size = Math.min(found.blocks_per_cell, found.num_blocks - first + 1);
      all.push({ first, size, holders: 0, cached, in_use, shared, pinned, free: size - cached - in_use - shared - pinned });
    }
  }
  return all;
};

const heldCells = (found) => found.held.flatMap(([first, count, holders]) => Array.from({ length: count }, (_, i) => ({
  first: first + i, size: 1, holders, cached: 0, free: 0,
  in_use: Number(holders === 1), shared: Number(holders > 1), pinned: Number(holders === 0),
})));

const space = () => ({ width: canvas.parentElement.clientWidth, height: canvas.parentElement.clientHeight });

// The largest pitch with which so many cells fit.
const pitchFor = (count) => {
  const { width, height } = space();
  let pitch = Math.min(MAX_PITCH, Math.max(MIN_PITCH, Math.ceil(Math.sqrt((width * height) / Math.max(count, 1)))));
  while (pitch > MIN_PITCH && Math.ceil(count / Math.max(1, Math.floor(width / pitch))) * pitch > height) pitch -= 1;
  return pitch;
};

const expand = () => {
  if (!blocks) {
    cells = [];
    byId("zoom").hidden = true;
    return;
  }
  const isLarge = blocks.blocks_per_cell > 1 || pitchFor(blocks.num_blocks) < BLOCK_PITCH;
  isZoomed = wantsZoom === null ? isLarge : wantsZoom;
  cells = isZoomed ? heldCells(blocks) : poolCells(blocks);
  byId("zoom").hidden = false;
  setText(byId("zoom"), isZoomed ? "Whole pool" : "In use only");
};

const layOut = () => {
  const pitch = pitchFor(cells.length);
  const columns = Math.max(1, Math.floor(space().width / pitch));
  const height = Math.max(1, Math.ceil(cells.length / columns)) * pitch;
  const scale = window.devicePixelRatio || 1;
  place = { pitch, columns };
  canvas.style.height = height + "px";
  canvas.style.width = columns * pitch + "px";
  canvas.width = Math.round(columns * pitch * scale);
  canvas.height = Math.round(height * scale);
  return scale;
};

const isHeld = ({ first, size }) => held.some(([start, count]) => start < first + size && first < start + count);

const draw = () => {
  const scale = layOut();
  const paint = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const colour = Object.fromEntries(STATES.map(([state]) => [state, style.getPropertyValue("--" + state.replace("_", "-"))]));
  const { pitch, columns } = place;
  const gap = pitch > 4 ? GAP : 0.5;
  const side = pitch - gap;
  paint.scale(scale, scale);
  paint.textAlign = "center";
  paint.textBaseline = "middle";
  paint.font = "600 " + Math.round(pitch * 0.58) + "px system-ui, sans-serif";
  cells.forEach((cell, index) => {
    const x = (index % columns) * pitch, top = Math.floor(index / columns) * pitch;
    paint.globalAlpha = marked === null || isHeld(cell) ? 1 : FADED;
    let y = top + side; // filled from below
    for (const [state] of STATES) {
      const height = (side * cell[state]) / cell.size;
      if (!height) continue;
      paint.fillStyle = colour[state];
      paint.fillRect(x, y - height, side, height);
      y -= height;
    }
    if (cell.holders > 1 && pitch >= COUNT_PITCH) {
      paint.fillStyle = style.getPropertyValue("--on-shared");
      paint.fillText(cell.holders > 99 ? "+" : String(cell.holders), x + side / 2, top + side / 2 + 0.5);
    }
  });
  paint.globalAlpha = 1;
  if (pointed >= 0 && pointed < cells.length) {
    paint.strokeStyle = style.getPropertyValue("--ink");
    paint.lineWidth = 2;
    paint.strokeRect((pointed % columns) * pitch, Math.floor(pointed / columns) * pitch, side, side);
  }
};

const describe = (cell) => {
  const last = cell.first + cell.size - 1;
  const where = cell.size === 1 ? "Block " + num(cell.first) : "Blocks " + num(cell.first) + " to " + num(last);
  const what = STATES.filter(([state]) => cell[state])
    .map(([state, word]) => (cell.size === 1 ? word : num(cell[state]) + " " + word));
  const runs = blocks.held.filter(([first, count]) => first <= last && cell.first < first + count);
  const holders = Math.max(0, ...runs.map(([, , references]) => references));
  const most = cell.size === 1 ? "" : " at most";
  setText(detail, where + ": " + what.join(", ") + (holders ? " · " + plural(holders, "reference") + most : ""));
};

const point = (cell) => {
  if (cell === pointed) return;
  pointed = cell;
  draw();
  if (cell < 0) setText(detail, HINT);
  else describe(cells[cell]);
};

const findHeld = async () => {
  const id = marked;
  let ranges = [];
  try {
    ranges = (await (await ask("v1/watch/held?" + new URLSearchParams({ model, id }))).json()).ranges;
  } catch {
    // it has just ended and holds nothing
  }
  if (id !== marked || !blocks) return;
  held = ranges;
  draw();
  if (pointed < 0) setText(detail, id + " holds " + plural(ranges.reduce((sum, [, count]) => sum + count, 0), "block") + ".");
};

// Fades the blocks that this request does not hold; null: fades none.
export const markRequest = (id) => {
  marked = id;
  held = [];
  if (id === null) {
    draw();
    setText(detail, HINT);
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

const makeLegend = () => {
  byId("pool").append(...STATES.map(([state]) => make("i", { class: "swatch " + state })));
  byId("legend").append(...STATES.map(([state, word, what]) =>
    make("li", { title: what }, make("i", { class: "swatch " + state }), word + " ", make("b", { id: "count-" + state }))));
};

const showTotals = (found) => {
  if (!byId("legend").children.length) makeLegend();
  STATES.forEach(([state], i) => {
    setText(byId("count-" + state), found ? num(found.counts[state]) : "–");
    byId("pool").children[i].style.flexGrow = String(found ? found.counts[state] : state === "free" ? 1 : 0);
  });
  const label = found ? STATES.map(([state, word]) => num(found.counts[state]) + " " + word).join(", ") : "no blocks";
  byId("pool").setAttribute("aria-label", "Pool: " + label);
  canvas.setAttribute("aria-label", "Block map: " + label);
};

const noteOf = (found) => {
  const numHeld = found.counts.in_use + found.counts.shared + found.counts.pinned;
  const parts = [];
  if (isZoomed) {
    parts.push(num(numHeld) + " of " + plural(found.num_blocks, "block") + " in use");
    if (cells.length < numHeld) parts.push(num(cells.length) + " shared ones shown");
  } else {
    parts.push(plural(found.num_blocks, "block") + " of " + found.block_size + " tokens");
    if (found.blocks_per_cell > 1) parts.push(plural(found.blocks_per_cell, "block") + " a cell");
  }
  if (found.max_holders > 1) parts.push("shared by up to " + num(found.max_holders));
  if (found.num_pending) parts.push(num(found.num_pending) + " not read yet");
  return parts.join(" · ");
};

const update = () => {
  const at = pointed >= 0 && pointed < cells.length ? cells[pointed].first : 0;
  expand();
  pointed = at ? cells.findIndex((cell) => cell.first === at) : -1; // blocks in use come and go
  draw();
  const isEmpty = !cells.length;
  canvas.hidden = isEmpty;
  byId("map-empty").hidden = !isEmpty;
  setText(byId("map-empty"), blocks ? "No request holds a block. Send a message and watch." : "No blocks: the model is not loaded.");
  setText(byId("map-note"), blocks ? noteOf(blocks) : "");
};

export const showBlocks = (name, found) => {
  if (model !== name) pointed = -1;
  model = name;
  blocks = found;
  showTotals(found);
  update();
  if (pointed >= 0) describe(cells[pointed]);
  else if (marked !== null) findHeld();
  else setText(detail, found ? HINT : "");
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
byId("zoom").addEventListener("click", () => {
  wantsZoom = !isZoomed;
  pointed = -1;
  update();
});
addEventListener("resize", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
