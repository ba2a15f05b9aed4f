// The row of views, in groups with a caption.

/** The views that a run has: some need attention, a cache, probabilities, or a next token. */
function viewsOf(run) {
  const attends = Object.values(run.kinds).some(({ layers }) => layers.length);
  const needs = {
    ...Object.fromEntries(GROUPS.attention.map((view) => [view, attends])),
    lens: run.probabilities,
    surprise: run.tokens && run.shape !== "encoder",
    salience: run.probabilities || run.says !== "tags", // not for tags that are chosen together
    patch: run.probabilities,
    cache: run.shape !== "encoder",
  };
  return VIEWS.filter((view) => needs[view] ?? true);
}

/** The views that are drawn side by side for two subjects; patching uses both texts by itself. */
const comparedViews = (run) => viewsOf(run).filter((view) => SHOW[view] && view !== "patch");

function fillTabs(run) {
  const own = viewsOf(run);
  const tab = (view) =>
    make(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${view}`,
        "aria-controls": "view",
        "aria-selected": String(view === state.view),
        tabindex: view === state.view ? 0 : -1,
        "aria-keyshortcuts": VIEW_KEYS[view],
        title: `${viewName(view, run)} (${VIEW_KEYS[view]})`,
        ...toward(viewChange(view), true),
      },
      viewName(view, run),
      view === "live" && run.live ? make("span", { class: "dot" }) : null,
    );
  const groups = Object.entries(GROUPS).map(([name, views]) =>
    make(
      "div",
      { class: "tab-group", role: "presentation" },
      make("span", { class: "tab-caption", "aria-hidden": "true" }, word(`group.${name}`)),
      make("div", { role: "presentation" }, views.filter((view) => own.includes(view)).map(tab)),
    ),
  );
  const tabs = byId("tabs");
  tabs.setAttribute("aria-label", word("views"));
  tabs.replaceChildren(...groups);
  const now = tabs.querySelector("[aria-selected=true]"), // on a narrow page the row scrolls
    from = now ? now.offsetLeft - tabs.offsetLeft : 0;
  if (now && (from < tabs.scrollLeft || from + now.offsetWidth > tabs.scrollLeft + tabs.clientWidth))
    tabs.scrollLeft = from - tabs.clientWidth / 3;
}

/** The sentence for a view that a run does not have, such as one opened by a link. */
const notForRun = (reason) => make("div", {}, make("p", { class: "empty" }, word(reason)));
