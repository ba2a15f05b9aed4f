// Patching: activations of text B in place of those of text A, one layer and position at a time.

/** A text of as many tokens in most cases: its last word is replaced by another of the same length. */
function otherText(text) {
  const words = text.split(/(\s+)/),
    at = words.findLastIndex((word) => /\S/.test(word)),
    last = words[at] ?? "",
    other = words.find(
      (word) => word.length === last.length && word !== last && /\S/.test(word) && !word.includes("<"),
    );
  words[at] = other ?? (last.slice(1) + last.slice(0, 1) || text);
  return words.join("");
}

/** Text B: that of the comparison, or one made from A. */
const donorText = () => (state.text2 && state.text2 !== state.text ? state.text2 : otherText(state.text));

function patchBody(subject) {
  const donor_target = subject.run.pair ? state.target2 || state.target || null : state.target2 || null;
  return { ...subject.body, donor: donorText(), donor_target, side: state.stack || null, at: state.at };
}

DRAWN.patch = { show: showPatch, requests: (subject) => (viewsOf(subject.run).includes("patch") ? [["patch", patchBody(subject)]] : []) };

async function showPatch(subject) {
  const { run } = subject;
  if (!viewsOf(run).includes("patch")) return notForRun("noPatch");
  const top = [explained("patch"), donorForm(subject)];
  let found;
  try {
    found = await ask("patch", patchBody(subject));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return make("div", {}, top, make("p", { class: "error", role: "alert" }, visibleText(error.message)));
  }
  if (!found.fits) {
    const [side, [a, b]] = Object.entries(found.counts).find(([, [a, b]]) => a !== b);
    return make(
      "div",
      {},
      top,
      make(
        "p",
        { class: "empty" },
        word("patchCounts")
          .replaceAll("{A}", a)
          .replace("{B}", b)
          .replace("{side}", word(`tokens.${side}`)),
      ),
    );
  }
  const parts = [...top, patchSides(subject, found), patchAnswers(subject, found)];
  if (!found.cells.length) return make("div", {}, parts, samePlaces(subject, found));
  return make("div", {}, parts, patchGrid(subject, found), patchDetail(found));
}

/** The field of text B. */
function donorForm(subject) {
  const text = make("textarea", {
    id: `donor-${subject.pane}`,
    rows: 1,
    spellcheck: "false",
    dir: "auto",
    readonly: Boolean(saved),
  });
  text.value = donorText();
  const go = (event) => {
    event.preventDefault();
    change({ text2: text.value, at: -1, cell: "" }, true);
  };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) go(event);
  });
  return make(
    "form",
    { class: "alone donor", onsubmit: go },
    make("label", { class: "field" }, make("span", {}, word("donor")), text),
    make(
      "button",
      { type: "submit", class: "go", id: `donor-go-${subject.pane}`, disabled: Boolean(saved) },
      word("go"),
    ),
  );
}

/** In an encoder–decoder, the stack whose activations are patched. */
function patchSides(subject, found) {
  if (found.sides.length < 2) return null;
  return make(
    "div",
    { class: "choice", role: "group", "aria-label": word("patchStack") },
    optionButtons(`stack-${subject.pane}`, found.sides, found.side, (stack) => ({ stack, cell: "" }), "tokens"),
  );
}

/** The answers of both texts at the position. */
function patchAnswers(subject, found) {
  const side = sideOf(subject.run),
    place =
      subject.run.says === "labels"
        ? []
        : [
            make("span", { class: "label" }, ` ${word(placeWords[subject.run.says] ?? "token")} `),
            tokenSpan(found.tokens[side][found.at]),
            make("sub", {}, String(found.at)),
          ];
  const one = (name, answer, p) => [
    make("span", { class: "label" }, ` ${name} `),
    tokenSpan(answer.name, { class: "answer" }),
    ` ${percent(p)}`,
  ];
  return make(
    "p",
    { class: "value" },
    make("span", { class: "label" }, word("patchAnswer")),
    place,
    ":",
    one("A", found.a, found.a.pa),
    " → ",
    one("B", found.b, found.b.pb),
  );
}

