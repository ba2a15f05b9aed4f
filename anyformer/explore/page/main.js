// The page: draws the state, and turns clicks and keys into changes of the state.

let runs = [];
let turns = 0; // an answer to an earlier turn came too late: it is not drawn

function subjects() {
  return state.view === "compare" ? [subjectOf(runs, 0), subjectOf(runs, 1)] : [subjectOf(runs, 0)];
}

/** Draws the state. */
async function render() {
  fitView();
  const turn = ++turns,
    now = subjects();
  surroundings(now);
  byId("view").setAttribute("aria-busy", "true");
  const drawn = await Promise.all(now.map(drawPane)),
    difference = comparesMatrices() ? await differencePane(now) : null;
  if (turn !== turns) return;
  byId("view").removeAttribute("aria-busy");
  keepingPlace(() => {
    const strips = drawn.map((pane) => pane.strip);
    if (strips.some((one, i) => one !== byId("strips").children[i]) || strips.length !== byId("strips").children.length)
      byId("strips").replaceChildren(...strips); // hundreds of tokens that stay are not laid out again
    byId("view").replaceChildren(
      ...(state.view === "compare" ? [bothPicker(comparedViews(now[0].run), now[0].run)] : []),
      ...drawn.map((pane) => pane.view),
      ...(difference ? [difference] : []),
    );
  });
  keysIntoSight();
  cellsIntoSight();
  markFirstDifference();
  stepIntoSight();
  for (const panes of [byId("strips"), byId("view")]) panes.classList.toggle("two", now.length > 1);
  await Promise.all([...now.map(answerLate), lessonPanel(now[0])]);
  if (turn === turns) await writeMissing(now);
}

/** The tokens, the answer and the view of one subject, or the server's error. */
async function drawPane(subject) {
  const wrong = (error) => {
    if (!(error instanceof Refused)) throw error;
    return make("p", { class: "error", role: "alert" }, serverText(error.message));
  };
  let reading, found;
  try {
    reading = await ask("read", subject.body);
    found = answersLate(subject) ? null : await answersOf(subject);
  } catch (error) {
    return { strip: make("div", { class: "pane" }, wrong(error)), view: make("div", { class: "pane" }) };
  }
  const top = kept(subject, () => {
    const panel = found ? output(subject, ...found) : waitingOutput();
    return make("div", { class: "pane" }, strip(subject, reading), panel);
  });
  const view = await drawing(viewNow()).show(subject, reading).catch(wrong);
  view.classList.add("pane", `view-${viewNow()}`);
  return { strip: top, view };
}

/** In a saved page, the state that decides which controls have saved answers. */
const gates = () => (saved ? [state.view, state.both, state.kind, state.layer, state.head, state.temperature, state.stage] : []);

const tops = new Map(); // tokens and answer of each pane, and what they were made of

/** The tokens and the answer, rebuilt only when they change: a slider moves many times a second. */
function kept(subject, build) {
  const { at, key, kind, write } = state,
    path = viewNow() === "path", // where a click on a token follows it
    bodies = [subject.pane, ...subjects().map(({ body }) => body), write && writeBody(subject)],
    of = JSON.stringify([earlier.length, bodies, at, key, kind, path, languageNow(), gates()]);
  if (tops.get(subject.pane)?.of !== of) tops.set(subject.pane, { of, top: build() });
  return tops.get(subject.pane).top;
}

