// The slider over training: it selects the step whose weights every view shows, plays the steps as a film and saves it.

const FRAME_TIME = 900; // milliseconds that a frame is shown at least
const MAX_FRAME_HEIGHT = 4000; // pixels of a frame of a GIF
const MAX_TITLE_TEXT = 48; // characters of a text above it

let film = null; // the film that plays, with its pane

/** The steps of a run that can be shown, in order; -1 is the run as it was opened: its result, or its newest step. */
function framesOf(run) {
  const own = run.step ?? run.result, // the step of the opened weights, if they are those of one step
    steps = [...new Set([...run.steps, ...(own === null ? [] : [own])])].sort((a, b) => a - b);
  const frames = steps.map((step) => ({ step: step === own ? -1 : step, name: frameName(step, step === run.result) }));
  return own === null ? [...frames, { step: -1, name: word("result") }] : frames;
}

function frameName(step, isResult) {
  return `${word("step")} ${step.toLocaleString("en")}${isResult ? ` · ${word("result")}` : ""}`;
}

const stepField = (pane) => (pane ? "step2" : "step");

/** The place of the shown step among the frames. */
function frameNow({ run, pane }) {
  const frames = framesOf(run),
    step = state[stepField(pane)],
    at = frames.findIndex((frame) => frame.step === (step === (run.step ?? run.result) ? -1 : step));
  return at < 0 ? frames.length - 1 : at;
}

/** The sliders below the view, one for each run that has steps to show. */
function filmBars(now) {
  const bars = byId("film"),
    shown = saved ? [] : now.filter(({ run }) => framesOf(run).length > 1);
  bars.hidden = !shown.length;
  bars.setAttribute("aria-label", word("film"));
  if (film && !shown.some(({ pane }) => pane === film.pane)) stopFilm();
  const of = JSON.stringify([shown.map(({ pane, run }) => [pane, run.name, framesOf(run)]), now.length]);
  if (bars.dataset.of !== of) {
    bars.dataset.of = of; // a slider that is dragged must stay the same element
    keepingPlace(() => bars.replaceChildren(...shown.map((subject) => filmBar(subject, now.length > 1))));
  }
  for (const subject of shown) fillFilmBar(subject);
}

function filmBar({ run, pane }, isCompared) {
  const last = framesOf(run).length - 1,
    button = (id, text, name, act) =>
      make("button", { type: "button", id: `${id}-${pane}`, "aria-label": name, title: name, onclick: act }, text);
  return make(
    "div",
    { class: "film", role: "group", "aria-label": isCompared ? `${word("film")} ${pane ? "B" : "A"}` : word("film") },
    isCompared ? make("b", {}, pane ? "B" : "A") : null,
    make("button", { type: "button", id: `film-play-${pane}`, class: "go", onclick: () => toggleFilm(pane) }),
    button("film-previous", "‹", `${word("previousStep")} (<)`, () => moveFilm(pane, -1)),
    make("input", {
      type: "range",
      id: `film-step-${pane}`,
      min: 0,
      max: last,
      step: 1,
      "aria-label": word("filmStep"),
      oninput: (event) => showFrame(pane, Number(event.target.value)),
    }),
    button("film-next", "›", `${word("nextStep")} (>)`, () => moveFilm(pane, 1)),
    make("output", { id: `film-now-${pane}`, for: `film-step-${pane}` }),
    make("button", { type: "button", id: `film-save-${pane}`, title: word("saveGifHint"), onclick: () => saveGif(pane) }, word("saveGif")),
  );
}

/** Copies the state into a bar. */
function fillFilmBar(subject) {
  const { pane, run } = subject,
    frames = framesOf(run),
    at = frameNow(subject),
    plays = film?.pane === pane,
    slider = byId(`film-step-${pane}`),
    button = byId(`film-play-${pane}`);
  slider.value = at;
  slider.setAttribute("aria-valuetext", frames[at].name);
  byId(`film-now-${pane}`).textContent = frames[at].name;
  byId(`film-previous-${pane}`).disabled = at === 0;
  byId(`film-next-${pane}`).disabled = at === frames.length - 1;
  button.textContent = plays ? `❚❚ ${word("pause")}` : `▶ ${word("film")}`;
  button.title = `${word(plays ? "pause" : "filmHint")} (f)`;
  button.setAttribute("aria-pressed", String(plays));
  byId(`film-save-${pane}`).disabled = Boolean(film?.saving);
}

