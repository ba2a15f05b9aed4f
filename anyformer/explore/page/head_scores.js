// The colour of the switches: a score of each head, with its number and its name.

const HEAD_SCORES = [
  "",
  "pattern",
  "effect",
  "previous",
  "next",
  "itself",
  "first",
  "induction",
  "vertical",
  "spread",
  "distance",
];
const LETTERS = {
  "previous token": "P",
  "next token": "N",
  itself: "S",
  induction: "I",
  "first token": "F",
  vertical: "V",
  diffuse: "D",
  positional: "L",
  mixed: "·",
};

const arrivedScores = new Map(); // answers, by request

/** The request of the selected score. */
function scoreRequest(subject) {
  if (state.score !== "effect") return ["scores", subject.body];
  return ["effects", { ...subject.body, at: state.at, output: state.output }];
}

/** The numbers of the heads: {score, heads} once they are there; asks for them and draws the panel again. */
function scoresNow(subject) {
  const { score } = state;
  if (!score || !Object.keys(subject.run.kinds).length) return null;
  const request = scoreRequest(subject),
    key = keyOf(...request);
  if (!arrivedScores.has(key)) {
    arrivedScores.set(key, {});
    ask(...request)
      .then((found) => arrivedScores.set(key, found))
      .catch((error) => {
        if (!(error instanceof Refused)) throw error;
        arrivedScores.set(key, { error: error.message });
      })
      .then(() => sidePanel(subjects()));
  }
  const found = arrivedScores.get(key);
  if (!found.heads) return { score, waiting: !found.error, error: found.error, heads: {} };
  const value = (id) =>
    score === "pattern" ? found.heads[id]?.name : score === "effect" ? found.heads[id] : found.heads[id]?.[score];
  return { score, found, heads: Object.fromEntries(Object.keys(found.heads).map((id) => [id, value(id)])) };
}

/** What the panel depends on besides the switches. */
function scoreMark(now) {
  if (!state.score) return [];
  return now.map((subject) => {
    const key = keyOf(...scoreRequest(subject)),
      found = arrivedScores.get(key);
    return [state.score, key, Boolean(found?.heads), found?.error];
  });
}

/** The colour, the text and the name of each head; null for the plain colours. */
function scorePaint(subject) {
  const now = scoresNow(subject);
  if (!now) return null;
  const values = Object.values(now.heads).filter((value) => typeof value === "number"),
    most = Math.max(...values.map(Math.abs), 1e-9),
    both = now.score === "effect",
    top = both || now.score === "distance" ? most : 1,
    colours = ramp(SCALES[theme()][both ? "both" : "up"]),
    grey = SCALES[theme()].hidden;
  const paint = (id) => {
    const value = now.heads[id];
    if (now.score === "pattern" && value)
      return { colour: patternColour(value), text: LETTERS[value] ?? "·", name: word(`name.${value}`) };
    if (typeof value !== "number")
      return { colour: grey, text: "", name: now.waiting ? word("computing") : word("undefinedScore") };
    const share = both ? (value / top + 1) / 2 : value / top;
    return { colour: colours[clamp(Math.round(share * 255), 0, 255)], text: shortScore(value), name: figure(value) };
  };
  return { now, paint, scale: { colours, low: both ? -top : 0, high: top }, both };
}

const shortScore = (value) => {
  const size = Math.abs(value);
  if (size < 0.005) return "0"; // no "-.00"
  return size >= 9.95 ? value.toFixed(0) : size >= 0.995 ? value.toFixed(1) : value.toFixed(2).replace("0.", ".");
};

/** A colour for each pattern, by its order. */
function patternColour(name) {
  const at = Object.keys(LETTERS).indexOf(name),
    colour = at < 0 || name === "mixed" ? "#8a8f98" : HEADS[theme()][at];
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

/** The selector of the score. */
function scorePicker(subject) {
  if (subject.pane) return null;
  const known = (score) => {
    if (!saved || !score) return true;
    const before = state.score;
    state.score = score;
    const found = isKnown(...scoreRequest(subject));
    state.score = before;
    return found;
  };
  const select = make(
    "select",
    { id: "score", onchange: (event) => change({ score: event.target.value }) },
    HEAD_SCORES.map((score) =>
      make(
        "option",
        { value: score, selected: score === state.score, ...(known(score) ? {} : notSaved()) },
        word(`score.${score || "none"}`),
      ),
    ),
  );
  return make("label", { class: "pick score-pick" }, make("span", {}, word("scoreBy")), select);
}

/** Under the switches: the meaning of the colours, and the strongest heads by name. */
function scoreLegend(subject, painted) {
  if (!painted) return null;
  const { now, scale, both } = painted;
  if (now.error) return make("p", { class: "error", role: "alert" }, visibleText(now.error));
  if (now.waiting) return make("p", { class: "note", role: "status" }, word("computing"));
  if (now.score === "pattern") return patternLegend(now);
  const order = Object.entries(now.heads)
    .filter(([, value]) => typeof value === "number")
    .sort((a, b) => (both ? Math.abs(b[1]) - Math.abs(a[1]) : b[1] - a[1]))
    .slice(0, 5);
  const about = both
    ? [word(`effectOf.${now.found.of}`), " ", tokenSpan(now.found.output.name), make("sub", {}, String(now.found.at))]
    : word(`scoreAbout.${now.score}`);
  return make(
    "div",
    {},
    legend(scale, false),
    make("p", { class: "note" }, about),
    order.length
      ? make(
          "ol",
          { class: "strongest", "aria-label": word("strongestHeads") },
          order.map(([id, value]) =>
            make("li", {}, make("b", {}, headName(id)), ` ${both ? signed(value) : figure(value)}`),
          ),
        )
      : make("p", { class: "note" }, word("undefinedScore")),
  );
}

/** `cross.1.0` as "Decoder → encoder 1.0"; in a model with one kind of attention, as "1.0". */
function headName(id) {
  const [kind, ...place] = id.split("."),
    one = Object.keys(subjects()[0].run.kinds).length === 1;
  return one ? place.join(".") : `${word(`kind.${kind}`)} ${place.join(".")}`;
}

/** The names of the patterns, each with its letter and its heads. */
function patternLegend(now) {
  const rows = Object.keys(LETTERS)
    .map((name) => [name, Object.keys(now.heads).filter((id) => now.heads[id] === name)])
    .filter(([, ids]) => ids.length);
  return make(
    "dl",
    { class: "patterns" },
    rows.map(([name, ids]) => {
      const colour = patternColour(name);
      return [
        make(
          "dt",
          {},
          make(
            "span",
            { class: "pattern", style: { background: `rgb(${colour.join(" ")})`, color: inkOn(colour) } },
            LETTERS[name],
          ),
          ` ${word(`name.${name}`)}`,
        ),
        make("dd", {}, ids.map(headName).join(", ")),
      ];
    }),
  );
}
