// Speaking to the server: the key, JSON, and server-sent events read from a fetch (an EventSource sends no key).
const NAME = "quire-key";

export const getKey = () => sessionStorage.getItem(NAME) || "";
export const setKey = (key) => (key ? sessionStorage.setItem(NAME, key) : sessionStorage.removeItem(NAME));

const options = (more) => {
  const headers = { ...(more.headers || {}) };
  if (getKey()) headers.Authorization = "Bearer " + getKey();
  return { credentials: "omit", cache: "no-store", ...more, headers };
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Browsers say "Failed to fetch" and the like. Stopping on purpose is no failure.
const inWords = (text) => (error) => {
  throw error.name === "AbortError" ? error : new Error(text);
};

// A response that is not an error. Addresses are relative: the server may stand below a path of a proxy.
export const ask = async (path, more = {}) => {
  const answer = await fetch(path, options(more)).catch(inWords("the server does not answer"));
  if (answer.ok) return answer;
  let text = "the server answered " + answer.status;
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

// What stands behind each "data: " of a stream, one after the other.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(inWords("the connection broke off"));
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
