"use strict";
// Draws bars and charts. The text beside them has the same numbers, so they are hidden from screen readers.

const SVG = "http://www.w3.org/2000/svg";
// Six hues that are easy to distinguish, each in a light and a dark tone; red is reserved for problems. With more than
// twelve containers the colours repeat, and the number distinguishes them.
const HUES = [212, 28, 140, 325, 265, 48];
const TONES = 2 * HUES.length;

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Give a node, and thereby its descendants, the colour of a container. */
function tone(node, number) {
  const at = (number - 1) % TONES;
  node.classList.add("tone");
  node.classList.toggle("second", at >= HUES.length);
  node.style.setProperty("--hue", HUES[at % HUES.length]);
  return node;
}

/** Define a hatch pattern for each tone; hatching shows lent time and parked memory. */
function makeHatches(defs) {
  for (let at = 0; at < TONES; at++) {
    defs.append(tone(draw("pattern", {id: `hatch-${at}`, width: 4, height: 9, patternUnits: "userSpaceOnUse"},
      draw("rect", {width: 4, height: 9}), draw("path", {d: "M-1 2 1 -2M-1 11 5 -2M3 11 5 7"})), at + 1));
  }
}

function width(node, value) { node.style.width = `${clamp(value)}%`; return node; }

function mark(kind, at) {
  const node = make("span", {class: `mark ${kind}`});
  node.style.left = `${clamp(at)}%`;
  return node;
}

function timeBar(had) {
  const bar = make("div", {class: "bar time", "aria-hidden": "true"});
  bar.append(width(make("span", {class: "own"}), had.used - had.lent));
  bar.append(width(make("span", {class: "lent"}), Math.min(had.lent, 100 - clamp(had.used - had.lent))));
  bar.append(mark("guarantee", had.guarantee));
  if (had.limit < 100) bar.append(mark("limit", had.limit));
  return bar;
}

/** Return the used part of a container's memory quota as parts of a bar: what is on the GPU, and what is parked. */
function memoryParts({memory, parked, memory_limit: limit}, whole) {
  const within = Math.min(memory, limit), away = Math.min(parked, within), scale = whole ? 100 / whole : 0;
  const parts = [width(make("span", {class: "own"}), scale * (within - away))];
  return away ? [...parts, width(make("span", {class: "parked"}), scale * away)] : parts;
}

function memoryBar(had) {
  const bar = make("div", {class: "bar memory", "aria-hidden": "true"});
  bar.append(...memoryParts(had, Math.max(had.memory, had.memory_limit)));
  if (had.memory > had.memory_limit) {
    const within = 100 * had.memory_limit / had.memory;
    bar.append(width(make("span", {class: "over"}), 100 - within), mark("limit", within));
  }
  return bar;
}

/** Return a container's part of a GPU's bar, with its number if there is room for it. */
function slot(row, share, kind, ...children) {
  const node = tone(width(make("span", {class: kind}, ...children), share), row.number);
  node.title = `${row.number}: ${short(plain(row.one.name || row.one.id), 64)}`;
  if (share >= 4) node.append(make("b", {}, make("span", {}, String(row.number))));
  return node;
}

function totalBar(rows) {
  const bar = make("div", {class: "bar total", "aria-hidden": "true"});
  let room = 100;
  for (const row of rows) {
    const share = Math.min(room, row.had.used * row.had.part);
    if (share <= 0) continue;
    room -= share;
    const lent = 100 * row.had.lent / row.had.used;
    bar.append(slot(row, share, "slot", width(make("span", {class: "own"}), 100 - lent),
      width(make("span", {class: "lent"}), lent)));
  }
  return bar;
}

function totalMemoryBar(rows, gpu) {
  const bar = make("div", {class: "bar total memory", "aria-hidden": "true"});
  const here = rows.filter((row) => row.had.stays);
  // If more memory is granted than the GPU has, a mark shows the GPU's memory.
  const whole = Math.max(gpu.memory, sum(here.map((row) => row.had.memory_limit)));
  for (const row of here) {
    const limit = row.had.memory_limit;
    bar.append(slot(row, 100 * limit / whole, "slot granted", ...memoryParts(row.had, limit)));
  }
  if (whole > gpu.memory) bar.append(mark("limit", 100 * gpu.memory / whole));
  return bar;
}

/** Yield a container's steps that a chart shows: for each, its position in the chart and its index in the columns. */
function* shown(one) {
  const start = firstShown();
  for (let i = Math.max(0, start - one.first); i < one.used.length; i++) yield [one.first + i - start, i];
}

