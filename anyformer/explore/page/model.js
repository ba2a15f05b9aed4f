// The model view: every head of every layer as a small map; a click opens it as a matrix.

DRAWN.model = { show: showModel, requests: (subject) => [["model", placeOf(subject, ["kind"])]] };

async function showModel(subject) {
  const { kind } = chosen(subject.run);
  const found = await ask("model", { ...subject.body, kind });
  const colours = ramp(SCALES[theme()].up);
  const heads = Math.max(...found.layers.map((layer) => countOf(found, layer)));
  const grid = make("div", {
    class: "maps",
    role: "grid",
    "aria-label": word("view.model"),
    style: { "--heads": heads },
    "data-scroll": `maps-${subject.pane}`,
  });
  grid.append(
    make(
      "div",
      { class: "maps-row", role: "row" },
      make("span", { class: "corner", role: "columnheader" }, `${word("layer")} \\ ${word("head")}`),
      Array.from({ length: heads }, (_, head) => make("span", { role: "columnheader" }, String(head))),
    ),
  );
  const now = chosen(subject.run);
  for (const layer of found.layers) {
    const cells = Array.from({ length: countOf(found, layer) }, (_, head) => {
      const here = layer === now.layer && head === now.head;
      return make("span", { role: "gridcell" }, map(subject, found, kind, layer, head, colours, here));
    });
    grid.append(
      make("div", { class: "maps-row", role: "row" }, make("span", { role: "rowheader" }, String(layer)), cells),
    );
  }
  if (!grid.querySelector("button[tabindex='0']")) grid.querySelector("button")?.setAttribute("tabindex", 0);
  roving(grid, "button", () => heads);
  const top = make("div", { class: "choice" }, picker(subject, ["kind"]), fitButton(subject));
  return make("div", {}, top, explained("model"), grid);
}

function countOf(found, layer) {
  return Object.keys(found.maps).filter((key) => key.startsWith(`${layer}.`)).length;
}

/** The colour of a byte of a small map, by the square root, as in the matrix: faint weights stay visible. */
function mapColour(colours, peak, fit = 0) {
  const high = fit ? 1 : peak; // the bytes are relative to the largest weight
  return (value) => colours[clamp(Math.round(Math.sqrt((value / 255) * high) * 255), 0, 255)];
}

function map(subject, found, kind, layer, head, colours, here) {
  const [rows, columns] = found.sizes[layer],
    values = numbers(found.maps[`${layer}.${head}`], Uint8Array);
  const picture = pixels(values, rows, columns, mapColour(colours, found.peaks[`${layer}.${head}`], state.fit));
  const off = subject.body.off.includes(`${kind}.${layer}.${head}`);
  const name = found.names?.[`${layer}.${head}`];
  const title = `${word("layer")} ${layer}, ${word("head")} ${head}${name ? `: ${word(`name.${name}`)}` : ""}`;
  return make(
    "button",
    {
      type: "button",
      class: off ? "map off" : "map",
      title,
      "aria-label": title,
      tabindex: here ? 0 : -1,
      id: `map-${subject.pane}-${layer}-${head}`,
      "aria-current": here ? "true" : null,
      ...toward({ kind, layer, head, ...(state.view === "compare" ? { both: "matrix" } : { view: "matrix" }) }, true),
    },
    picture,
  );
}
