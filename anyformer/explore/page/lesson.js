// Lessons: a panel above the view that asks; a click on a candidate shows the model with that change, and the answer.

const picks = new Map(); // the candidates that were clicked, the last one at the end, by question

const questionKey = () => JSON.stringify([state.run, state.lesson, state.lessonStep]);
const picksNow = () => picks.get(questionKey()) ?? [];
const wording = (texts) => texts[languageNow()];

/** Draws the panel: the list of lessons, or a step of one. */
async function lessonPanel({ run }) {
  const box = byId("lesson"),
    turn = turns,
    open = Boolean(state.lesson) && !saved;
  byId("lessons").hidden = Boolean(saved); // the model is not in a saved page
  byId("lessons").setAttribute("aria-expanded", String(open));
  if (!open) return box.replaceChildren();
  let content;
  try {
    const all = await ask("lessons", { run: run.name }),
      lesson = all.find(({ name, why }) => name === state.lesson && !why);
    content = lesson ? await lessonStep(lesson) : lessonList(all);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    content = [make("p", { class: "error", role: "alert" }, serverText(error.message))];
  }
  if (turn !== turns) return;
  box.setAttribute("aria-label", word("lessons"));
  keepingPlace(() => box.replaceChildren(...content));
}

function toggleLessons() {
  return state.lesson ? closeLesson() : listLessons();
}

async function listLessons() {
  await change({ lesson: "list" }, true);
  focusLesson();
}

/** Moves the focus to the title, unless a button of the panel has kept it. */
function focusLesson() {
  if (!byId("lesson").contains(document.activeElement)) byId("lesson-title")?.focus({ preventScroll: true });
  byId("lesson").scrollIntoView({ block: "nearest" });
}

async function closeLesson() {
  await change({ lesson: "", lessonStep: 0, off: [], step: -1 }, true);
  byId("lessons").focus();
}

function lessonTop(title, ...more) {
  const close = make("button", { type: "button", id: "lesson-close", onclick: closeLesson }, word("lessonClose"));
  return make("div", { class: "lesson-top" }, make("h2", { id: "lesson-title", tabindex: -1 }, title), more, close);
}

function lessonList(all) {
  const items = all.map((lesson) =>
    make(
      "li",
      {},
      make(
        "button",
        { type: "button", id: `lesson-${lesson.name}`, class: "link", disabled: Boolean(lesson.why), onclick: () => openLesson(lesson, 0) },
        wording(lesson.title),
      ),
      lesson.why ? make("p", { class: "note" }, serverText(lesson.why)) : null,
    ),
  );
  return [lessonTop(word("lessons")), make("p", { class: "explained" }, word("lessonsHow")), make("ol", {}, items)];
}

/** Opens a step: its text, its view, and all heads on. */
async function openLesson(lesson, at) {
  const { view } = lesson.steps[at],
    place = lesson.places[at],
    { layer, head, shown, kind, key, stage, target, off, step } = DEFAULTS;
  await change(
    {
      ...{ layer, head, shown, kind, key, target, off, step },
      ...{ lesson: lesson.name, lessonStep: at, text: lesson.text, view: view.name, at: place, query: place },
      ...{ layer: view.layer ?? layer, head: view.head ?? head, stage: view.stage ?? stage },
    },
    true,
  );
  announce([wording(lesson.steps[at].text), wording(lesson.steps[at].question?.text ?? { en: "", ko: "" })].join(" "));
  focusLesson();
}

/** One step: text, question and the ways on. */
async function lessonStep(lesson) {
  const at = clamp(state.lessonStep, 0, lesson.steps.length - 1),
    { text, question } = lesson.steps[at],
    found = question ? await ask("lesson", { run: state.run, lesson: lesson.name, step: at }) : null,
    done = !question || picksNow().some((pick) => isRight(found, pick)),
    last = at === lesson.steps.length - 1;
  const go = (id, name, to, props = {}) =>
    make("button", { type: "button", id, onclick: () => openLesson(lesson, to), ...props }, name);
  return [
    lessonTop(wording(lesson.title), make("span", { class: "number" }, `${at + 1} / ${lesson.steps.length}`)),
    make("p", { class: "sentence" }, wording(text)),
    ...(question ? asked(lesson, found, question) : []),
    make(
      "div",
      { class: "choice lesson-ways" },
      go("lesson-back", word("lessonBack"), at - 1, { disabled: at === 0 }),
      last
        ? make("button", { type: "button", id: "lesson-all", onclick: listLessons }, word("lessonAll"))
        : go("lesson-next", word("lessonNext"), at + 1, { class: done ? "go" : "" }),
    ),
  ];
}

