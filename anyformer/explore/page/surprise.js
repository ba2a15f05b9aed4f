// The text coloured by log-probability: how expected each token was after the tokens before it.

const SURPRISED = 8; // nats at which the colour is full: p = 0.03 %

DRAWN.surprise = { show: showSurprise, requests: (subject) => (viewsOf(subject.run).includes("surprise") ? [["surprise", subject.body]] : []) };

async function showSurprise(subject) {
  if (!viewsOf(subject.run).includes("surprise")) return notForRun("noSurprise");
  const found = await ask("surprise", subject.body),
    colours = ramp(SCALES[theme()].heat),
    shade = (logp) => colours[clamp(Math.round((-logp / SURPRISED) * 255), 0, 255)],
    said = make("p", { class: "value", role: "status", "aria-live": "polite" });
  const pieces = found.tokens.map((token, i) => surprisePiece(subject, found, token, i, shade, said));
  const text = make("div", { class: "surprise", role: "group", "aria-label": word("view.surprise") }, pieces);
  const first = pieces.find((one) => one.tagName === "BUTTON");
  if (first) first.tabIndex = 0;
  roving(text, "button");
  said.append(...surpriseWords(found, -1));
  text.addEventListener("mouseleave", () => said.replaceChildren(...surpriseWords(found, -1)));
  return make(
    "div",
    {},
    explained(found.all ? "surprise" : "surprise.answer"),
    text,
    said,
    surpriseEnd(found),
    make("div", { class: "legend" }, "log p", legend({ colours, low: 0, high: -SURPRISED }, false)),
  );
}

/** A token as a button; one without a log-probability as plain text. */
function surprisePiece(subject, found, token, i, shade, said) {
  const row = found.rows[i];
  if (!row) return make("bdi", { class: "expected none", dir: "auto", title: word("notPredicted") }, visible(token));
  const colour = shade(row.logp),
    tell = () => said.replaceChildren(...surpriseWords(found, i)),
    to = state.view === "compare" ? { at: i - 1 } : { at: i - 1, view: "next" };
  const piece = make(
    "button",
    {
      type: "button",
      class: "expected",
      id: `expected-${subject.pane}-${i}`,
      tabindex: -1,
      "aria-label": `${visible(token)}: ${percent(Math.exp(row.logp))}, log p ${figure(row.logp)}`,
      style: { background: `rgb(${colour.join(" ")})`, color: inkOn(colour) },
      ...toward(to, true),
    },
    make("bdi", { dir: "auto" }, visible(token)),
  );
  for (const event of ["mouseenter", "focus"]) piece.addEventListener(event, tell);
  return piece;
}

/** The numbers of one token; -1 asks to point at one. */
function surpriseWords(found, i) {
  if (i < 0) return [make("span", { class: "label" }, word("pointToken"))];
  const { logp, rank, best, best_p } = found.rows[i],
    part = (name, value) => [make("span", { class: "label" }, ` ${name} `), make("b", {}, value)];
  return [
    tokenSpan(found.tokens[i]),
    make("sub", {}, String(i)),
    ...part("p", percent(Math.exp(logp))),
    ...part("log p", figure(logp)),
    ...part(word("rank"), String(rank)),
    ...(rank > 1
      ? [make("span", { class: "label" }, ` ${word("mostProbable")} `), tokenSpan(best), ` ${percent(best_p)}`]
      : []),
  ];
}

/** Mean log-probability and perplexity of the text. */
function surpriseEnd(found) {
  if (!found.count) return make("p", { class: "empty" }, word("nothingPredicted"));
  const term = (name, value) => make("span", { class: "term" }, make("b", {}, value), make("small", {}, name));
  return make(
    "div",
    { class: "sum" },
    term(word("tokensPredicted"), String(found.count)),
    term(word("meanLogp"), figure(found.mean)),
    make("span", { class: "sign" }, "→ exp(−x) →"),
    term(word("perplexity"), figure(found.perplexity)),
  );
}
