// Draws ranks, waiting times and curves. What they show is decided in words.js.
"use strict";

const $ = (id) => document.getElementById(id);
const MAX_POINTS = 4000; // of a line; of more, every second one is dropped
const FOLD = 40; // pixels within which marks of one kind are one
const MAX_COLUMNS = 2000; // of the history of waiting times
const COLORS = ["#3b7dd8", "#d9822b", "#2a9d63", "#b455c8", "#d0483e", "#1b93a3", "#93893b", "#7a8591"];
const charts = new Map(); // name of a metric -> {plot, series: rank -> {points}, other, zoom}
const uses = new Map(); // what -> plot
const columns = []; // {time, ranks: Map rank -> usage}
let marks = []; // events that charts show
const options = { smooth: 0, log: false, singles: false };

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text != null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// --- ranks by host -------------------------------------------------------------------------------
const STATES = { "": "computes", waits: "waits", idle: "starts or is paused", spare: "spare", bad: "failed or lost", gone: "ended" };
const SHADES = { "": "good", waits: "wait", idle: "gone", spare: "spare", bad: "bad", gone: "gone" };

function showRing(ranks) {
  const box = $("ring");
  const places = topology(ranks, Math.max(200, box.parentElement.clientWidth - 26));
  box.setAttribute("viewBox", `0 0 ${places.width} ${Math.max(places.height, 1)}`);
  box.style.maxWidth = `${places.width}px`;
  const parts = [];
  for (const { name, x, y, width, height } of places.hosts) {
    parts.push(svg("rect", { class: "host", x: x + 0.5, y: y + 0.5, width: width - 1, height: height - 1, rx: 6 }));
    const label = svg("text", { class: "name", x: x + 10, y: y + 12 });
    label.textContent = name || "host not known";
    parts.push(label);
  }
  for (const [a, b] of ringLinks(places.nodes)) {
    parts.push(svg("line", { class: "edge", x1: a.x, y1: a.y, x2: b.x, y2: b.y }));
  }
  for (const { rank, x, y } of places.nodes) {
    const node = svg("circle", { class: `node ${kindOf(rank)}`, cx: x, cy: y, r: 15 });
    node.appendChild(svg("title", {})).textContent = `rank ${rank.rank}${hasMoved(rank) ? `, as rank ${rank.as_rank}` : ""}, ${rank.kind}: ${rank.state}`;
    const letter = ROLE_LETTERS[rank.kind] ?? "";
    const label = svg("text", { x, y: letter ? y - 3 : y });
    label.textContent = rank.rank;
    parts.push(node, label);
    if (letter) {
      const role = svg("text", { class: "role", x, y: y + 8 });
      role.textContent = letter;
      parts.push(role);
    }
  }
  box.replaceChildren(...parts);
  const shown = new Set(ranks.map(kindOf));
  const dots = Object.entries(STATES).filter(([kind]) => shown.has(kind))
    .flatMap(([kind, text]) => [element("i", null, { class: SHADES[kind] }), text]);
  const letters = Object.entries(ROLE_LETTERS).filter(([kind, letter]) => letter && ranks.some((r) => r.kind === kind));
  const roles = letters.map(([kind, letter]) => ` ${letter}: ${kind}`).join(",");
  const ring = ringLinks(places.nodes).length ? " Lines: neighbours in the ring." : "";
  $("legend").replaceChildren(...dots, ".", roles ? `${roles}.` : "", ring);
}

// --- history of each rank ------------------------------------------------------------------------
function addColumn(column) {
  columns.push(column);
  if (columns.length > MAX_COLUMNS) {
    const half = columns.splice(0, MAX_COLUMNS / 2);
    columns.unshift(...half.filter((_, i) => i % 2 === 0));
  }
}

function shade(wait) {
  if (wait === -1) return "#c8372d";
  if (wait === -2 || wait == null) return "#8b95a1";
  return `hsl(${148 - 116 * wait} 62% 44%)`;
}

