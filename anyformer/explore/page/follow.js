// Follow one number: from an output back to parts, tokens and dimensions. Every step is a sum.

/** The attention head of a part such as `decoder.0.mixer.3`, as the switches name it; null for other parts. */
function switchOf(part) {
  const [side, layer, name, head] = part.split(".");
  if (head === undefined) return null;
  return `${name === "cross" ? "cross" : side}.${layer}.${head}`;
}

function partName(part) {
  const [, layer, name, head] = part.split(".");
  if (layer === "embed") return word("embedding");
  if (layer === "pooled") return word("pooledLayers");
  const mixer = word(head === undefined ? "step.mix" : "chapter.attention"),
    own = name === "mixer" ? mixer : word(name === "cross" ? "chapter.cross" : "chapter.feedforward");
  return `${word("layer")} ${layer} · ${own}${head === undefined ? "" : ` · ${word("head")} ${head}`}`;
}

/** The output that is followed, with its probability; the others as buttons. */
function followedOutput(view, outputs) {
  const { subject, outline, found } = view,
    [index, name, value, p] = found.output;
  return make(
    "div",
    { class: "followed" },
    make(
      "p",
      { class: "value" },
      tokenSpan(name),
      p === null ? null : make("b", {}, ` ${percent(p)}`),
      make("span", { class: "label" }, ` ${word(`outputOf.${subject.run.says}`)} `),
      make("b", {}, amount(value)),
    ),
    outputs
      ? make(
          "div",
          { class: "choice", role: "group", "aria-label": word("otherOutput") },
          outputs.map(([i, token, , share]) =>
            choice(
              `follow-output-${subject.pane}-${i}`,
              [tokenSpan(token), share === null ? "" : make("small", {}, ` ${percent(share)}`)],
              { ...followed(outline, i), stage: view.stage },
              { "aria-pressed": String(i === index) },
            ),
          ),
        )
      : null,
  );
}

const FOLLOW_STEPS = {
  "follow.positions": (view) => {
    const { subject, reading, outline, found } = view,
      tokens = reading.tokens[outline.last],
      most = Math.max(...found.terms.map(([, share]) => Math.abs(share)), 1e-9);
    return {
      sentence: word("say.follow.positions"),
      formula: "value = Σ_t share_t + b".replace("value", word(`outputOf.${subject.run.says}`)).replace("share", word("share")),
      numbers: [
        followedOutput(view),
        table(
          `positions-${subject.pane}`,
          [word("token"), word("share"), ""],
          found.terms.map(([at, share]) => ({
            name: choice(`place-${subject.pane}-${at}`, keyName(tokens[at], at), { place: at, part: "", from: -1, ...toStep("follow.parts") }),
            kind: at === found.place ? "current" : "",
            cells: [signed(share), signedBar(share, most)],
          })),
        ),
        adding(
          [
            [word("allTokens"), found.total - found.constant],
            [word("biases"), found.constant],
          ],
          found.total,
          found.value,
        ),
      ],
    };
  },

  "follow.parts": (view) => {
    const { found } = view;
    return {
      sentence: sentences(word("say.follow.parts"), found.pooled ? word("say.follow.place", String(found.place)) : ""),
      formula: "logit = u · e + Σ_l u · y_l + b".replace("logit", word(`outputOf.${view.subject.run.says}`)),
      numbers: [followedOutput(view, found.outputs), partGrid(view), strongestParts(view), partSum(found)],
    };
  },

  "follow.tokens": (view) => {
    const { subject, found } = view;
    if (!found.keys) return neuronTerms(view);
    const most = Math.max(...found.terms.map(Math.abs), 1e-9);
    return {
      sentence: sentences(word("say.follow.tokens"), found.off ? word("headOff") : ""),
      formula: "term = Σ_s w_s · (v_s · u)".replace("term", word("term")),
      numbers: [
        make("h3", {}, partName(found.part)),
        table(
          `terms-${subject.pane}`,
          [word("token"), word("weight"), "v · u", word("product"), ""],
          found.keys.map((token, i) => ({
            name: choice(`from-${subject.pane}-${i}`, keyName(token, i), { part: found.part, from: i, ...toStep("follow.dimensions") }),
            kind: i === found.key ? "current" : found.weights[i] ? "" : "unseen",
            cells: [amount(found.weights[i]), amount(found.gains[i]), signed(found.terms[i]), signedBar(found.terms[i], most)],
          })),
        ),
        adding([[word("allTokens"), found.total]], found.total, found.value),
      ],
    };
  },

  "follow.dimensions": (view) => {
    const { found } = view;
    if (!found.keys)
      return { sentence: word("say.follow.noHead"), formula: "", numbers: make("h3", {}, partName(found.part)) };
    const hidden = found.score === null,
      sign = (text) => make("span", { class: "sign" }, text);
    return {
      sentence: word("say.follow.dimensions"),
      formula: "w · Σ_i v_i u_i        w = exp(Σ_i q_i k_i × scale + bias) / Σ exp(score)".replace("scale", word("scale")).replace("bias", word("biasShort")).replace("(score)", `(${word("score")})`),
      numbers: [
        make("h3", {}, partName(found.part), " · ", tokenSpan(found.keys[found.query] ?? ""), " → ", tokenSpan(found.keys[found.key])),
        strips([
          ["", "v", found.v],
          ["·", "u", found.u, word("role.u")],
          ["=", "v · u", found.terms, `Σ ${amount(found.gain)}`],
        ]),
        make("div", { class: "sum" }, term(word("weight"), found.weight), sign("×"), term("v · u", found.gain), sign("="), term(word("term"), found.total)),
        make("h3", {}, word("whyWeight")),
        strips([
          ["", "q", found.q],
          ["·", "k", found.k],
          ["=", `q · k × ${word("scale")}`, found.scored, `Σ ${amount(found.dot)}`],
        ]),
        make(
          "div",
          { class: hidden ? "sum unseen" : "sum" },
          term(`q · k × ${word("scale")}`, found.dot),
          found.cap === null ? null : [sign("→"), term(word("cap"), found.capped)],
          found.bias === null ? null : [sign("+"), term(word("bias"), found.bias)],
          sign("="),
          hidden ? term(word("score"), 0) : term(word("score"), found.score),
          found.sum === null ? null : [sign("→ exp("), sign("−"), term("log Σ exp", found.sum), sign(")")],
          sign("="),
          term(word("weight"), found.weight),
        ),
        adding([[`${word("weight")} × v · u`, found.total]], found.total, found.value),
      ],
    };
  },

  "follow.check": checkStep,
};

