// The chat: sends a conversation, shows the answer as it comes, stops and regenerates it.
import { button, byId, make, num, setText } from "./dom.js";
import { listHistory, startHistory } from "./history.js";
import { events, post } from "./net.js";
import { findChat, listChats, saveChat } from "./storage.js";
import { AnswerNode, questionNode } from "./turns.js";

const MAX_TOKENS = 512; // of an answer, until the field is changed: a small model may not find an end
const TITLE_CHARS = 60;
// Chosen for a large margin at every token of the default model's answers, which are right (benchmarks/first_answer.py).
const EXAMPLES = ["What is the capital city of Japan?", "What are the first five even numbers?", "What is the plural of mouse?"];

const log = byId("log");
let model = null; // the name of the model that is selected
let chat = null;
let running = null; // an AbortController while an answer is generated

export const useModel = (name) => {
  model = name;
};

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toEnd = () => {
  log.scrollTop = log.scrollHeight;
};

// Settings

const fields = { system: byId("system"), temperature: byId("temperature"), max_tokens: byId("max-tokens") };

const problemOf = () => {
  if (!fields.temperature.checkValidity()) return "Temperature must be a number from 0 to 2.";
  if (!fields.max_tokens.checkValidity()) return "Max tokens must be a whole number from 1 to 1,000,000.";
  return "";
};

const noteSettings = () => {
  const { system, temperature, max_tokens: most } = chat.settings;
  const parts = [system ? "system prompt" : "", "temperature " + (temperature === null ? "default" : temperature),
    most === null ? "" : num(most) + " tokens"];
  setText(byId("settings-note"), ": " + parts.filter(Boolean).join(" · "));
};

const readSettings = () => {
  const number = (field) => (field.value.trim() === "" ? null : Number(field.value));
  const problem = problemOf();
  setText(byId("settings-problem"), problem);
  if (problem) return false;
  chat.settings = { system: fields.system.value, temperature: number(fields.temperature), max_tokens: number(fields.max_tokens) };
  noteSettings();
  return true;
};

const showSettings = () => {
  for (const [name, field] of Object.entries(fields)) field.value = chat.settings[name] === null ? "" : String(chat.settings[name]);
  setText(byId("settings-problem"), "");
  noteSettings();
};

// The conversation

const newChat = () => ({
  id: Date.now().toString(36) + Math.random().toString(36).slice(2, 10), title: "New chat", updated: 0, turns: [],
  settings: chat ? { ...chat.settings } : { system: "", temperature: null, max_tokens: MAX_TOKENS },
});

const save = () => {
  saveChat(chat);
  listHistory(chat.id);
};

const welcome = () => {
  const examples = EXAMPLES.map((text) => button(text, { class: "example" }, () => running || send(text)));
  return make("div", { class: "welcome" }, make("h3", {}, "What would you like to ask?"), ...examples,
    make("p", { class: "note" }, "Each answer shows how much of its prompt came from the cache, and why not more."));
};

const draw = () => {
  const nodes = chat.turns.map((turn, i) => {
    if (turn.role === "user") return questionNode(turn);
    const answer = new AnswerNode(turn, i === chat.turns.length - 1 ? regenerate : null);
    answer.finish();
    return answer.node;
  });
  log.replaceChildren(...(nodes.length ? nodes : [welcome()]));
  setText(byId("chat-title"), chat.title);
  toEnd();
};

const show = (wanted) => {
  if (running) running.abort();
  chat = wanted;
  showSettings();
  draw();
  listHistory(chat.id);
};

// What is sent: without reasoning, and without questions that have no answer, since roles must alternate.
const messagesOf = (turns, system) => {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, i) => {
    const next = turns[i + 1];
    if (turn.role === "user" && (!next || next.content)) messages.push({ role: "user", content: turn.content });
    if (turn.role === "assistant" && turn.content) messages.push({ role: "assistant", content: turn.content });
  });
  return messages;
};

const bodyOf = ({ turns, settings }) => {
  const body = {
    model, messages: messagesOf(turns, settings.system), stream: true, cache: true, stream_options: { include_usage: true },
  };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.max_tokens !== null) body.max_tokens = settings.max_tokens;
  return body;
};

const take = (turn, chunk) => {
  if (chunk.error) throw new Error(chunk.error.message);
  for (const { delta, finish_reason: reason } of chunk.choices || []) {
    turn.content += delta.content || "";
    turn.thought += delta.reasoning_content || "";
    turn.refusal += delta.refusal || "";
    for (const call of delta.tool_calls || []) if (call.function.name) turn.calls.push(call.function.name);
    turn.reason = reason || turn.reason;
  }
  turn.cache = chunk.cache || turn.cache;
  turn.usage = chunk.usage || turn.usage;
};

const setRunning = (controller) => {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
};

const answer = async () => {
  const mine = chat; // another may be shown when this answer ends
  const body = bodyOf(mine);
  const controller = new AbortController();
  const turn = {
    role: "assistant", content: "", thought: "", refusal: "", calls: [], reason: null, cache: null, usage: null,
    took_s: 0, model, max_tokens: mine.settings.max_tokens, is_stopped: false, error: "",
  };
  setRunning(controller);
  const shown = new AnswerNode(turn, regenerate);
  mine.turns.push(turn);
  log.append(shown.node);
  toEnd();
  save();
  const began = performance.now();
  try {
    for await (const data of events(await post("v1/chat/completions", body, controller.signal))) {
      if (data === "[DONE]") break;
      take(turn, JSON.parse(data));
      const follows = isAtEnd();
      shown.grow(() => follows && toEnd());
    }
  } catch (error) {
    turn.is_stopped = error.name === "AbortError";
    turn.error = turn.is_stopped ? "" : error.message;
  }
  turn.took_s = (performance.now() - began) / 1000;
  const follows = isAtEnd();
  shown.finish();
  if (follows) toEnd();
  if (findChat(mine.id)) saveChat(mine); // or it was deleted meanwhile
  if (chat === mine) setText(byId("chat-title"), mine.title);
  listHistory(chat.id);
  if (running === controller) setRunning(null);
};

const dropRegenerate = () => log.querySelectorAll(".regenerate").forEach((node) => node.remove());

const send = (text) => {
  if (!readSettings()) {
    byId("settings").open = true;
    return false;
  }
  if (!chat.turns.length) {
    log.replaceChildren();
    chat.title = text.replace(/\s+/g, " ").slice(0, TITLE_CHARS);
    setText(byId("chat-title"), chat.title);
  }
  dropRegenerate();
  chat.turns.push({ role: "user", content: text });
  log.append(questionNode({ content: text }));
  answer();
  return true;
};

const regenerate = () => {
  if (running || !readSettings()) return;
  chat.turns.pop();
  log.lastElementChild.remove();
  answer();
};

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (text && !running && send(text)) byId("text").value = "";
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running && running.abort());
for (const field of Object.values(fields)) {
  field.addEventListener("change", () => {
    if (readSettings() && chat.turns.length && !running) save();
  });
}
addEventListener("pagehide", () => {
  if (running && chat.turns.length) {
    chat.turns.at(-1).is_stopped = true; // what has come so far is kept
    saveChat(chat);
  }
});
startHistory({ open: (id) => findChat(id) && show(findChat(id)), start: () => show(newChat()) });
show(listChats()[0] || newChat());
byId("settings").open = matchMedia("(min-width: 54rem)").matches;