function showHeat() {
  const span = Number($("span").value);
  const last = columns.length ? columns.at(-1).time : 0;
  const begin = columns.length ? columns[0].time : 0;
  const first = span ? Math.max(begin, last - span) : begin;
  const shown = columns.filter((column) => column.time >= first);
  const ranks = [...new Set(shown.flatMap((column) => [...column.ranks.keys()]))].sort((a, b) => a - b);
  const canvas = $("heat");
  const [row, left, foot, scale] = [ranks.length > 24 ? 9 : 16, 34, 20, devicePixelRatio || 1];
  const width = Math.max(200, canvas.parentElement.clientWidth - 26);
  const height = Math.max(1, ranks.length) * row + foot;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui";
  pen.textBaseline = "middle";
  const at = (time) => left + ((time - first) / Math.max(last - first, 1e-9)) * (width - left);
  shown.forEach((column, i) => {
    const x = Math.max(left, at(i ? shown[i - 1].time : column.time - 0.5));
    const wide = Math.max(1, at(column.time) - x + 0.5);
    ranks.forEach((rank, y) => {
      const use = column.ranks.get(rank);
      if (use === undefined) return;
      pen.fillStyle = shade(use.wait);
      pen.fillRect(x, y * row, wide, row - 1);
    });
  });
  pen.fillStyle = color("mute");
  const every = row < 12 ? 4 : 1;
  ranks.forEach((rank, y) => y % every === 0 && pen.fillText(`${rank}`, 8, y * row + row / 2));
  if (!shown.length) return;
  pen.textAlign = "center";
  const ticks = width < 500 ? 2 : 6;
  for (let i = 0; i <= ticks; i += 1) {
    const time = first + ((last - first) * i) / ticks;
    pen.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
    pen.fillText(clockText(time), at(time), height - foot / 2 + 2);
  }
}

const USES = {
  cpu: ["CPU, cores", (v) => v], memory: ["memory, MB", (v) => v / 1e6],
  gpu: ["GPU memory, MB", (v) => v / 1e6], nbytes: ["payload, MB/s", (v) => v / 1e6],
};

function showUses() {
  const ranks = [...new Set(columns.flatMap((column) => [...column.ranks.keys()]))].sort((a, b) => a - b);
  for (const [what, [title, unit]] of Object.entries(USES)) {
    const values = (rank) => columns.map((column) => {
      const value = column.ranks.get(rank)?.[what];
      return value == null ? null : unit(value);
    });
    const data = [columns.map((column) => column.time), ...ranks.map(values)];
    const isSeen = data.slice(1).some((line) => line.some((value) => value > 0));
    const old = uses.get(what);
    if (!isSeen && !old) continue;
    if (old && old.n === ranks.length) {
      old.plot.setData(data);
      continue;
    }
    old?.plot.destroy();
    const series = ranks.map((rank, i) => ({ label: `${rank}`, stroke: COLORS[i % COLORS.length], width: 1, spanGaps: false, points: { show: false } }));
    const style = frame(title);
    style.axes[0].values = (_, ticks) => ticks.map(clockText);
    style.axes[0].space = 70;
    const legend = { show: ranks.length <= 16, live: false };
    uses.set(what, { plot: new uPlot({ ...style, series: [{}, ...series], legend }, data, $("uses")), n: ranks.length });
  }
  arrange($("uses"), [...uses.values()].map(({ plot }) => plot), 260, 150);
}

// --- curves --------------------------------------------------------------------------------------
// Gives plots as much room as there is, several beside each other if they have `least` pixels each.
function arrange(parent, plots, least, height) {
  const across = Math.max(1, Math.min(plots.length, Math.floor((parent.clientWidth + 14) / (least + 14))));
  parent.style.gridTemplateColumns = `repeat(${across}, minmax(0, 1fr))`;
  const width = Math.floor((parent.clientWidth - 14 * (across - 1)) / across);
  plots.filter((plot) => plot.width !== width).forEach((plot) => plot.setSize({ width, height }));
}

function frame(title) {
  const axis = { stroke: color("mute"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("line"), width: 1 }, font: "11px system-ui" };
  return { title, width: 300, height: 150, axes: [{ ...axis }, { ...axis, size: 56, values: (_, ticks) => ticks.map(numberText) }] };
}

function thin(points) {
  [...points.keys()].forEach((step, i) => i % 2 && points.delete(step));
}

function addPoints(lines, rank, points) {
  if (!lines.has(rank)) lines.set(rank, { points: new Map() });
  const line = lines.get(rank);
  for (const [step, value] of points) {
    line.points.set(step, value);
    if (line.points.size > MAX_POINTS) thin(line.points);
  }
}

function chartOf(name) {
  if (!charts.has(name)) charts.set(name, { plot: null, series: new Map(), other: new Map(), zoom: null, isNew: true });
  return charts.get(name);
}

// Takes what one run has logged; what `isOther` is of the run that it is compared with.
function addMetrics(lines, isOther = false) {
  for (const { rank, name, points } of lines) {
    const chart = chartOf(name);
    addPoints(isOther ? chart.other : chart.series, rank, points);
    chart.isNew = true;
  }
}

