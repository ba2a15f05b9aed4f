// The next token: probabilities under temperature, top-k and top-p, and the logit lens.

const BARS = 16; // tokens shown at most

DRAWN.next = { show: showNext, requests: (subject) => (subject.run.tokens ? [["next", nextBody(subject, readingOf(subject))]] : []) };

async function showNext(subject, reading) {
  const kind = sideOf(subject.run);
  const tokens = reading.tokens[kind] ?? [];
  if (!subject.run.tokens) return showAnswer(subject, reading);
  const found = await ask("next", nextBody(subject, reading));
  const place = make(
    "p",
    { class: "value" },
    make("span", { class: "label" }, word(kind === "encoder" ? "inPlaceOf" : "after"), " "),
    tokenSpan(found.token ?? tokens[found.at] ?? ""),
    make("sub", {}, String(found.at ?? state.at)),
  );
  const title = word(kind === "encoder" ? "inPlace" : "distribution"),
    parts = [make("div", {}, make("h3", {}, title), place, distribution(found))];
  if (found.lens?.length)
    parts.push(make("div", {}, make("h3", {}, word("lens")), explained("lens"), lens(found.lens)));
  return make("div", {}, explained("next"), make("div", { class: "next" }, parts), await ablation(subject, reading));
}

/** The request for the selected position. */
function nextBody(subject, reading) {
  const kind = sideOf(subject.run),
    at = state.at < 0 ? -1 : Math.min(state.at, reading.tokens[kind].length - 1);
  return { ...subject.body, at, kind };
}

/** The stack whose tokens are predicted. */
const sideOf = (run) => (run.shape === "encoder" ? "encoder" : "decoder");

/** The probabilities of tokens in descending order, under the sliders; `rest` is the total of all others.
 *
 * In the order of decoding: temperature, then top-k, then top-p of the tokens left.
 */
function probabilities(logits, rest, { temperature, topk, topp }) {
  if (temperature === 0) return { kept: logits.map((_, i) => (i ? 0 : 1)), others: 0 };
  const scaled = logits.map((logit) => logit / temperature),
    most = scaled[0];
  const weights = scaled.map((logit, i) => (topk && i >= topk ? 0 : Math.exp(logit - most)));
  let others = rest && !(topk && topk <= logits.length) ? Math.exp(restAt(rest, temperature) - most) : 0;
  let whole = weights.reduce((a, b) => a + b, others),
    before = 0;
  if (topp < 1) {
    for (let i = 0; i < weights.length; i++) {
      const weight = weights[i];
      if (before >= topp * whole) weights[i] = 0;
      before += weight;
    }
    if (before >= topp * whole) others = 0;
    whole = weights.reduce((a, b) => a + b, others);
  }
  return { kept: weights.map((weight) => weight / whole), others: others / whole };
}

/** log Σ exp(logit / temperature) of the tokens that are not listed, at the nearest temperature of the slider. */
function restAt(rest, temperature) {
  const nearest = rest.temperatures.reduce(
    (best, one, i) => (Math.abs(one - temperature) < Math.abs(rest.temperatures[best] - temperature) ? i : best),
    0,
  );
  return rest.lse[nearest];
}

/** The bars of the most probable tokens; with `to`, a click on the i-th makes the change `to(i)`. */
function distribution(found, to = null) {
  const logits = found.logits.map(([, logit]) => logit);
  const now = probabilities(logits, found.rest, state),
    plain = probabilities(logits, found.rest, { temperature: 1, topk: 0, topp: 1 });
  const seen = clamp(
    found.logits.findLastIndex((_, i) => Math.max(now.kept[i], plain.kept[i]) >= 5e-4) + 1,
    Math.min(6, logits.length),
    BARS,
  );
  const tail = (p) => p.kept.slice(seen).reduce((a, b) => a + b, p.others);
  const most = Math.max(now.kept[0], plain.kept[0], tail(now), tail(plain));
  const rows = found.logits
    .slice(0, seen)
    .map(([token], i) =>
      bar(
        to
          ? choice(`follow-${i}`, tokenSpan(token), to(i), { "aria-label": `${word("followIt")}: ${visible(token)}` })
          : tokenSpan(token),
        now.kept[i],
        plain.kept[i],
        most,
        `logit ${figure(logits[i])}`,
        token === found.actual,
      ),
    );
  const count = Math.max(0, found.logits.length - seen) + (found.rest?.count ?? 0);
  if (count) rows.push(bar(make("i", {}, word("others", count)), tail(now), tail(plain), most, ""));
  const kept = now.kept.filter((p) => p > 0).length,
    left = now.others > 0 ? word("all") : String(kept);
  const entropy = -now.kept.reduce((total, p) => total + (p > 0 ? p * Math.log(p) : 0), 0);
  return make(
    "div",
    {},
    make("div", { class: "bars" }, rows),
    make(
      "p",
      { class: "legend" },
      make("span", { class: "swatch now" }),
      word("now"),
      make("span", { class: "swatch plain" }),
      word("plain"),
      found.actual ? make("span", {}, `✓ ${word("actual")}`) : null,
      make("span", {}, `${word("kept")}: ${left}`),
      now.others > 0 ? null : make("span", {}, `${word("entropy")}: ${entropy.toFixed(2)}`),
    ),
  );
}

/** One bar, over a pale bar for the probability without the sliders. */
function bar(name, now, plain, most, title, actual = false) {
  const wide = (p) => `${(100 * p) / most}%`;
  return make(
    "div",
    { class: `bar-row${now > 0 ? "" : " cut"}${actual ? " actual" : ""}`, title },
    make("span", { class: "bar-name" }, name),
    make(
      "span",
      { class: "bar-track" },
      make("span", { class: "bar-plain", style: { width: wide(plain) } }),
      make("span", { class: "bar-now", style: { width: wide(now) } }),
    ),
    make("span", { class: "number" }, percent(now)),
  );
}

/** The logit lens: a row for the embeddings and for each layer, with its most probable tokens. */
function lens(layers) {
  const wide = Math.max(...layers.map((one) => one.top.length));
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, word("layer")),
    Array.from({ length: wide }, (_, i) => make("th", { scope: "col" }, String(i + 1))),
    make("th", { scope: "col" }, word("entropy")),
  );
  const final = layers[layers.length - 1].top[0]?.[0];
  const body = [...layers].reverse().map((one) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, one.layer < 0 ? word("embedding") : String(one.layer)),
      one.top.map(([token, p]) =>
        make(
          "td",
          { class: token === final ? "same" : "", style: { "--p": p } },
          tokenSpan(token),
          make("small", {}, percent(p)),
        ),
      ),
      make("td", { class: "number" }, typeof one.entropy === "number" ? one.entropy.toFixed(2) : ""),
    ),
  );
  return make(
    "div",
    { class: "wide", "data-scroll": "lens", tabindex: 0, role: "group", "aria-label": word("lens") },
    make("table", { class: "lens" }, make("thead", {}, head), make("tbody", {}, body)),
  );
}
