// Predictions other than tokens: labels, a number, a tag of each word, an answer, a vector.

/** The name of a view: its title, or the page's word for it; that of `next` depends on what the run predicts. */
function viewName(view, run) {
  const title = run.views.find((one) => one.view === view)?.title;
  return title ? visibleText(title) : word(view === "next" ? `next.${run.says}` : `view.${view}`);
}

/** The view `next` of a run that does not predict tokens. */
async function showAnswer(subject, reading) {
  const { says } = subject.run,
    found = await ask("answer", subject.body),
    parts = {
      labels: () => labels(found.probabilities ?? []),
      number: () => make("p", { class: "figure" }, visibleText(found.answer || "–")),
      tags: () => tagTable(subject, found, state.at < 0 ? reading.at : state.at),
      answer: () => make("p", { class: "figure" }, visibleText(found.answer || "–")),
      vector: () => vectorBars(found.vector ?? []),
    };
  return make("div", {}, explained(`next.${says}`), parts[says](), await ablation(subject, reading));
}

/** Probabilities of labels; sliders do not change them. */
function labels(found) {
  const most = Math.max(...found.map(([, p]) => p), 1e-9);
  return make(
    "div",
    { class: "bars" },
    found.map(([label, p]) => bar(tokenSpan(label), p, 0, most, "")),
  );
}

/** Each word with its tag, the probability, and the other probable tags. */
function tagTable(subject, answer, current) {
  const tags = answer.tags ?? [],
    shares = tags.some((one) => one.probabilities);
  const heads = ["word", "tag", ...(shares ? ["probability", "otherTags"] : [])];
  const rows = tags.map(({ at, word: text, label, probabilities: found }) => {
    const own = found?.find(([name]) => name === label)?.[1] ?? 0,
      others = (found ?? []).filter(([name, p]) => name !== label && p >= 5e-4);
    const cells = [
      make(
        "td",
        {},
        make("span", { class: "bar-track" }, make("span", { class: "bar-now", style: { width: `${100 * own}%` } })),
        make("span", { class: "number" }, percent(own)),
      ),
      make("td", {}, others.map(([name, p]) => make("span", { class: "share" }, tokenSpan(name), ` ${percent(p)}`))),
    ];
    return make(
      "tr",
      { class: at === current ? "current" : "" },
      make("th", { scope: "row" }, tokenSpan(text)),
      make("td", {}, make("b", {}, tokenSpan(label))),
      found ? cells : [],
    );
  });
  const table = make(
    "table",
    { class: "tags" },
    tableHead(heads.map((name) => word(name))),
    make("tbody", {}, rows),
  );
  const note = shares ? null : make("p", { class: "note" }, word("jointTags"));
  return make("div", { class: "wide", "data-scroll": `tags-${subject.pane}` }, table, note);
}

/** The values of a vector, and a list of the largest. */
function vectorBars(values) {
  const most = Math.max(...values.map(Math.abs), 1e-9),
    largest = [...values.entries()].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 8);
  return make(
    "div",
    { class: "neurons" },
    make("p", { class: "value" }, vectorWords(values)),
    signs(word("values"), values, most),
    make("h3", {}, word("largestValues")),
    make(
      "p",
      { class: "details" },
      largest.map(([i, value]) => make("span", {}, make("span", { class: "label" }, `[${i}]`), figure(value))),
    ),
  );
}

const vectorWords = (values) =>
  `${word("valuesCount", values.length)}, ${word("length")} ${Math.hypot(...values).toFixed(2)}`;

/** The cosine of two vectors of the same size, else null. */
function cosine(a, b) {
  if (!a || !b || a.length !== b.length) return null;
  const dot = a.reduce((total, value, i) => total + value * b[i], 0);
  return dot / (Math.hypot(...a) * Math.hypot(...b) || 1);
}

/** An answer that is not text, for the line under the tokens; null if it is text. */
function answerParts(answer, before) {
  if (answer.vector) return [vectorWords(answer.vector)];
  if (!answer.tags) return null;
  return answer.tags.map(({ word: text, label, probabilities: found }, i) => {
    const p = found?.find(([name]) => name === label)?.[1];
    const changed = before?.tags?.[i] && before.tags[i].label !== label;
    return make(
      "span",
      { class: changed ? "tagged changed" : "tagged" },
      make("bdi", { dir: "auto" }, visibleText(text)),
      make("small", {}, p === undefined ? visible(label) : `${visible(label)} ${percent(p)}`),
    );
  });
}
