// The state of a model in words, for the header and for the banner above the message field.
import { byId, percent, plural, seconds, setShare, setText } from "./dom.js";
import { post } from "./net.js";

const LATE_S = 2; // without an answer from the worker
let failure = ""; // of the last load from here

const isBusy = (engine) => engine.num_running || engine.num_waiting || engine.requests.length;

const loadingText = (model) => {
  if (model.progress === null) return "Waiting for memory or for another model to load.";
  const eta = model.eta_s === null ? "" : model.eta_s < 1 ? ", almost done" : ", about " + seconds(Math.ceil(model.eta_s)).replace(".0", "") + " left";
  return "Loading " + model.name + ": " + percent(model.progress, 1) + eta + ".";
};

const waitingText = ({ num_waiting: count }) =>
  (count ? " " + plural(count, "request") + (count === 1 ? " waits" : " wait") + " for it." : "");

// { label, kind: good | busy | bad, text: for the banner or "", action: a button's text or "", progress: 0 to 1 or null }
export const stateOf = (model, snapshot) => {
  const { engine, state, name } = model;
  const made = (label, kind, text = "", action = "", progress = null) => ({ label, kind, text, action, progress });
  const admin = (action) => (snapshot.is_admin ? action : "");
  if (snapshot.is_draining) return made("shutting down", "busy", "The server is shutting down and takes no new requests.");
  if (state === "unloaded") return made("not loaded", "busy", name + " is not loaded. The next request loads it.", admin("Load now"));
  if (state === "loading") {
    const label = model.progress === null ? "loading" : "loading " + percent(model.progress, 1);
    return made(label, "busy", loadingText(model) + waitingText(model), "", model.progress || 0);
  }
  if (state === "failed") {
    const why = model.error ? ": " + model.error : ". The server's log has the reason.";
    return made("failed", "bad", name + " could not be loaded" + why, admin("Try again"));
  }
  if (state !== "ready" || !engine) return made(state, "busy", name + " is " + state + "." + waitingText(model));
  if (!engine.is_moving) return made("stuck", "bad", name + " does not respond. The server restarts it if this lasts.");
  if (engine.age_s > LATE_S) return made("in one long step, figures are " + seconds(engine.age_s) + " old", "busy");
  return made(isBusy(engine) ? "working" : "ready", "good");
};

export const showState = (label, kind) => {
  setText(byId("state"), label);
  byId("state").className = "state " + kind;
};

let shown = null; // the name of the model of the banner

export const showBanner = (name, state) => {
  if (shown !== name) failure = "";
  shown = name;
  const text = [state.text, state.kind === "bad" || state.action ? failure : ""].filter(Boolean).join(" ");
  byId("banner").hidden = !text;
  byId("banner").className = "banner " + state.kind;
  setText(byId("banner-text"), text);
  byId("banner-meter").hidden = state.progress === null;
  setShare(byId("banner-meter"), state.progress);
  byId("banner-action").hidden = !state.action;
  setText(byId("banner-action"), state.action);
};

byId("banner-action").addEventListener("click", async () => {
  failure = "";
  byId("banner-action").disabled = true;
  try {
    await post("v1/models/load", { model: shown, wait: false });
  } catch (error) {
    failure = error.message;
  }
  byId("banner-action").disabled = false;
});
