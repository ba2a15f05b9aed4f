// The matrix of one head: rows are queries, columns are keys; weights, scores, position bias and mask, as applied.

const zooms = new Map(); // where each pane looks, while the page is open
const matrices = new Map(); // the drawings on the page: pointing at a cell of one marks it in those of the same size

DRAWN.matrix = { show: showMatrix, requests: (subject) => [["matrix", { ...placeOf(subject, ["kind", "layer", "head"]), what: state.what }]] };

async function showMatrix(subject, reading) {
  const { kind, layer, head } = chosen(subject.run),
    where = { ...subject.body, kind, layer, head };
  const found = await ask("matrix", { ...where, what: state.what });
  const buttons = optionButtons(`what-${subject.pane}`, WHATS, state.what, (what) => ({ what }), "what");
  const top = [
    picker(subject, ["kind", "layer", "head"]),
    make(
      "div",
      { class: "choice", role: "group", "aria-label": word("what") },
      buttons,
      state.what === "weights" ? fitButton(subject) : null,
    ),
  ];
  if (!found.values) {
    const query = state.query < 0 ? found.shape[0] - 1 : clamp(state.query, 0, found.shape[0] - 1),
      turns = found.position.startsWith("rotary"),
      key = !turns || state.key >= 0 ? state.key : await strongest(subject, kind, layer, head, query);
    return make(
      "div",
      {},
      top,
      make("p", { class: "empty" }, word(`noBias.${turns ? "rotary" : found.position}`)),
      turns ? await rotationPart(subject, { kind, layer, head }, query, clamp(key, 0, found.shape[1] - 1)) : null,
    );
  }
  const values = numbers(found.values, Float32Array);
  const mask =
    state.what === "weights" ? numbers((await ask("matrix", { ...where, what: "mask" })).values, Float32Array) : null;
  const shot = await pictures(subject, reading);
  return make(
    "div",
    {},
    top,
    shot?.box,
    explained(`matrix.${state.what === "weights" ? found.normalizer : state.what}`),
    zoomable(subject, found, values, mask, (row) => shot?.paint(row)),
  );
}

/** The switch that scales the colours to the largest weight, for long texts, whose weights are small. */
function fitButton(subject) {
  const props = {
    type: "button",
    id: `fit-${subject.pane}`,
    "aria-pressed": String(Boolean(state.fit)),
    title: word("fitHint"),
  };
  return make("button", { ...props, ...toward({ fit: state.fit ? 0 : 1 }) }, word("fit"));
}

/** The drawing with zoom, cursor, and a line with the value under the cursor. */
function zoomable(subject, found, values, mask, asks, what = state.what) {
  const [rows, columns] = found.shape,
    scale = colouring(what, values),
    grey = SCALES[theme()].hidden;
  const shade = mask ? (value, i) => (mask[i] ? scale.colour(value) : grey) : scale.colour,
    picture = pixels(values, rows, columns, shade);
  const hidden = mask ? mask.includes(0) : values.some((value) => value < HIDDEN);
  const canvas = make("canvas", {
    id: `matrix-${subject.pane}`,
    tabindex: 0,
    role: "application",
    "aria-label": word("matrixLabel"),
  });
  const said = make("p", { class: "value", role: "status", "aria-live": "polite" });
  const shape = `${subject.pane} ${rows} ${columns}`;
  if (!zooms.has(shape)) zooms.set(shape, { zoom: 1, x: 0, y: 0 });
  const seat = zooms.get(shape),
    asked = clamp(state.query < 0 ? rows - 1 : state.query, 0, rows - 1);
  const at = {
    row: asked,
    column: state.key < 0 ? greatest(values, asked, columns) : clamp(state.key, 0, columns - 1),
  };
  const hint = make("div", { class: "hint", hidden: true }),
    drawn = { canvas, rows, columns, values, mask, found, shade, picture, seat, at, hint };
  const paint = () => paintMatrix(drawn);
  const tell = (cell) => said.replaceChildren(...cellWords(drawn, cell));
  drawn.mark = (cell) => {
    placeHint(drawn, cell);
    tell(cell ?? at);
  };
  matrices.set(subject.pane, drawn);
  const move = (row, column, keep) => {
    at.row = clamp(row, 0, rows - 1);
    at.column = clamp(column, 0, columns - 1);
    if (keep) {
      Object.assign(state, { query: at.row, key: at.column });
      writeHash(false);
    }
    intoSight(drawn);
    paint();
    tell(at);
    asks(at.row);
  };
  const zoom = (factor, x, y) => {
    zoomBy(drawn, factor, x, y);
    paint();
  };
  new ResizeObserver(paint).observe(canvas);
  canvas.addEventListener("keydown", (event) => matrixKeys(event, at, move, zoom));
  pointing(drawn, move, zoom, paint, tell);
  tell(at);
  const tools = make(
    "span",
    { class: "tools" },
    [
      ["−", 1 / 1.5, "zoomOut"],
      ["+", 1.5, "zoomIn"],
      ["1:1", 0, "zoomAll"],
    ].map(([text, factor, name]) =>
      make(
        "button",
        {
          type: "button",
          id: `${name}-${subject.pane}`,
          title: word(name),
          "aria-label": word(name),
          onclick: () => zoom(factor),
        },
        text,
      ),
    ),
  );
  return make(
    "div",
    { class: "matrix" },
    make("div", { class: "matrix-top" }, said, tools),
    make("div", { class: "drawing" }, canvas, hint),
    legend(scale, hidden),
  );
}

