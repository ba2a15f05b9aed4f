// The model as a diagram, from its config: the residual stream of each stack runs upwards, its parts are at its side.

const STREAM = 92,
  LEFT = 166,
  WIDE = 264,
  BOX = 44,
  THIN = 24,
  GAP = 18; // pixels of the drawing
const ADDED = ["sinusoidal", "learned"]; // positions that are added to the stream; others act within attention

DRAWN.block = { show: showBlock, requests: (subject) => [["block", subject.body]] };

async function showBlock(subject) {
  const found = await ask("block", subject.body),
    told = make("div", { class: "details", id: `details-${subject.pane}`, "aria-live": "polite" });
  const tell = (part) => told.replaceChildren(...detailsOf(part));
  const stacks = found.stacks.map((stack) =>
    make(
      "figure",
      { class: "stack" },
      make("figcaption", {}, word(`stack.${stack.side}`)),
      drawStack(found, stack, stack === found.stacks.at(-1), tell),
    ),
  );
  const total = make(
    "p",
    { class: "value" },
    make("b", {}, short(found.total.parameters)),
    ` ${word("parameters")} · `,
    make("b", {}, short(found.total.flops)),
    ` FLOPs ${word("forTokens", [found.source_length, found.length].filter(Boolean).join(" + "))}`,
  );
  tell(null);
  return make(
    "div",
    {},
    explained("block"),
    total,
    told,
    make("div", { class: stacks.length > 1 ? "block both" : "block" }, stacks, costs(found)),
  );
}

/** Draws from the bottom up: `pen.y` is the lower edge of the next part. The drawing is shifted into view at the end. */
function drawStack(found, stack, last, tell) {
  const pen = { y: 0, parts: [], tell, memory: [] };
  const embedding = found.input[stack.side];
  onStream(pen, { ...embedding, name: `${word("embedding")} · ${word("width")} ${found.width}` }, BOX);
  if (ADDED.includes(stack.position.name))
    onStream(pen, { ...stack.position, name: `${word("position")}: ${word(`scheme.${stack.position.name}`)}` }, THIN);
  if (embedding.types) onStream(pen, { name: `${word("tokenTypes")}: ${embedding.types}` }, THIN);
  if (embedding.norm) onStream(pen, { name: word(`normKind.${embedding.norm}`) }, THIN);
  for (const layer of stack.layers) drawLayer(pen, layer, stack);
  if (stack.final_norm.name !== "none")
    onStream(pen, { ...stack.final_norm, name: `${word("finalNorm")}: ${word(`normKind.${stack.final_norm.name}`)}` }, THIN);
  if (last) onStream(pen, { ...found.head, name: `${word("output")} · ${word(`headKind.${found.head.name}`)}` }, BOX);
  else {
    wire(pen, GAP);
    encoded(pen, STREAM, pen.y - 26);
    pen.y -= 26;
  }
  const top = pen.y - 8,
    bottom = pen.memory.length ? 48 : 8;
  if (pen.memory.length) memoryRail(pen);
  return draw(
    "svg",
    { viewBox: `0 ${top} ${LEFT + WIDE + 34} ${bottom - top}`, role: "group", "aria-label": word(`stack.${stack.side}`) },
    pen.parts.flat(),
  );
}

/** A part on the residual stream. */
function onStream(pen, part, height) {
  wire(pen, GAP);
  box(pen, 8, pen.y - height, LEFT + WIDE - 8, height, part, height === BOX ? "end" : "norm");
  pen.y -= height;
}

function wire(pen, by) {
  pen.parts.unshift(draw("path", { class: "wire", d: `M${STREAM} ${pen.y}V${pen.y - by}` }));
  pen.y -= by;
}

function drawLayer(pen, layer, stack) {
  wire(pen, GAP);
  const bottom = pen.y,
    count = layer.to - layer.from + 1,
    residual = layer.sublayers[0]?.residual;
  const norm = { name: word(`normKind.${layer.norms.name}`), details: { placement: layer.placement } };
  if (layer.parallel) drawParallel(pen, layer, norm);
  else for (const part of layer.sublayers) drawSublayer(pen, part, norm);
  wire(pen, 10);
  const name = count === 1 ? `${word("layer")} ${layer.from}` : `${word("layers")} ${layer.from}–${layer.to}`;
  pen.parts.unshift(
    draw("rect", { class: "frame", x: 2, y: pen.y, width: LEFT + WIDE + 16, height: bottom - pen.y, rx: 10 }),
  );
  const notes = [name, stack.share ? word("shared") : "", residual ? "" : word("noResidual")].filter(Boolean),
    y = bottom - 10 - 15 * notes.length; // low, beside the first part: norms on the stream stand higher
  pen.parts.push(
    draw("text", { class: "times", x: 6, y: y - 3 }, `× ${count}`),
    notes.map((note, i) => draw("text", { class: "small", x: 6, y: y + 15 + 15 * i }, note)),
  );
}