const short2 = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

/** Layers × heads with the term of each; a click goes on to its tokens. */
function partGrid({ subject, found }) {
  const rows = new Map(),
    most = Math.max(...found.terms.flatMap(({ heads, value }) => (heads ?? [value]).map(Math.abs)), 1e-9),
    colours = ramp(SCALES[theme()].both);
  for (const one of found.terms) {
    const [, layer, name] = one.name.split(".");
    if (name === undefined) continue;
    if (!rows.has(layer)) rows.set(layer, {});
    rows.get(layer)[name] = one;
  }
  const cell = (part, value, label) => {
    const [red, green, blue] = colours[Math.round(((value / most + 1) / 2) * 255)];
    return make(
      "button",
      {
        type: "button",
        class: "part-cell",
        id: `part-${subject.pane}-${part}`,
        title: `${partName(part)}: ${signed(value)}`,
        "aria-label": `${partName(part)}: ${signed(value)}`,
        "aria-pressed": String(part === (state.part || found.part)),
        style: { background: `rgb(${red} ${green} ${blue})`, color: red + green + blue > 380 ? "#111" : "#fff" },
        ...toward({ part, from: -1, ...toStep("follow.tokens") }, true),
      },
      label,
    );
  };
  const few = Math.max(...found.terms.map(({ heads }) => heads?.length ?? 1)) <= 8;
  const of = (one) =>
    !one
      ? []
      : one.heads
        ? one.heads.map((value, head) => cell(`${one.name}.${head}`, value, few ? short2(value) : ""))
        : [cell(one.name, one.value, few ? short2(one.value) : "")];
  const parts = ["mixer", "cross", "feedforward"].filter((name) => [...rows.values()].some((row) => row[name])),
    titles = { mixer: "chapter.attention", cross: "chapter.cross", feedforward: "chapter.feedforward" };
  return make(
    "div",
    { class: "part-grid wide", tabindex: 0, role: "group", "aria-label": word("step.follow.parts"), "data-scroll": `parts-${subject.pane}` },
    make(
      "div",
      { class: "part-row part-head" },
      make("span", { class: "label" }, word("layer")),
      parts.map((name) => make("span", { class: `label group-${name}` }, word(titles[name]))),
    ),
    [...rows.entries()].reverse().map(([layer, row]) =>
      make(
        "div",
        { class: "part-row" },
        make("span", { class: "label" }, layer),
        parts.map((name) => make("span", { class: `part-group group-${name}` }, of(row[name]))),
      ),
    ),
  );
}

/** The eight parts with the largest terms. */
function strongestParts({ subject, found }) {
  const all = found.terms.flatMap(({ name, value, heads }) =>
    heads ? heads.map((term, head) => [`${name}.${head}`, term]) : [[name, value]],
  );
  const best = all.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 8),
    most = Math.abs(best[0]?.[1] ?? 1);
  return make(
    "div",
    {},
    make("h3", {}, word("strongestParts")),
    make(
      "div",
      { class: "head-bars" },
      best.map(([part, value]) =>
        make(
          "div",
          { class: "head-bar part-bar" },
          choice(`best-${subject.pane}-${part}`, partName(part), { part, from: -1, ...toStep("follow.tokens") }),
          signedBar(value, most),
          make("span", { class: "number" }, signed(value)),
        ),
      ),
    ),
  );
}