/** The column of the highest value of a row. */
function greatest(values, row, columns) {
  const own = values.subarray(row * columns, (row + 1) * columns);
  return own.reduce((best, value, i) => (value > own[best] ? i : best), 0);
}

function matrixKeys(event, at, move, zoom) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const zooming = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, 0: 0 }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (moves) move(at.row + moves[0], at.column + moves[1], true);
  else if (zooming !== undefined) zoom(zooming);
  else if (event.key === "Enter") openNeuron(at);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function openNeuron({ row, column }) {
  change({ query: row, key: column, ...(state.view === "compare" ? { both: "neuron" } : { view: "neuron" }) }, true);
}

/** The geometry: margins for the tokens, size of a cell, and the visible range. */
function frame({ canvas, rows, columns, seat }) {
  const width = canvas.parentElement?.clientWidth || 600,
    left = width < 500 ? 64 : 104,
    top = 76;
  const fit = clamp(Math.min((width - left) / columns, 620 / rows), 0.5, 52);
  const cell = fit * seat.zoom,
    height = top + Math.max(60, Math.min(620, rows * fit));
  seat.x = clamp(seat.x, 0, Math.max(0, columns * cell - (width - left)));
  seat.y = clamp(seat.y, 0, Math.max(0, rows * cell - (height - top)));
  return { width, height, left, top, cell };
}

function paintMatrix(drawn) {
  const { canvas, rows, columns, shade, picture, seat, at, values, mask } = drawn;
  if (!canvas.isConnected) return;
  const { width, height, left, top, cell } = frame(drawn),
    context = sharp(canvas, width, height);
  const ink = getComputedStyle(canvas).color,
    font = getComputedStyle(canvas).fontFamily;
  context.save();
  context.beginPath();
  context.rect(left, top, width - left, height - top);
  context.clip();
  context.imageSmoothingEnabled = cell < 1;
  context.drawImage(picture, left - seat.x, top - seat.y, columns * cell, rows * cell);
  if (cell >= 40) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `11px ${font}`;
    for (let row = Math.floor(seat.y / cell); row < Math.min(rows, (seat.y + height) / cell); row++) {
      for (let column = Math.floor(seat.x / cell); column < Math.min(columns, (seat.x + width) / cell); column++) {
        const i = row * columns + column;
        if ((mask && !mask[i]) || values[i] < HIDDEN) continue;
        const [red, green, blue] = shade(values[i], i);
        context.fillStyle = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#111" : "#fff";
        context.fillText(
          Math.abs(values[i]) >= 10 ? values[i].toFixed(0) : values[i].toFixed(2),
          left - seat.x + (column + 0.5) * cell,
          top - seat.y + (row + 0.5) * cell,
        );
      }
    }
  }
  context.lineWidth = 2;
  context.strokeStyle = "#d55e00";
  context.strokeRect(
    left - seat.x + at.column * cell,
    top - seat.y + at.row * cell,
    Math.max(cell, 3),
    Math.max(cell, 3),
  );
  context.restore();
  names(drawn, context, ink, font);
}

/** The tokens in the margins: as many as fit, and always those of the cursor. */
function names(drawn, context, ink, font) {
  const { rows, columns, found, seat, at } = drawn,
    { width, height, left, top, cell } = frame(drawn);
  const every = Math.ceil(13 / cell);
  context.fillStyle = ink;
  context.textBaseline = "middle";
  const name = (tokens, i, marked, length) => {
    context.font = `${marked ? "bold " : ""}12px ${font}`;
    const text = visible(tokens[i] ?? ""),
      most = Math.max(1, Math.floor(length / 7));
    const letters = [...text];
    context.fillText(`\u2068${letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text}\u2069`, 0, 0);
  };
  const shown = (i, cursor) => i === cursor || (i % every === 0 && Math.abs(i - cursor) * cell >= 13);
  for (let row = 0; row < rows; row++) {
    const y = top - seat.y + (row + 0.5) * cell;
    if (y < top || y > height || !shown(row, at.row)) continue;
    context.save();
    context.textAlign = "right";
    context.translate(left - 8, y);
    name(found.rows, row, row === at.row, left - 8);
    context.restore();
  }
  for (let column = 0; column < columns; column++) {
    const x = left - seat.x + (column + 0.5) * cell;
    if (x < left || x > width || !shown(column, at.column)) continue;
    context.save();
    context.textAlign = "left";
    context.translate(x, top - 8);
    context.rotate(-Math.PI / 2);
    name(found.columns, column, column === at.column, top - 8);
    context.restore();
  }
}

