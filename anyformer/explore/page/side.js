// The side panel: switches for heads, and sampling options.

/** The switches of one run: a row for each layer, a column for each head; the address lists those that are off. */
function switches(subject) {
  const { run, pane } = subject,
    off = new Set(subject.body.off),
    painted = scorePaint(subject),
    name = pane ? "off2" : "off";
  const to = (next) => toward({ [name]: [...next].sort() });
  const tables = Object.entries(run.kinds).map(([kind, { layers, heads }]) => {
    const rows = layers.map((layer, i) => {
      const ids = Array.from({ length: heads[i] }, (_, head) => `${kind}.${layer}.${head}`);
      const others = [...off].filter((id) => !ids.includes(id)),
        flipped = ids.every((id) => off.has(id)) ? others : [...others, ...ids];
      const cells = ids.map((id, head) => {
        const score = painted?.paint(id);
        const button = {
          type: "button",
          role: "switch",
          class: score ? "switch scored" : "switch",
          id: `switch-${pane}-${id}`,
          "aria-checked": String(!off.has(id)),
          tabindex: i + head ? -1 : 0,
          title: `${word("layer")} ${layer}, ${word("head")} ${head}: ${word(off.has(id) ? "isOff" : "isOn")}${score ? ` · ${score.name}` : ""}`,
          "aria-label": `${word(`kind.${kind}`)} ${layer}.${head}${score ? `, ${score.name}` : ""}`,
          style: score
            ? { "--head": `rgb(${score.colour.join(" ")})`, color: inkOn(score.colour) }
            : { "--head": headColour(head) },
          ...to(off.has(id) ? [...off].filter((one) => one !== id) : [...off, id]),
        };
        return make("button", button, score && !off.has(id) && heads[i] <= 7 ? score.text : null);
      });
      const all = make(
        "button",
        {
          type: "button",
          class: "layer-name",
          id: `layer-${pane}-${kind}-${layer}`,
          title: word("flipLayer"),
          "aria-label": `${word("flipLayer")} ${layer}`,
          tabindex: -1, // arrow keys lead here
          ...to(flipped),
        },
        String(layer),
      );
      return make("div", { class: "switch-row" }, all, cells);
    });
    const grid = make(
      "div",
      {
        class: "switches",
        role: "group",
        "aria-label": word(`kind.${kind}`),
        "data-scroll": `switches-${pane}-${kind}`,
        style: { "--size": Math.max(...heads) > 10 ? "15px" : painted && Math.max(...heads) <= 7 ? "29px" : "20px" },
      },
      rows,
    );
    roving(grid, ".switch, .layer-name", () => Math.max(...heads) + 1);
    return make("div", {}, make("h3", {}, word(`kind.${kind}`)), grid);
  });
  const title = state.view === "compare" ? `${word("switches")} ${pane ? "B" : "A"}` : word("switches");
  const allOn = make(
    "button",
    { type: "button", id: `all-on-${pane}`, ...to([]), ...(off.size ? {} : { disabled: true }) },
    word("allOn"),
  );
  return fold(
    `switches-${pane}`,
    title,
    tables.length
      ? [
          make("p", { class: "note" }, off.size ? word("offCount", off.size) : word("switchesHow")),
          scorePicker(subject),
          tables,
          scoreLegend(subject, painted),
          allOn,
        ]
      : [make("p", { class: "note" }, word("noAttention"))],
  );
}

const SLIDERS = {
  temperature: {
    label: "temperature",
    min: 0,
    max: 3,
    step: 0.05,
    tell: (value) => (value ? value.toFixed(2) : word("greedy")),
  },
  topk: { label: "topk", min: 0, max: 100, step: 1, tell: (value) => (value ? String(value) : word("isOff")) },
  topp: {
    label: "topp",
    min: 0.05,
    max: 1,
    step: 0.05,
    tell: (value) => (value < 1 ? value.toFixed(2) : word("isOff")),
  },
};

/** Temperature, top-k, top-p; seed and length of the generated text. */
function sliders() {
  const slide = ([name, { label, min, max, step, tell }]) =>
    make(
      "label",
      { class: "slide", for: name }, // or it would name the first it holds, the output
      make("span", {}, word(label)),
      make("output", { id: `${name}-now` }, tell(state[name])),
      // text generated with other settings is dropped
      make("input", {
        type: "range",
        id: name,
        min,
        max,
        step,
        value: state[name],
        oninput: (event) => {
          keepWritten();
          change({ [name]: Number(event.target.value), write: 0 });
        },
      }),
    );
  const field = (name, min, max) =>
    make(
      "label",
      { class: "slide field" },
      make("span", {}, word(name)),
      make("input", {
        type: "number",
        id: name,
        min,
        max,
        value: state[name],
        ...(saved ? notSaved() : {}),
        onchange: (event) => change({ [name]: clamp(Math.round(Number(event.target.value)) || min, min, max) }),
      }),
    );
  return fold("sampling", word("sampling"), [
    Object.entries(SLIDERS).map(slide),
    make("div", { class: "fields" }, field("seed", 0, 2 ** 31), field("most", 1, 200)),
    make(
      "button",
      { type: "button", id: "plain", onclick: () => change({ temperature: 1, topk: 0, topp: 1 }) },
      word("reset"),
    ),
  ]);
}

/** Copies the state into the sliders. */
function fillSliders() {
  if (!byId("fold-sampling")) return;
  for (const [name, { tell }] of Object.entries(SLIDERS)) {
    byId(name).value = state[name];
    byId(`${name}-now`).textContent = tell(state[name]);
  }
  for (const name of ["seed", "most"]) byId(name).value = state[name];
}

const folded = new Map(); // what a person opened or closed

/** A section of the panel that opens and closes; closed at first on narrow pages. */
function fold(id, title, content) {
  const open = folded.get(id) ?? !window.matchMedia("(max-width: 900px)").matches;
  return make(
    "details",
    { id: `fold-${id}`, open, ontoggle: (event) => folded.set(id, event.target.open) },
    make("summary", {}, title),
    content,
  );
}
