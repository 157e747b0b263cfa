// Shows what /stream sends. All text of jobs is set as textContent, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const charts = new Map(); // name of a metric -> {plot, series: rank -> {points: step -> value}}
const waits = []; // columns of the heat map: wait of each rank
const COLUMNS = 480; // two minutes of four per second
const SHOWN_VALUES = 4;
const RETRY_MS = 1000;
const MAX_POINTS = 4000; // of a line; of more, every second one is dropped
const COLORS = ["#27c", "#d90", "#2a7", "#c3c", "#c33", "#088", "#884", "#555"];
let nRanks = 0;

function cell(row, text) {
  row.appendChild(document.createElement("td")).textContent = text ?? "";
}

function megabytes(nbytes) {
  return nbytes ? `${Math.round(nbytes / 1e6)} MB` : "";
}

// Of rc.log(); of a server, how many slices, shards and requests it has.
function valuesOf(rank) {
  const values = Object.entries(rank.scalars ?? {}).slice(0, SHOWN_VALUES);
  const short = (value) => (typeof value === "number" ? Number(value.toPrecision(4)) : value);
  return values.map(([name, value]) => `${name}=${short(value)}`).join(" ");
}

function showRanks(ranks) {
  const rows = ranks.map((r) => {
    const row = document.createElement("tr");
    row.className = r.is_bad ? "bad" : "";
    row.dataset.rank = r.rank;
    const operation = r.operation ? `${r.operation} for ${r.operation_s.toFixed(1)} s` : "";
    const wait = r.wait == null ? "" : `${Math.round(100 * r.wait)} %`;
    const [memory, gpu] = [r.memory_nbytes, r.gpu_nbytes].map(megabytes);
    const texts = [r.rank, r.pid, r.state, r.step, operation, wait, memory, gpu, valuesOf(r)];
    texts.forEach((text) => cell(row, text));
    return row;
  });
  $("ranks").replaceChildren(...rows);
}

function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Its process has ended, though not by its own fault.
function isGone(rank) {
  return rank.memory_nbytes == null;
}

// It has no place in the job, and waits for one.
function isSpare(rank) {
  return rank.state === "spare" || rank.state === "reserve";
}

function kindOf(rank) {
  if (rank.is_bad) return "bad";
  if (isGone(rank)) return "gone";
  if (isSpare(rank)) return "spare";
  return rank.operation ? "waits" : "";
}

function showRing(ranks) {
  const place = (i) => {
    const angle = (2 * Math.PI * i) / ranks.length - Math.PI / 2;
    return ranks.length === 1 ? [0, 0] : [95 * Math.cos(angle), 95 * Math.sin(angle)];
  };
  const live = ranks.map((r, i) => [r, i]).filter(([r]) => ["", "waits"].includes(kindOf(r)));
  const parts = [];
  live.forEach(([, i], k) => {
    const [x1, y1] = place(i);
    const [x2, y2] = place(live[(k + 1) % live.length][1]);
    parts.push(svg("line", { class: "edge", x1, y1, x2, y2 }));
  });
  ranks.forEach((r, i) => {
    const [cx, cy] = place(i);
    const node = svg("circle", { class: `node ${kindOf(r)}`, cx, cy, r: 13 });
    node.appendChild(svg("title", {})).textContent = `rank ${r.rank}: ${r.state}`;
    const label = svg("text", { x: cx, y: cy });
    label.textContent = r.rank;
    parts.push(node, label);
  });
  $("ring").replaceChildren(...parts);
}

function showHeat(ranks) {
  waits.push(ranks.map((r) => (r.is_bad ? -1 : isGone(r) ? -2 : (r.wait ?? 0))));
  if (waits.length > COLUMNS) waits.shift();
  const canvas = $("heat");
  const height = 14;
  canvas.width = COLUMNS;
  canvas.height = Math.max(1, ranks.length) * height;
  const pen = canvas.getContext("2d");
  waits.forEach((column, x) =>
    column.forEach((wait, i) => {
      const color = `hsl(${140 - 110 * wait} 70% 45%)`;
      pen.fillStyle = wait === -1 ? "#d33" : wait === -2 ? "#888" : color;
      pen.fillRect(x, i * height, 1, height - 2);
    }),
  );
}

function thin(points) {
  [...points.keys()].forEach((step, i) => i % 2 && points.delete(step));
}

