// The state of the page: it is stored in the address after #, so links and the Back button work.

// What each view of the server draws: `show`, and `requests`, those that it makes for the state.
const DRAWN = {};
const WHATS = ["weights", "scores", "bias", "mask"];

const DEFAULTS = {
  run: "",
  text: "",
  target: "",
  off: [], // the first subject
  run2: "",
  text2: "",
  target2: "",
  off2: [], // the second, when two are compared
  step: -1, // of the training, for each subject; -1: the result, or the newest when it was opened
  step2: -1,
  view: "path",
  both: "heads", // `both`: the view in which two are compared
  kind: "",
  layer: -1, // the last; in the path the first
  head: 0,
  shown: [], // `shown`: the heads whose lines are drawn; none means all
  query: -1,
  key: -1,
  at: -1,
  what: "weights", // -1: the last query, its strongest key, the last token
  deep: -2, // the layer whose predictions are listed: -1 is the embedding, -2 the last layer
  fit: 0, // 1: colours of weights are scaled to the largest
  method: "gradient", // of salience
  score: "", // the colour of the switches; empty: a colour for each head
  stack: "", // that is patched; empty: the first
  cell: "", // of the patched grid, as layer.position; empty: that of the largest effect
  stage: "", // of the path; empty means the first
  output: -1, // the output that is followed, the position, part and token: -1 or empty means the largest
  place: -1,
  part: "",
  from: -1,
  temperature: 1,
  topk: 0,
  topp: 1,
  seed: 1,
  most: 40,
  write: 0,
  lesson: "", // the name of a lesson and its step; "list": the list of lessons
  lessonStep: 0,
  lang: "",
  theme: "",
};

const state = structuredClone(DEFAULTS);

/** The state of an address; unknown or invalid values become the default. */
function fromHash(hash) {
  const found = structuredClone(DEFAULTS);
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const like = DEFAULTS[name];
    if (like === undefined) continue;
    if (Array.isArray(like)) found[name] = text ? text.split(",") : [];
    else if (typeof like === "number") found[name] = Number.isFinite(Number(text)) ? Number(text) : like;
    else found[name] = text;
  }
  if (!METHODS.includes(found.method)) found.method = DEFAULTS.method;
  if (!HEAD_SCORES.includes(found.score)) found.score = DEFAULTS.score;
  if (!WHATS.includes(found.what)) found.what = DEFAULTS.what;
  found.shown = found.shown.map(Number).filter(Number.isInteger);
  return found;
}

function toHash(from) {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(from)) {
    const text = String(value);
    if (text !== String(DEFAULTS[name])) said.set(name, text);
  }
  return `#${said}`;
}

/** Changes the state, the address and the page. With `step`, Back returns to the previous state. */
function change(updates, step = false) {
  const possible = offered(updates);
  if (!possible) return say(word("notSaved"));
  Object.assign(state, possible);
  writeHash(step);
  return render();
}

let pending = 0; // browsers slow down pages that change their address at every move of a slider

function writeHash(step) {
  if (location.protocol === "about:") return; // in a notebook's frame there is no address
  clearTimeout(pending);
  if (!step) {
    pending = setTimeout(() => history.replaceState(null, "", toHash(state)), 150);
  } else if (toHash(state) !== location.hash) {
    history.pushState(null, "", toHash(state));
  }
}

function readHash(hash) {
  clearTimeout(pending);
  Object.assign(state, fromHash(hash));
}
