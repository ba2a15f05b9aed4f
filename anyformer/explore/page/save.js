// Saving a view: as a standalone page with its answers, as a picture, as a link.

const HEAVY = 5e6; // parameters from which patching is saved only if it was opened

/** The standalone page: every view in all layers, up to the size limit, and all cached answers. */
async function saveHtml(subjects) {
  const kept = {};
  say(word("saving"));
  for (const subject of subjects) {
    for (const off of subject.body.off.length ? [[], subject.body.off] : [[]])
      Object.assign(kept, await ask("everything", { ...subject.body, off }).catch(gone)); // of a blank text nothing
    await everyView(subject);
  }
  for (const [key, promise] of answers) {
    const name = key.slice(0, key.indexOf(" ")),
      body = JSON.parse(key.slice(name.length + 1));
    const about = subjects.some(
      ({ body: own }) => own.run === body.run && own.text === body.text && (own.target ?? undefined) === body.target,
    );
    if (name === "runs" || name === "live" || (about && name !== "everything"))
      kept[key] = await promise.catch((error) => ({ error: error.message }));
  }
  const text = JSON.stringify({ hash: toHash(state), answers: kept }).replaceAll("<", "\\u003c");
  const response = await fetch("/alone"),
    page = await response.text(),
    hole = /(<script type="application\/json" id="saved">)null/;
  download(new Blob([page.replace(hole, (_, open) => open + text)], { type: "text/html" }), "html");
}

/** Makes each view request its current answers; for a training, only those requested before. */
async function everyView(subject) {
  try {
    const reading = await ask("read", subject.body);
    const heavy = subject.run.parameters > HEAVY && !answers.has(keyOf("patch", patchBody(subject))),
      shown = viewsOf(subject.run).filter((one) => !["compare", "live", ...(heavy ? ["patch"] : [])].includes(one));
    for (const view of shown)
      await drawing(view).show(subject, reading).catch(gone);
  } catch (error) {
    gone(error); // what is refused is refused in the file, too
  }
}

function download(blob, ending) {
  const link = make("a", {
    href: URL.createObjectURL(blob),
    download: `anyformer-${state.run || "run"}-${state.view}.${ending}`.replace(/[^\w.-]/g, "_"),
  });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function savePng() {
  const captions = subjects().map(({ run, body }) =>
      [run.name, viewName(viewNow(), run), visibleText(body.text), ...(run.tokens ? [settings()] : [])].join(" · "),
    ),
    canvas = await viewPicture(2, captions.join(" | "));
  download(await new Promise((done) => canvas.toBlob(done, "image/png")), "png");
}

/** The view as a picture: its elements and the page's style inside an SVG, which an image can load. */
async function viewPicture(scale, title = "") {
  const view = byId("view"),
    paper = make("div", { class: "paper", "data-theme": theme(), lang: document.documentElement.lang });
  const copy = view.cloneNode(true);
  const canvases = view.querySelectorAll("canvas");
  for (const [i, canvas] of copy.querySelectorAll("canvas").entries()) {
    const image = make("img", { src: canvases[i].toDataURL(), class: canvas.className });
    image.style.cssText = canvas.style.cssText;
    canvas.replaceWith(image);
  }
  const selects = view.querySelectorAll("select");
  for (const [i, select] of copy.querySelectorAll("select").entries())
    select.replaceWith(make("b", {}, selects[i].selectedOptions[0]?.textContent ?? ""));
  const rules = [...document.querySelectorAll("style")].map((style) => style.textContent).join("\n");
  paper.append(make("style", {}, rules), ...(title ? [make("p", { class: "film-title" }, title)] : []), copy);
  const width = Math.min(view.clientWidth + hiddenWidth(view) + 32, 8000),
    height = Math.min(wholeHeight(view) + (title ? 72 : 32), 16000);
  const frame = draw(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}` },
    draw("foreignObject", { width: "100%", height: "100%" }, paper),
  );
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(frame))}`;
  await image.decode();
  const ratio = height > 8000 ? 1 : scale,
    canvas = make("canvas", { width: width * ratio, height: height * ratio });
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** How much wider the widest scrolled part of a view is than what is seen of it. */
function hiddenWidth(view) {
  const parts = [...view.querySelectorAll(".links, .maps, .wide, .weights, .rows, .part-grid")];
  return Math.max(0, ...parts.map((part) => part.scrollWidth - part.clientWidth));
}

/** The full height of a view, with scrolled parts. */
function wholeHeight(view) {
  view.classList.add("whole");
  const height = view.scrollHeight;
  view.classList.remove("whole");
  return height;
}

async function copyLink() {
  const link = location.href.split("#")[0] + toHash(state);
  try {
    await navigator.clipboard.writeText(link);
    say(word("copied"));
  } catch {
    say(link);
  }
}
