// The neuron view: the elementwise products of one query and one key, and how their sum becomes a weight.

DRAWN.neuron = { show: showNeuron, requests: (subject) => [["neuron", pairOf(subject)]] };

async function showNeuron(subject, reading) {
  const { kind, layer, head } = chosen(subject.run),
    { rows, columns } = ends(kind, reading.tokens);
  const query = state.query < 0 ? rows.length - 1 : clamp(state.query, 0, rows.length - 1);
  const key =
    state.key < 0 ? await strongest(subject, kind, layer, head, query) : clamp(state.key, 0, columns.length - 1);
  const found = await ask("neuron", { ...subject.body, kind, layer, head, query, key });
  const pair = make(
    "p",
    { class: "value" },
    make("span", { class: "label" }, `${word("query")} `),
    tokenSpan(rows[query] ?? ""),
    make("sub", {}, String(query)),
    " → ",
    make("span", { class: "label" }, `${word("key")} `),
    tokenSpan(columns[key] ?? ""),
    make("sub", {}, String(key)),
  );
  const shot = await pictures(subject, reading);
  const most = Math.max(...found.q.map(Math.abs), ...found.k.map(Math.abs)) || 1;
  const product = Math.max(...found.product.map(Math.abs)) || 1;
  const bars = make(
    "div",
    { class: "neurons" },
    signs("q", found.q, most),
    signs("k", found.k, most),
    signs("q × k", found.product, product),
  );
  return make(
    "div",
    {},
    picker(subject, ["kind", "layer", "head"]),
    shot?.box,
    explained("neuron"),
    pair,
    bars,
    sum(found),
    found.position?.startsWith("rotary") ? await rotationPart(subject, { kind, layer, head }, query, key) : null,
    row(subject, found, columns, key),
  );
}

/** The key with the highest weight of a query. */
async function strongest(subject, kind, layer, head, query) {
  return (await ask("heads", { ...subject.body, kind, layer })).strongest[head][query];
}

/** Scrolls the row of weights to the selected key. */
function keysIntoSight() {
  for (const row of document.querySelectorAll(".weights")) {
    const key = row.querySelector("[aria-pressed=true]"),
      from = key.offsetLeft - row.offsetLeft;
    if (from < row.scrollLeft || from + key.offsetWidth > row.scrollLeft + row.clientWidth)
      row.scrollLeft = from - row.clientWidth / 2;
  }
}

/** Values as bars above and below a line. */
function signs(name, values, most) {
  const high = 40,
    bars = values.map((value, i) => {
      const size = (Math.abs(value) / most) * high;
      return draw(
        "rect",
        {
          x: i + 0.1,
          width: 0.8,
          y: value < 0 ? high : high - size,
          height: Math.max(size, 0.4),
          class: value < 0 ? "below" : "above",
        },
        draw("title", {}, `${name}[${i}] = ${figure(value)}`),
      );
    });
  const total = values.reduce((a, b) => a + b, 0);
  const drawing = draw(
    "svg",
    {
      viewBox: `0 0 ${values.length} ${2 * high}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${name}: ${word("valuesCount", values.length)}, ${figure(Math.min(...values))} … ${figure(Math.max(...values))}`,
    },
    bars,
    draw("path", { d: `M0 ${high}H${values.length}`, class: "axis" }),
  );
  return make(
    "div",
    { class: "signs" },
    make("b", {}, name),
    drawing,
    make("span", { class: "number" }, name === "q × k" ? `Σ ${figure(total)}` : `±${figure(most)}`),
  );
}

/** From the sum to the weight: q·k × scale + bias = score → softmax → weight. */
function sum(found) {
  const term = (name, value) =>
    make(
      "span",
      { class: "term" },
      make("b", {}, typeof value === "number" ? figure(value) : word("nothing")),
      make("small", {}, name),
    );
  const sign = (text) => make("span", { class: "sign" }, text);
  const parts = [term("q · k", found.dot), sign("×"), term(found.root ? `1/√${found.root}` : word("scale"), found.scale)];
  if (typeof found.cap === "number") parts.push(sign("→"), term(word("cap"), found.cap));
  parts.push(
    sign("+"),
    term(word("bias"), found.bias ?? 0),
    sign("="),
    found.visible ? term(word("score"), found.score) : term(word("score"), word("hidden")),
  );
  if (typeof found.sink === "number") parts.push(sign("·"), term(word("sink"), found.sink));
  parts.push(sign(`→ ${found.normalizer} →`), term(word("weight"), found.weight));
  const line = make("div", { class: found.visible ? "sum" : "sum unseen" }, parts);
  return found.visible ? line : make("div", {}, line, make("p", { class: "note" }, word("unseen")));
}

/** The query's weights on every key; a click selects another key. */
function row(subject, found, columns, key) {
  const most = Math.max(...found.row, 1e-9);
  const keys = make(
    "div",
    { class: "weights", role: "group", "aria-label": word("key"), "data-scroll": `weights-${subject.pane}` },
    columns.map((token, i) =>
      make(
        "button",
        {
          type: "button",
          id: `weight-${subject.pane}-${i}`,
          tabindex: i === key ? 0 : -1,
          "aria-pressed": String(i === key),
          title: figure(found.row[i] ?? 0),
          ...toward({ key: i }),
        },
        make("span", { class: "fill", style: { height: `${(60 * (found.row[i] ?? 0)) / most}px` } }),
        tokenSpan(token),
        make("small", {}, (found.row[i] ?? 0).toFixed(2)),
      ),
    ),
  );
  roving(keys, "button");
  return make("div", {}, make("h3", {}, word("rowOf")), keys);
}