/** Sequential sublayers: norm, part and norm at the side of the stream; then the sum and its norm. */
function drawSublayer(pen, part, norm) {
  wire(pen, 12);
  const from = pen.y,
    middle = LEFT + WIDE / 2,
    column = { y: from - 12 };
  const step = (height, what, kind) => {
    pen.parts.unshift(draw("path", { class: "wire", d: `M${middle} ${column.y + 12}V${column.y}` }));
    box(pen, LEFT, column.y - height, WIDE, height, what, kind);
    column.y -= height + 12;
  };
  if (part.norms.in) step(THIN, norm, "norm");
  const inner = named(part);
  step(inner.height, inner, part.name);
  if (part.name === "cross") pen.memory.push(column.y + 12 + inner.height / 2);
  if (part.norms.branch) step(THIN, norm, "norm");
  pen.parts.unshift(
    draw("path", {
      class: "wire",
      d: `M${STREAM} ${from}H${middle}V${from - 12}M${middle} ${column.y + 12}V${column.y}H${STREAM + (part.residual ? 9 : 0)}`,
    }),
  );
  if (part.residual) {
    pen.parts.unshift(draw("path", { class: "wire", d: `M${STREAM} ${from}V${column.y}` }));
    plus(pen, column.y);
  }
  pen.y = column.y - (part.residual ? 9 : 0);
  if (part.norms.sum) normOnStream(pen, norm);
}

/** Parallel sublayers: all read the same input, and one sum adds them. */
function drawParallel(pen, layer, norm) {
  wire(pen, 12);
  const from = pen.y,
    rail = LEFT - 14,
    far = LEFT + WIDE + 8;
  let y = from - 8;
  const each = [],
    entries = [];
  if (layer.norms.shared) {
    box(pen, LEFT - 60, y - THIN + 8, 110, THIN, norm, "norm");
    y -= THIN;
  }
  for (const part of layer.sublayers) {
    if (part.norms.in) {
      box(pen, LEFT, y - THIN, WIDE, THIN, norm, "norm");
      pen.parts.unshift(draw("path", { class: "wire", d: `M${LEFT + WIDE / 2} ${y - THIN}v-8` }));
      y -= THIN + 8;
    }
    const inner = named(part);
    box(pen, LEFT, y - inner.height, WIDE, inner.height, inner, part.name);
    if (part.name === "cross") pen.memory.push(y - inner.height / 2);
    entries.push(part.norms.in ? y + THIN / 2 + 8 : y - inner.height / 2);
    each.push(y - inner.height / 2);
    y -= inner.height + 12;
  }
  const across = each.map((at, i) => `M${rail} ${entries[i]}H${LEFT}M${LEFT + WIDE} ${at}H${far}`).join("");
  const start = layer.norms.shared ? `M${STREAM} ${from}H${LEFT - 60}` : `M${STREAM} ${from}H${rail}`;
  pen.parts.unshift(
    draw("path", {
      class: "wire",
      d: `${start}M${rail} ${from}V${Math.min(...entries)}${across}M${far} ${Math.max(...each)}V${y}H${STREAM + 9}M${STREAM} ${from}V${y}`,
    }),
  );
  plus(pen, y);
  pen.y = y - 9;
  if (layer.norms.sum) normOnStream(pen, norm);
}

/** The description of a part; for attention also its pattern and positions. */
function named(part) {
  const { pattern, position } = part.details,
    within = position && ![...ADDED, "none"].includes(position) ? word(`scheme.${position}`) : "",
    reach = ["before", "after", "size", "block"].filter((name) => part.details[`pattern.${name}`] !== undefined),
    size = reach.map((name) => `${word(`reach.${name}`)} ${part.details[`pattern.${name}`]}`).join(", ");
  const seen = pattern ? word(`pattern.${pattern}`) + (size ? ` (${size})` : "") : "",
    note = [seen, within].filter(Boolean).join(" · ");
  return { ...part, name: innerName(part.inner), note, height: note ? BOX + 14 : BOX };
}

function normOnStream(pen, norm) {
  wire(pen, 8);
  box(pen, STREAM - 66, pen.y - THIN, 132, THIN, norm, "norm");
  pen.y -= THIN;
}

/** The description of a part in the current language; numbers are placeholders of its key. */
function innerName(text) {
  return text.match(/\d+/g)?.reduce((said, number) => said.replace("{}", number), word(`part.${text.replace(/\d+/g, "{}")}`, "{}"))
    ?? word(`part.${text}`);
}

