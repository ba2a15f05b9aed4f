// The path view: one forward pass step by step, for one token, layer and head; it can be played.

const HEAD_STEPS = ["qkv", "scores", "mask", "softmax", "values", "out"]; // that depend on a head
const LAYER_STEPS = [...HEAD_STEPS, "norm", "mix", "add", "ff", "ffadd"]; // that depend on a layer
const SECONDS = 5; // of a step that is played

const FIRST_PATH = { at: -1, query: -1, key: -1, output: -1, place: -1, part: "", from: -1 };

let playing = false;
let timer = 0;
let drawnStep = ""; // numbers grow when a step is drawn for the first time, not when a slider moves

const splitStep = (stage) => [stage.slice(0, stage.indexOf(".")), stage.slice(stage.indexOf(".") + 1)];

/** The chapters with their steps, for the selected layer: [{id, kind, name, stages}]. */
function chaptersOf(outline) {
  const chapters = [];
  const add = (kind, name, stage) => {
    const last = chapters[chapters.length - 1];
    if (last?.id === `${kind}.${name}`) last.stages.push(stage);
    else chapters.push({ id: `${kind}.${name}`, kind, name, stages: [stage] });
  };
  for (const { side, begin, layers, end } of outline.sides) {
    for (const stage of begin) add(side, "input", stage);
    for (const stage of layers[layerOf(layers)]) {
      const [kind, name] = splitStep(stage),
        last = chapters[chapters.length - 1];
      if (name === "add" && last.name === "feedforward") last.stages.push(stage); // the sum of parallel sublayers
      else if (name.startsWith("ff")) add(side, "feedforward", stage);
      else add(kind, "attention", stage);
    }
    for (const stage of end) add(side, "output", stage);
  }
  for (const stage of outline.head) add(outline.last, "output", stage);
  for (const stage of outline.follow) add("follow", "follow", stage);
  return chapters;
}

const layerOf = (layers) => clamp(state.layer, 0, layers.length - 1);

/** The step of the state; one that this model or layer lacks becomes the first of its chapter, or of all. */
function stepNow(chapters) {
  const all = chapters.flatMap(({ stages }) => stages);
  if (all.includes(state.stage)) return state.stage;
  const [kind, name] = splitStep(state.stage || "."),
    near = LAYER_STEPS.includes(name) ? chapters.find((one) => one.kind === kind && one.name === "attention") : null;
  return near?.stages[0] ?? all[0];
}

/** The request of a step: only the fields on which its numbers depend. */
function stageRequest(subject, outline, stage) {
  const [kind, name] = splitStep(stage),
    { output, place, part } = state,
    at = state.at;
  if (kind === "follow") {
    if (name === "check") {
      const off = subject.body.off.filter((one) => one !== switchOf(part)); // both passes read the tokens with the head on
      return ["follow", { ...subject.body, off, level: "parts", at, output, place }];
    }
    const below = name === "tokens" ? { part } : name === "dimensions" ? { part, key: state.from } : {};
    return ["follow", { ...subject.body, level: name, at, output, place, ...below }];
  }
  const body = { ...subject.body, stage, at };
  if (kind === "encoder" && outline.last === "decoder") body.key = state.key;
  if (LAYER_STEPS.includes(name)) body.layer = Math.max(0, state.layer);
  if (HEAD_STEPS.includes(name)) body.head = state.head;
  return ["stage", body];
}

/** The requests of the view, for a saved page. */
function pathRequests(subject) {
  const first = ["path", subject.body],
    outline = saved.answers[keyOf(...first)];
  if (!outline) return [first];
  const stage = stepNow(chaptersOf(outline)),
    own = stageRequest(subject, outline, stage),
    found = saved.answers[keyOf(...own)],
    more =
      stage === "head.sample" && subject.run.tokens
        ? [["next", nextBody(subject, readingOf(subject))]]
        : stage === "follow.check" && found
          ? Object.values(checkRequests(subject, outline, found) ?? {})
          : [];
  return [first, own, ...more];
}

/** The change that opens a step; the kind of attention follows it, so that other views show the same. */
function toStep(stage) {
  const [kind] = splitStep(stage);
  return { stage, ...(["encoder", "decoder", "cross"].includes(kind) ? { kind } : {}) };
}

/** The change by a click on a token: the token that is followed. */
function followToken(subject, side, index) {
  const last = side === "decoder" || subject.run.shape === "encoder";
  return last ? { at: index, query: index, place: -1, from: -1 } : { key: index };
}

