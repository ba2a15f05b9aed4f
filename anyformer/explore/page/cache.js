// The KV cache: its growth with every token, and its size during generation.

DRAWN.cache = { show: showCache, requests: (subject) => (subject.run.shape === "encoder" ? [] : [["cache", subject.body]]) };

async function showCache(subject) {
  if (subject.run.shape === "encoder") return make("div", {}, make("p", { class: "empty" }, word("noCache")));
  const found = await ask("cache", subject.body);
  const kinds = Object.entries(found.kinds).filter(([, values]) => values?.length && Math.max(...values) > 0);
  if (!found.steps.length || !kinds.length) return make("div", {}, make("p", { class: "empty" }, word("noCache")));
  const most = Math.max(...found.steps.map((_, i) => kinds.reduce((total, [, values]) => total + values[i], 0)), 1);
  const width = 640,
    height = 240,
    left = 92,
    wide = (width - left) / found.steps.length;
  const bars = found.steps.flatMap((step, i) => {
    let y = height;
    return kinds.map(([kind, values], j) => {
      const size = ((height - 10) * values[i]) / most;
      y -= size;
      return draw(
        "rect",
        {
          x: left + i * wide,
          y,
          width: Math.max(0.5, wide * 0.86),
          height: size,
          fill: headColour(j),
          class: step <= found.now ? "held" : "",
        },
        draw("title", {}, `${word("tokensCount", step)} · ${word(`cache.${kind}`)}: ${bytes(values[i])}`),
      );
    });
  });
  const ticks = [0, 0.5, 1].map((share) =>
    draw(
      "g",
      {},
      draw("path", { class: "grid", d: `M${left} ${height - (height - 10) * share}H${width}` }),
      draw(
        "text",
        { x: left - 6, y: height - (height - 10) * share + 4, "text-anchor": "end" },
        bytes(Math.round(most * share)),
      ),
    ),
  );
  const names = [0, Math.floor((found.steps.length - 1) / 2), found.steps.length - 1].map((i) =>
    draw(
      "text",
      { x: left + (i + 0.43) * wide, y: height + 18, "text-anchor": i && i === found.steps.length - 1 ? "end" : "middle" },
      String(found.steps[i]),
    ),
  );
  const chart = draw(
    "svg",
    { class: "chart", viewBox: `0 -14 ${width} ${height + 54}`, role: "img", "aria-label": word("view.cache") },
    ticks,
    bars,
    names,
    draw("text", { x: left + (width - left) / 2, y: height + 36, "text-anchor": "middle" }, word("tokensRead")),
  );
  const facts = [
    [
      word("cacheNow"),
      bytes(
        kinds.reduce(
          (total, [, values]) =>
            total +
            values[
              Math.max(
                0,
                found.steps.findLastIndex((step) => step <= found.now),
              )
            ],
          0,
        ),
      ),
    ],
    [word("cacheLimit"), found.limit ? word("tokensCount", found.limit) : word("noLimit")],
    ...(found.capacity ? [[word("cacheCapacity"), bytes(found.capacity)]] : []),
  ];
  const legendRow = make(
    "p",
    { class: "legend" },
    kinds.flatMap(([kind], j) => [
      make("span", { class: "swatch", style: { background: headColour(j) } }),
      make("span", {}, word(`cache.${kind}`)),
    ]),
  );
  const button = subject.run.writes
    ? make(
        "button",
        { type: "button", id: `watch-${subject.pane}`, class: "go", ...toward(nextWriting()) },
        word("writeWatch"),
      )
    : null;
  const record = subject.run.writes ? written.get(keyOf("write", writeBody(subject))) : null;
  const tank = make(
    "div",
    { class: "tank", "data-most": most },
    make("span", { class: "tank-bars" }),
    make("span", { class: "tank-words" }),
  );
  if (record && state.write) fillTank(tank, record);
  return make(
    "div",
    {},
    explained("cache"),
    make(
      "dl",
      { class: "facts" },
      facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
    ),
    chart,
    legendRow,
    make("div", { class: "tank-row" }, button, tank),
    layerTable(found.layers ?? []),
  );
}

/** The bytes per token of each layer, and its maximum number of tokens. */
function layerTable(layers) {
  if (!layers.length) return null;
  const head = make(
    "tr",
    {},
    [word("layer"), word("bytesPerToken"), word("tokensKept")].map((name) => make("th", { scope: "col" }, name)),
  );
  const rows = layers.map((one) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, String(one.layer)),
      make("td", {}, bytes(one.bytes)),
      make("td", {}, one.slots ? String(one.slots) : word("all")),
    ),
  );
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, rows)));
}

/** Called after each generated token. */
function filling(record) {
  for (const tank of document.querySelectorAll(".tank")) fillTank(tank, record);
}

function fillTank(tank, record) {
  const tokens = record.lines.filter((line) => !line.done),
    last = tokens[tokens.length - 1];
  if (!last) return;
  const most = Math.max(Number(tank.dataset.most), last.cache);
  tank.firstChild.replaceChildren(
    ...tokens.map((line) => make("span", { style: { height: `${(100 * line.cache) / most}%` } })),
  );
  tank.lastChild.textContent = `${word("tokensCount", tokens.length)}: ${bytes(last.cache)}`;
}
