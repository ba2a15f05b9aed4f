// The head view: lines from query tokens to key tokens, coloured by head; opacity shows the weight.

const ROW = 26; // pixels of a token's line, as in style.css
const SHADES = [0.08, 0.2, 0.4, 0.65, 0.9]; // lines of like weight are one path, so that thousands stay fast
const LIT_SHADES = 20; // the same for highlighted lines, in finer steps

DRAWN.heads = { show: showHeads, requests: (subject) => [["heads", placeOf(subject, ["kind", "layer"])]] };

async function showHeads(subject, reading) {
  const { kind, layer } = chosen(subject.run);
  const found = await ask("heads", { ...subject.body, kind, layer });
  const off = (head) => subject.body.off.includes(`${kind}.${layer}.${head}`);
  const shown = found.links
    .map((_, head) => head)
    .filter((head) => !off(head) && (!state.shown.length || state.shown.includes(head)));
  const height = ROW * Math.max(found.rows.length, found.columns.length);
  const over = draw("g", { class: "over" });
  const shift = shifts(shown);
  const lines = draw(
    "g",
    { class: "lines" },
    shown.flatMap((head) => paths(found.links[head], head, shift.get(head))),
  );
  const drawing = draw(
    "svg",
    { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    lines,
    over,
  );
  drawing.style.height = `${height}px`;
  const pinned = state.query < 0 ? -1 : Math.min(state.query, found.rows.length - 1);
  const left = side(subject, "query", found.rows, pinned, spoken(found, shown)),
    right = side(subject, "key", found.columns, state.key);
  const links = shown.flatMap((head) => found.links[head].map((link) => [...link, head])),
    linked = new Set(links.map(([query]) => query)),
    faint = found.rows.flatMap((_, query) =>
      linked.has(query)
        ? []
        : shown.map((head) => [query, found.strongest[head][query], found.highest[head][query], head]),
    ),
    [linksByEnd, faintByEnd] = [links, faint].map(byEnd);
  const box = make(
    "div",
    { class: "links", "data-scroll": `links-${subject.pane}` },
    make("span", { class: "end query" }, word("query")),
    make("span", { class: "end" }, word("key")),
    left,
    drawing,
    right,
  );
  const shot = await pictures(subject, reading);
  let now = [];
  const light = (end, index) => {
    const own = (end === 0 && !linked.has(index) ? faintByEnd : linksByEnd)[end].get(index) ?? [],
      still = end === 0 && index === pinned; // stays in a saved picture, which shows all that scrolls
    now = [end, index];
    box.classList.toggle("focused", index >= 0);
    litLines(over, own, shift);
    litTokens(box, own, end, still ? [0, Infinity] : inSight(box));
    if (end === 0) shot?.paint(index);
  };
  box.addEventListener("scroll", () => light(...now)); // tokens that come into sight
  for (const [column, end] of [
    [left, 0],
    [right, 1],
  ]) {
    for (const [i, button] of [...column.children].entries()) {
      for (const event of ["mouseenter", "focus"]) button.addEventListener(event, () => light(end, i));
      button.addEventListener("blur", () => light(0, pinned));
    }
    column.addEventListener("mouseleave", () => light(0, pinned)); // not between two tokens: each repaints all lines
  }
  light(0, pinned);
  return make(
    "div",
    {},
    picker(subject, shot ? ["kind", "layer", "head"] : ["kind", "layer"]),
    shot?.box,
    chips(subject, found, off),
    explained("heads"),
    make(
      "p",
      { class: "note", id: `lines-${subject.pane}` },
      linesWords(links.length, found.rows.length - linked.size),
    ),
    box,
  );
}

/** How many lines there are, and how many queries have none. */
function linesWords(count, without) {
  return `${word("linesDrawn", count)}${without ? ` ${word("queriesWithout", without)}` : ""}`;
}

/** For each query the keys of its strongest links, as text for screen readers. */
function spoken(found, shown) {
  const best = found.rows.map(() => []);
  for (const head of shown) for (const [query, key, weight] of found.links[head]) best[query].push([weight, key, head]);
  return best.map((links) =>
    links
      .sort((a, b) => b[0] - a[0])
      .slice(0, 3)
      .map(([weight, key, head]) => `${visible(found.columns[key])} ${key} (${word("head")} ${head}): ${weight.toFixed(2)}`)
      .join(", "),
  );
}

function side(subject, end, tokens, current, texts = []) {
  const column = make(
    "div",
    { class: `column ${end}`, role: "group", "aria-label": word(end) },
    tokens.map((token, i) =>
      make(
        "button",
        {
          type: "button",
          id: `${end}-${subject.pane}-${i}`,
          tabindex: i === Math.max(0, current) ? 0 : -1,
          "aria-pressed": String(i === current),
          "aria-label": texts[i] ? `${visible(token)} ${i} → ${texts[i]}` : `${visible(token)} ${i}`,
          onclick: () => change({ [end]: state[end] === i ? -1 : i }),
        },
        tokenSpan(token),
        make("span", { class: "weight" }),
      ),
    ),
  );
  roving(column, "button");
  return column;
}

/** One path for all lines of a head with similar weight. */
function paths(links, head, shift) {
  const parts = SHADES.map(() => []);
  for (const [query, key, weight] of links) {
    parts[clamp(Math.floor(weight * SHADES.length), 0, SHADES.length - 1)].push(line(query, key, shift));
  }
  return parts.flatMap((part, shade) =>
    part.length ? [draw("path", { d: part.join(""), stroke: headColour(head), "stroke-opacity": SHADES[shade] })] : [],
  );
}

const line = (query, key, shift) => `M0 ${ROW * (query + 0.5) + shift}L100 ${ROW * (key + 0.5) + shift}`;

/** The vertical offset of a head's lines, so that equal links of several heads do not overlap. */
function shifts(shown) {
  const by = Math.min(3, 14 / shown.length);
  return new Map(shown.map((head, i) => [head, (i - (shown.length - 1) / 2) * by]));
}

/** The links of each query, and of each key. */
function byEnd(links) {
  const ends = [new Map(), new Map()];
  for (const link of links) {
    for (const end of [0, 1]) {
      if (!ends[end].has(link[end])) ends[end].set(link[end], []);
      ends[end].get(link[end]).push(link);
    }
  }
  return ends;
}

/** Draws the highlighted lines over the others: one path for those of a head with about the same weight. */
function litLines(over, links, shift) {
  const parts = new Map();
  for (const [query, key, weight, head] of links) {
    const part = `${head} ${Math.round(weight * LIT_SHADES) / LIT_SHADES}`;
    parts.set(part, (parts.get(part) ?? "") + line(query, key, shift.get(head)));
  }
  over.replaceChildren(
    ...[...parts].map(([part, d]) => {
      const [head, weight] = part.split(" ").map(Number);
      return draw("path", {
        d,
        stroke: headColour(head),
        "stroke-opacity": 0.25 + 0.75 * weight,
        "stroke-width": 1 + 3 * weight,
      });
    }),
  );
}

/** The first and last row of tokens in sight: hundreds of others need no weights while the pointer moves. */
function inSight(box) {
  const first = Math.floor(box.scrollTop / ROW) - 1;
  return [first, first + Math.ceil(box.clientHeight / ROW) + 1];
}

/** Writes the highest weight beside each token at the other end of the links, from row `first` to row `last`. */
function litTokens(box, links, end, [first, last]) {
  const most = new Map();
  for (const link of links) {
    const other = link[1 - end];
    if (other >= first && other <= last) most.set(other, Math.max(most.get(other) ?? 0, link[2]));
  }
  for (const one of box.querySelectorAll(".lit")) {
    one.classList.remove("lit");
    one.lastChild.textContent = "";
    one.style.removeProperty("--weight");
  }
  const others = box.querySelector(end === 0 ? ".column.key" : ".column.query").children;
  for (const [other, weight] of most) {
    others[other].classList.add("lit");
    others[other].style.setProperty("--weight", weight);
    others[other].lastChild.textContent = weight >= 0.01 ? weight.toFixed(2) : weight.toFixed(4);
  }
}

/** The legend of heads with the name of each; a click shows that head alone, further clicks add others. */
function chips(subject, found, off) {
  const group = make("div", { class: "chips", role: "group", "aria-label": word("headsShown") });
  for (let head = 0; head < found.links.length; head++) {
    const on = !off(head) && (!state.shown.length || state.shown.includes(head));
    const name = found.names?.[head] ? word(`name.${found.names[head]}`) : "";
    const entropy = found.entropy?.[head],
      distance = found.distance?.[head];
    const facts = [
      typeof entropy === "number" ? `${word("entropy")} ${entropy.toFixed(2)}` : "",
      typeof distance === "number" ? `${word("distance")} ${distance.toFixed(1)}` : "",
    ]
      .filter(Boolean)
      .join(" · ");
    group.append(
      make(
        "button",
        {
          type: "button",
          class: off(head) ? "head off" : "head",
          id: `chip-${subject.pane}-${head}`,
          "aria-pressed": String(on),
          title: facts,
          style: { "--head": headColour(head) },
          onclick: () => change(shownAfter(head, found.links.length)),
        },
        make("b", {}, String(head)),
        ` ${off(head) ? word("isOff") : name}`,
      ),
    );
  }
  return group;
}

function shownAfter(head, count) {
  const now = state.shown.length ? state.shown : [...Array(count).keys()];
  const next =
    now.length === count
      ? [head]
      : now.includes(head)
        ? now.filter((one) => one !== head)
        : [...now, head].sort((a, b) => a - b);
  return { head, shown: next.length === count ? [] : next };
}

/** A line that explains a view. */
function explained(view) {
  return make("p", { class: "explained" }, word(`about.${view}`));
}
