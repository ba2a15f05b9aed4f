// A saved page has no server: controls without saved answers are disabled, with the reason.

const isKnown = (name, body) => saved.answers[keyOf(name, body)] !== undefined;
const readingOf = (subject) => saved.answers[keyOf("read", subject.body)];

function placeOf(subject, parts) {
  const now = chosen(subject.run);
  return Object.assign({ ...subject.body }, ...parts.map((part) => ({ [part]: now[part] })));
}

function pairOf(subject) {
  const place = placeOf(subject, ["kind", "layer", "head"]),
    { rows, columns } = ends(place.kind, readingOf(subject).tokens),
    query = state.query < 0 ? rows.length - 1 : clamp(state.query, 0, rows.length - 1),
    { strongest } = saved.answers[keyOf("heads", placeOf(subject, ["kind", "layer"]))] ?? {};
  return {
    ...place,
    query,
    key: state.key < 0 ? strongest?.[place.head][query] : clamp(state.key, 0, columns.length - 1),
  };
}

/** Whether a saved page has all answers that it needs after a change of the state. */
function isSaved(updates) {
  const before = { ...state },
    known = (request) => isKnown(...request);
  Object.assign(state, updates);
  try {
    return subjects().every((subject) => {
      const { run, body } = subject,
        offs = body.off.length ? [[], body.off] : [[]],
        needs = [["read", body], ...offs.map((off) => ["answer", { ...body, off }])];
      if (state.write && run.writes) needs.push(...offs.map((off) => ["write", writeBody(subject, off)]));
      return needs.every(known) && drawing(viewNow()).requests(subject).every(known);
    });
  } catch (error) {
    gone(error); // the view says it, such as that there is no attention
    return true;
  } finally {
    Object.assign(state, before);
  }
}

const FIRST_CAUSES = { deep: -2, method: "gradient", stack: "", cell: "" };

/** The change that a page can show, or null; what was not saved becomes the default: a pinned key, the path of a token. */
function offered(updates) {
  if (!saved) return updates;
  const changes = "key" in updates ? [updates] : [updates, { ...updates, key: -1 }];
  if (updates.view === "path") changes.push({ ...updates, ...FIRST_PATH });
  if (["lens", "salience", "patch"].includes(updates.view)) changes.push({ ...updates, ...FIRST_PATH, ...FIRST_CAUSES });
  return changes.find(isSaved) ?? null;
}

/** The properties of a control that changes the state: disabled with the reason as title if it cannot. */
function toward(updates, step = false) {
  const onclick = () => change(updates, step);
  return offered(updates) ? { onclick } : { onclick, ...notSaved() };
}

const notSaved = () => ({ disabled: true, title: word("notSaved") });