DRAWN.path = { show: showPath, requests: (subject) => pathRequests(subject) };

async function showPath(subject, reading) {
  const outline = await ask("path", subject.body),
    chapters = chaptersOf(outline),
    all = chapters.flatMap(({ stages }) => stages),
    stage = stepNow(chapters),
    chapter = chapters.find(({ stages }) => stages.includes(stage));
  const found = await ask(...stageRequest(subject, outline, stage));
  const view = { subject, reading, outline, chapters, all, stage, found };
  const parts = await (FOLLOW_STEPS[stage] ?? STEPS[splitStep(stage)[1]])(view);
  const shownFormula = found.formula?.join("\n") ?? parts.formula,
    fresh = drawnStep !== stage;
  drawnStep = stage;
  const title = `${all.indexOf(stage) + 1}. ${stepName(stage, outline.says)}`;
  if (fresh && !subject.pane) announce(`${title}. ${parts.sentence}`);
  if (playing && !subject.pane) schedule(subject);
  return make(
    "div",
    { class: fresh ? "path fresh" : "path" },
    rail(view, chapter),
    make(
      "article",
      { class: "stage", "aria-labelledby": `stage-title-${subject.pane}` },
      make(
        "div",
        { class: "stage-top" },
        make(
          "div",
          {},
          make("p", { class: "label" }, placeName(view, chapter)),
          make("h2", { id: `stage-title-${subject.pane}` }, title),
        ),
        player(view),
      ),
      make("p", { class: "sentence" }, parts.sentence),
      shownFormula ? formula(shownFormula) : null,
      stagePickers(view),
      make("div", { class: "stage-numbers" }, parts.numbers),
      checked(found),
    ),
  );
}

/** On a narrow page, scrolls the list of steps to the current one. */
function stepIntoSight() {
  for (const list of document.querySelectorAll(".rail")) {
    const now = list.querySelector("[aria-current=step]");
    if (!now) continue;
    const from = now.getBoundingClientRect().left - list.getBoundingClientRect().left;
    if (from < 0 || from + now.offsetWidth > list.clientWidth) list.scrollLeft += from - list.clientWidth / 3;
  }
}

function announce(text) {
  byId("announce").textContent = text;
}

/** The name of a step; the last ones have names of their own where the run returns a number or a vector. */
function stepName(stage, says) {
  const [kind, name] = splitStep(stage),
    own = `step.${name}.${says}`;
  return word(kind === "follow" ? `step.${stage}` : own in ENGLISH ? own : `step.${name}`);
}

/** The name of a chapter; with two stacks, after that of its stack. */
function chapterName(view, { kind, name, stages }) {
  const two = view.outline.sides.length > 1,
    mixes = stages.includes(`${kind}.mix`), // without attention
    own = word(mixes ? "step.mix" : kind === "cross" ? "chapter.cross" : `chapter.${name}`);
  return two && kind in { encoder: 1, decoder: 1 } ? `${word(`kind.${kind}`)}: ${own}` : own;
}

/** The line above the title: token, layer and head. */
function placeName(view, chapter) {
  const { found, stage } = view,
    [kind, name] = splitStep(stage),
    parts = [chapterName(view, chapter)];
  if (LAYER_STEPS.includes(name) && kind !== "follow") parts.push(`${word("layer")} ${found.layer}`);
  if (HEAD_STEPS.includes(name)) parts.push(`${word("head")} ${found.head ?? state.head}`);
  if ((found.token ?? null) === null) return parts.join(" · ");
  return [parts.join(" · "), ` · ${word("token")} `, tokenSpan(found.token), ` · ${word("position")} ${found.position}`];
}