/** A question with its candidates and, after a click, the model's answer. */
function asked(lesson, found, question) {
  const pick = picksNow().at(-1),
    names = [...found.candidates.map((one) => candidateName(question, one)), word("noneOfThem")];
  const buttons = names.map((name, i) =>
    make(
      "button",
      {
        type: "button",
        id: `candidate-${i}`,
        tabindex: i === (pick ?? 0) ? 0 : -1,
        "aria-pressed": String(i === pick),
        onclick: () => answerLesson(lesson, found, i),
      },
      name,
    ),
  );
  const group = make("div", { class: "choice candidates", role: "group", "aria-label": wording(question.text) }, buttons);
  roving(group, "button");
  return [
    make("p", { class: "asked" }, wording(question.text)),
    group,
    ...(pick === undefined ? [] : modelAnswer(found, question, pick)),
  ];
}

/** The name of a candidate: a head, a word of the text, a step. */
function candidateName({ find }, { name }) {
  if (find === "token") return tokenSpan(name);
  if (find === "step") return `${word("step")} ${Number(name).toLocaleString("en")}`;
  const [kind, layer, head] = name.split(".");
  const only = Object.keys(subjectOf(runs, 0).run.kinds).length === 1;
  return `${only ? "" : `${word(`kind.${kind}`)} `}${word("layer")} ${layer} · ${word("head")} ${head}`;
}

const fillAll = (text, ...fills) => fills.reduce((now, fill) => now.replace("{}", () => fill), text);
const isRight = (found, pick) => (found.right.length ? found.right.includes(pick) : pick === found.candidates.length);

/** Shows the model with the change of a candidate; "none of them" shows it without any. */
async function answerLesson(lesson, found, pick) {
  const { off, step } = DEFAULTS,
    at = lesson.places[state.lessonStep];
  picks.set(questionKey(), [...picksNow().filter((one) => one !== pick), pick]);
  await change({ off, step, at, query: at, text: lesson.text, ...found.candidates[pick]?.change });
  announce([...byId("lesson").querySelectorAll(".verdict, .verdict-then")].map((one) => one.textContent).join(" "));
}

/** The verdict and the probabilities of the candidates tried so far; when one was right, of all, and what follows. */
function modelAnswer(found, question, pick) {
  const candidate = found.candidates[pick],
    right = isRight(found, pick),
    solved = picksNow().some((one) => isRight(found, one)),
    token = visible(found.output);
  const verdict = [
    word(right ? "lessonRight" : "lessonWrong"),
    candidate ? fillAll(word(`lessonWith.${question.find}`, token), percent(candidate.p), percent(found.before)) : "",
    right ? (candidate ? "" : word("lessonNone", token)) : word("lessonAgain"),
  ];
  const rows = found.candidates.map((one, i) => {
    const row = bar([solved && found.right.includes(i) ? "✓ " : "", candidateName(question, one)], one.p, 0, 1, figure(one.p));
    row.classList.toggle("picked", i === pick);
    return solved || picksNow().includes(i) ? row : null;
  });
  if (solved && found.control !== null) rows.push(bar(word("lessonControl"), found.control, 0, 1, figure(found.control)));
  return [
    make("p", { class: right ? "verdict right" : "verdict" }, verdict.filter(Boolean).join(" ")),
    make("p", { class: "label" }, word(`lessonBars.${question.find}`, token)),
    make("div", { class: "bars" }, rows),
    ...(solved ? [make("p", { class: "sentence verdict-then" }, wording(question.then))] : []),
  ];
}
