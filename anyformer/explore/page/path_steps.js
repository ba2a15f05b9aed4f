// The steps of the path: for each its sentence, its formula and its numbers.

/** A sentence with optional further ones. */
const sentences = (...parts) => parts.filter(Boolean).join(" ");

const STEPS = {
  tokens: ({ subject, found, stage }) => ({
    sentence: word(found.position === null ? "say.tokens.attended" : "say.tokens"),
    formula: word("formula.tokens"),
    numbers: make(
      "div",
      { class: "ids" },
      found.tokens.map((token, i) =>
        make(
          "button",
          {
            type: "button",
            class: "id-card",
            id: `card-${subject.pane}-${i}`,
            style: { "--i": Math.min(i, 40) },
            "aria-pressed": String(i === found.position),
            ...toward(followToken(subject, splitStep(stage)[0], i)),
          },
          tokenSpan(token),
          make("b", { class: "number" }, found.ids[i] >= 0 ? String(found.ids[i]) : "–"),
        ),
      ),
    ),
  }),

  embed: ({ found }) => ({
    sentence: sentences(
      found.id === null ? word("say.embed.other") : word("say.embed", found.vector.length),
      found.scale && found.scale !== 1 ? word("say.embed.scale", plainNumber(found.scale)) : "",
    ),
    formula: found.id === null ? "" : found.scale !== 1 ? `e = E[${found.id}] · ${plainNumber(found.scale)}` : `e = E[${found.id}]`,
    numbers: strips([["", "e", found.vector]]),
  }),

  position: ({ found }) => {
    const rows = [["", "e", found.before]];
    if (found.added) rows.push(["+", "p", found.added, `${word("position")} ${found.position}`]);
    if (found.types) rows.push(["+", "t", found.types, word("tokenType")]);
    rows.push([found.norm ? `→ ${word("norm")}` : "=", "x", found.result]);
    return {
      sentence: sentences(
        word(`say.position.${found.added || found.scheme === "none" ? found.scheme : schemeWord(found.scheme)}`),
        found.types ? word("say.position.types") : "",
        found.norm ? word("say.position.norm") : "",
      ),
      formula: `x = ${found.norm ? "N(" : ""}e${found.added ? " + p" : ""}${found.types ? " + t" : ""}${found.norm ? ")" : ""}`,
      numbers: strips(rows),
    };
  },

  norm: ({ found }) => normed(found, word(`say.norm.${found.norm}`)),
  final: ({ found, stage, outline }) =>
    normed(
      found,
      sentences(
        word("say.final"),
        splitStep(stage)[0] === "encoder" && outline.last === "decoder" ? word("say.final.encoder") : "",
      ),
    ),

  qkv: ({ found }) => ({
    sentence: sentences(
      word(found.key ? "say.qkv.cross" : "say.qkv"),
      found.scheme.startsWith("rotary") ? word("say.qkv.rotary") : "",
      found.normed ? word("say.qkv.norm") : "",
      found.groups < found.heads ? word("say.qkv.groups", `${found.groups} : ${found.heads}`) : "",
    ),
    formula: found.key ? "q = x W_q    k = m W_k    v = m W_v" : "q = x W_q    k = x W_k    v = x W_v",
    numbers: [
      strips([["", "x", found.read]]),
      strips([
        ["", "q", found.q, word("role.q")],
        ["", "k", found.k, found.key ? `${word("role.k")} (${visible(found.key[1])})` : word("role.k")],
        ["", "v", found.v, found.key ? `${word("role.v")} (${visible(found.key[1])})` : word("role.v")],
      ]),
    ],
  }),

  scores: ({ subject, found }) => {
    const most = Math.max(...found.scores.map(Math.abs), 1e-9),
      biased = found.bias !== null,
      heads = [word("key"), "q · k", ...(biased ? [word("bias")] : []), word("score"), ""];
    return {
      sentence: sentences(
        word("say.scores"),
        biased ? word(`say.scores.bias`) : "",
        found.cap !== null ? word("say.scores.cap", plainNumber(found.cap)) : "",
      ),
      formula: `score_s = ${found.cap === null ? "" : "cap("}q · k_s × ${plainNumber(found.scale)}${found.cap === null ? "" : ")"}${biased ? " + bias_s" : ""}`,
      numbers: table(
        `scores-${subject.pane}`,
        heads,
        found.keys.map((token, i) => ({
          name: keyName(token, i),
          cells: [
            amount(found.dots[i]),
            ...(biased ? [found.visible[i] ? signed(found.bias[i]) : "–"] : []),
            amount(found.scores[i]),
            signedBar(found.scores[i], most),
          ],
        })),
      ),
    };
  },

  mask: ({ found }) => {
    const hidden = found.visible.filter((one) => !one).length,
      [rows, columns] = found.size,
      values = numbers(found.map, Uint8Array),
      colours = ramp(SCALES[theme()].up),
      canvas = pixels(values, rows, columns, (value) => (value ? colours[Math.round(value / 2)] : SCALES[theme()].hidden));
    canvas.className = "mask-map";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", word("maskMap"));
    const line = make("span", {
      class: "mask-row",
      style: {
        top: `${(100 * Math.floor((found.row * rows) / found.queries)) / rows}%`,
        height: `${100 / rows}%`,
      },
    });
    return {
      sentence: word(hidden ? "say.mask" : "say.mask.none", String(hidden)),
      formula: "score_s = −∞  (hidden)".replace("hidden", word("hiddenShort")),
      numbers: make(
        "div",
        { class: "masked" },
        make(
          "figure",
          {},
          make("div", { class: "mask-frame" }, canvas, line),
          make("figcaption", { class: "label" }, word("maskMap")),
        ),
        make(
          "div",
          { class: "ids" },
          found.keys.map((token, i) =>
            make(
              "span",
              {
                class: found.visible[i] ? "id-card" : "id-card off",
                style: { "--i": Math.min(i, 40) },
                title: word(found.visible[i] ? "seen" : "hidden"),
              },
              tokenSpan(token),
              make("small", {}, found.visible[i] ? "✓" : "−∞"),
            ),
          ),
        ),
      ),
    };
  },

  softmax: ({ subject, found }) => {
    const most = Math.max(...found.weights, 1e-9),
      relu = found.normalizer === "relu",
      peak = Math.max(...found.scores.filter((one) => one !== null), found.sink ?? -Infinity);
    const rows = found.keys.map((token, i) => ({
      name: keyName(token, i),
      kind: found.scores[i] === null ? "unseen" : "",
      cells: [
        found.scores[i] === null ? "−∞" : amount(found.scores[i]),
        ...(relu ? [] : [found.scores[i] === null ? "0" : amount(Math.exp(found.scores[i] - peak))]),
        amount(found.weights[i]),
        plainBar(found.weights[i], most),
      ],
    }));
    return {
      sentence: sentences(
        word(relu ? "say.relu" : "say.softmax"),
        found.sink === null ? "" : word("say.sink", amount(found.sink)),
      ),
      formula: relu ? "w_s = max(score_s, 0) / n" : "w_s = exp(score_s) / Σ exp(score)",
      numbers: [
        table(
          `softmax-${subject.pane}`,
          [word("key"), word("score"), ...(relu ? [] : [`exp(${word("score")} − max)`]), word("weight"), ""],
          rows,
        ),
        make("p", { class: "label" }, `Σ w = ${amount(found.weights.reduce((a, b) => a + b, 0))}`),
      ],
    };
  },

  values: ({ found }) => {
    const rows = found.terms.map(([key, weight, values], i) => [
      i ? "+" : "",
      [make("b", { class: "number" }, amount(weight)), " · v ", tokenSpan(found.keys[key]), make("sub", {}, String(key))],
      values.map((value) => weight * value),
    ]);
    if (found.rest.count > 0) rows.push(["+", word("othersShort", String(found.rest.count)), found.rest.vector]);
    rows.push(["=", "o", found.result, found.off ? word("headOff") : ""]);
    return { sentence: word("say.values"), formula: "o = Σ_s w_s v_s", numbers: strips(rows.map(stripRow)) };
  },

  out: ({ subject, found }) => {
    const most = Math.max(...found.lengths, 1e-9);
    return {
      sentence: sentences(
        word("say.out"),
        found.gated ? word("say.out.gated") : "",
        found.norm ? word("say.out.norm") : "",
      ),
      formula: `y = Σ_h o_h W_{o,h}${found.bias ? " + b" : ""}`,
      numbers: [
        make("h3", {}, word("eachHead")),
        make(
          "div",
          { class: "head-bars" },
          found.lengths.map((length, head) =>
            make(
              "div",
              { class: "head-bar" },
              choice(`out-${subject.pane}-${head}`, `${word("head")} ${head}`, { head }, {
                "aria-pressed": String(head === found.head),
              }),
              plainBar(length, most),
              make("span", { class: "number" }, found.off.includes(head) ? word("isOff") : amount(length)),
            ),
          ),
        ),
        strips([
          ["", `${word("head")} ${found.head}`, found.own],
          [found.norm ? `→ ${word("norm")}` : "Σ", "y", found.result, word("allHeads")],
        ]),
      ],
    };
  },

  mix: ({ found }) => ({
    sentence: word("say.mix", found.what),
    formula: "y_t = mix(x_1, …, x_t)",
    numbers: strips([
      ["", "x", found.read],
      ["→", "y", found.result],
    ]),
  }),

  add: ({ found }) => {
    const rows = found.before ? [["", "x", found.before, word("stream")]] : [],
      names = { mixer: word("chapter.attention"), cross: word("chapter.cross"), feedforward: word("chapter.feedforward") };
    for (const [name, values] of found.added) rows.push([rows.length ? "+" : "", "y", values, names[name]]);
    rows.push(["=", "x", found.total]);
    if (found.norm) rows.push([`→ ${word("norm")}`, "x", found.result]);
    return {
      sentence: sentences(word(found.before ? "say.add" : "say.add.alone"), found.norm ? word("say.add.norm") : ""),
      formula: found.norm ? "x ← N(x + y)" : "x ← x + y",
      numbers: strips(rows),
    };
  },
  ffadd: (view) => STEPS.add(view),

  ff: ({ found }) => {
    const numbers = [strips([["", "x", found.read, found.normed ? word("normedInput") : ""]])];
    if (found.router) {
      numbers.push(make("h3", {}, word("experts")));
      numbers.push(bars(found.router.map(([i, weight]) => [`#${i}`, weight])));
    }
    if (found.hidden) {
      const { count, top } = found.hidden,
        most = Math.max(...top.map(([, value]) => Math.abs(value)), 1e-9);
      numbers.push(make("h3", {}, word("neurons", String(count))));
      numbers.push(
        make(
          "div",
          { class: "head-bars" },
          top.map(([i, value]) =>
            make(
              "div",
              { class: "head-bar" },
              make("span", { class: "label" }, `#${i}`),
              signedBar(value, most),
              make("span", { class: "number" }, amount(value)),
            ),
          ),
        ),
      );
    }
    numbers.push(strips([[found.norm ? `→ ${word("norm")}` : "=", "y", found.result]]));
    return {
      sentence: sentences(word("say.ff"), found.router ? word("say.ff.experts", found.what) : ""),
      formula: found.router ? "y = Σ_e r_e f_e(x)" : "y = W_down act(W_up x)",
      numbers,
    };
  },

  layers: ({ subject, found, outline, stage }) => {
    const [kind] = splitStep(stage),
      names = { mixer: "chapter.attention", cross: "chapter.cross", feedforward: "chapter.feedforward" },
      parts = ["mixer", "cross", "feedforward"].filter((part) => found.rows.some((row) => part in row.added)),
      most = Math.max(found.first, ...found.rows.map((row) => row.length)),
      firsts = outline.sides.find(({ side }) => side === kind).layers;
    const top = (i) => (found.tops ? [[tokenSpan(found.tops[i][0]), " ", make("small", {}, percent(found.tops[i][1]))]] : []);
    const rows = found.rows.map((row, i) => ({
      name: firsts[i].length
        ? choice(`layer-${subject.pane}-${i}`, String(row.layer), { layer: row.layer, ...toStep(firsts[i][0]) })
        : String(row.layer),
      cells: [
        ...parts.map((part) => (part in row.added ? amount(row.added[part]) : "–")),
        amount(row.length),
        plainBar(row.length, most),
        ...top(i + 1),
      ],
    }));
    rows.unshift({
      name: word("embedding"),
      cells: [...parts.map(() => ""), amount(found.first), plainBar(found.first, most), ...top(0)],
    });
    return {
      sentence: sentences(word("say.layers"), found.tops ? word("say.layers.lens") : ""),
      formula: "x ← x + y_0 + y_1 + …",
      numbers: table(
        `layers-${subject.pane}`,
        [
          word("layer"),
          ...parts.map((part) => `|y| ${word(names[part])}`),
          `|x| ${word("stream")}`,
          "",
          ...(found.tops ? [word("wouldSay")] : []),
        ],
        rows,
      ),
    };
  },

  pool: ({ found }) => ({
    sentence: word(`say.pool.${found.how}`, String(found.count)),
    formula: { mean: "h = Σ_t x_t / n", max: "h_i = max_t x_{t,i}", first: "h = x_0", last: "h = x_n" }[found.how],
    numbers: strips([
      ["", "x", found.own, `${word("position")} ${found.position}`],
      ["→", "h", found.result, word("wholeText")],
    ]),
  }),

  logits: ({ subject, found, outline }) => {
    const most = Math.max(...found.tops.map(([, , value]) => Math.abs(value)), 1e-9),
      list = make(
        "div",
        { class: "head-bars" },
        found.tops.map(([index, name, value]) =>
          make(
            "div",
            { class: "head-bar" },
            choice(`logit-${subject.pane}-${index}`, tokenSpan(name), followed(outline, index), { title: word("followIt") }),
            signedBar(value, most),
            make("span", { class: "number" }, amount(value)),
          ),
        ),
      );
    const rows = [["", "h", found.read, found.transform ? word("transformed") : ""]];
    if (found.row) {
      rows.push(["·", [`W `, tokenSpan(found.tops[0][1])], found.row]);
      rows.push(["Σ", "h · W", found.row.map((value, i) => value * found.read[i])]);
    }
    const plain = !found.bias && found.cap === null,
      sum = found.row
      ? make(
          "div",
          { class: "sum" },
          term("h · W", found.dot),
          found.bias ? [make("span", { class: "sign" }, "+"), term(word("biasShort"), found.bias)] : null,
          found.cap === null ? null : [make("span", { class: "sign" }, "→"), term(word("cap"), found.cap)],
          plain ? null : [make("span", { class: "sign" }, "="), term(word(`outputOf.${subject.run.says}`), found.logit)],
        )
      : null;
    return {
      sentence: word(found.row ? "say.logits" : "say.logits.vector"),
      formula: found.row ? `logit_i = h · W_i${found.bias ? " + b_i" : ""}` : "",
      numbers: [strips(rows.map(stripRow)), sum, make("h3", {}, word(`largest.${subject.run.says}`)), list],
    };
  },

  sample: async (view) => {
    const { subject, reading, found } = view;
    if (!subject.run.tokens) {
      const shares = found.outputs.some(([, , , p]) => p !== null);
      return {
        sentence: sentences(word(shares ? "say.sample.labels" : "say.sample.values"), word("say.sample.follow")),
        formula: shares ? "p_i = exp(logit_i) / Σ exp(logit)" : "",
        numbers: outputBars(view),
      };
    }
    const next = await ask("next", nextBody(subject, reading));
    return {
      sentence: sentences(word(subject.run.says === "masked" ? "say.sample.masked" : "say.sample"), word("say.sample.follow")),
      formula: "p_i = exp(logit_i / T) / Σ exp(logit / T)",
      numbers: distribution(next, (i) => followed(view.outline, next.ids[i])),
    };
  },
};

