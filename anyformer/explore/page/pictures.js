// Images and spectrograms of the text, with the weights of one query on their patches or frames.

/** The pictures for a view of attention, and `paint(query)`, which shows another query; null if there are none. */
async function pictures(subject, reading) {
  const sides = Object.entries(reading.pictures ?? {}).filter(([, found]) => found.length);
  if (!sides.length) return null;
  const { kind, layer, head } = chosen(subject.run),
    { rows, columns } = ends(kind, reading.tokens),
    keys = kind === "decoder" ? "decoder" : "encoder",
    found = await ask("matrix", { ...subject.body, kind, layer, head, what: "weights" }).catch(gone);
  const [height, width] = found?.shape ?? [0, 0],
    weights = width === columns.length && height === rows.length ? numbers(found.values, Float32Array) : null;
  const all = sides.flatMap(([side, list]) =>
    list.map((one) => framed(subject, reading.tokens[side], side, one, side === keys && weights !== null)),
  );
  const paint = (asked) => {
    const query = clamp(asked < 0 ? (state.query < 0 ? rows.length : state.query) : asked, 0, rows.length - 1),
      row = weights?.subarray(query * width, (query + 1) * width),
      most = Math.max(1e-9, ...all.filter((one) => one.heated).flatMap((one) => one.places.map((_, i) => row[one.start + i])));
    for (const one of all) one.paint(query, row, most, rows[query]);
    high.textContent = figure(most);
  };
  const high = make("span"),
    scale = make("p", { class: "legend" }, make("span", {}, "0"), make("span", { class: "heat-ramp" }), high);
  paint(-1);
  const box = make(
    "section",
    { class: "pictures", "aria-label": word("pictures") },
    make("p", { class: "explained" }, word("about.pictures")),
    make("div", { class: "picture-row" }, all.map((one) => one.element)),
    all.some((one) => one.heated) ? scale : make("p", { class: "note" }, word("notKeys")),
  );
  return { box, paint };
}

/** A picture under a grid of buttons, one for each place: a click makes the place the query, or in cross-attention the key. */
function framed(subject, tokens, side, one, heated) {
  const { kind, start, grid, size, channels } = one,
    [rows, columns] = grid,
    bytes = numbers(one.pixels, Uint8Array),
    colours = ramp(SCALES[theme()].up);
  const drawn = () => {
    const shot = pixels(bytes, ...size, (_, i) =>
      kind === "audio" ? colours[bytes[i]] : [0, 1, 2].map((c) => bytes[channels * i + (channels > 1 ? c : 0)]),
    );
    if (size[1] > 120) shot.classList.add("smooth");
    return shot;
  };
  const places = Array.from({ length: rows * columns }, (_, i) =>
    make("button", {
      type: "button",
      class: "place",
      id: `place-${subject.pane}-${side}-${start + i}`,
      ...toward(pickToken(subject, side, start + i)),
    }),
  );
  const cells = make("div", { class: "places", role: "group", "aria-label": word(`media.${kind}`) }, places);
  cells.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
  roving(cells, "button", () => columns);
  const caption = make("figcaption"),
    box = make("div", { class: heated ? "shot heated" : "shot" }, drawn(), cells),
    plain = kind === "image" && heated ? make("div", { class: "shot" }, drawn()) : null; // colours would mix with orange
  if (kind === "audio") box.style.minWidth = `${4 * columns}px`;
  else for (const one of [box, plain]) one?.style.setProperty("aspect-ratio", `${size[1]} / ${size[0]}`);
  const ends = [tokens[start], tokens[start + places.length - 1]].map((token) => tokenSpan(token)),
    axis = kind === "audio" ? make("div", { class: "seconds", "aria-hidden": "true" }, ends) : null;
  const scroll = make("div", { class: "wide", "data-scroll": `shot-${subject.pane}-${start}` }, box, axis);
  const paint = (query, row, most, token) => {
    const asks = chosen(subject.run).kind !== "cross",
      current = asks ? query - start : state.key - start;
    let sum = 0;
    for (const [i, place] of places.entries()) {
      const weight = heated ? row[start + i] : 0,
        name = `${visible(tokens[start + i])}${heated ? `: ${figure(weight)}` : ""}`;
      sum += weight;
      place.style.setProperty("--heat", (weight / most).toFixed(3));
      place.title = name;
      place.setAttribute("aria-label", name);
      place.setAttribute("aria-pressed", String(i === current));
      place.tabIndex = i === clamp(current, 0, places.length - 1) ? 0 : -1;
    }
    if (!heated) return;
    caption.replaceChildren(tokenSpan(token ?? ""), make("sub", {}, String(query)), ` → ${percent(sum)}`);
  };
  const element = make("figure", { class: `picture ${kind}` }, make("div", { class: "shots" }, scroll, plain), caption);
  return { element, places, start, heated, paint };
}

/** The pictures of a stack without weights. */
function shots(subject, reading, side) {
  return (reading.pictures?.[side] ?? []).map((one) => {
    const { element, paint } = framed(subject, reading.tokens[side], side, one, false);
    paint(state.at, null, 1);
    return element;
  });
}