/** The list of chapters; the steps of the current one are listed. Every step is a link. */
function rail(view, current) {
  const { subject, chapters, all, stage } = view;
  const link = (one, name, props) =>
    make(
      "a",
      {
        href: toHash({ ...state, ...toStep(one) }),
        id: `step-${subject.pane}-${one}`,
        ...props,
        ...(offered(toStep(one)) ? {} : { "aria-disabled": "true", title: word("notSaved") }),
        onclick: (event) => {
          event.preventDefault();
          stop();
          change(toStep(one), true);
        },
      },
      name,
    );
  const items = chapters.map((chapter) => {
    const open = chapter === current,
      steps = chapter.stages.map((one) =>
        make(
          "li",
          {},
          link(one, [make("span", { class: "count" }, String(all.indexOf(one) + 1)), stepName(one, view.outline.says)], {
            "aria-current": one === stage ? "step" : null,
          }),
        ),
      );
    const head = open
      ? make("span", { class: "chapter" }, chapterName(view, chapter))
      : link(chapter.stages[0], chapterName(view, chapter), { class: "chapter" });
    return make("li", { class: open ? "open" : "" }, head, open ? make("ol", {}, steps) : null);
  });
  return make(
    "nav",
    { class: "rail", "aria-label": word("steps.path"), "data-scroll": `rail-${subject.pane}` },
    make("ol", {}, items),
  );
}

/** Previous, play or pause, next. */
function player(view) {
  const { subject, all, stage } = view,
    at = all.indexOf(stage);
  const button = (id, name, sign, to) =>
    make(
      "button",
      {
        type: "button",
        id: `${id}-${subject.pane}`,
        "aria-label": name,
        title: name,
        disabled: to < 0 || to >= all.length || !offered(toStep(all[to])),
        onclick: () => {
          stop();
          change(toStep(all[to]), true);
        },
      },
      sign,
    );
  return make(
    "div",
    { class: "player", role: "group", "aria-label": word("player") },
    button("previous", word("previous"), "‹", at - 1),
    make(
      "button",
      {
        type: "button",
        id: `play-${subject.pane}`,
        class: "go",
        "aria-pressed": String(playing),
        onclick: () => togglePlay(subject),
      },
      playing ? `❚❚ ${word("pause")}` : `▶ ${word("play")}`,
    ),
    button("next", word("following"), "›", at + 1),
    make("span", { class: "number" }, `${at + 1} / ${all.length}`),
  );
}

function stop() {
  playing = false;
  clearTimeout(timer);
}

async function togglePlay(subject) {
  if (playing) {
    stop();
    return render();
  }
  playing = true;
  const all = chaptersOf(await ask("path", subject.body)).flatMap(({ stages }) => stages),
    last = state.stage === all[all.length - 1];
  return change(last ? toStep(all[0]) : { stage: state.stage });
}

function schedule(subject) {
  clearTimeout(timer);
  timer = setTimeout(() => moveStep(subject, 1, false), 1000 * SECONDS);
}

/** Opens the next or previous step; at the end, playing stops. */
async function moveStep(subject, by, step) {
  if (viewNow() !== "path") return stop();
  const chapters = chaptersOf(await ask("path", subject.body)),
    all = chapters.flatMap(({ stages }) => stages),
    to = all.indexOf(stepNow(chapters)) + by;
  if (to < 0 || to >= all.length || !offered(toStep(all[to]))) {
    stop();
    return render();
  }
  return change(toStep(all[to]), step);
}

function pathKeys(subject) {
  const move = (by) => () => {
    stop();
    moveStep(subject, by, true);
  };
  return { ",": move(-1), ".": move(1), p: () => togglePlay(subject) };
}

/** The selectors of layer and head, where the step depends on them. */
function stagePickers(view) {
  const { subject, outline, stage } = view,
    [kind, name] = splitStep(stage),
    { layers, heads } = outline.sides.find(({ side }) => side === (kind === "cross" ? "decoder" : kind)) ?? {};
  if (!layers || !LAYER_STEPS.includes(name)) return null;
  const pick = (what, count, now) =>
    make(
      "label",
      { class: "pick" },
      make("span", {}, word(what)),
      make(
        "select",
        { id: `path-${what}-${subject.pane}`, onchange: (event) => change({ [what]: Number(event.target.value) }) },
        Array.from({ length: count }, (_, i) => option(i, String(i), i === now, { [what]: i })),
      ),
    );
  const layer = layerOf(layers),
    own = view.found.heads ?? heads[layer];
  return make(
    "div",
    { class: "picker" },
    layers.length > 1 ? pick("layer", layers.length, layer) : null,
    HEAD_STEPS.includes(name) && own > 1 ? pick("head", own, clamp(state.head, 0, own - 1)) : null,
  );
}

/** The line that compares the numbers with the model's. */
function checked(found) {
  if (typeof found.check !== "number") return null;
  return make("p", { class: "check" }, "✓ ", word("check", found.check ? found.check.toExponential(1) : "0"));
}