/** Embedding + attention + feed-forward + biases = logit. */
function partSum(found) {
  const total = (test) => found.terms.filter(({ name }) => test(name)).reduce((sum, { value }) => sum + value, 0);
  const groups = [
    ["embedding", (name) => name.endsWith(".embed")],
    ["pooledLayers", (name) => name.endsWith(".pooled")],
    ["chapter.attention", (name) => name.endsWith(".mixer")],
    ["chapter.cross", (name) => name.endsWith(".cross")],
    ["chapter.feedforward", (name) => name.endsWith(".feedforward")],
  ].filter(([, test]) => found.terms.some(({ name }) => test(name)));
  return make(
    "div",
    {},
    adding([...groups.map(([name, test]) => [word(name), total(test)]), [word("biases"), found.constant]], found.total, found.value),
    make("p", { class: "note" }, word("frozen")),
  );
}

/** The neurons of a feed-forward; other parts are one step. */
function neuronTerms({ subject, found }) {
  if (!found.neurons)
    return {
      sentence: word("say.follow.one"),
      formula: "",
      numbers: [make("h3", {}, partName(found.part)), adding([[word("term"), found.total]], found.total, found.value)],
    };
  const most = Math.max(...found.neurons.map(([, , share]) => Math.abs(share)), 1e-9);
  return {
    sentence: word("say.follow.neurons", String(found.count)),
    formula: "term = Σ_j h_j · (W_{down,j} · u)".replace("term", word("term")),
    numbers: [
      make("h3", {}, partName(found.part)),
      table(
        `neurons-${subject.pane}`,
        [word("neuron"), "h", word("product"), ""],
        found.neurons.map(([i, hidden, share]) => ({ name: `#${i}`, cells: [amount(hidden), signed(share), signedBar(share, most)] })),
      ),
      adding(
        [
          [word("shownNeurons", String(found.neurons.length)), found.neurons.reduce((sum, [, , share]) => sum + share, 0)],
          [word("othersShort", String(found.count - found.neurons.length)), found.rest],
          [word("biases"), found.constant],
        ],
        found.total,
        found.value,
      ),
    ],
  };
}

/** The head that is followed: the selected one, or the one with the largest term. */
const headNow = (found) => (switchOf(state.part) ? state.part : found.part);

/** The requests with the head that is followed on and off; null if it is not a head. */
function checkRequests(subject, outline, found) {
  const id = switchOf(headNow(found)),
    [, body] = stageRequest(subject, outline, "follow.check"),
    now = { ...body, off: body.off.filter((one) => one !== id), output: found.output[0] };
  return id ? { on: ["follow", now], off: ["follow", { ...now, without: [id] }] } : null;
}

/** The same output with the head switched off: what the term said, and what happened. */
async function checkStep(view) {
  const { subject, outline, found } = view,
    part = headNow(found),
    id = switchOf(part),
    name = subject.pane ? "off2" : "off",
    requests = checkRequests(subject, outline, found);
  if (!requests) return { sentence: word("say.follow.noHead"), formula: "", numbers: make("h3", {}, partName(part)) };
  const { off: on } = requests.on[1],
    [before, after] = [await ask(...requests.on), await ask(...requests.off)],
    [attention, head] = [part.slice(0, part.lastIndexOf(".")), Number(part.slice(part.lastIndexOf(".") + 1))],
    own = before.terms.find((one) => one.name === attention)?.heads[head] ?? 0,
    isOff = subject.body.off.includes(id),
    value = (one) => (before.pooled ? one.output[2] : one.value),
    row = (title, one) => ({
      name: title,
      cells: [amount(value(one)), one.output[3] === null ? "–" : percent(one.output[3]), plainBar(one.output[3] ?? 0, 1)],
    });
  return {
    sentence: word("say.follow.check"),
    formula: "",
    numbers: [
      make("h3", {}, tokenSpan(before.output[1]), ` · ${partName(part)}`),
      make(
        "button",
        { type: "button", class: "go", id: `flip-${subject.pane}`, role: "switch", "aria-checked": String(!isOff), ...toward({ [name]: isOff ? on : [...on, id].sort(), part, output: found.output[0] }) },
        word(isOff ? "switchOn" : "switchOff"),
      ),
      table(
        `check-${subject.pane}`,
        ["", word(`outputOf.${subject.run.says}`), word("probability"), ""],
        [row(word("withHead"), before), row(word("withoutHead"), after)],
      ),
      make(
        "div",
        { class: "sum" },
        term(word("directTerm"), -own),
        make("span", { class: "sign" }, "+"),
        term(word("otherLayers"), value(after) - value(before) + own),
        make("span", { class: "sign" }, "="),
        term(word("realChange"), value(after) - value(before)),
      ),
      make("p", { class: "note" }, word("checkNote")),
    ],
  };
}
