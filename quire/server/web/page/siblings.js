// Eight requests with one new prompt: one computes it, the others share its blocks.
import { byId, num, plural, setText } from "./dom.js";
import { post } from "./net.js";

const COUNT = 8;
const WORDS = ("river stone lantern harbour winter copper meadow signal paper orchard thunder velvet mirror engine garden " +
  "window silver candle forest bridge ocean letter marble pepper violin shadow market valley ribbon anchor").split(" ");

let model = null;
let maxContext = 0; // 0: the model is not loaded
let running = null; // an AbortController

const show = () => {
  const node = byId("siblings");
  setText(node, running ? "Stop" : "Eight siblings");
  node.disabled = !running && !maxContext;
};

export const useSiblings = (name, engine) => {
  model = name;
  maxContext = engine ? engine.max_model_len : 0;
  show();
};

const say = (text) => {
  byId("siblings-note").hidden = byId("detail").hidden = false;
  byId("detail").hidden = Boolean(text);
  byId("siblings-note").hidden = !text;
  setText(byId("siblings-note"), text);
};

// Random words: no cached prompt starts like this.
const newPrompt = () => {
  const numWords = Math.max(24, Math.min(250, Math.floor(maxContext / 6)));
  const words = Array.from({ length: numWords }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
  return "A story with some of these words, in any order: " + words.join(", ") + ".\n\n";
};

// One HTTP request with eight prompts: the engine runs them as eight, and a browser opens six connections at most.
const send = async () => {
  running = new AbortController();
  show();
  say("");
  const body = {
    model, prompt: Array(COUNT).fill(newPrompt()), max_tokens: Math.min(64, Math.floor(maxContext / 8)), ignore_eos: true, temperature: 1,
  };
  try {
    const { usage } = await (await post("v1/completions", body, running.signal)).json();
    const shared = usage.prompt_tokens_details.cached_tokens;
    say(COUNT + " × " + num(usage.prompt_tokens / COUNT) + " = " + num(usage.prompt_tokens) + " prompt tokens requested: " +
      num(usage.prompt_tokens - shared) + " computed, " + num(shared) + " shared. " + plural(usage.completion_tokens, "token") + " generated.");
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : error.message);
  }
  running = null;
  show();
};

byId("siblings").addEventListener("click", () => (running ? running.abort() : send()));
byId("map").addEventListener("pointerenter", () => say(""));
byId("map").addEventListener("focus", () => say(""));
