// A small chat, and eight siblings: what each answer cost, and what the cache gave it.
import { events, post } from "./net.js";
import { byId, make, num, plural, setText } from "./dom.js";

const MAX_TOKENS = 512; // of an answer: nobody should have to wait for one that has lost its way
const SIBLINGS = 8;
const WORDS = ("river stone lantern harbour winter copper meadow signal paper orchard thunder velvet mirror engine garden " +
  "window silver candle forest bridge ocean letter marble pepper violin shadow market valley ribbon anchor").split(" ");

const log = byId("log");
let model = null;
let maxContext = 2048;
let turns = [];
let under = null; // an AbortController while something runs

export const useModel = (name, context) => {
  if (model !== null && model !== name) forget();
  model = name;
  if (context) maxContext = context;
};

const toEnd = () => {
  log.scrollTop = log.scrollHeight;
};

const entry = (who, text) => {
  const words = make("p", { class: "words" }, text);
  const node = make("article", { class: "turn " + who }, words);
  log.append(node);
  toEnd();
  return { node, words };
};

const busy = (controller) => {
  under = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  byId("siblings").disabled = byId("forget").disabled = Boolean(controller);
};

// A bar of a prompt: what came from the cache, and what was computed.
const bar = (part, whole, label) => {
  const meter = make("div", { class: "share", role: "img", "aria-label": label }, make("i", {}));
  meter.firstChild.style.width = (whole ? (100 * part) / whole : 0) + "%";
  return meter;
};

const explain = (node, cache, usage, tookS) => {
  const facts = make("div", { class: "facts" });
  if (cache) {
    facts.append(bar(cache.matched_tokens, cache.prompt_tokens, "share of the prompt from the cache"));
    facts.append(make("p", { class: "cache" }, cache.message));
  }
  if (usage) {
    const rate = tookS > 0 ? " · " + (usage.completion_tokens / tookS).toFixed(1) + " tokens/s" : "";
    facts.append(make("p", { class: "note" }, plural(usage.completion_tokens, "token") + " in " + tookS.toFixed(1) + " s" + rate));
  }
  node.append(facts);
  toEnd();
};

const fail = (node, error) => {
  const text = error.name === "AbortError" ? "stopped" : error.message;
  node.append(make("p", { class: error.name === "AbortError" ? "note" : "bad" }, text));
  toEnd();
};

const whyCut = (usage) => (usage && usage.completion_tokens < MAX_TOKENS
  ? "Cut off: the model's context is full" : "Cut off at " + MAX_TOKENS + " tokens, the most that this page asks for");

// One answer as it grows: thoughts dimmed above the words, and what else it was in a line below them.
const newAnswer = () => {
  const { node, words } = entry("assistant", "");
  const thoughts = make("p", { class: "thoughts", "aria-label": "Thoughts" });
  const answer = { node, said: "", thought: "", refusal: "", calls: [], reason: null };
  answer.grow = ({ delta, finish_reason: reason }) => {
    answer.said += delta.content || "";
    answer.thought += delta.reasoning_content || "";
    answer.refusal += delta.refusal || "";
    for (const call of delta.tool_calls || []) if (call.function.name) answer.calls.push(call.function.name);
    answer.reason = reason || answer.reason;
    if (answer.thought && !thoughts.isConnected) words.before(thoughts);
    setText(thoughts, answer.thought);
    setText(words, answer.said);
    toEnd();
  };
  answer.end = (usage) => {
    words.hidden = !answer.said;
    const tell = (text) => node.append(make("p", { class: "note" }, text));
    if (answer.refusal) tell("The model refused: " + answer.refusal);
    if (answer.calls.length) tell("The model called " + answer.calls.join(", ") + ". This page has no tools: the call is forgotten.");
    if (answer.reason === "length") tell(whyCut(usage) + (answer.said ? "." : ", before it began to answer."));
  };
  return answer;
};

const send = async (text) => {
  const controller = new AbortController();
  busy(controller);
  const talk = turns; // another chat may have begun when this answer ends
  talk.push({ role: "user", content: text });
  entry("user", text);
  const answer = newAnswer();
  let cache = null, usage = null;
  const began = performance.now();
  try {
    const body = {
      model, messages: talk, max_tokens: MAX_TOKENS, stream: true, cache: true, stream_options: { include_usage: true },
    };
    for await (const data of events(await post("v1/chat/completions", body, controller.signal))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      (chunk.choices || []).forEach(answer.grow);
      cache = chunk.cache || cache;
      usage = chunk.usage || usage;
    }
    answer.end(usage);
    explain(answer.node, cache, usage, (performance.now() - began) / 1000);
  } catch (error) {
    fail(answer.node, error);
  }
  // Without thoughts. Where nothing was said the question goes too: roles alternate.
  if (answer.said) talk.push({ role: "assistant", content: answer.said });
  else talk.pop();
  busy(null);
};

// Words in an order nobody has seen: the cache has nothing of it.
const newPrompt = () => {
  const numWords = Math.max(24, Math.min(250, Math.floor(maxContext / 6)));
  const words = Array.from({ length: numWords }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
  return "A story with some of these words, in any order: " + words.join(", ") + ".\n\n";
};

// One call that carries eight prompts: they are eight requests to the engine, and a browser has six connections to a
// server at most, one of which watches.
const siblings = async () => {
  const controller = new AbortController();
  busy(controller);
  const prompt = newPrompt();
  entry("user", "Eight requests with one new prompt, at once: " + prompt.slice(0, 110) + " …");
  const { node, words } = entry("assistant", "Watch the map: one of them computes the prompt, the others share its blocks.");
  const body = {
    model, prompt: Array(SIBLINGS).fill(prompt), max_tokens: Math.min(64, Math.floor(maxContext / 8)), ignore_eos: true, temperature: 1,
  };
  try {
    const { usage } = await (await post("v1/completions", body, controller.signal)).json();
    const shared = usage.prompt_tokens_details.cached_tokens;
    setText(words, SIBLINGS + " × " + num(usage.prompt_tokens / SIBLINGS) + " = " + num(usage.prompt_tokens) + " prompt tokens were asked for.");
    node.append(make("div", { class: "facts" }, bar(shared, usage.prompt_tokens, "share of the prompts that was shared"),
      make("p", { class: "cache" }, num(usage.prompt_tokens - shared) + " were computed, " + num(shared) + " shared. " +
        plural(usage.completion_tokens, "token") + " answered.")));
    toEnd();
  } catch (error) {
    fail(node, error);
  }
  busy(null);
};

const forget = () => {
  if (under) under.abort();
  turns = [];
  log.replaceChildren();
};

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || under) return;
  byId("text").value = "";
  send(text);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => under && under.abort());
byId("siblings").addEventListener("click", () => under || siblings());
byId("forget").addEventListener("click", forget);
