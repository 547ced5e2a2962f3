// The page: reads v1/watch and shows it. Watches only while it can be seen, and comes back by itself.
import { showBlocks } from "./blocks.js";
import { useModel } from "./chat.js";
import { byId, make, seconds, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { showModels } from "./models.js";
import { ask, events, getKey, setKey } from "./net.js";
import { showRequests } from "./requests.js";

const INTERVAL_MS = 500;
const MAX_PAUSE_MS = 5000;
const LATE_S = 2; // without an answer from the worker
let chosen = null; // the model that is shown; null: the first
let snapshot = null;
let watching = null; // an AbortController

const say = (text, kind) => {
  setText(byId("state"), text);
  byId("state").className = "state " + kind;
};

const isBusy = (engine) => engine.num_running || engine.num_waiting || engine.requests.length;

const stateOf = (model) => {
  if (snapshot.is_draining) return ["shutting down", "busy"];
  if (model.state === "ready" && model.engine && !model.engine.is_moving) return ["stuck", "bad"];
  if (model.state === "ready" && model.engine && model.engine.age_s > LATE_S) {
    return ["in one long step; figures are " + seconds(model.engine.age_s) + " old", "busy"];
  }
  if (model.state === "ready") return [model.engine && isBusy(model.engine) ? "working" : "ready", "good"];
  if (model.state === "loading" && model.progress !== null) return ["loading " + Math.round(model.progress * 100) + " %", "busy"];
  return [model.state, model.state === "failed" ? "bad" : "busy"];
};

const showTabs = (models, current) => {
  const box = byId("tabs");
  const names = models.map((one) => one.name);
  if (box.dataset.names !== JSON.stringify(names)) {
    box.dataset.names = JSON.stringify(names);
    box.replaceChildren(...models.map((one) => {
      const button = make("button", { type: "button" }, one.name);
      button.addEventListener("click", () => {
        chosen = one.name;
        show();
      });
      return button;
    }));
  }
  [...box.children].forEach((button, i) => button.setAttribute("aria-pressed", String(names[i] === current)));
};

const show = () => {
  const models = snapshot.models;
  const model = models.find((one) => one.name === chosen) || models[0];
  const engine = model.engine;
  setText(byId("version"), snapshot.version);
  document.title = "quire · " + model.name;
  say(...stateOf(model));
  showTabs(models, model.name);
  showFigures(model.name, engine);
  showBlocks(model.name, engine ? engine.blocks : null);
  showRequests(model);
  showModels(snapshot);
  useModel(model.name, engine ? engine.max_model_len : 0);
};

const wantKey = (text) => {
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  setText(byId("key-note"), text);
  say("locked", "busy");
};

const follow = async (signal) => {
  const answer = await ask("v1/watch?interval_ms=" + INTERVAL_MS, { signal });
  for await (const data of events(answer)) {
    snapshot = JSON.parse(data);
    byId("main").hidden = false;
    byId("key-form").hidden = true;
    show();
  }
};

const pause = (ms, signal) => new Promise((done) => {
  setTimeout(done, ms);
  signal.addEventListener("abort", done);
});

const watch = async () => {
  if (watching) watching.abort();
  const { signal } = (watching = new AbortController());
  let pauseMs = 500;
  while (!signal.aborted) {
    try {
      await follow(signal);
      if (!signal.aborted) say("away, trying again", "bad");
      pauseMs = 500;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        wantKey(getKey() ? error.message : "It stays in this tab until you close it.");
        return;
      }
      say(error.status ? error.message : "away, trying again", "bad");
    }
    await pause(pauseMs, signal);
    pauseMs = Math.min(pauseMs * 1.5, MAX_PAUSE_MS);
  }
};

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  watch();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    if (watching) watching.abort();
  } else if (byId("key-form").hidden) {
    watch();
  }
});
watch();
