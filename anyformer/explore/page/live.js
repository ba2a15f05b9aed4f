// A training: its loss, its evaluations, and the predictions for the text at the saved steps.

const EVERY = 3000; // milliseconds between looks at a run that is being trained
const ROWS = 14; // steps that are shown, of many from the first to the last

DRAWN.live = { show: showLive, requests: (subject) => [["live", { run: subject.body.run, since: 0 }]] };

async function showLive(subject) {
  const body = { run: subject.body.run, since: 0 },
    found = await ask("live", body);
  if (!found.rows.length) return make("div", {}, make("p", { class: "empty" }, word("noMetrics")));
  const names = [...new Set(found.rows.flatMap(Object.keys))].filter((name) => name.endsWith("loss"));
  const lines = names.map((name) => [
    name,
    found.rows.filter((row) => typeof row[name] === "number").map((row) => [row.step, row[name]]),
  ]);
  const latest = Object.entries(Object.assign({}, ...found.rows)).filter(([, value]) => typeof value === "number");
  return make(
    "div",
    {},
    explained("live"),
    curve(lines),
    make(
      "p",
      { class: "details" },
      latest.map(([name, value]) => make("span", {}, make("span", { class: "label" }, name), figure(value))),
    ),
    await probe(subject, spread(found.checkpoints)),
  );
}

/** Selects at most `most` steps, evenly spaced, with the first and the last. */
function spread(steps) {
  if (steps.length <= ROWS) return steps;
  return Array.from({ length: ROWS }, (_, i) => steps[Math.round((i * (steps.length - 1)) / (ROWS - 1))]);
}

/** Polls runs that are being trained every few seconds, while the page is open and the server responds. */
function watchTraining() {
  clearTimeout(watchTraining.timer);
  if (saved || !subjects().some(({ run }) => run.live)) return;
  watchTraining.timer = setTimeout(async () => {
    try {
      for (const { run } of subjects().filter(({ run }) => run.live)) {
        const body = { run: run.name, since: 0 };
        forget("live", body);
        const { live, checkpoints } = await ask("live", body),
          last = checkpoints.at(-1) ?? 0;
        run.steps = checkpoints;
        if (!live || last > (run.step ?? 0)) run.newer = live ? word("showStep", last) : word("showFinished");
      }
    } catch (error) {
      return gone(error); // the server has ended
    }
    aboutRun(subjects()[0].run);
    filmBars(subjects());
    if (viewNow() === "live") await render();
    else watchTraining();
  }, EVERY);
}

/** Switches to the newest weights and drops cached answers about older ones. */
async function showNewest() {
  for (const kept of [answers, written, tops]) kept.clear();
  runs = await ask("runs");
  await change({ step: -1, step2: -1 });
}

/** A chart of metrics over steps, one line for each name. */
function curve(lines) {
  const points = lines.flatMap(([, line]) => line);
  if (!points.length) return make("p", { class: "empty" }, word("noMetrics"));
  const width = 640,
    height = 260,
    left = 64,
    steps = Math.max(...points.map((p) => p[0]), 1);
  const high = Math.max(...points.map((p) => p[1])),
    low = Math.min(0, ...points.map((p) => p[1]));
  const x = (step) => left + ((width - left - 8) * step) / steps,
    y = (value) => height - ((height - 10) * (value - low)) / (high - low || 1);
  const ticks = [low, (low + high) / 2, high].map((value) =>
    draw(
      "g",
      {},
      draw("path", { class: "grid", d: `M${left} ${y(value)}H${width}` }),
      draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(2)),
    ),
  );
  const dots = lines.flatMap(([, line], i) =>
    line.length > 40
      ? []
      : line.map(([step, value]) => draw("circle", { cx: x(step), cy: y(value), r: 3, fill: headColour(i) })),
  );
  const drawn = lines.map(([, line], i) =>
    draw("polyline", {
      points: line.map(([step, value]) => `${x(step)},${y(value)}`).join(" "),
      fill: "none",
      stroke: headColour(i),
      "stroke-width": 2,
    }),
  );
  const chart = draw(
    "svg",
    { class: "chart", viewBox: `0 -14 ${width} ${height + 54}`, role: "img", "aria-label": word("view.live") },
    ticks,
    drawn,
    dots,
    draw("text", { x: width - 8, y: height + 18, "text-anchor": "end" }, String(steps)),
    draw("text", { x: left, y: height + 18 }, "0"),
    draw("text", { x: width / 2, y: height + 36, "text-anchor": "middle" }, word("steps")),
  );
  return make(
    "div",
    {},
    chart,
    make(
      "p",
      { class: "legend" },
      lines.flatMap(([name], i) => [
        make("span", { class: "swatch", style: { background: headColour(i) } }),
        make("span", {}, name),
      ]),
    ),
  );
}

/** The text at each saved step: the run's prediction, and the maps of the selected layer. */
async function probe(subject, steps) {
  if (!steps.length || !Object.keys(subject.run.kinds).length) return null;
  const rows = [],
    colours = ramp(SCALES[theme()].up),
    { kind, layer, heads } = chosen(subject.run);
  for (const step of steps) {
    const body = { ...subject.body, step },
      found = await ask("model", { ...body, kind }).catch(gone);
    if (!found) continue;
    const [height, width] = found.sizes[layer];
    const maps = Array.from({ length: heads }, (_, head) =>
      pixels(
        numbers(found.maps[`${layer}.${head}`], Uint8Array),
        height,
        width,
        mapColour(colours, found.peaks[`${layer}.${head}`]),
      ),
    );
    rows.push(
      make(
        "div",
        { class: "probe" },
        make("b", {}, `${word("step")} ${step}`),
        make("span", { class: "probe-maps" }, maps),
        make("bdi", { dir: "auto" }, visibleText(await saidAt(subject, step))),
      ),
    );
  }
  if (!rows.length) return null;
  return make("div", {}, make("h3", {}, word("overSteps")), picker(subject, ["kind", "layer"]), rows);
}

/** The prediction at a step; for a language model, its continuation. */
async function saidAt(subject, step) {
  const found = await ask("answer", { ...subject.body, step }).catch(gone),
    lines = [];
  if (!found || found.answer || !subject.run.writes) return found?.answer ?? "";
  await stream("write", { ...writeBody(subject), step }, (line) => lines.push(line)).catch(gone);
  return lines.at(-1)?.text ?? "";
}

/** Leaves out refused requests, such as a step that the training has deleted meanwhile. */
function gone(error) {
  if (!(error instanceof Refused)) throw error;
}
