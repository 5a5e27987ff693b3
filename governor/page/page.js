"use strict";
// Renders the page (a section for each GPU, and a table of refusals and violations), and polls the governor.

const WAIT_MS = 15000;
const HEADS = ["Container", "GPU time", "GPU time, last 15 minutes", "Memory", "Memory, last 15 minutes"];
const MOVES = {
  leaving: "memory is leaving the GPU", parked: "memory is parked", coming: "memory is coming to the GPU", resident: "",
};

let answered = null;  // time of the governor's last answer
let sections = new Map();  // by GPU

const byId = (id) => document.getElementById(id);

/** Return the selected steps: several, which are averaged, or one. */
function chosen() {
  const seconds = Number(document.querySelector("input[name=window]:checked").value);
  return spanOf(seconds, Number(byId("moment").value));
}

// Rows and sections

function cell(tag, role, ...children) { return make(tag, {role}, ...children); }

function trouble(text) { return make("p", {}, make("span", {class: "bad"}, "\u26a0"), ` ${text}`); }

/** Yield the problems of a container on this GPU. */
function* notesOf({one, had}) {
  if (had.refused) yield `${count(had.refused, "allocation")} refused: the quota is ${bytes(had.memory_limit)}`;
  for (const violation of state.violations) {
    if (violation.id !== one.id || violation.gpu !== one.gpu) continue;
    // An id may be reused by a later container.
    if (violation.ended !== null && violation.began < timeOf(one.first) - about.step_s) continue;
    const when = violation.ended === null ? `since ${clock(violation.began)}` : `${clock(violation.began)}, over`;
    yield `violation: ${violation.kind}, ${when}`;
  }
}

function renderHead(row, live) {
  const {one, number} = row;
  const who = make("div", {class: "who"}, tone(make("span", {class: "number"}, String(number)), number));
  who.append(foreign(one.name || one.id, 64));
  if (one.name) who.append(document.createElement("br"), make("small", {}, foreign(one.id, 32)));
  const head = cell("th", "rowheader", who);
  head.setAttribute("scope", "row");
  if (one.ended) head.append(make("p", {class: "quiet"}, `ended ${clock(timeOf(one.first + one.used.length - 1))}`));
  if (live) head.append(make("p", {class: "quiet"}, count(live.processes, "process", "processes")));
  if (live && live.frozen) head.append(trouble("frozen because of a violation"));
  if (live && live.suspension) head.append(make("p", {class: "quiet"}, live.suspension));
  const moves = live && live.parking ? MOVES[live.parking.residency] : "";
  if (moves) head.append(make("p", {class: "quiet"}, moves));
  for (const use of live ? live.elsewhere : []) {
    head.append(trouble(`uses GPU ${use.index}, which is not its own: process ${use.pid}, ${bytes(use.memory)}`));
  }
  for (const note of notesOf(row)) head.append(trouble(note));
  return head;
}

function renderTime({one, had}, live) {
  const time = cell("td", "cell", timeBar(had));
  time.append(make("p", {}, make("strong", {}, `used ${percent(had.used)}`), ` ${ownAndLent(had.used, had.lent, "its")}`));
  const latency = live && live.class === "latency" ? ", class latency" : "";
  time.append(make("p", {class: "quiet"}, `guaranteed ${had.guarantee}\u00a0%, limit ${had.limit}\u00a0%${latency}`));
  const device = live && live.devices.find((own) => own.gpu === one.gpu);
  if (device && device.grant_wait_ms[0] !== null) {
    const [half, most] = device.grant_wait_ms.map(bound);
    time.append(make("p", {class: "quiet"}, `waited for a grant: median ${half}, 99th percentile ${most}`));
  }
  if (had.part < 1) time.append(make("small", {}, `in the ${lasted(had.steps * about.step_s)} during which it ran`));
  return time;
}

