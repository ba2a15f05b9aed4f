// Keyboard shortcuts.

const KEYS = [
  ["1 … 9, 0, g, e, s, a", "keyViews"],
  [", .", "keySteps"],
  ["p", "keyPlay"],
  ["< >", "keyTrainingSteps"],
  ["f", "keyFilm"],
  ["← →", "keyTokens"],
  ["↑ ↓", "keyLayers"],
  ["[ ]", "keyHeads"],
  ["k", "keyKind"],
  ["x", "keyOff"],
  ["w", "keyWrite"],
  ["/", "keyText"],
  ["Enter", "keyGo"],
  ["+ − 0", "keyZoom"],
  ["d", "keyTheme"],
  ["l", "keyLanguage"],
  ["?", "keys"],
  ["Esc", "keyEscape"],
];

function showKeys() {
  const dialog = byId("keys");
  const close = make("button", { type: "button", class: "go", onclick: () => dialog.close() }, word("close"));
  dialog.replaceChildren(
    make("h2", {}, word("keys")),
    make(
      "dl",
      { class: "keys" },
      KEYS.flatMap(([key, name]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, word(name))]),
    ),
    close,
  );
  dialog.setAttribute("aria-label", word("keys"));
  if (!dialog.open) dialog.showModal();
}

/** Shortcuts that work everywhere except in text fields. */
function pageKeys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const typing = event.target.closest?.("input:not([type=range]), textarea, select");
  if (event.key === "Escape") {
    event.target.blur?.();
    if (!typing && (state.query >= 0 || state.key >= 0 || state.shown.length))
      change({ query: -1, key: -1, shown: [] });
    return;
  }
  const sliding = event.target.type === "range" && event.key.startsWith("Arrow"); // which move the slider
  if (typing || sliding) return;
  const act = actions()[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function actions() {
  const [subject] = subjects(),
    views = Object.fromEntries(tabsOf(subject.run).filter(({ key }) => key).map(({ view, key }) => [key, () => openView(view)]));
  const step = (list, now, by) => list[clamp(list.indexOf(now) + by, 0, list.length - 1)];
  const attends = Object.keys(subject.run.kinds).length > 0,
    now = attends ? chosen(subject.run) : null;
  const looks = attends
    ? {
        ArrowUp: () => change({ layer: step(now.layers, now.layer, 1) }),
        ArrowDown: () => change({ layer: step(now.layers, now.layer, -1) }),
        "[": () =>
          change({ head: Math.max(0, now.head - 1), shown: state.shown.length ? [Math.max(0, now.head - 1)] : [] }),
        "]": () =>
          change({
            head: Math.min(now.heads - 1, now.head + 1),
            shown: state.shown.length ? [Math.min(now.heads - 1, now.head + 1)] : [],
          }),
        k: () => change({ kind: now.kinds[(now.kinds.indexOf(now.kind) + 1) % now.kinds.length], query: -1, key: -1 }),
        x: () => flip(`${now.kind}.${now.layer}.${now.head}`),
      }
    : {};
  return {
    ...views,
    ...looks,
    ...(viewNow() === "path" ? pathKeys(subject) : {}),
    ...filmKeys(),
    ArrowLeft: () => moveToken(subject, -1),
    ArrowRight: () => moveToken(subject, 1),
    w: () => subject.run.writes && writeAgain(),
    "/": () => byId("text").select(),
    d: () => byId("theme").click(),
    l: () => byId("language").click(),
    "?": showKeys,
  };
}

function flip(id) {
  change({ off: state.off.includes(id) ? state.off.filter((one) => one !== id) : [...state.off, id].sort() });
}

/** Moves to the next token of the stack that predicts. */
async function moveToken(subject, by) {
  const { tokens, at: first } = await ask("read", subject.body),
    side = tokens.decoder?.length ? "decoder" : "encoder",
    { length } = tokens[side];
  const at = clamp((state.at < 0 ? first : state.at) + by, 0, length - 1);
  await change({ ...pickToken(subject, side, at), at });
  byId(`token-0-${side}-${at}`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** In the row of tabs, arrow keys open the neighbours. */
function tabKeys() {
  byId("tabs").addEventListener("keydown", (event) => {
    const tabs = [...byId("tabs").querySelectorAll("[role=tab]")],
      at = tabs.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
    const to = {
      ArrowRight: (at + 1) % tabs.length,
      ArrowLeft: (at - 1 + tabs.length) % tabs.length,
      Home: 0,
      End: tabs.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const { id } = tabs[to];
    openView(id.slice("tab-".length));
    byId(id).focus();
  });
}