/** The encoder's output, with the same look in both drawings. */
function encoded(pen, middle, y) {
  const wide = 150,
    x = clamp(middle - wide / 2, 2, LEFT + WIDE + 32 - wide);
  pen.parts.push(
    draw("rect", { class: "encoded", x, y, width: wide, height: 26, rx: 13 }),
    draw("text", { x: x + wide / 2, y: y + 17, "text-anchor": "middle" }, word("encoderOutput")),
  );
}

/** The encoder's output runs up at the right, into each cross-attention. */
function memoryRail(pen) {
  const x = LEFT + WIDE + 26,
    arrows = pen.memory.map((y) => `M${x} ${y}H${LEFT + WIDE + 3}m6 -5l-6 5l6 5`).join("");
  pen.parts.push(draw("path", { class: "wire memory", d: `M${x} 18V${Math.min(...pen.memory)}${arrows}` }));
  encoded(pen, x, 18);
}

function plus(pen, y) {
  pen.parts.push(
    draw(
      "g",
      { class: "plus" },
      draw("circle", { cx: STREAM, cy: y, r: 9 }),
      draw("path", { d: `M${STREAM - 5} ${y}h10M${STREAM} ${y - 5}v10` }),
    ),
  );
}

/** A part with its name and cost; a click or Enter shows its settings. */
function box(pen, x, y, width, height, part, kind) {
  const cost =
    part.parameters || part.flops
      ? `${short(part.parameters)} ${word("parametersShort")} · ${short(part.flops)} FLOPs`
      : "";
  const high = height >= BOX,
    middle = x + width / 2;
  const open = (event) =>
    (event.type === "click" || ["Enter", " "].includes(event.key)) && (event.preventDefault(), pen.tell(part));
  pen.parts.push(
    draw(
      "g",
      {
        class: `part ${kind}`,
        role: "button",
        tabindex: 0,
        "aria-label": `${part.name} ${cost}`,
        onclick: open,
        onkeydown: open,
      },
      draw("rect", { x, y, width, height, rx: 6 }),
      draw(
        "text",
        { x: middle, y: y + (high ? (cost ? 18 : 27) : 16), "text-anchor": "middle" },
        high || !cost ? part.name : `${part.name} · ${short(part.parameters)} ${word("parametersShort")}`,
      ),
      part.note ? draw("text", { class: "small", x: middle, y: y + 34, "text-anchor": "middle" }, part.note) : null,
      high && cost
        ? draw("text", { class: "small", x: middle, y: y + height - 9, "text-anchor": "middle" }, cost)
        : null,
    ),
  );
}

function detailsOf(part) {
  if (!part) return [make("p", { class: "note" }, word("clickPart"))];
  const facts = {
    [word("parameters")]: part.parameters?.toLocaleString(),
    FLOPs: part.flops?.toLocaleString(),
    ...part.details,
  };
  return [
    make("b", {}, part.name),
    ...Object.entries(facts)
      .filter(([, value]) => value !== undefined)
      .map(([name, value]) => make("span", {}, make("span", { class: "label" }, name), String(value))),
  ];
}

/** A table of all parts with their share of the parameters. */
function costs(found) {
  const rows = [];
  const add = (name, cost, times = 1) =>
    (cost.parameters || cost.flops) && rows.push([name, cost.parameters * times, cost.flops * times]);
  for (const stack of found.stacks) {
    const many = found.stacks.length > 1 ? `${word(`stack.${stack.side}`)}: ` : "";
    add(many + word("embedding"), found.input[stack.side]);
    add(many + word("position"), stack.position);
    for (const layer of stack.layers) {
      const times = layer.to - layer.from + 1,
        range = times > 1 ? `${layer.from}–${layer.to}` : layer.from,
        where = stack.layers.length > 1 ? ` ${range}` : "";
      for (const part of layer.sublayers) add(`${many}${innerName(part.inner)}${where}`, part, times);
      add(`${many}${word("norm")}${where}`, layer.norms, times);
      if (layer.adapters) add(`${many}${word("adapters")}${where}`, layer.adapters, times);
    }
    add(many + word("finalNorm"), stack.final_norm);
  }
  add(word("output"), found.head);
  const share = (value, whole) =>
    make(
      "td",
      { class: "number" },
      make("span", { class: "share-bar", style: { width: `${whole ? (100 * value) / whole : 0}%` } }),
      make("span", {}, short(value)),
    );
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, word("partName")),
    make("th", { scope: "col" }, word("parameters")),
    make("th", { scope: "col" }, "FLOPs"),
  );
  const body = rows.map(([name, parameters, flops]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      share(parameters, found.total.parameters),
      share(flops, found.total.flops),
    ),
  );
  return make(
    "div",
    { class: "wide" },
    make("table", { class: "cost" }, make("thead", {}, head), make("tbody", {}, body)),
  );
}