function renderMemory({one, had}, span, live) {
  const limit = had.memory_limit, peak = `peak ${bytes(one.memory_peak)}`;
  const memory = cell("td", "cell");
  if (one.ended && !span.moment) {
    // An ended container has no memory now, so its peak is shown.
    const then = {...had, memory: one.memory_peak, parked: 0};
    memory.append(memoryBar(then), make("p", {}, `${peak} of ${bytes(limit)}`));
    return memory;
  }
  const share = limit ? ` (${Math.round(100 * had.memory / limit)}\u00a0%)` : "";
  memory.append(memoryBar(had), make("p", {}, `${bytes(had.memory)} of ${bytes(limit)}${share} in use`));
  if (had.parked) memory.append(make("p", {}, `${bytes(had.parked)} of it parked in host memory`));
  if (!span.moment) memory.append(make("p", {class: "quiet"}, `${peak} since its start`));
  const {times_parked: times, away_s: waited} = (live && live.parking) || {times_parked: 0, away_s: 0};
  if (times || waited) {
    const cost = `calls waited ${waited.toFixed(1)}\u00a0s for it`;
    memory.append(make("p", {class: "quiet"}, `parked ${count(times, "time")}, ${cost}`));
  }
  return memory;
}

function renderRow(row, span, now, most) {
  const {one} = row;
  // `live` is the container's present state, which is not shown for past moments. An ended container has none: its key
  // may now belong to a successor.
  const live = one.ended || span.moment ? undefined : now.get(one.key);
  const limit = one.memory_limit.at(-1) || 0;
  const cells = [
    renderHead(row, live), renderTime(row, live), cell("td", "cell", timePlot(HEADS[2], [one], most, span)),
    renderMemory(row, span, live), cell("td", "cell", memoryPlot(HEADS[4], [one], limit, span)),
  ];
  return tone(make("tr", {role: "row", class: one.ended ? "ended" : "here"}, ...cells), row.number);
}

function makeSection(gpu) {
  const title = `gpu-${sections.size}`;
  const section = make("section", {class: "gpu", "aria-labelledby": title});
  const rows = make("tbody", {role: "rowgroup"});
  const parts = {
    section, rows, title: make("h2", {id: title}), facts: make("p", {class: "quiet"}), trouble: make("p", {}),
    words: make("p"), bar: make("div"), chart: make("div"),
    memoryWords: make("p"), memoryBar: make("div"), memoryChart: make("div"),
    caption: make("caption"), table: make("table", {role: "table"}), gone: make("p", {class: "quiet"}),
  };
  parts.table.append(parts.caption, make("colgroup", {}, ...HEADS.map(() => make("col"))),
    make("thead", {role: "rowgroup"}, make("tr", {role: "row"},
      ...HEADS.map((text) => make("th", {scope: "col", role: "columnheader"}, text)))), rows);
  section.append(parts.title, parts.facts, parts.trouble, make("div", {class: "sums"},
    make("div", {}, parts.words, parts.bar, parts.chart),
    make("div", {}, parts.memoryWords, parts.memoryBar, parts.memoryChart)), parts.table, parts.gone);
  sections.set(gpu.uuid, parts);
  byId("gpus").append(section);
  return parts;
}

function renderFacts(gpu, parts) {
  parts.title.replaceChildren(`GPU ${gpu.index}: `, foreign(gpu.name));
  const divides = gpu.scheduling === "hardware" ? "its own scheduler divides its time" : "grants divide its time";
  parts.facts.replaceChildren(`${gpu.uuid}, strategy ${gpu.strategy}; ${divides}`);
  if (gpu.not_steered) parts.facts.append(", not its own scheduler: ", foreign(gpu.not_steered, 400));
  const troubles = [["does not answer, and no part of it is granted", gpu.lost], ["accepts no containers at present", gpu.closed]];
  parts.trouble.replaceChildren(...troubles.filter(([, why]) => why !== null)
    .map(([what, why]) => make("span", {class: "bad"}, `\u26a0 It ${what}: `, foreign(why, 400))));
}

