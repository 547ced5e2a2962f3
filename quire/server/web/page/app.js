// Reads v1/watch and shows it. Watches only while the page is visible, and reconnects by itself.
import { showBlocks } from "./blocks.js";
import { useModel } from "./chat.js";
import { byId, make, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { acceptKey, askForAdminKey, isKeyFormOpen, requireKey, startKeys } from "./key.js";
import { showModels } from "./models.js";
import { showBanner, showState, stateOf } from "./modelstate.js";
import { ask, events } from "./net.js";
import { showPools } from "./pools.js";
import { showRequests } from "./requests.js";
import { useSiblings } from "./siblings.js";

const INTERVAL_MS = 500;
const MAX_PAUSE_MS = 5000;
let chosen = null; // the name of the model that is shown; null: the first
let snapshot = null;
let watching = null; // an AbortController

const showChoice = (models, current) => {
  const select = byId("model");
  const names = models.map((one) => one.name);
  if (select.dataset.names !== JSON.stringify(names)) {
    select.dataset.names = JSON.stringify(names);
    select.replaceChildren(...names.map((name) => make("option", {}, name)));
    names.forEach((name, i) => {
      select.options[i].value = name;
    });
  }
  select.hidden = byId("views").hidden = false;
  select.selectedIndex = names.indexOf(current);
};

const show = () => {
  const { models } = snapshot;
  const model = models.find((one) => one.name === chosen) || models[0];
  const { engine } = model;
  const state = stateOf(model, snapshot);
  setText(byId("version"), snapshot.version);
  document.title = "quire · " + model.name;
  showState(state.label, state.kind);
  showBanner(model.name, state);
  showChoice(models, model.name);
  showFigures(model.name, engine);
  showBlocks(model.name, engine ? engine.blocks : null);
  showPools(engine);
  showRequests(model);
  showModels(snapshot, () => askForAdminKey(snapshot));
  useModel(model.name);
  useSiblings(model.name, engine);
};

const away = (text) => {
  showState(text, "bad");
  if (snapshot) showBanner(byId("model").value, { text: "No connection to the server. Trying again …", kind: "bad", action: "", progress: null });
};

const lock = () => {
  byId("main").hidden = byId("model").hidden = byId("views").hidden = true;
  byId("key-button").hidden = true;
};

// No key helps: the server does not serve this host or origin.
const showProblem = (text) => {
  lock();
  byId("problem").hidden = false;
  setText(byId("problem"), "The server refuses this page: " + text);
  showState("refused", "bad");
};

const follow = async (signal) => {
  const answer = await ask("v1/watch?interval_ms=" + INTERVAL_MS, { signal });
  for await (const data of events(answer)) {
    snapshot = JSON.parse(data);
    byId("main").hidden = false;
    byId("problem").hidden = true;
    acceptKey(snapshot);
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
      if (!signal.aborted) away("no connection, retrying");
      pauseMs = 500;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) {
        lock();
        showState("key required", "busy");
        return void requireKey();
      }
      if (error.status === 403) showProblem(error.message);
      else away(error.status ? error.message : "no connection, retrying");
    }
    await pause(pauseMs, signal);
    pauseMs = Math.min(pauseMs * 1.5, MAX_PAUSE_MS);
  }
};

byId("model").addEventListener("change", () => {
  chosen = byId("model").value;
  show();
});
for (const one of byId("views").children) {
  one.addEventListener("click", () => {
    document.body.dataset.view = one.dataset.view;
    for (const other of byId("views").children) other.setAttribute("aria-pressed", String(other === one));
    dispatchEvent(new Event("resize")); // the map is drawn for the space it has now
  });
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    if (watching) watching.abort();
  } else if (!isKeyFormOpen() || !byId("main").hidden) {
    watch();
  }
});
startKeys(watch, () => snapshot);
watch();
