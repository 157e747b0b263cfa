// Shows what the server sends. All text of jobs is set as textContent, never as HTML.
"use strict";

const RETRY_MS = 1000;
const DRAW_MS = 1000;
const LIST_MS = 2000;
const MAX_LINES = 5000; // of the log
const ASKED = new URLSearchParams(location.search);
const GOOD = { training: "good", completed: "good", failed: "bad", lost: "bad", paused: "wait", stopped: "wait", finishing: "spare", init: "spare", importing: "spare", starting: "spare", running: "good" };
const COLUMNS = [ // key, title, width
  ["rank", "rank", 5], ["as_rank", "as rank", 6], ["kind", "role", 6], ["host", "host", 7], ["pid", "pid", 6], ["state", "state", 11],
  ["step", "step", 6], ["operation", "operation", 15], ["wait", "wait", 5], ["memory_nbytes", "memory", 7],
  ["gpu_nbytes", "GPU", 5], ["values", "values", 20], ["stacks", "", 6],
];
const lines = []; // [rank, text] of the log
let run = ASKED.get("run") ?? "";
let sort = ["rank", false];
let before = null; // the last state
let otherName = "";
let logCursor = "";
const OWN_NAME = () => before?.title ?? "";
const OTHER_NAME = () => otherName;

// --- the head ------------------------------------------------------------------------------------
function showBadge(word, text) {
  $("state").textContent = word;
  $("state").className = `badge ${GOOD[word] ?? ""}`;
  $("text").textContent = text;
}

function showHead({ title, job, late }) {
  $("title").textContent = title;
  document.title = `${title} - ringcomm`;
  showBadge(job.state, job.text);
  const facts = {
    host: job.host, started: job.started, elapsed: durationText(job.elapsed_s),
    step: job.of ? `${job.of[0]} of ${job.of[1]}` : job.step, "steps per s": numberText(job.steps_per_s),
    "samples per s": numberText(job.samples_per_s), "time left": durationText(job.left_s),
    commit: job.commit?.slice(0, 10),
  };
  const shown = Object.entries(facts).filter(([, value]) => value !== "" && value != null);
  if ($("facts").childElementCount !== shown.length) $("facts").replaceChildren(...shown.map(() => {
    const pair = element("div");
    pair.append(element("dt"), element("dd"));
    return pair;
  }));
  shown.forEach(([name, value], i) => {
    const [key, text] = $("facts").children[i].children;
    if (key.textContent !== name) key.textContent = name;
    if (text.textContent !== String(value)) text.textContent = value;
  });
  $("command").textContent = job.command ?? "";
  $("done").hidden = !job.of;
  if (job.of) $("done").value = Math.min(1, job.of[0] / job.of[1]);
  if ($("late").textContent !== late) $("late").textContent = late;
  document.querySelectorAll("#control button, #control input").forEach((each) => (each.disabled = !["training", "paused"].includes(job.state)));
  if (!$("parameters").childElementCount) showParameters(job);
}

