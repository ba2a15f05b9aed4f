// Heads off: the probabilities before and after, and where two generated texts begin to differ.

const ABLATED = ["tokens", "masked", "labels", "tags"]; // outputs that have probabilities

/** The request for the selected position with all heads on. */
function ablatedBody(subject, reading) {
  const { length } = reading.tokens[sideOf(subject.run)];
  return { ...subject.body, at: state.at < 0 ? -1 : Math.min(state.at, length - 1) };
}

const isAblated = (subject) => subject.body.off.length > 0 && ABLATED.includes(subject.run.says);

/** Probabilities with all heads on and with some off, for the same tokens; null if all are on. */
async function ablation(subject, reading) {
  if (!isAblated(subject)) return null;
  let found;
  try {
    found = await ask("ablated", ablatedBody(subject, reading));
  } catch (error) {
    gone(error); // a CRF has no probabilities of single tags; a saved page may lack them
    return null;
  }
  const [best] = found.rows,
    most = Math.max(...found.rows.flatMap(([, before, after]) => [before, after]), 1e-9);
  const rows = found.rows.map(([name, before, after]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, tokenSpan(name)),
      make(
        "td",
        {},
        make(
          "span",
          { class: "bar-track" },
          make("span", { class: "bar-plain", style: { width: `${(100 * before) / most}%` } }),
          make("span", { class: "bar-now", style: { width: `${(100 * after) / most}%` } }),
        ),
      ),
      make("td", { class: "number" }, percent(before)),
      make("td", { class: "number" }, percent(after)),
      make("td", { class: "number" }, points(after - before)),
    ),
  );
  const heads = ["", "", word("before"), word("withOff", subject.body.off.length), word("changeOf")];
  return make(
    "div",
    { class: "ablated" },
    make("h3", {}, word("headsOff", subject.body.off.length)),
    make(
      "p",
      { class: "value", id: `lost-${subject.pane}` },
      word("lostOf").replace("{A}", visible(best[0])).replace("{B}", percent(best[1])).replace("{C}", percent(best[2])),
      typeof found.logp === "number" ? ` (log p ${signed(found.logp)}).` : ".",
      ` ${word("moved", percent(found.moved))}`,
    ),
    make(
      "div",
      {
        class: "wide",
        "data-scroll": `ablated-${subject.pane}`,
        tabindex: 0,
        role: "group",
        "aria-label": word("headsOff", subject.body.off.length),
      },
      make(
        "table",
        { class: "tags" },
        tableHead(heads),
        make("tbody", {}, rows),
      ),
    ),
  );
}

/** A change of probability in percentage points. */
const points = (by) => (Math.abs(by) < 5e-5 ? "0" : `${by > 0 ? "+" : "−"}${(100 * Math.abs(by)).toFixed(2)}`);

/** Marks the first token at which the texts generated with all heads on and with some off differ. */
function markFirstDifference() {
  for (const rows of document.querySelectorAll(".said-rows")) {
    const [before, after] = rows.querySelectorAll(".written[data-key]");
    if (!after) continue;
    const texts = [before, after].map((line) => [...line.querySelectorAll(".piece")]),
      at = texts[1].findIndex((piece, i) => texts[0][i]?.textContent !== piece.textContent);
    for (const pieces of texts)
      for (const [i, piece] of pieces.entries())
        piece.classList.toggle("first-different", at >= 0 && i === at && texts[0].length > 0);
    const note = rows.querySelector(".first-note");
    if (note) note.textContent = at < 0 ? word("sameSoFar") : word("differFrom", at);
  }
}
