// Tokens in visible form, and the strip of tokens above the views.

const PICTURES = { "\u007f": "␡", " ": "␣" };
const UNSEEN = /\p{Cc}|\p{Cf}|\p{Cs}|\p{Co}|\p{Zl}|\p{Zp}|\p{Noncharacter_Code_Point}/gu;

/** A token with invisible characters escaped: ␊ for a line feed, \u{202e} for a direction mark. */
function visible(token) {
  const seen = String(token)
    .replace(UNSEEN, (c) => (c === "\u200d" && token.length > 1 ? c : picture(c)))
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
  return seen === "" ? "∅" : /^\p{M}/u.test(seen) ? `◌${seen}` : seen;
}

function picture(c) {
  const code = c.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return PICTURES[c] ?? `\\u{${code.toString(16)}}`;
}

/** The same for a longer text, with its line breaks. */
function visibleText(text) {
  return String(text).replace(UNSEEN, (c) => (c === "\n" || c === "\u200d" ? c : picture(c)));
}

/** An element that holds a token, isolated from the text direction around it. */
function tokenSpan(token, props = {}) {
  const { class: more = "", ...others } = props;
  return make("bdi", { class: `token ${more}`, dir: "auto", title: visible(token), ...others }, visible(token));
}

/** The tokens of queries and keys for a kind of attention. */
function ends(kind, tokens) {
  return {
    rows: tokens[kind === "encoder" ? "encoder" : "decoder"] ?? [],
    columns: tokens[kind === "decoder" ? "decoder" : "encoder"] ?? [],
  };
}

/** The selected kind, layer and head, limited to those that a run has. */
function chosen(run) {
  const kinds = Object.keys(run.kinds).filter((kind) => run.kinds[kind].layers.length);
  if (!kinds.length) throw new Refused(word("noAttention"));
  const first = ["cross", "decoder", "encoder"].find((kind) => kinds.includes(kind)), // as in `anyformer inspect`
    kind = kinds.includes(state.kind) ? state.kind : first;
  const { layers, heads } = run.kinds[kind],
    wanted = state.layer < 0 ? layers.at(-1) : state.layer;
  const near = layers.reduce((best, layer) => (Math.abs(layer - wanted) < Math.abs(best - wanted) ? layer : best));
  const count = heads[layers.indexOf(near)];
  return { kinds, kind, layers, layer: near, heads: count, head: clamp(state.head, 0, count - 1) };
}

/** A button for each value, the current one pressed; `updates` gives the state of a value, `words` the prefix of its name. */
function optionButtons(id, values, current, updates, words) {
  return values.map((value) =>
    make(
      "button",
      { type: "button", id: `${id}-${value}`, "aria-pressed": String(value === current), ...toward(updates(value)) },
      word(`${words}.${value}`),
    ),
  );
}

/** The selectors of kind, layer and head above a view. */
function picker(subject, parts) {
  const now = chosen(subject.run);
  const lists = {
    kind: now.kinds.map((kind) => [kind, word(`kind.${kind}`)]),
    layer: now.layers.map((layer) => [layer, String(layer)]),
    head: Array.from({ length: now.heads }, (_, head) => [head, String(head)]),
  };
  const picks = parts.map((part) => {
    const select = make(
      "select",
      {
        id: `${part}-${subject.pane}`,
        onchange: (event) => change({ [part]: part === "kind" ? event.target.value : Number(event.target.value) }),
      },
      lists[part].map(([value, name]) => option(value, name, value === now[part], { [part]: value })),
    );
    return make("label", { class: "pick" }, make("span", {}, word(part)), select);
  });
  return make("div", { class: "picker" }, picks);
}

/** A selector that changes the state. */
function option(value, name, selected, updates) {
  return make("option", { value, selected, ...(offered(updates) ? {} : notSaved()) }, name);
}

/** The tokens of each stack, with the selected ones marked; a click selects one. */
function strip(subject, reading) {
  const sides = ["encoder", "decoder"].filter((side) => reading.tokens[side]?.length);
  const rows = sides.map((side) => {
    const tokens = reading.tokens[side],
      last = sides.length === 1 || side === "decoder";
    const current = last ? (state.at < 0 ? reading.at : Math.min(state.at, tokens.length - 1)) : state.key;
    const answers = side !== "encoder" && reading.begins !== null && reading.begins < tokens.length;
    const buttons = tokens.map((token, i) =>
      make(
        "button",
        {
          type: "button",
          id: `token-${subject.pane}-${side}-${i}`,
          class: answers && i >= reading.begins ? "chip answers" : "chip",
          tabindex: i === Math.max(0, current) ? 0 : -1,
          "aria-pressed": String(i === current),
          ...toward(pickToken(subject, side, i)),
        },
        tokenSpan(token),
        make("small", {}, String(i)),
      ),
    );
    const row = make(
      "div",
      {
        class: "tokens",
        role: "group",
        "aria-label": word(`tokens.${side}`),
        "data-scroll": `tokens-${subject.pane}-${side}`,
      },
      buttons,
    );
    roving(row, "button");
    const label = make("span", { class: "label" }, word(`tokens.${side}`));
    if (answers) label.append(" ", make("small", {}, word("answerTokens")));
    return make("div", { class: "strip-row" }, label, row);
  });
  const notes = (reading.notes ?? []).map((note) => make("p", { class: "note" }, serverText(note)));
  return make("div", { class: "strip" }, rows, notes);
}

/** The change by a click on a token: the position, the query, or in cross-attention the key. */
function pickToken(subject, side, index) {
  if (viewNow() === "path") return followToken(subject, side, index);
  const { kind } = Object.keys(subject.run.kinds).length ? chosen(subject.run) : { kind: "" };
  if (kind === "cross" && side === "encoder") return { key: index };
  const said = side === "decoder" || subject.run.shape === "encoder";
  const asks = side === (kind === "encoder" ? "encoder" : "decoder");
  return { ...(said ? { at: index } : {}), ...(asks ? { query: index, key: -1 } : {}) };
}
