// The list of conversations.
import { button, byId, make, setText } from "./dom.js";
import { deleteAllChats, deleteChat, listChats, onOtherTab, storageProblem } from "./storage.js";

let current = null; // its id
let actions = { open: () => {}, start: () => {} };

const showHistory = (isOpen) => {
  document.body.classList.toggle("shows-history", isOpen);
  byId("history-button").setAttribute("aria-expanded", String(isOpen));
};

const whenOf = (updated) => {
  const date = new Date(updated);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? date.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false })
    : date.toLocaleDateString("en", { month: "short", day: "numeric" });
};

const rowOf = (chat) => {
  const open = button("", { class: "open", title: chat.title }, () => {
    showHistory(false);
    actions.open(chat.id);
  });
  open.append(make("span", {}, chat.title), make("small", {}, whenOf(chat.updated)));
  if (chat.id === current) open.setAttribute("aria-current", "true");
  const remove = button("×", { class: "remove", title: "Delete this chat" }, () => {
    deleteChat(chat.id);
    if (chat.id === current) actions.start();
    listHistory(current);
  });
  remove.setAttribute("aria-label", "Delete the chat " + chat.title);
  return make("li", {}, open, remove);
};

export const listHistory = (id) => {
  current = id;
  const chats = listChats();
  byId("chats").replaceChildren(...chats.map(rowOf));
  byId("clear-chats").hidden = !chats.length;
  const note = storageProblem() || (chats.length ? "" : "Chats are kept in this browser only.");
  setText(byId("history-note"), note);
};

export const startHistory = (given) => {
  actions = given;
  byId("new-chat").addEventListener("click", () => {
    showHistory(false);
    actions.start();
  });
  byId("clear-chats").addEventListener("click", () => {
    if (!confirm("Delete all chats stored in this browser?")) return;
    deleteAllChats();
    actions.start();
  });
  byId("history-button").addEventListener("click", () => showHistory(!document.body.classList.contains("shows-history")));
  byId("history-close").addEventListener("click", () => showHistory(false));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showHistory(false);
  });
  onOtherTab(() => listHistory(current));
};
