// The steps of the path: for each its sentence, its formula and its numbers.

/** A sentence with optional further ones. */
const sentences = (...parts) => parts.filter(Boolean).join(" ");

const STEPS = {
  tokens: ({ subject, reading, found, stage }) => ({
    sentence: sentences(
      word(found.patches ? "say.tokens.patches" : "say.tokens", String(found.ids.filter((id) => id < 0).length)),
      found.media ? word("say.tokens.media") : "",
      word(found.position === null ? "say.tokens.attended" : "say.tokens.followed"),
    ),
    formula: word(found.patches ? "formula.patches" : "formula.tokens"),
    numbers: [...shots(subject, reading, splitStep(stage)[0]), make(
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
          make("b", { class: "number" }, found.ids[i] >= 0 && !found.patches ? String(found.ids[i]) : "–"),
        ),
      ),
    )],
  }),

  embed: ({ found }) => ({
    sentence: sentences(
      found.id !== null
        ? word("say.embed", found.vector.length)
        : found.patch
          ? word("say.embed.patch", found.patch.length)
          : word(found.first ? "say.embed.class" : "say.embed.other"),
      found.scale && found.scale !== 1 ? word("say.embed.scale", plainNumber(found.scale)) : "",
    ),
    numbers: strips([...(found.patch ? [["", "p", found.patch, word("pixels")]] : []), ["", "e", found.vector]]),
  }),

  position: ({ found }) => {
    const rows = [["", "e", found.before]];
    if (found.added) rows.push(["+", "p", found.added, `${word("position")} ${found.position}`]);
    if (found.types) rows.push(["+", "t", found.types, word("tokenType")]);
    rows.push([found.norm ? `→ ${word("norm")}` : "=", "x", found.result]);
    return {
      sentence: sentences(
        word(`say.position.${found.added || found.scheme === "none" ? found.scheme : schemeWord(found.scheme)}`),
        found.added || found.scheme === "none" ? word(`say.order.${found.order}`) : "",
        found.types ? word("say.position.types") : "",
        found.norm ? word("say.position.norm") : "",
      ),
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
    numbers: [
      strips([["", "x", found.read, found.before ? word("normedInput") : ""]]),
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
        found.root ? word("say.scores.root", found.root) : "",
        biased ? word(`say.scores.bias`) : "",
        found.cap !== null ? word("say.scores.cap", plainNumber(found.cap)) : "",
      ),
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
      peak = Math.max(...found.scores.filter((one) => one !== null), found.sink ?? -Infinity),
      between = {
        softmax: [[`exp(${word("score")} − max)`, (score) => (score === null ? "0" : amount(Math.exp(score - peak)))]],
        relu: [],
      }[found.normalizer]; // columns between the score and the weight
    const rows = found.keys.map((token, i) => ({
      name: keyName(token, i),
      kind: found.scores[i] === null ? "unseen" : "",
      cells: [
        found.scores[i] === null ? "−∞" : amount(found.scores[i]),
        ...between.map(([, value]) => value(found.scores[i])),
        amount(found.weights[i]),
        plainBar(found.weights[i], most),
      ],
    }));
    return {
      sentence: sentences(
        word(`say.${found.normalizer}`),
        found.sink === null ? "" : word("say.sink", amount(found.sink)),
      ),
      numbers: [
        table(
          `softmax-${subject.pane}`,
          [word("key"), word("score"), ...between.map(([name]) => name), word("weight"), ""],
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
    return { sentence: word("say.values"), numbers: strips(rows.map(stripRow)) };
  },

  out: ({ subject, found }) => {
    const most = Math.max(...found.lengths, 1e-9);
    return {
      sentence: sentences(
        word("say.out"),
        found.gated ? word("say.out.gated") : "",
        found.norm ? word("say.out.norm") : "",
      ),
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
      sentence: sentences(
        word(found.before ? "say.add" : "say.add.alone"),
        found.norm ? word("say.add.norm") : found.before ? word("say.add.kept") : "",
      ),
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
      sentence: sentences(
        word(found.gated ? "say.ff.gated" : "say.ff"),
        found.router ? word("say.ff.experts", found.what) : "",
      ),
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
      sentence: sentences(
        word(found.shared ? "say.layers.shared" : "say.layers"),
        found.tops ? word("say.layers.lens") : "",
      ),
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
    const rows = [["", "h", found.hidden]];
    if (found.transform) rows.push(["→", "z", found.read, word("transformed")]);
    if (found.row) {
      rows.push(["·", [`W `, tokenSpan(found.tops[0][1])], found.row]);
      rows.push(["Σ", `${found.transform ? "z" : "h"} · W`, found.row.map((value, i) => value * found.read[i])]);
    }
    if (found.result) rows.push(["→", "y", found.result]);
    const plain = !found.bias && found.cap === null,
      sum = found.row
      ? make(
          "div",
          { class: "sum" },
          term(`${found.transform ? "z" : "h"} · W`, found.dot),
          found.bias ? [make("span", { class: "sign" }, "+"), term(word("biasShort"), found.bias)] : null,
          found.cap === null ? null : [make("span", { class: "sign" }, "→"), term(word("cap"), found.cap)],
          plain ? null : [make("span", { class: "sign" }, "="), term(word(`outputOf.${subject.run.says}`), found.logit)],
        )
      : null;
    return {
      sentence: word(found.row ? "say.logits" : found.scaled ? "say.logits.unit" : "say.logits.vector"),
      numbers: [strips(rows.map(stripRow)), sum, make("h3", {}, word(`largest.${subject.run.says}`)), list],
    };
  },

  sample: async (view) => {
    const { subject, reading, found } = view;
    if (!subject.run.tokens) {
      const shares = found.outputs.some(([, , , p]) => p !== null);
      return {
        sentence: sentences(
          word(!shares ? "say.sample.values" : found.separate ? "say.sample.separate" : "say.sample.labels"),
          word("say.sample.follow"),
        ),
        numbers: outputBars(view),
      };
    }
    const next = await ask("next", nextBody(subject, reading));
    return {
      sentence: sentences(word(subject.run.says === "masked" ? "say.sample.masked" : "say.sample"), word("say.sample.follow")),
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
