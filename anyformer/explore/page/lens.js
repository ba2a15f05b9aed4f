// The lens grid: the most probable output after each layer, at every token; a click lists the others.

const LENS_PAGE = 64; // tokens of one answer, as in lens.py

const placeWords = { tokens: "after", masked: "inPlaceOf" };

/** The cell whose predictions are listed: its layer and position. */
function lensPlace(subject, reading, found) {
  const at = subject.run.says === "labels" ? 0 : state.at < 0 ? reading.at : state.at,
    layer = found.layers.includes(state.deep) ? state.deep : found.layers.at(-1);
  return { at: clamp(at, 0, found.count - 1), layer };
}

/** The page of tokens that holds the selected one. */
function lensBody(subject, reading) {
  const { length } = reading.tokens[sideOf(subject.run)],
    at = subject.run.says === "labels" ? 0 : clamp(state.at < 0 ? reading.at : state.at, 0, length - 1);
  return { ...subject.body, first: at - (at % LENS_PAGE) };
}

function lensRequests(subject, reading) {
  if (!viewsOf(subject.run).includes("lens")) return [];
  const first = ["lens", lensBody(subject, reading)],
    found = saved.answers[keyOf(...first)];
  return found?.layers ? [first, ["cell", { ...subject.body, ...lensPlace(subject, reading, found) }]] : [first];
}

DRAWN.lens = { show: showLens, requests: (subject) => lensRequests(subject, readingOf(subject)) };

async function showLens(subject, reading) {
  const { run } = subject;
  if (!viewsOf(run).includes("lens")) return notForRun("noLens");
  const found = await ask("lens", lensBody(subject, reading)),
    place = lensPlace(subject, reading, found),
    one = await ask("cell", { ...subject.body, ...place }),
    colours = ramp(SCALES[theme()].up),
    order = [...found.layers.keys()].reverse(), // the last layer on top, as the path runs upwards
    final = found.rows.at(-1);
  const layerName = (layer) => (layer < 0 ? word("embedding") : String(layer));
  const grid = cellGrid({
    id: `lens-${subject.pane}`,
    label: word("view.lens"),
    corner: `${word("layer")} \\ ${word("token")}`,
    rows: order.map((row) => layerName(found.layers[row])),
    columns: found.columns.map((token) => (token === "" ? word("wholeText") : tokenSpan(token))),
    numbers: found.columns.map((_, i) => found.first + i),
    cell: (row, column) => {
      const layer = found.layers[order[row]],
        [token, p, id] = found.rows[order[row]][column],
        at = found.first + column,
        where = `${word("layer")} ${layerName(layer)}, ${visible(found.columns[column] || word("wholeText"))} ${at}`;
      return {
        text: make("bdi", { class: "token", dir: "auto" }, visible(token)),
        note: percent(p),
        colour: colours[clamp(Math.round(p * 255), 0, 255)],
        name: `${where}: ${visible(token)} ${percent(p)}`,
        to: { deep: layer, ...(run.says === "labels" ? {} : { at }) },
        current: layer === place.layer && at === place.at,
        same: id === final[column][2],
      };
    },
  });
  return make(
    "div",
    {},
    explained(`lens.${run.says}`),
    lensPages(subject, found),
    grid,
    legend({ colours, low: 0, high: 1 }, false),
    lensList(subject, one, layerName(place.layer)),
  );
}

/** For long texts, a selector of the page of tokens. */
function lensPages(subject, found) {
  if (found.count <= found.page) return null;
  const starts = Array.from({ length: Math.ceil(found.count / found.page) }, (_, i) => i * found.page);
  const select = make(
    "select",
    { id: `lens-page-${subject.pane}`, onchange: (event) => change({ at: Number(event.target.value) }) },
    starts.map((at) => option(at, `${at} – ${Math.min(at + found.page, found.count) - 1}`, at === found.first, { at })),
  );
  return make(
    "div",
    { class: "picker" },
    make("label", { class: "pick" }, make("span", {}, word("tokensShown")), select),
  );
}

/** The outputs of the selected cell. */
function lensList(subject, one, layer) {
  const place = make(
    "p",
    { class: "value", role: "status", "aria-live": "polite" },
    make("span", { class: "label" }, `${word("layer")} ${layer} · `),
    one.token === ""
      ? word("wholeText")
      : [
          make("span", { class: "label" }, word(placeWords[subject.run.says] ?? "token"), " "),
          tokenSpan(one.token),
          make("sub", {}, String(one.at)),
        ],
    typeof one.entropy === "number"
      ? make("span", { class: "share" }, `${word("entropy")} ${one.entropy.toFixed(2)}`)
      : null,
  );
  const rest = one.count - one.top.length,
    open =
      subject.run.tokens && state.view !== "compare"
        ? make(
            "button",
            { type: "button", id: `lens-next-${subject.pane}`, ...toward({ view: "next", at: one.at }, true) },
            word("openIn", viewName("next", subject.run)),
          )
        : null;
  return make(
    "div",
    { class: "cell-list" },
    place,
    plainBars(one.top),
    rest > 0 ? make("p", { class: "note" }, word("others", rest)) : null,
    open,
  );
}
