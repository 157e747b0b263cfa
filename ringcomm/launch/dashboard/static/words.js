// Decides what the page shows: texts, curves and places. Nothing here touches the page.
"use strict";

// What the dots of events, and the marks in charts, look like: a letter and a color.
const KINDS = {
  death: ["D", "bad"], recovery: ["R", "good"], spare: ["P", "spare"], failover: ["F", "wait"],
  view: ["V", "spare"], checkpoint: ["C", "gone"], stall: ["S", "wait"], slow: ["L", "wait"],
  command: ["K", "spare"], end: ["E", "gone"], warning: ["W", "wait"], note: ["N", "gone"],
};
const MARKED = ["death", "recovery", "spare", "failover", "view", "checkpoint", "stall", "slow", "command"];

const ALONE = ["death", "recovery"]; // have a mark each
const SHORT = ["checkpoint", "command", "view"]; // have a short line in charts

function durationText(seconds) {
  if (seconds == null || !isFinite(seconds)) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${two(m)} min` : `${m} min ${two(s)} s`;
}

function numberText(value) {
  if (value == null) return "";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function amountText(nbytes) {
  if (!nbytes) return "";
  return nbytes >= 1e9 ? `${(nbytes / 1e9).toFixed(1)} GB` : `${Math.round(nbytes / 1e6)} MB`;
}

function clockText(seconds) {
  return new Date(seconds * 1000).toTimeString().slice(0, 8);
}

// Returns [steps, mean, least, largest] of some ranks' points, each a Map of step -> value.
function band(lines) {
  const steps = [...new Set(lines.flatMap((points) => [...points.keys()]))].sort((a, b) => a - b);
  const [mean, low, high] = [[], [], []];
  for (const step of steps) {
    let [n, sum, least, most] = [0, 0, Infinity, -Infinity];
    for (const points of lines) {
      const value = points.get(step);
      if (value == null) continue;
      n += 1;
      sum += value;
      if (value < least) least = value;
      if (value > most) most = value;
    }
    mean.push(n ? sum / n : null);
    low.push(n ? least : null);
    high.push(n ? most : null);
  }
  return [steps, mean, low, high];
}

// Exponential smoothing as TensorBoard's, without the pull to zero at the begin; gaps stay gaps.
function smoothed(values, weight) {
  if (!weight) return values;
  let [last, n] = [0, 0];
  return values.map((value) => {
    if (value == null) return null;
    n += 1;
    last = last * weight + (1 - weight) * value;
    return last / (1 - weight ** n);
  });
}

// On a logarithmic scale, what is not above zero has no place.
function positive(values) {
  return values.map((value) => (value > 0 ? value : null));
}

// Its process has ended, though not by its own fault.
function isGone(rank) {
  return !rank.lives;
}

// It is through the begin of init(), and tells what it does.
function hasPage(rank) {
  return rank.size != null;
}

function kindOf(rank) {
  if (rank.is_bad) return "bad";
  if (isGone(rank)) return "gone";
  if (rank.kind === "spare") return "spare";
  if (/^(starting|importing|in init)/.test(rank.state) || rank.state.endsWith("paused")) return "idle";
  return rank.operation ? "waits" : "";
}

// Its process has the place of another rank now: the table has a column for that then.
function hasMoved(rank) {
  return rank.as_rank != null && rank.as_rank !== rank.rank;
}

const ROLE_LETTERS = { worker: "", chief: "C", server: "S", evaluator: "E", spare: "P" };

// Returns the places of ranks: one box per host, in it rows of circles.
// {width, height, hosts: [{name, x, y, width, height}], nodes: [{rank, x, y}]}
function topology(ranks, width) {
  const CELL = 40, PAD = 10, HEAD = 20;
  const hosts = new Map();
  for (const rank of ranks) {
    const name = rank.host ?? "";
    if (!hosts.has(name)) hosts.set(name, []);
    hosts.get(name).push(rank);
  }
  const [boxes, nodes] = [[], []];
  let [x, y, tallest, used] = [0, 0, 0, 0];
  const most = Math.max(1, Math.floor((width - 2 * PAD) / CELL));
  for (const [name, members] of hosts) {
    const across = Math.min(most, Math.max(members.length > 8 ? 8 : members.length, 2));
    const down = Math.ceil(members.length / across);
    const [w, h] = [Math.max(across * CELL, 7 * name.length) + 2 * PAD, down * CELL + HEAD + PAD];
    if (x && x + w > width) [x, y, tallest] = [0, y + tallest + PAD, 0];
    boxes.push({ name, x, y, width: w, height: h });
    members.forEach((rank, i) => {
      const [column, row] = [i % across, Math.floor(i / across)];
      nodes.push({ rank, x: x + PAD + (column + 0.5) * CELL, y: y + HEAD + (row + 0.5) * CELL });
    });
    x += w + PAD;
    used = Math.max(used, x - PAD);
    tallest = Math.max(tallest, h);
  }
  return { width: Math.max(used, 1), height: y + tallest, hosts: boxes, nodes };
}

// Returns pairs of nodes that are neighbours in the ring. Jobs with servers have none: there each
// worker speaks with each server. Of many ranks, the lines would only hide the ranks.
function ringLinks(nodes) {
  const place = ({ rank }) => rank.as_rank ?? rank.rank;
  const live = nodes.filter(({ rank }) => ["", "waits"].includes(kindOf(rank))).sort((a, b) => place(a) - place(b));
  if (nodes.some(({ rank }) => rank.kind === "server") || live.length < 2 || live.length > 16) return [];
  const pairs = live.map((node, i) => [node, live[(i + 1) % live.length]]);
  return live.length === 2 ? pairs.slice(0, 1) : pairs;
}

// Returns where in a chart of these steps something is marked that may be beyond what was logged.
function within(step, steps) {
  return steps.length ? Math.min(Math.max(step, steps[0]), steps.at(-1)) : step;
}

// Folds marks of one kind that would stand closer than `least` pixels into one with a count; deaths
// and recoveries stay single, no mark is folded over one of them, and they come first: at the top.
// marks: [{kind, x}], in the order of time. Returns [{kind, x, n}].
function folded(marks, least) {
  const [first, rest, open] = [[], [], new Map()];
  for (const { kind, x } of [...marks].sort((a, b) => a.x - b.x)) {
    const before = open.get(kind);
    if (ALONE.includes(kind)) {
      first.push({ kind, x, n: 1 });
      open.clear();
    } else if (before && x - before.x < least) before.n += 1;
    else {
      open.set(kind, { kind, x, n: 1 });
      rest.push(open.get(kind));
    }
  }
  return [...first, ...rest];
}

// Orders rows for the table: numbers by size, texts by letters, what is empty last.
function inOrder(rows, key, isDown) {
  const of = (row) => row[key];
  const isNone = (value) => value == null || value === "";
  return [...rows].sort((a, b) => {
    const [left, right] = [of(a), of(b)];
    if (isNone(left) || isNone(right)) return isNone(left) - isNone(right) || a.rank - b.rank;
    const order = typeof left === "number" && typeof right === "number"
      ? left - right : String(left).localeCompare(String(right));
    return (isDown ? -order : order) || a.rank - b.rank;
  });
}

// Returns rates of a rank from two of its rows and the seconds between them.
function usage(now, before, seconds) {
  const used = { wait: now.wait, memory: now.memory_nbytes, gpu: now.gpu_nbytes };
  if (!before || !(seconds > 0) || now.cpu_s == null || before.cpu_s == null) return used;
  const cpu = Math.max(0, (now.cpu_s - before.cpu_s) / seconds);
  const nbytes = Math.max(0, (now.ended_nbytes - before.ended_nbytes) / seconds);
  return { ...used, cpu, nbytes };
}

// Returns a column of the history that the run's files have.
function pastColumn({ time, ranks }) {
  const use = ([wait, cpu, memory, nbytes]) => (wait < 0 ? { wait } : { wait, cpu, memory, nbytes });
  return { time, ranks: new Map(Object.entries(ranks).map(([rank, values]) => [Number(rank), use(values)])) };
}

// Returns a test for lines of the log: a regular expression, or a plain text if it is none.
function lineTest(pattern) {
  if (!pattern) return () => true;
  try {
    const found = new RegExp(pattern, "i");
    return (line) => found.test(line);
  } catch {
    return (line) => line.toLowerCase().includes(pattern.toLowerCase());
  }
}