function addMetrics(lines) {
  const touched = new Set();
  for (const { rank, name, points } of lines) {
    if (!charts.has(name)) charts.set(name, { plot: null, series: new Map() });
    const { series } = charts.get(name);
    if (!series.has(rank)) series.set(rank, { points: new Map() });
    const line = series.get(rank);
    for (const [step, value] of points) {
      line.points.set(step, value);
      if (line.points.size > MAX_POINTS) thin(line.points);
    }
    touched.add(name);
  }
  touched.forEach(drawChart);
}

function drawChart(name) {
  const chart = charts.get(name);
  const ranks = [...chart.series.keys()].sort((a, b) => a - b);
  const lines = ranks.map((r) => chart.series.get(r).points);
  const steps = [...new Set(lines.flatMap((points) => [...points.keys()]))];
  steps.sort((a, b) => a - b);
  const data = [steps, ...lines.map((points) => steps.map((s) => points.get(s) ?? null))];
  if (chart.plot && chart.ranks === ranks.length) return chart.plot.setData(data);
  if (chart.plot) chart.plot.destroy();
  else if (charts.size === 1) $("charts").replaceChildren();
  chart.ranks = ranks.length;
  const styles = ranks.map((r, i) => ({
    label: `rank ${r}`, stroke: COLORS[i % COLORS.length], width: 1.5, spanGaps: true,
  }));
  const options = {
    title: name, width: Math.max(320, $("charts").clientWidth - 10), height: 220,
    scales: { x: { time: false } }, series: [{ label: "step" }, ...styles],
    axes: [{ stroke: "#888" }, { stroke: "#888" }],
  };
  chart.plot = new uPlot(options, data, $("charts"));
}

function showEnd(end) {
  $("end").textContent = end ? `${end.what} - exit ${end.code}` : "";
  $("end").className = end && end.code ? "bad" : "";
}

function show(state) {
  $("title").textContent = state.title;
  showRanks(state.ranks);
  showRing(state.ranks);
  showHeat(state.ranks);
  addMetrics(state.metrics);
  showEnd(state.end);
  $("late").textContent = state.late;
  $("events").textContent = state.events.join("\n") + (state.end ? `\n${state.end.report}` : "");
  if (state.ranks.length !== nRanks) {
    nRanks = state.ranks.length;
    const choices = state.ranks.map((r) => new Option(r.rank, r.rank));
    $("which").replaceChildren(...choices);
  }
}

async function showLog() {
  const rank = $("which").value;
  if (rank !== "") {
    const answer = await ask(`/log/${rank}`);
    const box = $("log");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 20;
    if (answer.ok) box.textContent = await answer.text();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
}

async function give(command) {
  const stops = command[0] === "stop";
  if (stops && !confirm("Stop the job after its present step?")) return;
  $("outcome").textContent = `${command.join(" ")} ...`;
  try {
    const answer = await ask("/command", { method: "POST", body: JSON.stringify({ command }) });
    $("outcome").textContent = `${command.join(" ")}: ${(await answer.text()).trim()}`;
    $("outcome").className = answer.ok ? "" : "bad";
  } catch {
    $("outcome").textContent = "no connection";
  }
}

document.querySelectorAll("[data-command]").forEach((button) => {
  button.addEventListener("click", () => give([button.dataset.command]));
});
$("set").addEventListener("submit", (event) => {
  event.preventDefault();
  give(["set", new FormData($("set")).get("what").trim()]);
});

// The token comes after the "#" of the address, which no browser sends. It is kept for this tab and
// this origin, and goes as a header to where the page comes from; no cookie takes it elsewhere.
function token() {
  const given = location.hash.slice(1);
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token") ?? "";
}

function ask(path, options = {}) {
  return fetch(path, { ...options, headers: { authorization: `Bearer ${TOKEN}` } });
}

function showLost(text) {
  $("lost").textContent = text;
  $("lost").hidden = !text;
}

// Shows each line of /stream until it ends. Returns whether another try makes sense.
async function readStream() {
  const answer = await ask("/stream");
  if (!answer.ok) {
    showLost(`no access: ${(await answer.text()).trim()}`);
    return false;
  }
  charts.forEach((chart) => chart.plot?.destroy());
  charts.clear();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return true;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      showLost("");
      show(JSON.parse(line));
      document.body.dataset.ready = "1";
    }
  }
}

async function keepReading() {
  while (await readStream().catch(() => true)) {
    showLost("no connection");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const TOKEN = token();
window.onhashchange = () => location.reload(); // another address with a token
keepReading();
$("which").onchange = () => showLog().catch(() => {});
setInterval(() => showLog().catch(() => {}), 1000);
