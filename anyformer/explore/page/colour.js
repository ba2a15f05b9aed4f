// Colours for colour-blind readers: Okabe and Ito's palette for heads, one hue from paper to ink for weights.

const HEADS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5a5a5a", "#b3a400"],
  dark: ["#56b4e9", "#e69f00", "#2fc39b", "#e3a1c6", "#f0e442", "#ff8a4c", "#c9c9c9", "#7aa8ff"],
};

// Anchor colours of the scales, as red, green, blue: from 0 to 1 (`heat`: in orange), and from -1 over 0 to 1.
const SCALES = {
  light: {
    up: [
      [255, 255, 255],
      [198, 219, 239],
      [107, 174, 214],
      [33, 113, 181],
      [8, 48, 107],
    ],
    both: [
      [179, 88, 6],
      [253, 184, 99],
      [255, 255, 255],
      [146, 197, 222],
      [5, 113, 176],
    ],
    heat: [
      [255, 255, 255],
      [254, 217, 166],
      [253, 141, 60],
      [166, 54, 3],
    ],
    hidden: [226, 224, 218],
  },
  dark: {
    up: [
      [22, 26, 33],
      [28, 66, 107],
      [46, 125, 178],
      [126, 196, 232],
      [244, 250, 255],
    ],
    both: [
      [255, 176, 84],
      [150, 84, 20],
      [22, 26, 33],
      [36, 104, 158],
      [120, 200, 250],
    ],
    heat: [
      [26, 30, 37],
      [92, 48, 16],
      [200, 96, 24],
      [255, 190, 120],
    ],
    hidden: [52, 54, 60],
  },
};

function theme() {
  return document.documentElement.dataset.theme;
}

function headColour(head) {
  const colours = HEADS[theme()];
  return colours[head % colours.length];
}

/** 256 colours between the anchors. */
function ramp(anchors) {
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (anchors.length - 1),
      low = Math.min(Math.floor(at), anchors.length - 2);
    return anchors[low].map((c, j) => Math.round(c + (anchors[low + 1][j] - c) * (at - low)));
  });
}

const HIDDEN = -1e29; // what is below was masked

/** An image with one pixel per value; `colour(value)` returns red, green, blue. */
function pixels(values, rows, columns, colour) {
  const canvas = make("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"),
    image = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const [red, green, blue] = colour(values[i], i);
    image.data.set([red, green, blue, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The colour scale of values: weights and masks from 0 to 1 (or to the largest weight), others symmetric around 0. */
function colouring(what, values) {
  const scale = SCALES[theme()];
  if (what === "weights" || what === "mask") {
    const colours = ramp(scale.up),
      high = what === "weights" && state.fit ? values.reduce((a, b) => Math.max(a, b), 0) || 1 : 1;
    return {
      colour: (value) => colours[clamp(Math.round(Math.sqrt(Math.max(0, value / high)) * 255), 0, 255)],
      low: 0,
      high,
      colours,
    };
  }
  let most = 0;
  for (const value of values) if (value > HIDDEN) most = Math.max(most, Math.abs(value));
  const colours = ramp(scale.both);
  const colour = (value) =>
    value < HIDDEN ? scale.hidden : colours[most ? Math.round(((value / most + 1) / 2) * 255) : 128];
  return { colour, low: -most, high: most, colours };
}

/** The legend of a colour scale. */
function legend({ colours, low, high }, hidden) {
  const canvas = make("canvas", { class: "ramp", width: 256, height: 1, "aria-hidden": "true" });
  canvas.getContext("2d").drawImage(
    pixels(colours, 1, 256, (c) => c),
    0,
    0,
  );
  const masked = hidden ? [make("span", { class: "swatch" }), make("span", {}, word("hidden"))] : [];
  return make("p", { class: "legend" }, make("span", {}, figure(low)), canvas, make("span", {}, figure(high)), masked);
}
