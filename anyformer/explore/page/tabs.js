// The row of views, in groups with a caption.

const COMPARE = { view: "compare", title: "", group: "runs", key: "9" }; // the page's own: two of the others

/** The tabs of a run: those of its views, in the server's order, and the comparison. */
function tabsOf({ views }) {
  const first = views.findIndex(({ group }) => group === COMPARE.group),
    at = first < 0 ? views.length : first;
  return [...views.slice(0, at), COMPARE, ...views.slice(at)];
}

const viewsOf = (run) => tabsOf(run).map(({ view }) => view);

/** The views that are drawn side by side for two subjects; patching uses both texts by itself. */
const comparedViews = (run) => viewsOf(run).filter((view) => view !== "compare" && view !== "patch");

/** Falls back to the first views where the run does not have those of the state. */
function fitView() {
  const { run } = subjectOf(runs, 0);
  if (!viewsOf(run).includes(state.view)) state.view = DEFAULTS.view;
  if (!comparedViews(run).includes(state.both)) state.both = DEFAULTS.both;
}

/** How a view is drawn; one that the page has no drawing for is shown entry by entry. */
const drawing = (view) =>
  DRAWN[view] ?? { show: (subject) => showEntries(view, subject), requests: (subject) => [[view, subject.body]] };

function fillTabs(run) {
  const own = tabsOf(run);
  const tab = ({ view, key }) =>
    make(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${view}`,
        "aria-controls": "view",
        "aria-selected": String(view === state.view),
        tabindex: view === state.view ? 0 : -1,
        "aria-keyshortcuts": key || null,
        title: viewName(view, run) + (key ? ` (${key})` : ""),
        ...toward(viewChange(view), true),
      },
      viewName(view, run),
      view === "live" && run.live ? make("span", { class: "dot" }) : null,
    );
  const groups = [...new Set(own.map(({ group }) => group))].map((name) =>
    make(
      "div",
      { class: "tab-group", role: "presentation" },
      make("span", { class: "tab-caption", "aria-hidden": "true" }, word(`group.${name}`)),
      make("div", { role: "presentation" }, own.filter(({ group }) => group === name).map(tab)),
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