/** The frame around the views. */
function surroundings(now) {
  const language = languageNow();
  document.documentElement.lang = language;
  document.documentElement.dataset.theme =
    state.theme || (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = word(element.dataset.word);
  byId("language").textContent = language === "ko" ? "English" : "한국어";
  byId("theme").textContent = word(theme() === "dark" ? "light" : "dark");
  byId("help").setAttribute("aria-label", word("keys"));
  byId("form-2").hidden = now.length < 2;
  for (const subject of now) fillForm(runs, subject);
  const { run } = now[0];
  aboutRun(run);
  filmBars(now);
  watchTraining();
  keepingPlace(() => {
    fillTabs(run);
    sidePanel(now);
  });
  byId("view").setAttribute("aria-labelledby", `tab-${state.view}`);
  const tab = byId(`tab-${state.view}`);
  byId("tabs").scrollLeft = Math.max(0, tab.offsetLeft - byId("tabs").offsetLeft - 40); // narrow pages scroll the tabs
  byId("view-title").textContent = viewName(state.view, run);
  byId("strips").setAttribute("aria-label", word("texts"));
  document.querySelector(".bar").setAttribute("aria-label", word("views"));
  byId("side").setAttribute("aria-label", word("switches"));
  byId("side").classList.toggle("sampling-first", viewNow() === "next");
  byId("save-html").hidden = Boolean(saved);
  byId("saving").hidden = location.protocol === "about:"; // a notebook's frame may not download
}

/** The line about a run; while it is being trained, its step and a button for a newer one. */
function aboutRun(run) {
  const facts = [
    word(`shape.${run.shape}`),
    run.task === run.shape ? word(`says.${run.says}`) : run.task,
    `${short(run.parameters)} ${word("parameters")}`,
    ...(saved ? [word("savedPage")] : []),
    ...(state.step >= 0 || run.step !== null ? [`${word("step")} ${state.step < 0 ? run.step : state.step}`] : []),
  ];
  const newer = { type: "button", id: "newer", title: word("newerHint"), onclick: showNewest };
  byId("about").replaceChildren(facts.join(" · "), ...(run.newer ? [" ", make("button", newer, run.newer)] : []));
}

/** The side panel, rebuilt only when its switches change, so that a slider can be dragged. */
function sidePanel(now) {
  const side = byId("side"),
    of = JSON.stringify([now.map(({ run, body }) => [run.name, body.off]), languageNow(), theme(), gates(), scoreMark(now)]);
  if (side.dataset.of === of) return fillSliders();
  side.dataset.of = of;
  const samples = now.some(({ run }) => run.tokens); // else there is nothing to draw from
  side.replaceChildren(...now.map(switches), ...(samples ? [sliders()] : []));
}

function openView(view) {
  change(viewChange(view), true);
}

function viewChange(view) {
  const second =
    view === "compare" && !state.run2
      ? { run2: state.run, text2: state.text2 || state.text, target2: state.target2 || state.target }
      : {};
  return { view, ...second };
}

/** Runs a function that replaces elements, and restores the focus and scroll positions. */
function keepingPlace(act) {
  const focus = document.activeElement?.id;
  const places = new Map(
    [...document.querySelectorAll("[data-scroll]")].map((one) => [one.dataset.scroll, [one.scrollLeft, one.scrollTop]]),
  );
  act();
  for (const one of document.querySelectorAll("[data-scroll]")) {
    if (places.has(one.dataset.scroll)) [one.scrollLeft, one.scrollTop] = places.get(one.dataset.scroll);
  }
  if (focus && document.activeElement?.id !== focus) byId(focus)?.focus({ preventScroll: true });
}

/** A short message to the user, hidden after a while. */
function say(text) {
  byId("said").textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => (byId("said").textContent = ""), 4000);
}

/** The state of an address; in a saved page without answers for it, the saved state. */
function begins(hash) {
  readHash(hash);
  settle();
  if (!saved || isSaved({})) return;
  say(word("notSaved"));
  readHash(saved.hash);
  settle();
}

/** Defaults for an address without run or text: the first run, and its example. */
function settle() {
  if (!runs.some((one) => one.name === state.run)) {
    if (state.run) say(word("noSuchRun", state.run));
    Object.assign(state, { run: runs[0].name });
  }
  const { run, text } = state,
    of = runs.find((one) => one.name === run);
  if (!text) Object.assign(state, exampleOf(of));
  fitView();
  if (state.view !== "compare") return;
  if (!state.run2) Object.assign(state, { run2: state.run });
  if (!state.text2) Object.assign(state, { text2: state.text, target2: state.target2 || state.target });
}

async function begin() {
  byId("forms").append(form(0), form(1));
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = word(element.dataset.word);
  try {
    runs = await ask("runs");
    if (!runs.length) throw new Refused(word("noRuns"));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    byId("words").textContent = error.message;
    byId("words").hidden = false;
    return;
  }
  begins(location.hash.length > 1 || !saved ? location.hash : saved.hash);
  byId("language").onclick = () => change({ lang: languageNow() === "ko" ? "en" : "ko" });
  byId("theme").onclick = () => change({ theme: theme() === "dark" ? "light" : "dark" });
  byId("help").onclick = showKeys;
  byId("lessons").onclick = toggleLessons;
  byId("copy-link").onclick = copyLink;
  byId("save-html").onclick = () => saveHtml(subjects());
  byId("save-png").onclick = savePng;
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  window.addEventListener("popstate", () => {
    begins(location.hash);
    render();
  });
  document.addEventListener("keydown", pageKeys);
  tabKeys();
  await render();
}

begin();