/** A frame around a cell, over the drawing, which is not painted again; null, or a cell out of sight, hides it. */
function placeHint(drawn, cell) {
  const { hint, seat } = drawn,
    at = frame(drawn),
    x = cell ? (cell.column + 0.5) * at.cell - seat.x : -1,
    y = cell ? (cell.row + 0.5) * at.cell - seat.y : -1,
    side = Math.max(at.cell, 9);
  hint.hidden = x < 0 || y < 0 || x > at.width - at.left || y > at.height - at.top;
  hint.style.width = hint.style.height = `${side}px`;
  hint.style.transform = `translate(${at.left + x - side / 2}px, ${at.top + y - side / 2}px)`;
}

/** Marks a cell in the other drawings of the same size; null removes the mark. */
function markOthers(drawn, cell) {
  for (const other of matrices.values()) {
    const alike = other !== drawn && other.rows === drawn.rows && other.columns === drawn.columns;
    if (alike && other.canvas.isConnected) other.mark(cell);
  }
}

function cellWords({ found, values, mask, columns }, { row, column }) {
  const i = row * columns + column,
    seen = mask ? mask[i] : values[i] > HIDDEN;
  return [
    make("span", { class: "label" }, `${word("query")} `),
    tokenSpan(found.rows[row] ?? ""),
    make("sub", {}, String(row)),
    " → ",
    make("span", { class: "label" }, `${word("key")} `),
    tokenSpan(found.columns[column] ?? ""),
    make("sub", {}, String(column)),
    ": ",
    make("b", {}, seen ? figure(values[i]) : word("hidden")),
  ];
}

function zoomBy(drawn, factor, x, y) {
  const { seat, at } = drawn,
    before = frame(drawn);
  if (!factor) Object.assign(seat, { zoom: 1, x: 0, y: 0 });
  else {
    const zoom = clamp(seat.zoom * factor, 1, Math.max(1, 64 / (before.cell / seat.zoom))),
      ratio = zoom / seat.zoom;
    const px = x ?? (at.column + 0.5) * before.cell - seat.x,
      py = y ?? (at.row + 0.5) * before.cell - seat.y;
    Object.assign(seat, { zoom, x: (seat.x + px) * ratio - px, y: (seat.y + py) * ratio - py });
  }
  drawn.canvas.classList.toggle("zoomed", seat.zoom > 1);
}

function intoSight(drawn) {
  const { seat, at } = drawn,
    { width, height, left, top, cell } = frame(drawn);
  seat.x = clamp(seat.x, (at.column + 1) * cell - (width - left), at.column * cell);
  seat.y = clamp(seat.y, (at.row + 1) * cell - (height - top), at.row * cell);
}

/** Mouse and touch: hovering shows the value, a click sets the cursor, a double click opens Neurons, dragging pans. */
function pointing(drawn, move, zoom, paint, tell) {
  const { canvas, rows, columns, seat } = drawn;
  let from = null,
    last = "";
  const place = (event) => {
    const { left, top, cell } = frame(drawn),
      box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left - left,
      y = event.clientY - box.top - top;
    return { x, y, row: Math.floor((y + seat.y) / cell), column: Math.floor((x + seat.x) / cell) };
  };
  const inside = ({ x, y, row, column }) => x >= 0 && y >= 0 && row < rows && column < columns;
  const point = (cell) => {
    const now = cell ? `${cell.row} ${cell.column}` : "";
    if (now === last) return; // a pointer moves many times within a cell
    last = now;
    tell(cell ?? drawn.at);
    markOthers(drawn, cell);
  };
  canvas.addEventListener(
    "wheel",
    (event) => {
      const { x, y } = place(event);
      if (event.deltaY > 0 && seat.zoom <= 1) return; // the page scrolls on
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, x, y);
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    from = { x: event.clientX, y: event.clientY, moved: false };
    if (seat.zoom > 1) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from && seat.zoom > 1 && event.buttons) {
      from.moved ||= Math.hypot(event.clientX - from.x, event.clientY - from.y) > 3;
      seat.x -= event.movementX;
      seat.y -= event.movementY;
      return paint();
    }
    const cell = place(event);
    point(inside(cell) ? cell : null);
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("pointerup", (event) => {
    const cell = place(event);
    if (!from?.moved && inside(cell)) move(cell.row, cell.column, true);
    from = null;
  });
  canvas.addEventListener("dblclick", (event) => inside(place(event)) && openNeuron(place(event)));
}