/** Shows a frame that a person selected: a film that plays stops. */
function showFrame(pane, at) {
  stopFilm();
  return changeFrame(pane, at);
}

function changeFrame(pane, at) {
  const frames = framesOf(subjectOf(runs, pane).run);
  return change({ [stepField(pane)]: frames[clamp(at, 0, frames.length - 1)].step });
}

function moveFilm(pane, by) {
  return showFrame(pane, frameNow(subjectOf(runs, pane)) + by);
}

function stopFilm() {
  film = null;
}

/** Plays from the shown step, or from the first one if it is the last; a second call pauses. */
async function toggleFilm(pane) {
  const subject = subjectOf(runs, pane);
  if (film) {
    stopFilm();
    return fillFilmBar(subject);
  }
  stop(); // the path, if that plays
  const own = (film = { pane }),
    at = frameNow(subject),
    { length } = framesOf(subject.run);
  await eachFrame(own, at < length - 1 ? at : 0, (begun) => waited(FRAME_TIME - (performance.now() - begun)));
  if (film !== own) return;
  stopFilm();
  fillFilmBar(subjectOf(runs, pane));
}

/** Shows the frames one after the other, from the first on, as long as the film is not stopped. */
async function eachFrame(own, first, act) {
  const { length } = framesOf(subjectOf(runs, own.pane).run);
  for (let at = first; at < length && film === own; at++) {
    const begun = performance.now();
    await changeFrame(own.pane, at);
    if (film === own) await act(begun);
  }
}

const waited = (time) => new Promise((done) => setTimeout(done, Math.max(0, time)));

/** The view at every step as one GIF, each frame with its step; the server puts the pictures together. */
async function saveGif(pane) {
  const before = state[stepField(pane)],
    own = (film = { pane, saving: true }),
    pictures = [],
    { length } = framesOf(subjectOf(runs, pane).run);
  stop();
  await eachFrame(own, 0, async () => {
    say(word("gifFrame", `${pictures.length + 1} / ${length}`));
    const titles = await Promise.all(subjects().map(frameTitle));
    pictures.push(await viewPicture(1, titles.join("   ")));
  });
  const isComplete = film === own;
  stopFilm();
  await change({ [stepField(pane)]: before });
  if (!isComplete) return say(word("gifStopped"));
  say(word("saving"));
  try {
    const response = await sent("gif", { frames: sameSize(pictures), milliseconds: FRAME_TIME });
    if (!response.ok) throw new Refused((await response.json()).error);
    download(await response.blob(), "gif");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    say(error.message);
  }
}

/** The line above a frame: the run, its step, the text and the answer. */
async function frameTitle(subject) {
  const { run, body } = subject,
    { answer } = await ask("answer", body),
    texts = [body.text, ...(answer ? [answer] : [])].map((text) => visibleText(text).slice(0, MAX_TITLE_TEXT));
  return `${run.name} · ${framesOf(run)[frameNow(subject)].name} · ${texts.join(" → ")}`;
}

/** The pictures as PNG in base64, on paper of the size of the largest. */
function sameSize(pictures) {
  const width = Math.max(...pictures.map((one) => one.width)),
    height = Math.min(Math.max(...pictures.map((one) => one.height)), MAX_FRAME_HEIGHT);
  return pictures.map((picture) => {
    const canvas = make("canvas", { width, height }),
      context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(document.body).backgroundColor;
    context.fillRect(0, 0, width, height);
    context.drawImage(picture, 0, 0);
    return canvas.toDataURL("image/png").slice("data:image/png;base64,".length);
  });
}

/** Shortcuts of the film. */
function filmKeys() {
  const [subject] = subjects();
  if (saved || framesOf(subject.run).length < 2) return {};
  return { f: () => toggleFilm(0), "<": () => moveFilm(0, -1), ">": () => moveFilm(0, 1) };
}
