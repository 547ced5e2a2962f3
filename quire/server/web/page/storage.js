// Conversations in this browser's localStorage, one entry each, so that two tabs do not overwrite each other's.
// Chat must work without storage: it may be blocked, full, or hold something else. Then conversations live in memory.
const PREFIX = "quire-chat:";
const MAX_CHATS = 100;
const memory = new Map(); // id -> chat
let problem = "";

const attempt = (action) => {
  try {
    return action();
  } catch (error) {
    problem = error.name === "QuotaExceededError"
      ? "The storage of this browser is full: new messages are lost when the page is closed."
      : "This browser does not store data for this page: conversations are lost when it is closed.";
    return undefined;
  }
};

export const storageProblem = () => problem;

// An entry of another version, or changed by hand, must not break the page.
const isTurn = (one) => one && typeof one.content === "string" && (one.role === "user" || one.role === "assistant")
  && (!one.usage || (typeof one.usage.completion_tokens === "number" && typeof one.took_s === "number"))
  && (!one.cache || typeof one.cache.message === "string") && (!one.calls || Array.isArray(one.calls));

const isSettings = (one) => one && typeof one.system === "string"
  && [one.temperature, one.max_tokens].every((value) => value === null || typeof value === "number");

const isChat = (one) => one && typeof one.id === "string" && typeof one.title === "string" && typeof one.updated === "number"
  && isSettings(one.settings) && Array.isArray(one.turns) && one.turns.every(isTurn);

const read = (name) => {
  try {
    const found = JSON.parse(localStorage.getItem(name));
    return isChat(found) && PREFIX + found.id === name ? found : null;
  } catch {
    return null; // not written by this page
  }
};

const storedNames = () => attempt(() => Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) || [];

// Newest first.
export const listChats = () => {
  for (const name of storedNames()) {
    const chat = read(name);
    const known = chat && memory.get(chat.id);
    if (chat && (!known || chat.updated > known.updated)) memory.set(chat.id, chat);
  }
  return [...memory.values()].sort((a, b) => b.updated - a.updated);
};

export const findChat = (id) => memory.get(id);

export const saveChat = (chat) => {
  chat.updated = Date.now();
  memory.set(chat.id, chat);
  for (const old of listChats().slice(MAX_CHATS)) deleteChat(old.id);
  problem = "";
  attempt(() => localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat)));
};

export const deleteChat = (id) => {
  memory.delete(id);
  attempt(() => localStorage.removeItem(PREFIX + id));
};

export const deleteAllChats = () => {
  memory.clear();
  for (const name of storedNames()) attempt(() => localStorage.removeItem(name));
};

// Another tab has changed the list.
export const onOtherTab = (action) => addEventListener("storage", (event) => {
  if (event.key !== null && !event.key.startsWith(PREFIX)) return;
  if (event.key === null) memory.clear();
  else if (event.newValue === null) memory.delete(event.key.slice(PREFIX.length));
  action();
});