function renderGpu(gpu, span, now) {
  const parts = sections.get(gpu.uuid) || makeSection(gpu);
  renderFacts(gpu, parts);
  const rows = rowsOf(gpu, span), all = seriesOf(gpu);
  const used = sum(rows.map((row) => row.had.used * row.had.part));
  const lent = sum(rows.map((row) => row.had.lent * row.had.part));
  const here = rows.filter((row) => row.had.stays);
  const when = span.moment
    ? `in the ${about.step_s} s before ${clock(timeOf(span.last))}`
    : `in the last ${lasted((span.last - span.first + 1) * about.step_s)}`;
  // Only the present values include grants that no container is using yet; the history does not have them.
  const guaranteed = span.moment ? sum(here.map((row) => row.had.guarantee)) : 100 - gpu.compute_left;
  const granted = span.moment ? sum(here.map((row) => row.had.memory_limit)) : gpu.memory_granted;
  const parked = sum(here.map((row) => row.had.parked));
  parts.words.replaceChildren(`GPU time ${when}: `, make("strong", {}, `${percent(used)} used`),
    ` ${ownAndLent(used, lent, "their")}; guaranteed ${guaranteed}\u00a0%`);
  parts.bar.replaceChildren(totalBar(rows));
  parts.memoryWords.replaceChildren(span.moment ? "Memory then: " : "Memory now: ",
    make("strong", {}, `${bytes(sum(here.map((row) => row.had.memory)) - parked)} in use`),
    parked ? `, ${bytes(parked)} parked in host memory` : "", `; granted ${bytes(granted)} of ${bytes(gpu.memory)}`);
  parts.memoryBar.replaceChildren(totalMemoryBar(rows, gpu));
  // The charts show all containers, whichever steps are selected.
  parts.chart.replaceChildren(timePlot("All containers: GPU time, last 15 minutes", all, 100, span));
  parts.memoryChart.replaceChildren(
    memoryPlot("All containers: memory on the GPU, last 15 minutes", all, gpu.memory, span, ON_GPU));
  parts.caption.textContent = `Containers on GPU ${gpu.index}`;
  parts.table.hidden = !rows.length;
  if (!rows.length) parts.words.append(". No container ran in this period.");
  const absent = all.length - rows.length;
  parts.gone.textContent = absent ? `${count(absent, "container")} that ran only at other times: see the charts above.` : "";
  const most = timeScale(rows.map((row) => row.one));
  parts.rows.replaceChildren(...rows.map((row) => renderRow(row, span, now, most)));
}

function renderEvents() {
  const names = new Map([...series.values()].map((one) => [one.id, one.name]));
  const indexes = new Map(state.gpus.map((gpu) => [gpu.uuid, gpu.index]));
  const events = [
    ...state.violations.map((one) => ({
      at: one.began, what: one.ended === null ? "violation, ongoing" : `violation, ${lasted(one.ended - one.began)}`,
      id: one.id, why: `${one.kind}, GPU ${indexes.get(one.gpu) ?? one.gpu}: ${one.reason} (process ${one.pid}); `
        + `policy: ${state.policy}`,
    })),
    ...state.refusals.map((one) => ({
      at: one.at, what: "start refused", id: one.id, why: (one.code === "refused" ? "" : `${one.code}: `) + `${one.message}; ${one.hint}`,
    })),
  ].sort((one, other) => other.at - one.at);
  byId("no-events").hidden = events.length > 0;
  byId("no-events").textContent = "None since the governor started.";
  byId("events").hidden = !events.length;
  byId("events").tBodies[0].replaceChildren(...events.map((event) => {
    const who = cell("td", "cell", foreign(names.get(event.id) || event.id || "not named yet", 64));
    return make("tr", {role: "row"}, cell("td", "cell", day(event.at)), cell("td", "cell", `\u26a0 ${event.what}`), who,
      cell("td", "cell", foreign(event.why, 600)));
  }));
}

