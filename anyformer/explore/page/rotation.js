// What rotary positions do to one query and one key: pairs of dimensions before and after, and the score by distance.

/** The part of a view about the rotation; null for other positions, and in a saved page without its numbers. */
async function rotationPart(subject, where, query, key) {
  const found = await ask("rotation", { ...subject.body, ...where, query, key }).catch(gone);
  if (!found) return null;
  const apart = typeof found.distance === "number",
    part = (name, values, label) => curveOf(word(name), found.distances, values, apart ? found.distance : null, label);
  return make(
    "section",
    { class: "turning" },
    make("h3", {}, word("rotation")),
    make("p", { class: "explained" }, word("about.rotation")),
    make(
      "p",
      { class: "value" },
      `q · k: ${figure(found.before)} ${word("beforeRotation")} → `,
      make("b", {}, figure(found.dot)),
      ` ${word("afterRotation")}${apart ? ` (${word("apart", found.distance)})` : ""}`,
    ),
    make(
      "p",
      { class: "legend" },
      ["q", "k"].flatMap((side) => [make("span", { class: `swatch turn-${side}` }), side]),
      make("span", {}, word("dialLegend")),
    ),
    make(
      "div",
      { class: "dials", role: "group", "aria-label": word("rotation") },
      found.shown.map((pair) => dial(pair)),
    ),
    make(
      "div",
      { class: "curves" },
      part("scoreByDistance", found.scores, word("score")),
      part("envelope", found.envelope, word("relativeScore")),
    ),
  );
}

/** One pair of dimensions as a clock: q and k before (dashed) and after the rotation. */
function dial({ pair, dims, turn, q, k, q_turned, k_turned }) {
  const most = Math.max(...[q, k, q_turned, k_turned].map(([x, y]) => Math.hypot(x, y)), 1e-9),
    hand = ([x, y], name) => draw("path", { class: name, d: `M0 0L${(40 * x) / most} ${(-40 * y) / most}` }),
    degrees = (180 * turn) / Math.PI,
    shown = degrees >= 10 ? degrees.toFixed(1) : degrees >= 0.1 ? degrees.toFixed(2) : degrees.toPrecision(2);
  const drawing = draw(
    "svg",
    {
      viewBox: "-46 -46 92 92",
      role: "img",
      "aria-label": `${word("pair", pair)}: ${word("perToken", `${degrees.toFixed(1)}°`)}; q (${q_turned.map(figure).join(", ")}), k (${k_turned.map(figure).join(", ")})`,
    },
    draw("circle", { class: "grid", r: 44, fill: "none" }),
    draw("path", { class: "grid", d: "M-44 0H44M0 -44V44" }),
    hand(q, "hand turn-q unturned"),
    hand(k, "hand turn-k unturned"),
    hand(q_turned, "hand turn-q"),
    hand(k_turned, "hand turn-k"),
  );
  return make(
    "figure",
    { class: "dial", title: `[${dims.join(", ")}]` },
    drawing,
    make("figcaption", {}, make("b", {}, word("pair", pair)), make("span", {}, word("perToken", `${shown}°`))),
  );
}

/** A value by distance, with a mark at the distance of the pair. */
function curveOf(title, distances, values, at, label) {
  const width = 420,
    height = 150,
    left = 60,
    [low, high] = [Math.min(0, ...values), Math.max(0, ...values)],
    from = distances[0],
    to = distances.at(-1);
  const x = (distance) => left + ((width - left - 10) * (distance - from)) / (to - from || 1),
    y = (value) => height - ((height - 12) * (value - low)) / (high - low || 1);
  const here = at === null ? -1 : distances.indexOf(at);
  return make(
    "figure",
    { class: "by-distance" },
    make("figcaption", {}, title),
    draw(
      "svg",
      {
        class: "chart",
        viewBox: `0 0 ${width} ${height + 40}`,
        role: "img",
        "aria-label": here < 0 ? title : `${title} ${word("apart", at)}: ${figure(values[here])}`,
      },
      [low, 0, high].filter((value, i) => i !== 1 || Math.min(y(low) - y(0), y(0) - y(high)) > 14).map((value) =>
        draw(
          "g",
          {},
          draw("path", { class: "grid", d: `M${left} ${y(value)}H${width}` }),
          draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, figure(Number(value.toPrecision(3)))),
        ),
      ),
      draw("polyline", { class: "curve", points: distances.map((one, i) => `${x(one)},${y(values[i])}`).join(" ") }),
      here < 0
        ? null
        : draw("circle", { class: "mark", cx: x(at), cy: y(values[here]), r: 5 }, draw("title", {}, figure(values[here]))),
      draw("text", { x: x(from), y: height + 16 }, String(from)),
      draw("text", { x: x(to), y: height + 16, "text-anchor": "end" }, String(to)),
      draw("text", { x: (left + width) / 2, y: height + 34, "text-anchor": "middle" }, `${word("tokensApart")} → ${label}`),
    ),
  );
}