const schemeWord = (scheme) => (scheme.startsWith("rotary") ? "rotary" : ["alibi", "t5"].includes(scheme) ? "bias" : "other");

/** The change that follows an output back. */
const followed = (outline, output) => ({ output, place: -1, part: "", from: -1, ...toStep(outline.follow[0]) });

/** A row of strips whose name is a list of nodes. */
const stripRow = ([sign, name, ...rest]) => [sign, Array.isArray(name) ? make("span", {}, name) : name, ...rest];

const term = (name, value) =>
  make("span", { class: "term" }, make("b", {}, amount(value)), make("small", {}, name));

/** Bars of shares that sum to at most 1. */
function bars(rows) {
  const most = Math.max(...rows.map(([, value]) => value), 1e-9);
  return make(
    "div",
    { class: "head-bars" },
    rows.map(([name, value]) =>
      make(
        "div",
        { class: "head-bar" },
        make("span", { class: "label" }, name),
        plainBar(value, most),
        make("span", { class: "number" }, amount(value)),
      ),
    ),
  );
}

/** The norm of a vector: before, its statistics, after. */
function normed(found, sentence) {
  const facts =
    found.norm === "layer"
      ? `${word("mean")} ${amount(found.mean)}, ${word("deviation")} ${amount(found.deviation)}`
      : found.norm === "rms"
        ? `${word("rms")} ${amount(found.size)}`
        : "";
  return {
    sentence,
    formula: {
      layer: "N(x) = (x − mean) / deviation · γ + β",
      rms: "N(x) = x / rms · γ",
      batch: "N(x) = (x − μ) / σ · γ + β",
      tanh: "N(x) = tanh(α x) · γ + β",
    }[found.norm],
    numbers: strips([
      ["", "x", found.before, facts],
      ["→", "N(x)", found.result],
    ]),
  };
}

/** The outputs of a head that does not predict tokens; a click follows one. */
function outputBars({ subject, outline, found: { outputs } }) {
  const most = Math.max(...outputs.map(([, , value, p]) => Math.abs(p ?? value)), 1e-9);
  return make(
    "div",
    { class: "head-bars" },
    outputs.map(([index, name, value, p]) =>
      make(
        "div",
        { class: "head-bar" },
        choice(`output-${subject.pane}-${index}`, tokenSpan(name), followed(outline, index), { title: word("followIt") }),
        p === null ? signedBar(value, most) : plainBar(p, most),
        make("span", { class: "number" }, p === null ? amount(value) : percent(p)),
      ),
    ),
  );
}
