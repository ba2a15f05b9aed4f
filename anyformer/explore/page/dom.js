// Creating elements. Text is always inserted as text, never as HTML.

/** Creates an element: `make("button", {class: "x", onclick: f}, "text", child)`. Keys that begin with "on" are listeners. */
function make(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** The same for SVG. */
function draw(tag, props = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

/** The head of a table, a column for each name; an empty one has no heading. */
function tableHead(names) {
  return make("thead", {}, make("tr", {}, names.map((name) => (name ? make("th", { scope: "col" }, name) : make("td")))));
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

/** A canvas with a size in CSS pixels, sharp on any screen, and its scaled context. */
function sharp(canvas, width, height) {
  const ratio = Math.max(2, window.devicePixelRatio || 1); // a saved picture has twice the pixels
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Arrow keys, Home and End move the focus within a group that is one tab stop. */
function roving(group, selector, columns = () => 1) {
  group.addEventListener("keydown", (event) => {
    const items = [...group.querySelectorAll(selector)].filter((item) => !item.disabled);
    const at = items.indexOf(document.activeElement);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = columns();
    const moves = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: width,
      ArrowUp: -width,
      Home: -at,
      End: items.length - 1 - at,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const to = at + moves[event.key];
    if (to < 0 || to >= items.length || to === at) return;
    items[at].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
  });
}

/** 1234567 as "1.23 M". */
function short(number) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  for (const [unit, least] of [
    ["T", 1e12],
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ]) {
    if (size >= least) return `${(number / least).toPrecision(3)} ${unit}`;
  }
  return String(Math.round(number * 100) / 100);
}

/** Bytes as "12.3 kB". */
const bytes = (number) => (Math.abs(number) < 1000 ? `${number} B` : `${short(number)}B`);

/** Formats a value of a matrix. */
function figure(value) {
  const size = Math.abs(value);
  if (value === 0) return "0"; // -0 too
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1e5 || size < 1e-4 ? value.toExponential(2) : value.toFixed(size >= 100 ? 1 : size >= 1 ? 3 : 4);
}

const percent = (p) =>
  p >= 0.9995
    ? "100 %"
    : p >= 0.1
      ? `${(100 * p).toFixed(1)} %`
      : p >= 1e-4
        ? `${(100 * p).toFixed(2)} %`
        : p > 0
          ? "<0.01 %"
          : "0 %";