// Returns the columns and styles of a chart.
function curves(chart) {
  const [own, other] = [chart.series, chart.other].map((lines) => {
    const ranks = [...lines.keys()].sort((a, b) => a - b);
    return { ranks, lines: ranks.map((rank) => lines.get(rank).points) };
  });
  const [steps, mean, low, high] = band(own.lines);
  const rest = band(other.lines);
  const all = [...new Set([...steps, ...rest[0]])].sort((a, b) => a - b);
  const along = (from, values) => {
    const at = new Map(from.map((step, i) => [step, values[i]]));
    return all.map((step) => at.get(step) ?? null);
  };
  const fit = (values) => (options.log ? positive(values) : values);
  const curve = (from, values) => fit(along(from, smoothed(values, options.smooth)));
  const [data, series] = [[all], [{ label: "step" }]];
  const add = (values, style) => (data.push(values), series.push({ spanGaps: true, points: { show: all.length < 3 }, value: (_, v) => numberText(v), ...style }));
  const several = own.ranks.length > 1;
  const bands = [];
  if (steps.length) add(curve(steps, mean), { label: rest[0].length ? OWN_NAME() : several ? "mean" : `rank ${own.ranks[0]}`, stroke: COLORS[0], width: 2 });
  if (several && !options.singles) {
    add(curve(steps, high), { label: "largest", stroke: color("band"), width: 1 });
    add(curve(steps, low), { label: "least", stroke: color("band"), width: 1 });
    bands.push({ series: [series.length - 2, series.length - 1], fill: color("band") });
  }
  if (several && options.singles) {
    own.ranks.forEach((rank, i) => {
      const points = own.lines[i];
      add(curve(steps, steps.map((step) => points.get(step) ?? null)), { label: `rank ${rank}`, stroke: COLORS[(i + 1) % COLORS.length], width: 1 });
    });
  }
  if (rest[0].length) add(curve(rest[0], rest[1]), { label: OTHER_NAME(), stroke: color("ink"), width: 2, dash: [6, 4] });
  return { data, series, bands };
}

function drawMarks(plot) {
  const { ctx: pen, bbox } = plot;
  const scale = devicePixelRatio || 1;
  pen.save();
  pen.font = `700 ${10 * scale}px system-ui`;
  pen.textAlign = "center";
  const taken = new Map(); // how many letters stand at a place
  const steps = plot.data[0];
  const placed = marks.map(({ step, kind }) => ({ kind, x: Math.round(plot.valToPos(within(step, steps), "x", true)) }));
  const seen = placed.filter(({ x }) => x >= bbox.left && x <= bbox.left + bbox.width);
  const shown = folded(seen, FOLD * scale);
  pen.setLineDash([3 * scale, 3 * scale]);
  pen.globalAlpha = 0.6;
  for (const { kind, x } of [...shown].reverse()) { // what comes first lies on top
    pen.strokeStyle = color(KINDS[kind][1]);
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + (SHORT.includes(kind) ? 24 * scale : bbox.height));
    pen.stroke();
  }
  pen.globalAlpha = 1;
  for (const { kind, x, n } of shown) {
    const [letter, shadeName] = KINDS[kind];
    const place = Math.round(x / (10 * scale));
    pen.fillStyle = color(shadeName);
    pen.fillText(n > 1 ? `${letter}${n}` : letter, x, bbox.top + (9 + 11 * (taken.get(place) ?? 0)) * scale);
    taken.set(place, (taken.get(place) ?? 0) + 1);
  }
  pen.restore();
}

function drawChart(name) {
  const chart = charts.get(name);
  chart.isNew = false;
  const { data, series, bands } = curves(chart);
  const shape = JSON.stringify([series.map((each) => each.label), options.log, data[0].length < 3]);
  if (chart.plot && chart.shape === shape) {
    chart.plot.setData(data, !chart.zoom);
    if (chart.zoom) chart.plot.setScale("x", chart.zoom);
    return;
  }
  chart.plot?.destroy();
  if (charts.size && !document.querySelector("#charts .uplot")) $("charts").replaceChildren();
  chart.shape = shape;
  const zoomed = (plot) => {
    if (plot.select.width < 2) return;
    const [min, max] = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
    chart.zoom = { min, max };
  };
  chart.plot = new uPlot({
    ...frame(name), series, bands,
    scales: { x: { time: false }, y: { distr: options.log ? 3 : 1 } },
    hooks: { setSelect: [zoomed], draw: [drawMarks] },
  }, data, $("charts"));
  chart.plot.over.addEventListener("dblclick", () => (chart.zoom = null));
  if (chart.zoom) chart.plot.setScale("x", chart.zoom);
}

function drawCharts(all = false) {
  for (const [name, chart] of charts) if (all || chart.isNew) drawChart(name);
  arrange($("charts"), [...charts.values()].map(({ plot }) => plot).filter(Boolean), 340, 230);
}

// Draws all anew, as after a change of the width or of the colors.
function redraw() {
  for (const chart of charts.values()) chart.shape = "";
  for (const { plot } of uses.values()) plot.destroy();
  uses.clear();
  drawCharts(true);
  showUses();
  showHeat();
}