/** Where both texts have the same answer: the positions at which they differ. */
function samePlaces(subject, found) {
  const side = sideOf(subject.run);
  return make(
    "div",
    {},
    make("p", { class: "empty" }, word(found.differ.length ? "patchSame" : "patchSameAll")),
    make(
      "div",
      { class: "choice" },
      found.differ
        .slice(0, 24)
        .map((at) =>
          make(
            "button",
            { type: "button", id: `differ-${subject.pane}-${at}`, ...toward({ at, cell: "" }) },
            tokenSpan(found.tokens[side][at] ?? ""),
            make("sub", {}, String(at)),
          ),
        ),
    ),
  );
}

const layerWords = (layer) => (layer < 0 ? word("embedding") : String(layer));

/** The selected cell as [row, column]: that of the state, or the one with the largest effect. */
function patchPlace(found) {
  const [layer, at] = state.cell.split(".").map(Number),
    row = found.layers.indexOf(layer),
    column = found.positions.indexOf(at);
  if (state.cell && row >= 0 && column >= 0) return [row, column];
  let best = [0, 0];
  for (const [i, cells] of found.cells.entries())
    for (const [j, { effect }] of cells.entries()) if (effect > found.cells[best[0]][best[1]].effect) best = [i, j];
  return best;
}

function patchGrid(subject, found) {
  const colours = ramp(SCALES[theme()].both),
    order = [...found.layers.keys()].reverse(),
    place = patchPlace(found),
    a = found.tokens[found.side],
    b = found.donor[found.side];
  const header = (at) =>
    a[at] === b[at] ? tokenSpan(a[at]) : make("span", { class: "swap" }, tokenSpan(a[at]), "→", tokenSpan(b[at]));
  const grid = cellGrid({
    id: `patch-${subject.pane}`,
    label: word("view.patch"),
    corner: `${word("layer")} \\ ${word("token")}`,
    rows: order.map((row) => layerWords(found.layers[row])),
    columns: found.positions.map(header),
    numbers: found.positions,
    cell: (row, column) => {
      const layer = found.layers[order[row]],
        at = found.positions[column],
        { effect, pb, top } = found.cells[order[row]][column];
      return {
        text: effectWords(effect),
        colour: colours[clamp(Math.round(((effect + 1) / 2) * 255), 0, 255)],
        name: `${word("layer")} ${layerWords(layer)}, ${visible(a[at])} ${at}: ${word("effect")} ${effectWords(effect)}, ${visible(found.b.name)} ${percent(pb)}, ${word("mostProbable")} ${visible(top)}`,
        to: { cell: `${layer}.${at}` },
        current: place[0] === order[row] && place[1] === column,
        same: top === found.b.name,
      };
    },
  });
  const limited = found.limited
    ? make("p", { class: "note" }, word("patchLimited").replace("{A}", found.positions.length))
    : null;
  return make("div", {}, grid, legend({ colours, low: -1, high: 1 }, false), limited);
}

const effectWords = (effect) => (Math.abs(effect) < 0.005 ? "0" : effect.toFixed(2).replace("-", "−"));

/** The probabilities of both answers: in A, in A with the selected activation of B, in B. */
function patchDetail(found) {
  const [row, column] = patchPlace(found),
    one = found.cells[row][column],
    layer = layerWords(found.layers[row]),
    token = found.tokens[found.side][found.positions[column]];
  const line = (name, pa, pb, top) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      [pa, pb].map((p) =>
        make(
          "td",
          {},
          make("span", { class: "bar-track" }, make("span", { class: "bar-now", style: { width: `${100 * p}%` } })),
          make("span", { class: "number" }, percent(p)),
        ),
      ),
      make("td", {}, tokenSpan(top)),
    );
  const table = make(
    "table",
    { class: "tags patched" },
    tableHead(["", ...[found.a, found.b].map(({ name }) => ["p ", tokenSpan(name)]), word("patchTop")]),
    make(
      "tbody",
      {},
      line("A", found.a.pa, found.a.pb, found.a.name),
      line(
        [
          word("patched"),
          ` (${word("layer")} ${layer}, `,
          tokenSpan(token),
          make("sub", {}, String(found.positions[column])),
          ")",
        ],
        one.pa,
        one.pb,
        one.top,
      ),
      line("B", found.b.pa, found.b.pb, found.b.name),
    ),
  );
  return make(
    "div",
    { class: "wide", "data-scroll": "patched", role: "status", "aria-live": "polite", tabindex: 0 },
    make("h3", {}, word("effect"), ` ${effectWords(one.effect)}`),
    table,
  );
}
