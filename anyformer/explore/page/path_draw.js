// Drawing of numbers in the path: vectors as strips of colour with their first values, rows of keys, formulae.

const FIRST_VALUES = 6;

/** A number to four digits, with a real minus sign. */
function amount(value) {
  return figure(Number(value.toPrecision(4))).replace("-", "−");
}

/** A setting as it is written in a config: 0.25. */
const plainNumber = (value) => String(Number(value.toPrecision(4))).replace("-", "−");

const signed = (value) => (value >= 0 ? `+${amount(value)}` : amount(value));

/** A formula: letters in italics, `_x` as an index. */
function formula(text) {
  const parts = text.split(/(_\{[^}]+\}|_[\p{L}\d]+)/u).map((part) =>
    part.startsWith("_") && part.length > 1 ? make("sub", {}, part.slice(1).replace(/[{}]/g, "")) : part,
  );
  return make("p", { class: "formula" }, parts);
}

/** Vectors one under the other with one colour scale: [[sign, name, values, note]]. */
function strips(rows) {
  const most = Math.max(...rows.flatMap(([, , values]) => values.map(Math.abs)), 1e-9);
  return make(
    "div",
    { class: "strips" },
    rows.map(([sign, name, values, note]) => vectorStrip(sign, name, values, most, note)),
  );
}

/** One vector: its name, a cell of colour for each value, and the first values. */
function vectorStrip(sign, name, values, most, note = "") {
  const colours = ramp(SCALES[theme()].both),
    canvas = pixels(values, 1, values.length, (value) => colours[Math.round(((value / most + 1) / 2) * 255)]);
  const first = values.slice(0, FIRST_VALUES).map(amount),
    length = `${word("valuesCount", values.length)}, ${word("length")} ${amount(Math.hypot(...values))}`;
  canvas.className = "vector";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${plainName(name)}: ${first.join(", ")} … ${length}`);
  return make(
    "div",
    { class: "strip-line" },
    make("span", { class: "strip-sign" }, sign),
    make("span", { class: "strip-name" }, name),
    make(
      "div",
      {},
      canvas,
      make(
        "p",
        { class: "strip-values" },
        make("span", { class: "mono" }, `${first.join("  ")}${values.length > FIRST_VALUES ? "  …" : ""}`),
        make("span", { class: "label" }, note ? `${length} · ${note}` : length),
      ),
    ),
  );
}

const plainName = (name) => (typeof name === "string" ? name : (name.textContent ?? ""));

/** A bar to the right for a positive value, to the left for a negative one. */
function signedBar(value, most) {
  const size = `${(50 * Math.abs(value)) / (most || 1)}%`;
  return make(
    "span",
    { class: "signed-track", "aria-hidden": "true" },
    make("span", { class: value < 0 ? "signed below" : "signed above", style: { "--size": size } }),
  );
}

/** A bar from the left. */
function plainBar(value, most) {
  return make(
    "span",
    { class: "plain-track", "aria-hidden": "true" },
    make("span", { class: "plain-bar", style: { "--size": `${(100 * value) / (most || 1)}%` } }),
  );
}

/** A table of keys or parts: heads, then rows of cells; a row may be a button, current or hidden. */
function table(id, heads, rows) {
  const kind = (content) =>
    typeof content === "string" ? "number" : content.classList?.value.endsWith("-track") ? "bar-cell" : "";
  const cell = (content) => make("td", { class: kind(content) }, content);
  return make(
    "div",
    { class: "rows", tabindex: 0, role: "group", "aria-label": heads.join(", "), "data-scroll": id },
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, heads.map((name) => make("th", { scope: "col" }, name)))),
      make(
        "tbody",
        {},
        rows.map(({ name, cells, kind }) =>
          make("tr", { class: kind ?? "" }, make("th", { scope: "row" }, name), cells.map(cell)),
        ),
      ),
    ),
  );
}

const keyName = (token, i) => [tokenSpan(token), make("sub", {}, String(i))];

/** A token or part as a button that changes the state. */
function choice(id, content, updates, props = {}) {
  return make("button", { type: "button", class: "link", id, ...props, ...toward(updates, true) }, content);
}

/** The terms of a sum, the sum, and its difference from the model's number. */
function adding(terms, total, value) {
  const parts = terms.flatMap(([name, term], i) => [
    i ? make("span", { class: "sign" }, "+") : null,
    make("span", { class: "term" }, make("b", {}, amount(term)), make("small", {}, name)),
  ]);
  return make(
    "div",
    { class: "adding" },
    make(
      "div",
      { class: "sum" },
      terms.length > 1 ? [parts, make("span", { class: "sign" }, "=")] : null,
      make("span", { class: "term whole" }, make("b", {}, amount(total)), make("small", {}, word("sum"))),
    ),
    make(
      "p",
      { class: "check" },
      "✓ ",
      word("addsUp", amount(value)),
      ` ${word("difference", Math.abs(total - value).toExponential(1))}`,
    ),
  );
}
