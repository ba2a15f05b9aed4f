// The run's answer, and generation token by token; with heads off, before and after.

const written = new Map(); // the lines that came so far, by request
let writing = null; // the requests under way, and what stops them

/** The request for generation. */
function writeBody(subject, off = subject.body.off) {
  const { temperature, topk, topp, seed, most } = state,
    drawn = temperature > 0; // else the likeliest: nothing is cut off
  return {
    ...subject.body,
    off,
    temperature,
    top_k: drawn ? topk : 0,
    top_p: drawn ? topp : 1,
    seed,
    max_new_tokens: most,
  };
}

const earlier = []; // generated with other settings, to be read beside the next

/** Keeps the generated text when a slider moves: one line for each setting. */
function keepWritten() {
  if (!state.write) return;
  for (const { pane, run, body } of subjects().filter((one) => one.run.writes)) {
    const { lines, done } = written.get(keyOf("write", writeBody({ pane, run, body }))) ?? {};
    if (done) earlier.push({ body: JSON.stringify(body), label: settings(), lines });
  }
  while (earlier.length > 6) earlier.shift();
}

/** The sampling options in short: "T 1.00, top-k 5, seed 2". */
function settings() {
  const { temperature, topk, topp, seed } = state;
  const parts = [
    `T ${temperature.toFixed(2)}`,
    topk ? `top-k ${topk}` : "",
    topp < 1 ? `top-p ${topp.toFixed(2)}` : "",
    temperature ? `${word("seed")} ${seed}` : "",
  ];
  return parts.filter(Boolean).join(", ");
}

/** Whether the answer takes a forward pass, which the first view does not: it is written after that is drawn. */
const answersLate = ({ run }) => run.says !== "tokens";

/** The answer; with heads off, that with all heads; in a comparison, that of the first subject. */
async function answersOf({ pane, body }) {
  const found = await ask("answer", body),
    before = body.off.length ? await ask("answer", { ...body, off: [] }) : null,
    other = pane ? await ask("answer", subjects()[0].body).catch(gone) : null;
  return [found, before, other];
}

/** The panel until the answer is there. */
const waitingOutput = () =>
  make(
    "div",
    { class: "output", "aria-busy": "true" },
    make("div", { class: "said-row" }, make("span", { class: "label" }, word("answer")), word("computing")),
  );

/** Writes a late answer into its panel, if that is still shown. */
async function answerLate(subject) {
  const panel = byId("strips").children[subject.pane]?.querySelector(".output[aria-busy]");
  if (!panel) return;
  try {
    panel.replaceWith(output(subject, ...(await answersOf(subject))));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    panel.replaceWith(make("p", { class: "output error", role: "alert" }, serverText(error.message)));
  }
}

/** The panel under the tokens: answer and generated text; with heads off, also those with all heads. */
function output(subject, found, before, other) {
  const rows = [];
  const add = (name, content) =>
    content && rows.push(make("div", { class: "said-row" }, make("span", { class: "label" }, name), content));
  const off = subject.body.off.length;
  if (found.answer || before?.answer) {
    if (before) add(`${word("answer")} · ${word("before")}`, answered(before, null));
    add(before ? `${word("answer")} · ${word("withOff", off)}` : word("answer"), answered(found, before));
  }
  const near = cosine(other?.vector, found.vector);
  if (near !== null)
    add(word("cosine"), make("span", { class: "cosine" }, make("b", {}, near.toFixed(3)), ` ${word("cosineHint")}`));
  const own = earlier.filter((one) => one.body === JSON.stringify(subject.body));
  for (const { label, lines } of own) {
    const line = make("span", { class: "written", role: "group", "aria-label": label });
    for (const one of lines) line.append(...piece(one, line));
    add(`${word("written")} · ${label}`, focusable(line));
  }
  if (subject.run.writes && state.write) {
    if (off) add(`${word("written")} · ${word("before")}`, writtenLine(subject, []));
    add(off ? `${word("written")} · ${word("withOff", off)}` : word("written"), writtenLine(subject, subject.body.off));
    if (off) rows.push(make("p", { class: "note first-note", role: "status" }));
  }
  if (!rows.length && subject.run.writes) rows.push(make("p", { class: "note" }, word("writeHint")));
  const button = subject.run.writes
    ? make(
        "button",
        { type: "button", id: `write-${subject.pane}`, class: "go", ...toward(nextWriting()) },
        word("write"),
      )
    : null;
  return make("div", { class: "output" }, make("div", { class: "said-rows" }, rows), button);
}

