// The difference of two matrices: A − B, cell by cell, below the two that are compared.

const comparesMatrices = () => state.view === "compare" && state.both === "matrix";

/** The name of a compared view; that of the matrix says that it shows a difference. */
const comparedName = (view, run) => `${viewName(view, run)}${view === "matrix" ? " · A − B" : ""}`;

/** A pane over the full width, or a sentence why there is no difference. */
async function differencePane(subjects) {
  const pane = (...parts) => make("div", { class: "pane across" }, make("h2", {}, "A − B"), parts);
  const asked = (what) =>
    Promise.all(
      subjects.map((subject) => {
        const { kind, layer, head } = chosen(subject.run);
        return ask("matrix", { ...subject.body, kind, layer, head, what });
      }),
    );
  let found, masks;
  try {
    found = await asked(state.what);
    masks = await asked("mask");
  } catch (error) {
    gone(error); // the panes say it
    return null;
  }
  const [a, b] = found;
  if (!a.values || !b.values) return null;
  if (String(a.shape) !== String(b.shape)) {
    const size = ({ shape }) => shape.join(" × ");
    return pane(make("p", { class: "empty" }, word("differenceSizes").replace("{A}", size(a)).replace("{B}", size(b))));
  }
  const [one, two] = found.map(({ values }) => numbers(values, Float32Array)),
    [seen, also] = masks.map(({ values }) => numbers(values, Float32Array)),
    masked = (i) => state.what !== "mask" && !seen[i] && !also[i],
    values = one.map((value, i) => (masked(i) || value < HIDDEN || two[i] < HIDDEN ? -1e30 : value - two[i])),
    names = (of) => a[of].map((token, i) => (token === b[of][i] ? token : `${token}|${b[of][i]}`));
  const both = { ...a, rows: names("rows"), columns: names("columns") },
    drawn = zoomable({ pane: "difference" }, both, values, null, () => {}, "difference");
  return pane(explained("difference"), largestDifference(both, values), drawn);
}

/** The cell at which both differ most, and the mean of all. */
function largestDifference({ rows, columns, shape }, values) {
  const seen = [...values.keys()].filter((i) => values[i] > HIDDEN),
    most = seen.reduce((best, i) => (Math.abs(values[i]) > Math.abs(values[best]) ? i : best), seen[0] ?? 0),
    row = Math.floor(most / shape[1]),
    column = most % shape[1],
    mean = seen.reduce((total, i) => total + Math.abs(values[i]), 0) / (seen.length || 1);
  return make(
    "p",
    { class: "value", id: "largest-difference" },
    make("span", { class: "label" }, `${word("largestDifference")} `),
    tokenSpan(rows[row]),
    make("sub", {}, String(row)),
    " → ",
    tokenSpan(columns[column]),
    make("sub", {}, String(column)),
    " ",
    make("b", {}, signed(values[most])),
    make("span", { class: "share" }, `${word("meanDifference")} ${figure(mean)}`),
  );
}
