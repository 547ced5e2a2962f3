// Requests to the server: the key, JSON, and server-sent events read from a fetch (an EventSource cannot send a key).
const NAME = "quire-key";
let key = "";
try {
  key = sessionStorage.getItem(NAME) || "";
} catch {
  // storage is blocked: the key stays in memory
}

export const getKey = () => key;
export const setKey = (value) => {
  key = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // as above
  }
};

const options = (more) => {
  const headers = { ...(more.headers || {}) };
  if (key) headers.Authorization = "Bearer " + key;
  return { credentials: "omit", cache: "no-store", ...more, headers };
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Browsers report "Failed to fetch" and the like. An abort was asked for and is not replaced.
const replaceError = (text) => (error) => {
  throw error.name === "AbortError" ? error : new Error(text);
};

// Resolves to a response that is not an error. Paths are relative: a proxy may serve the page below a path.
export const ask = async (path, more = {}) => {
  const answer = await fetch(path, options(more)).catch(replaceError("The server does not respond."));
  if (answer.ok) return answer;
  let text = "The server returned status " + answer.status + ".";
  try {
    const body = await answer.json();
    if (body.error && body.error.message) text = body.error.message;
  } catch {
    // not JSON: the status has to do
  }
  throw new Refused(answer.status, text);
};

export const post = (path, body, signal) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

// Yields the data of each event of a stream.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(replaceError("The connection was lost."));
      if (done) return;
      text += value;
      const frames = text.split("\n\n");
      text = frames.pop();
      for (const frame of frames) {
        if (frame.startsWith("data: ")) yield frame.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
