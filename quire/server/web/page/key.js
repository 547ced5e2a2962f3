// The form for the API key: reports what is wrong with a key, and which one is in use.
import { byId, setText } from "./dom.js";
import { getKey, setKey } from "./net.js";

const MIN_CHARS = 8; // of a key of quire
let onKey = () => {};
let previous = ""; // the key that was in use before the one that is being checked
let isChecking = false;
let wantsAdmin = false; // the form was opened to enter an admin key

const problemOf = (text) => {
  if (!text) return "Enter a key.";
  if (/\s/.test(text)) return "A key contains no spaces. Was more than the key copied?";
  if (!/^[\x21-\x7e\xa1-\xff]*$/.test(text)) return "This contains a character that cannot be part of a key.";
  if (text.length < MIN_CHARS) return "A key has at least " + MIN_CHARS + " characters; this has " + text.length + ".";
  return "";
};

const say = (text, isBad) => {
  setText(byId("key-note"), text);
  byId("key-note").className = isBad ? "bad" : "note";
  byId("key").setAttribute("aria-invalid", String(isBad));
};

const open = (about, canClose) => {
  byId("key-form").hidden = false;
  setText(byId("key-about"), about);
  say("", false);
  byId("key-forget").hidden = !getKey();
  byId("key-close").hidden = !canClose;
  byId("key").focus();
};

const close = () => {
  wantsAdmin = isChecking = false;
  byId("key-form").hidden = true;
};

// The server has refused the key, or there is none. A key that worked before is used again.
export const requireKey = () => {
  const used = getKey();
  const wrong = "The server does not accept this key (" + used.length + " characters). Check that all of it was copied.";
  const isChange = isChecking && previous;
  isChecking = false;
  if (isChange) {
    setKey(previous);
    onKey();
  } else {
    if (used) setKey("");
    open("This server requires an API key. Its admin issues them.", false);
  }
  if (used) say(wrong, true);
};

export const acceptKey = (snapshot) => {
  byId("key-button").hidden = snapshot.key === "local"; // the server has no keys
  setText(byId("key-name"), ": " + snapshot.key + (snapshot.is_admin ? " (admin)" : ""));
  if (!isChecking) {
    if (byId("key-close").hidden) byId("key-form").hidden = true;
    return;
  }
  isChecking = false;
  if (wantsAdmin && !snapshot.is_admin) {
    byId("key-close").hidden = false;
    say("The key " + snapshot.key + " is valid, but it is not an admin key.", true);
  } else {
    close();
  }
};

export const askForAdminKey = (snapshot) => {
  open("The key " + snapshot.key + " is not an admin key. An admin key can load models and cancel the requests of all keys.", true);
  wantsAdmin = true;
};

export const startKeys = (given, getSnapshot) => {
  onKey = given;
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("key").value.trim().replace(/^bearer\s+/i, "");
    const problem = problemOf(text);
    say(problem || "Checking …", Boolean(problem));
    if (problem) return;
    previous = getKey();
    isChecking = true;
    setKey(text);
    byId("key").value = "";
    onKey();
  });
  byId("key-forget").addEventListener("click", () => {
    close();
    setKey("");
    onKey();
  });
  byId("key-close").addEventListener("click", close);
  byId("key-button").addEventListener("click", () => {
    const { key, is_admin: isAdmin } = getSnapshot();
    open("In use: " + key + (isAdmin ? ", an admin key." : ", not an admin key.") + " Another key replaces it.", true);
  });
};

export const isKeyFormOpen = () => !byId("key-form").hidden;