function showParameters({ parameters = [], versions = [], commit, folder }) {
  const all = [...parameters, ...(commit ? [["commit", commit]] : []), ...(folder ? [["folder", folder]] : []), ...versions];
  $("about").hidden = !all.length;
  $("about").open = parameters.length > 0;
  $("parameters").replaceChildren(...all.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
}

function showEvents(events) {
  const minor = $("minor").checked;
  const shown = events.filter(({ kind }) => minor || !["note", "warning"].includes(kind));
  const box = $("events");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  const rows = shown.map((event) => {
    const [letter, shadeName] = KINDS[event.kind] ?? KINDS.note;
    const row = element("li", null, { "data-kind": event.kind });
    const who = event.ranks.length ? `rank ${event.ranks.join(", ")}` : "";
    const told = event.text.startsWith(who) ? "" : who;
    const where = [event.step == null ? "" : `step ${event.step}`, told].filter(Boolean).join(", ");
    row.append(
      element("i", letter, { class: shadeName, title: event.kind }), element("time", clockText(event.time)),
      element("span", `${event.kind}${where ? `, ${where}` : ""}`, { class: "of" }), element("span", event.text),
    );
    return row;
  });
  if (rows.length) box.replaceChildren(...rows);
  if (atEnd) box.scrollTop = box.scrollHeight;
  marks = events.filter((event) => event.step != null && MARKED.includes(event.kind));
  charts.forEach((chart) => (chart.isNew = true));
}

// --- ranks ---------------------------------------------------------------------------------------
// Of rc.log(); of a server, how many slices, shards and requests it has.
function valuesOf(rank) {
  return Object.entries(rank.scalars ?? {}).slice(0, 4).map(([name, value]) => `${name}=${numberText(value)}`).join(" ");
}

function cellTexts(r) {
  const operation = r.operation ? `${r.operation} for ${r.operation_s.toFixed(1)} s` : "";
  const wait = r.wait == null ? "" : `${Math.round(100 * r.wait)} %`;
  const [memory, gpu] = [r.memory_nbytes, r.gpu_nbytes].map(amountText);
  return [r.rank, r.as_rank, r.kind, r.host, r.pid, r.state, r.step, operation, wait, memory, gpu, valuesOf(r)];
}

function newRow() {
  const row = element("tr");
  for (let i = 1; i < COLUMNS.length; i += 1) row.append(element("td"));
  const button = element("button", "stacks", { type: "button" });
  button.addEventListener("click", () => showStacks(row.dataset.rank));
  row.appendChild(element("td")).append(button);
  return row;
}

function showRanks(ranks) {
  const body = $("ranks");
  while (body.rows.length > ranks.length) body.lastChild.remove();
  while (body.rows.length < ranks.length) body.append(newRow());
  $("table").classList.toggle("moved", ranks.some(hasMoved));
  const keyed = ranks.map((rank) => ({ ...rank, values: valuesOf(rank) }));
  inOrder(keyed, ...sort).forEach((rank, i) => {
    const row = body.rows[i];
    row.className = rank.is_bad ? "bad" : "";
    row.dataset.rank = rank.rank;
    cellTexts(rank).forEach((text, k) => {
      const now = String(text ?? "");
      if (row.cells[k].textContent !== now) row.cells[k].textContent = now;
    });
    row.cells[COLUMNS.length - 1].firstChild.disabled = isGone(rank) || !hasPage(rank);
  });
}

function showTableHead() {
  const total = COLUMNS.reduce((sum, [, , width]) => sum + width, 0);
  $("table").tHead.rows[0].replaceChildren(...COLUMNS.map(([key, title, width]) => {
    const head = element("th");
    head.style.width = `${(100 * width) / total}%`;
    if (key === sort[0]) head.setAttribute("aria-sort", sort[1] ? "descending" : "ascending");
    if (!title) return head;
    const button = element("button", title, { type: "button" });
    button.addEventListener("click", () => {
      sort = [key, key === sort[0] && !sort[1]];
      showTableHead();
      if (before) showRanks(before.ranks);
    });
    head.append(button);
    return head;
  }));
}

async function showStacks(rank) {
  $("whose").textContent = `Stacks of rank ${rank}`;
  $("frames").textContent = "...";
  $("stacks").showModal();
  try {
    $("frames").textContent = await (await ask(`/stacks/${rank}`, {}, { method: "POST" })).text();
  } catch {
    $("frames").textContent = "no connection";
  }
}

function noteUse(state) {
  const seconds = before ? state.time - before.time : 0;
  if (columns.length && state.time - columns.at(-1).time < 0.9) return false;
  if (!noted && columns.length) {
    noted = state; // rates need two looks; the files of the run have what was before
    return false;
  }
  const old = new Map((noted?.ranks ?? []).map((rank) => [rank.rank, rank]));
  const since = noted ? state.time - noted.time : seconds;
  const ranks = new Map(state.ranks.map((rank) => {
    const use = usage(rank, old.get(rank.rank), since);
    return [rank.rank, { ...use, wait: rank.is_bad ? -1 : isGone(rank) || !hasPage(rank) ? -2 : (use.wait ?? 0) }];
  }));
  noted = state;
  addColumn({ time: state.time, ranks });
  return true;
}
let noted = null;

function show(state) {
  showHead(state);
  showRanks(state.ranks);
  showRing(state.ranks);
  addMetrics(state.metrics);
  if (state.events) showEvents((shownEvents = state.events));
  const isFirst = !before;
  if (state.history && !columns.length) state.history.forEach((past) => addColumn(pastColumn(past)));
  if (state.job.is_live) noteUse(state);
  const ranks = state.ranks.map((rank) => rank.rank);
  if (ranks.length + 1 !== $("which").options.length) {
    const chosen = $("which").value;
    $("which").replaceChildren(new Option("all ranks", ""), ...ranks.map((rank) => new Option(`rank ${rank}`, rank)));
    $("which").value = chosen;
  }
  before = state;
  if (isFirst) drawCharts();
}
let shownEvents = [];

// --- the log -------------------------------------------------------------------------------------
function showLines() {
  const [which, test] = [$("which").value, lineTest($("find").value)];
  const shown = lines.filter(([rank, text]) => (which === "" || String(rank) === which) && test(text));
  const parts = shown.flatMap(([rank, text]) => [which === "" ? element("b", `[${rank}] `) : "", `${text}\n`]);
  const box = $("log");
  box.replaceChildren(...parts);
  $("found").textContent = $("find").value ? `${shown.length} of ${lines.length} lines` : "";
  if ($("follow").checked) box.scrollTop = box.scrollHeight;
}

async function readLog() {
  const answer = await ask("/logs", { after: logCursor });
  if (!answer.ok) return;
  const news = await answer.json();
  logCursor = news.cursor;
  if (!news.lines.length) return;
  lines.push(...news.lines);
  lines.splice(0, lines.length - MAX_LINES);
  showLines();
}

async function download() {
  const blob = await (await ask("/logs/all")).blob();
  const link = element("a", "", { href: URL.createObjectURL(blob), download: `${$("title").textContent}.log` });
  link.click();
  URL.revokeObjectURL(link.href);
}

// --- commands ------------------------------------------------------------------------------------
async function give(command) {
  const stops = command[0] === "stop";
  if (stops && !confirm("Stop the job after its present step?")) return;
  $("outcome").textContent = `${command.join(" ")} ...`;
  try {
    const answer = await ask("/command", {}, { method: "POST", body: JSON.stringify({ command }) });
    $("outcome").textContent = `${command.join(" ")}: ${(await answer.text()).trim()}`;
    $("outcome").className = answer.ok ? "good" : "bad";
  } catch {
    $("outcome").textContent = "no connection";
  }
}

// --- the list of runs ----------------------------------------------------------------------------
function linkOf(key, name) {
  return element("a", name, { href: `/?${new URLSearchParams({ run: key })}` });
}

function showList({ runs, folder }) {
  $("where").textContent = `in ${folder}, and live jobs`;
  $("none").textContent = runs.length ? "" : `no run yet: start one with ringcomm run -np 2 train.py. Looks into ${folder} every two seconds`;
  const chosen = new Set(chosenRuns());
  $("runs").tBodies[0].replaceChildren(...runs.map((each) => {
    const row = element("tr", null, { "data-key": each.key });
    const box = element("input", null, { type: "checkbox", "aria-label": `compare ${each.name}` });
    box.checked = chosen.has(each.key);
    const texts = [each.command, each.ranks, each.started, durationText(each.seconds), [each.how, each.where].filter(Boolean).join(", ")];
    const badge = element("span", each.state, { class: `badge ${GOOD[each.state] ?? ""}` });
    [box, linkOf(each.key, each.name), badge, ...texts].forEach((part) => row.appendChild(element("td")).append(part ?? ""));
    return row;
  }));
}

function chosenRuns() {
  const rows = [...$("runs").tBodies[0].rows];
  return rows.filter((row) => row.querySelector("input").checked).map((row) => row.dataset.key);
}

async function keepListing() {
  $("list").hidden = false;
  $("run").hidden = true;
  $("all").hidden = true;
  $("title").textContent = "";
  for (;;) {
    try {
      const answer = await ask("/runs");
      if (!answer.ok) return showLost(`no access: ${(await answer.text()).trim()}`);
      const listing = await answer.json();
      showLost("");
      const n = listing.runs.filter((each) => each.is_live).length;
      showBadge(n ? `${n} live` : "nothing live", "");
      if (n) $("state").className = "badge good";
      showList(listing);
      document.body.dataset.ready = "list";
    } catch {
      showLost("no connection");
    }
    await new Promise((resolve) => setTimeout(resolve, LIST_MS));
  }
}

// --- the connection ------------------------------------------------------------------------------
// The token comes after the "#" of the address, which no browser sends. It is kept for this tab and
// this origin, and goes as a header to where the page comes from; no cookie takes it elsewhere.
function token() {
  const given = location.hash.slice(1);
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("token") ?? "";
}

function ask(path, query = {}, request = {}) {
  const words = new URLSearchParams({ ...(run && { run }), ...query });
  return fetch(`${path}?${words}`, { ...request, headers: { authorization: `Bearer ${TOKEN}` } });
}

function showLost(text) {
  $("lost").textContent = text;
  $("lost").hidden = !text;
}

// Shows each line of a stream until it ends. Returns whether another try makes sense.
async function readStream(key, take, begin) {
  const answer = await ask("/stream", { ...(key && { run: key }) });
  if (!answer.ok) {
    showLost(answer.status === 401 ? `no access: ${(await answer.text()).trim()}` : (await answer.text()).trim());
    return false;
  }
  begin();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return true;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    for (const line of whole) take(JSON.parse(line));
  }
}

