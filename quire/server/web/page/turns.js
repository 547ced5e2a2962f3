// The turns of a conversation as nodes: a question, or an answer with its actions and what the cache gave it.
import { button, copyButton, make, meter, plural, setText } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const MIN_RENDER_MS = 60; // between two renderings of a growing answer

export const questionNode = (turn) => make("article", { class: "turn user" }, make("p", { class: "words" }, turn.content));

const whyCut = (turn) => {
  const isFull = turn.usage && turn.max_tokens && turn.usage.completion_tokens < turn.max_tokens;
  const limit = turn.max_tokens ? "the limit of " + plural(turn.max_tokens, "token") : "the server's limit";
  return "Cut off at " + (isFull ? "the end of the model's context" : limit) + (turn.content ? "." : ", before the answer began.");
};

const notesOf = (turn) => {
  const notes = [];
  if (turn.refusal) notes.push("The model refused: " + turn.refusal);
  if (turn.calls && turn.calls.length) notes.push("The model called " + turn.calls.join(", ") + ". This page has no tools, so the call has no effect.");
  if (turn.reason === "length") notes.push(whyCut(turn));
  if (turn.is_stopped) notes.push("Stopped.");
  return notes;
};

const factsNode = (turn) => {
  const facts = make("div", { class: "facts" });
  const { cache } = turn;
  if (cache) {
    facts.append(meter(cache.matched_tokens / cache.prompt_tokens, "Share of the prompt from the cache"));
    facts.append(make("p", { class: "cache" }, cache.message));
  }
  return facts;
};

const paceNode = ({ usage, took_s: tookS, model }) => {
  const rate = tookS > 0 ? " · " + (usage.completion_tokens / tookS).toFixed(1) + " tokens/s" : "";
  const node = make("p", { class: "note pace" }, plural(usage.completion_tokens, "token") + " in " + tookS.toFixed(1) + " s" + rate);
  node.title = "Answered by " + model;
  return node;
};

// An answer that may still grow. `onRegenerate` is null for all but the last.
export class AnswerNode {
  constructor(turn, onRegenerate) {
    this.turn = turn;
    this.words = make("div", { class: "words" });
    this.thoughts = make("p", { class: "thoughts", "aria-label": "Reasoning" });
    this.node = make("article", { class: "turn assistant" }, this.words);
    this.footer = null;
    this.timer = 0;
    this.pause_ms = MIN_RENDER_MS;
    this.onRegenerate = onRegenerate;
    this.render();
  }

  render() {
    const { turn } = this;
    const began = performance.now();
    if (turn.thought && !this.thoughts.isConnected) this.words.before(this.thoughts);
    setText(this.thoughts, turn.thought || "");
    const nodes = document.createDocumentFragment();
    for (const node of renderMarkdown(turn.content)) nodes.append(node); // one by one: there may be a hundred thousand
    this.words.replaceChildren(nodes);
    this.pause_ms = Math.max(MIN_RENDER_MS, 4 * (performance.now() - began));
  }

  // Renders now and then while the answer grows: each rendering costs as much as the answer is long.
  grow(after) {
    this.node.setAttribute("aria-busy", "true");
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.render();
      after();
    }, this.pause_ms);
  }

  finish() {
    const { turn } = this;
    clearTimeout(this.timer);
    this.timer = 0;
    this.node.setAttribute("aria-busy", "false");
    this.render();
    this.words.hidden = !turn.content;
    const actions = make("div", { class: "actions" });
    if (turn.usage) actions.append(paceNode(turn));
    if (turn.content) actions.append(copyButton("Copy the answer", () => turn.content));
    if (this.onRegenerate) actions.append(button("Regenerate", { class: "small regenerate" }, this.onRegenerate));
    const notes = notesOf(turn).map((text) => make("p", { class: "note" }, text));
    if (turn.error) notes.push(make("p", { class: "bad" }, turn.error));
    this.node.append(...notes, factsNode(turn), actions);
  }
}