/** Return a path along `top` of one container's steps and back along `floor`; `y` converts a value to a coordinate. */
function area(one, y, top, floor) {
  const there = [], back = [];
  for (const [x, i] of shown(one)) {
    there.push(`${x} ${y(top(x, i))} ${x + 1} ${y(top(x, i))}`);
    back.push(`${x + 1} ${y(floor(x, i))} ${x} ${y(floor(x, i))}`);
  }
  return there.length ? `M${there.join(" ")} ${back.reverse().join(" ")}Z` : "";
}

/** Return a line along the steps, interrupted where values are missing. */
function line(values, y) {
  return values.map((value, x) => value === null ? "" : `${values[x - 1] == null ? "M" : "L"}${x} ${y(value)} ${x + 1} ${y(value)}`)
    .join("");
}

/**
 * Return a chart of stacked containers over time, from columns given by name: `own` is drawn, `less` is subtracted from
 * it, `part` is the part of it that is hatched, and the sum of `promised` is the dashed line. `most` is the upper end
 * of the chart.
 */
function chart(ones, {own, less, part, promised}, most, span) {
  const svg = draw("svg", {class: "chart", viewBox: `0 0 ${about.steps} 100`, preserveAspectRatio: "none"});
  const y = (value) => (100 - 100 * clamp(value, most) / most).toFixed(2);
  const floor = Array(about.steps).fill(0), line_of = Array(about.steps).fill(null);
  for (const one of ones) {
    const number = numbers.get(one.key);
    const amount = (i) => one[own][i] - (less ? one[less][i] : 0);
    const base = (x) => floor[x], top = (x, i) => floor[x] + amount(i);
    const within = (x, i) => top(x, i) - (part ? one[part][i] : 0);
    const band = tone(draw("g", {}, draw("title", {}, `${number}: ${short(plain(one.name || one.id), 64)}`)), number);
    band.append(draw("path", {class: "own", d: area(one, y, within, base)}));
    if (part && one[part].some((value) => value > 0)) {
      const fill = `url(#hatch-${(number - 1) % TONES})`;
      band.append(draw("path", {class: part, fill, d: area(one, y, top, within)}));
    }
    svg.append(band);
    for (const [x, i] of shown(one)) {
      floor[x] += amount(i);
      line_of[x] += one[promised][i];
    }
  }
  svg.append(draw("path", {class: "promised", d: line(line_of, y)}));
  const start = firstShown();
  if (span.moment) {
    const x = span.last - start + 0.5;
    svg.append(draw("line", {class: "cursor", x1: x, x2: x, y1: 0, y2: 100}));
  } else if (span.first > Math.max(0, start)) {
    // Shades the steps that are not part of the selected time.
    svg.append(draw("rect", {class: "outside", x: 0, y: 0, width: span.first - start, height: 100}));
  }
  return svg;
}

/** Return a chart with its axes: the amounts in `labels`, from top to bottom, and the time. */
function plot(label, svg, labels) {
  const minutes = about.steps * about.step_s / 60;
  const ago = (third) => `\u2212${minutes * third / 3}`;
  for (const at of [1 / 3, 2 / 3]) {
    const x = at * about.steps;
    svg.prepend(draw("line", {class: "grid", x1: x, x2: x, y1: 0, y2: 100}));
  }
  svg.prepend(draw("line", {class: "grid", x1: 0, x2: about.steps, y1: 50, y2: 50}));
  const times = [`${ago(3)}\u00a0min`, ago(2), ago(1), "now"];
  return make("div", {class: "plot", "aria-hidden": "true"}, make("small", {class: "label"}, label),
    make("small", {class: "amounts"}, ...labels.map((text) => make("span", {}, text))), svg,
    make("small", {class: "times"}, ...times.map((text) => make("span", {}, text))));
}

const TIME = {own: "used", part: "lent", promised: "guarantee"};
const MEMORY = {own: "memory", part: "parked", promised: "memory_limit"};
const ON_GPU = {own: "memory", less: "parked", promised: "memory_limit"};

/** Return the upper end of these containers' charts, in percent: the same for all, so that they can be compared. */
function timeScale(ones) {
  const highest = Math.max(0, ...ones.map((one) => Math.max(...one.used, ...one.guarantee)));
  return [10, 20, 50].find((most) => highest <= most) ?? 100;
}

function timePlot(label, ones, most, span) {
  return plot(label, chart(ones, TIME, most, span), [most, most / 2, 0].map((amount) => `${amount}\u00a0%`));
}

/** Return a chart of memory over time, up to `whole` bytes, or up to the highest value if that is more. */
function memoryPlot(label, ones, whole, span, columns = MEMORY) {
  const peak = ones.length === 1 ? Math.max(...ones[0].memory, ...ones[0].memory_limit) : 0;
  const most = Math.max(whole, peak, MIB);
  return plot(label, chart(ones, columns, most, span), [bytes(most), bytes(most / 2), "0"]);
}
