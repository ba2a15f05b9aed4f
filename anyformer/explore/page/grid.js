// A grid of coloured cells: rows are layers, columns are tokens; a click selects a cell.

/** Black or white, whichever is easier to read on a colour (relative luminance as WCAG defines it). */
function inkOn(colour) {
  const [red, green, blue] = colour.map((value) => {
    const c = value / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

/** A table with a button in each cell. `cell(row, column)` returns {text, note, colour, name, to, current, same}. */
function cellGrid({ id, label, corner, rows, columns, cell, numbers }) {
  const buttons = [];
  const body = rows.map((name, row) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      columns.map((_, column) => {
        const one = cell(row, column);
        if (!one) return make("td", { class: "blank" });
        const button = make(
          "button",
          {
            type: "button",
            id: `${id}-${row}-${column}`,
            class: one.same ? "cell same" : "cell",
            tabindex: -1,
            title: one.name,
            "aria-label": one.name,
            "aria-pressed": String(Boolean(one.current)),
            style: { background: `rgb(${one.colour.join(" ")})`, color: inkOn(one.colour) },
            ...toward(one.to),
          },
          one.text,
          one.note ? make("small", {}, one.note) : null,
        );
        buttons.push(button);
        return make("td", {}, button);
      }),
    ),
  );
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, corner),
    columns.map((name, i) => make("th", { scope: "col" }, name, make("sub", {}, String(numbers[i])))),
  );
  const current = buttons.find((one) => one.getAttribute("aria-pressed") === "true") ?? buttons[0];
  if (current) current.tabIndex = 0;
  const table = make(
    "table",
    { class: "cells", "aria-label": label },
    make("thead", {}, head),
    make("tbody", {}, body),
  );
  roving(table, "button", () => columns.length);
  return make("div", { class: "wide cells-box", "data-scroll": id }, table);
}

/** Bars of outputs with their probabilities, in the order given. */
function plainBars(pairs) {
  const most = Math.max(...pairs.map(([, p]) => p), 1e-9);
  return make(
    "div",
    { class: "bars" },
    pairs.map(([name, p]) => bar(tokenSpan(name), p, 0, most, figure(p))),
  );
}

/** Scrolls wide grids to their selected cells. */
function cellsIntoSight() {
  for (const box of document.querySelectorAll(".cells-box")) {
    const cell = box.querySelector("[aria-pressed=true]");
    if (!cell || cell === document.activeElement) continue;
    const from = cell.getBoundingClientRect().left - box.getBoundingClientRect().left;
    if (from < 80 || from + cell.offsetWidth > box.clientWidth) box.scrollLeft += from - box.clientWidth / 2;
  }
}