/** An answer, with changes of label probabilities. */
function answered(found, before) {
  const changed = before && before.answer !== found.answer;
  const parts = answerParts(found, before) ?? visibleText(found.answer);
  const text = make("bdi", { class: changed && !found.tags ? "answer changed" : "answer", dir: "auto" }, parts);
  const old = new Map(before?.probabilities ?? []);
  const best = (found.probabilities ?? []).slice(0, 3).map(([label, p]) => {
    const by = old.has(label) ? p - old.get(label) : 0;
    const moved = Math.abs(by) >= 5e-5 ? ` (${by > 0 ? "+" : "−"}${(100 * Math.abs(by)).toFixed(2)})` : "";
    return make("span", { class: "share" }, tokenSpan(label), ` ${percent(p)}${moved}`);
  });
  return make("span", {}, text, best);
}

/** The tokens generated so far, shaded by probability; the title lists the ten most probable alternatives. */
function writtenLine(subject, off) {
  const record = written.get(keyOf("write", writeBody(subject, off)));
  const line = make("span", {
    class: "written",
    role: "group",
    "aria-label": word("written"),
    "data-key": keyOf("write", writeBody(subject, off)),
  });
  for (const one of record?.lines ?? []) line.append(...piece(one, line));
  if (record?.error) line.append(make("span", { class: "error" }, serverText(record.error)));
  return focusable(line);
}

/** Generated tokens by arrow keys; the one in focus lists its alternatives below. */
function focusable(line) {
  const told = make("span", { class: "alternatives", role: "status" });
  roving(line, ".piece");
  line.addEventListener("focusin", (event) => (told.textContent = event.target.title.replace(/\s*\n+/g, " · ")));
  line.addEventListener("focusout", () => (told.textContent = ""));
  return make("span", { class: "written-box" }, line, told, make("small", { class: "shades" }, word("shades")));
}

function piece(one, line) {
  if (one.done) return [];
  const top = (one.top ?? []).map(([token, p]) => `${visible(token)}  ${percent(p)}`).join("\n");
  return [
    make(
      "bdi",
      {
        class: "piece",
        dir: "auto",
        tabindex: line.querySelector(".piece") ? -1 : 0,
        title: `${visible(one.token)}  ${percent(one.p)}\n\n${top}`,
        style: { "--p": one.p },
      },
      visible(one.token),
    ),
  ];
}

/** Streams the outputs that are shown and missing, one after the other; only other requests stop it. */
async function writeMissing(subjects) {
  const bodies = !state.write
    ? []
    : subjects
        .filter((one) => one.run.writes)
        .flatMap((one) => (one.body.off.length ? [[], one.body.off] : [[]]).map((off) => writeBody(one, off)));
  const wanted = bodies.map((body) => keyOf("write", body)).join("\n");
  if (writing?.wanted === wanted) return;
  writing?.control.abort();
  writing = { wanted, control: new AbortController() };
  const { signal } = writing.control;
  for (const body of bodies) await writeOne(body, signal);
}

async function writeOne(body, signal) {
  const key = keyOf("write", body);
  if (signal.aborted || written.get(key)?.done) return;
  const record = { lines: [], done: false, error: "" };
  written.set(key, record);
  for (const line of linesOf(key)) line.replaceChildren();
  try {
    await stream(
      "write",
      body,
      (one) => {
        if (signal.aborted) return;
        record.lines.push(one);
        for (const line of linesOf(key)) line.append(...piece(one, line));
        markFirstDifference();
        if (one.cache !== undefined) filling(record);
      },
      signal,
    );
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof Refused)) throw error;
    record.error = error.message;
    for (const line of linesOf(key)) line.append(make("span", { class: "error" }, serverText(error.message)));
  }
  record.done = !signal.aborted;
}

function linesOf(key) {
  return [...document.querySelectorAll(".written")].filter((line) => line.dataset.key === key);
}

/** The button: generates; again, with the next seed if the temperature is not 0. */
function writeAgain() {
  change(nextWriting());
}

const nextWriting = () => (state.write && state.temperature > 0 ? { seed: state.seed + 1 } : { write: 1 });