async function keepReading(key, take, begin) {
  while (await readStream(key, take, begin).catch(() => true)) {
    showLost("no connection");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function forgetCurves() {
  charts.forEach((chart) => (chart.series = new Map()));
}

function keepShowing() {
  $("run").hidden = false;
  showTableHead();
  keepReading(run, (state) => {
    showLost("");
    show(state);
    document.body.dataset.ready = "1";
  }, forgetCurves);
  const other = ASKED.get("with");
  if (other) {
    keepReading(other, (state) => {
      otherName = state.title;
      if (!$("with").textContent) charts.forEach((chart) => (chart.isNew = true));
      $("with").textContent = `compared with ${otherName} (dashed)`;
      addMetrics(state.metrics, true);
    }, () => charts.forEach((chart) => (chart.other = new Map())));
  }
  setInterval(() => {
    if (document.hidden) return;
    drawCharts();
    if (before?.job.is_live || !uses.size) {
      showHeat();
      showUses();
    }
  }, DRAW_MS);
  const keepLog = () => readLog().catch(() => {}).finally(() => setTimeout(keepLog, 1000));
  keepLog();
}

async function begin() {
  if (!run && !ASKED.has("list")) {
    try {
      const answer = await ask("/runs");
      if (!answer.ok) return showLost(`no access: ${(await answer.text()).trim()}`);
      run = (await answer.json()).shown;
    } catch {
      showLost("no connection");
      return setTimeout(begin, RETRY_MS);
    }
  }
  return run ? keepShowing() : keepListing();
}

document.querySelectorAll("[data-command]").forEach((button) => {
  button.addEventListener("click", () => give([button.dataset.command]));
});
$("set").addEventListener("submit", (event) => {
  event.preventDefault();
  give(["set", new FormData($("set")).get("what").trim()]);
});
$("which").onchange = $("find").oninput = $("follow").onchange = showLines;
$("log").onwheel = (event) => { if (event.deltaY < 0) $("follow").checked = false; };
$("download").onclick = () => download().catch(() => {});
$("minor").onchange = () => showEvents(shownEvents);
$("span").onchange = showHeat;
$("smooth").oninput = () => ((options.smooth = Number($("smooth").value)), drawCharts(true));
$("log-scale").onchange = () => ((options.log = $("log-scale").checked), drawCharts(true));
$("singles").onchange = () => ((options.singles = $("singles").checked), drawCharts(true));
$("runs").onchange = () => ($("compare").disabled = chosenRuns().length !== 2);
$("compare").onclick = () => {
  const [first, second] = chosenRuns();
  location.search = new URLSearchParams({ run: first, with: second });
};
let width = innerWidth;
window.onresize = () => innerWidth !== width && ((width = innerWidth), redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
const TOKEN = token();
window.onhashchange = () => location.reload(); // another address with a token
begin();
