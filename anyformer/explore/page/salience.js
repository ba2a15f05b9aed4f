// Salience: which input tokens an output depends on, by gradients.

const METHODS = ["gradient", "integrated"];

function salienceBody(subject, reading) {
  const { length } = reading.tokens[sideOf(subject.run)],
    at = state.at < 0 ? -1 : Math.min(state.at, length - 1);
  return { ...subject.body, at, output: state.output, method: state.method };
}

DRAWN.salience = { show: showSalience, requests: (subject) => [["salience", salienceBody(subject, readingOf(subject))]] };

async function showSalience(subject, reading) {
  const found = await ask("salience", salienceBody(subject, reading)),
    values = Object.values(found.sides).flat(),
    most = Math.max(...values.map(Math.abs), 1e-12),
    scale = colouring("signed", [most]);
  const methods = optionButtons(`method-${subject.pane}`, METHODS, state.method, (method) => ({ method }), "method");
  const sides = Object.entries(found.sides).map(([side, numbers]) => [
    Object.keys(found.sides).length > 1 ? make("h3", {}, word(`tokens.${side}`)) : null,
    make(
      "ol",
      { class: "salient", "aria-label": word(`tokens.${side}`) },
      numbers.map((value, i) => salientToken(reading.tokens[side][i], value, i, scale, most, side, found, subject)),
    ),
  ]);
  return make(
    "div",
    {},
    explained("salience"),
    make("div", { class: "choice", role: "group", "aria-label": word("method") }, methods),
    salienceOutputs(subject, reading, found),
    sides,
    legend(scale, false),
    salienceSum(found),
    make("p", { class: "explained" }, word(`limit.${found.method}`, found.steps)),
  );
}

/** The output that is explained: a click chooses another. */
function salienceOutputs(subject, reading, found) {
  const { output, outputs } = found,
    listed = outputs.some(({ id }) => id === output.id) ? outputs : [output, ...outputs];
  const group = make(
    "div",
    { class: "choice", role: "group", "aria-label": word("salientOutput") },
    listed.map(({ id, name, p, value }) =>
      make(
        "button",
        {
          type: "button",
          id: `salient-output-${subject.pane}-${id}`,
          "aria-pressed": String(id === output.id),
          ...toward({ output: id }),
        },
        tokenSpan(name),
        make("small", {}, ` ${p === null ? figure(value) : percent(p)}`),
      ),
    ),
  );
  const side = sideOf(subject.run),
    place =
      subject.run.tokens || subject.run.says === "tags"
        ? [
            make("span", { class: "label" }, ` ${word(placeWords[subject.run.says] ?? "token")} `),
            tokenSpan(reading.tokens[side][found.at] ?? ""),
            make("sub", {}, String(found.at)),
          ]
        : [];
  return make(
    "div",
    { class: "salient-of" },
    make("p", { class: "value" }, make("span", { class: "label" }, word("salientOutput")), place),
    group,
  );
}

/** One token, shaded by its contribution, with a bar and the number under it. */
function salientToken(token, value, i, scale, most, side, found, subject) {
  const colour = scale.colour(value),
    last = side === sideOf(subject.run) && i === found.at;
  return make(
    "li",
    { class: last ? "here" : "" },
    make(
      "span",
      { class: "salient-name", style: { background: `rgb(${colour.join(" ")})`, color: inkOn(colour) } },
      make("bdi", { class: "token", dir: "auto" }, visible(token)),
    ),
    make(
      "span",
      { class: "salient-track" },
      make("span", { class: value < 0 ? "below" : "above", style: { width: `${(50 * Math.abs(value)) / most}%` } }),
    ),
    make("small", { class: "number" }, value ? signed(value) : "0"),
  );
}

/** The sum of all tokens beside the output. */
function salienceSum(found) {
  const term = (name, value) => make("span", { class: "term" }, make("b", {}, figure(value)), make("small", {}, name)),
    sign = (text) => make("span", { class: "sign" }, text);
  const parts = [
    term(word("salientTotal"), found.total),
    sign(word("besides")),
    term(word("salientValue"), found.value),
  ];
  if (typeof found.baseline === "number")
    parts.push(
      sign("−"),
      term(word("salientBase"), found.baseline),
      sign("="),
      term(word("realDifference"), found.value - found.baseline),
    );
  return make("div", { class: "sum" }, parts);
}