function render() {
  if (state === null || about === null) return;
  const span = chosen();
  const slider = byId("moment");
  const at = span.moment ? clock(timeOf(span.last)) : "none";
  slider.setAttribute("aria-valuetext", span.moment ? `at ${at}` : "the average");
  if (byId("chosen").textContent !== at) byId("chosen").textContent = at;
  const known = state.gpus.map((gpu) => gpu.uuid);
  for (const [uuid, parts] of sections) {
    if (!known.includes(uuid)) { parts.section.remove(); sections.delete(uuid); }
  }
  const now = new Map(state.containers.map((one) => [one.key, one]));
  for (const gpu of state.gpus) renderGpu(gpu, span, now);
  renderEvents();
  const left = about.left_out ? ` ${count(about.left_out, "more container")} did not fit into the history.` : "";
  const others = state.left_out.map((gpu) => ` GPU ${gpu.index} is not shared: ${plain(gpu.reason)}.`).join("");
  const {taken, needed, limit} = state.host_memory;
  const host = needed ? ` ${bytes(taken)} of host memory taken for parked memory, ${bytes(limit)} at most.` : "";
  byId("about").textContent = `version ${state.version}, governor since ${day(state.started)}, `
    + `${count(state.containers.length, "container")}.${host}${left}${others}`;
}

// Polling

async function ask(path) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(WAIT_MS)});
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

/** Process an answer; a selected moment stays selected. */
function take(answer) {
  const before = about;
  join(answer);
  const moment = byId("moment");
  if (before !== null && before.started === answer.started && Number(moment.value) < 0) {
    moment.value = Number(moment.value) - (answer.last - before.last);
  }
}

function say(text, isBad) {
  const status = byId("status");
  if (status.textContent === text) return;
  status.textContent = text;
  status.className = isBad ? "bad" : "quiet";
}

let timer = null, asking = false;
const isPaused = () => byId("pause").getAttribute("aria-pressed") === "true";

async function refresh() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  let wait = 5000;
  try {
    const since = about === null ? "" : `?since=${about.last}`;
    const [now, then] = await Promise.all([ask("api/v1/state"), ask(`api/v1/history${since}`)]);
    if (about !== null && since && then.started !== about.started) {
      take(await ask("api/v1/history"));
    } else {
      take(then);
    }
    state = now;
    answered = Date.now() / 1000;
    wait = 1000 * Math.min(about.step_s, Math.max(0.5, about.last_ended + about.step_s - state.now + 0.3));
    render();
    if (!isPaused()) say(`Up to date; refreshed every ${about.step_s} seconds`, false);
  } catch (error) {
    const since = answered === null ? "" : ` since ${clock(answered)}; the page shows the state at that time`;
    say(`\u26a0 No answer from the governor${since} (${plain(error.message)})`, true);
  }
  asking = false;
  if (!document.hidden && !isPaused()) timer = setTimeout(refresh, wait);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused()) refresh(); });
byId("pause").addEventListener("click", () => {
  const stop = !isPaused();
  byId("pause").setAttribute("aria-pressed", stop);
  clearTimeout(timer);
  if (stop) say(answered === null ? "Paused" : `Paused at ${clock(answered)}`, false); else refresh();
});
byId("windows").addEventListener("change", () => { byId("moment").value = "0"; render(); });
byId("moment").addEventListener("input", render);
byId("gpus").addEventListener("click", (event) => {
  const svg = event.target.closest("svg.chart");
  if (svg === null || about === null) return;
  const box = svg.getBoundingClientRect();
  const step = Math.min(about.steps - 1, Math.floor(about.steps * (event.clientX - box.left) / box.width));
  byId("moment").value = step - about.steps;  // -1 is the last step; 0 selects the average
  render();
});
makeHatches(byId("hatches"));
refresh();
