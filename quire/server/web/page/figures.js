// Figures with their history: what this page has seen since it was opened, at most LENGTH snapshots.
import { byId, make, num, plural, seconds, setText, short, svg } from "./dom.js";

const LENGTH = 120;
const WIDTH = 120;
const HEIGHT = 28;

// name, label, the number, what the line shows, a note
const FIGURES = [
  ["decode", "decode tokens/s", (now) => short(now.decode_tokens_per_s), (now) => now.decode_tokens_per_s,
    (now) => plural(now.num_running, "sequence") + " running"],
  ["prefill", "prefill tokens/s", (now) => short(now.prefill_tokens_per_s), (now) => now.prefill_tokens_per_s,
    (now) => num(now.num_waiting) + " waiting"],
  ["ttft", "first token", (now) => seconds(now.ttft_s_p50), (now) => now.ttft_s_p50 || 0,
    (now) => (now.num_ttft ? "95 %: " + seconds(now.ttft_s_p95) : "none in 5 minutes")],
  ["hits", "cache hits", (now) => Math.round(now.hit_rate * 100) + " %", (now) => now.hit_rate,
    (now) => short(now.num_hit_tokens) + " of " + short(now.num_queried_tokens) + " tokens"],
  ["preemptions", "preemptions", (now) => num(now.num_preemptions), (now, last) => now.num_preemptions - last.num_preemptions,
    () => "sequences restarted"],
  ["evictions", "evictions", (now) => num(now.num_evictions), (now, last) => now.num_evictions - last.num_evictions,
    () => "cached blocks lost"],
];

const pasts = new Map(); // model -> { last, lines: { name: [numbers] } }

const draw = (line, area, values) => {
  const top = Math.max(...values, 1e-9);
  const step = WIDTH / (LENGTH - 1);
  const left = WIDTH - (values.length - 1) * step;
  const points = values.map((value, i) => (left + i * step).toFixed(1) + "," + (HEIGHT - 1 - (HEIGHT - 4) * (value / top)).toFixed(1));
  line.setAttribute("points", points.join(" "));
  area.setAttribute("points", left.toFixed(1) + "," + HEIGHT + " " + points.join(" ") + " " + WIDTH + "," + HEIGHT);
};

const tile = (name, label) => {
  const chart = svg("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, preserveAspectRatio: "none", "aria-hidden": "true" });
  chart.append(svg("polygon", { class: "area" }), svg("polyline", { class: "line" }));
  return make("div", { class: "card figure", id: "figure-" + name },
    make("h2", {}, label), make("p", { class: "value" }, "–"), make("p", { class: "note" }), chart);
};

export const showFigures = (model, engine) => {
  const box = byId("figures");
  if (!box.children.length) box.append(...FIGURES.map(([name, label]) => tile(name, label)));
  if (!engine) {
    for (const [name] of FIGURES) {
      setText(byId("figure-" + name).querySelector(".value"), "–");
      setText(byId("figure-" + name).querySelector(".note"), "");
      for (const one of byId("figure-" + name).querySelectorAll(".line, .area")) one.setAttribute("points", "");
    }
    return;
  }
  const past = pasts.get(model) || { last: engine, lines: Object.fromEntries(FIGURES.map(([name]) => [name, []])) };
  pasts.set(model, past);
  for (const [name, , text, value, note] of FIGURES) {
    const values = past.lines[name];
    values.push(Math.max(0, value(engine, past.last)));
    if (values.length > LENGTH) values.shift();
    const node = byId("figure-" + name);
    setText(node.querySelector(".value"), text(engine));
    setText(node.querySelector(".note"), note(engine));
    draw(node.querySelector(".line"), node.querySelector(".area"), values);
  }
  past.last = engine;
};
