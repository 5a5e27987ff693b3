"use strict";
// Holds the governor's answers, and selects the part that the page shows.

const COLUMNS = ["used", "lent", "guarantee", "limit", "memory", "parked", "memory_limit", "refused"];

let state = null;     // the last answer of api/v1/state
let about = null;     // the last answer of api/v1/history
let series = new Map();  // by series number: a container on a GPU, its first step, and its columns
const numbers = new Map();  // by a container's key: its label in bars, which also determines its colour

/** Append an answer to the known series; if the governor was restarted, replace them. */
function join(answer) {
  const anew = about === null || about.started !== answer.started;
  const joined = new Map();
  for (const one of answer.series) {
    const before = anew ? undefined : series.get(one.series);
    // After a long pause there may be a gap before the new steps; in that case the old values are dropped.
    if (before !== undefined && (!one.used.length || one.first === before.first + before.used.length)) {
      const drop = Math.max(0, before.used.length + one.used.length - answer.steps);
      for (const name of COLUMNS) one[name] = before[name].concat(one[name]).slice(drop);
      one.first = before.first + drop;
    }
    joined.set(one.series, one);
  }
  series = joined;
  about = answer;
  numberContainers();
}

/** Give each container the lowest free number; it keeps the number as long as it is on the page. */
function numberContainers() {
  const keys = new Set([...series.values()].map((one) => one.key));
  for (const key of numbers.keys()) if (!keys.has(key)) numbers.delete(key);
  const taken = new Set(numbers.values());
  let free = 1;
  for (const key of keys) {
    if (numbers.has(key)) continue;
    while (taken.has(free)) free++;
    numbers.set(key, free);
    taken.add(free);
  }
}

const firstShown = () => about.last - about.steps + 1;
const timeOf = (step) => about.last_ended - (about.last - step) * about.step_s;

/** Return all known containers of a GPU; those that have ended come last. */
function seriesOf(gpu) {
  return [...series.values()].filter((one) => one.gpu === gpu.uuid)
    .sort((one, other) => one.ended - other.ended || numbers.get(one.key) - numbers.get(other.key));
}

/** Return the selected steps: those of the last `seconds` or, if `back` is negative, one step (-1 is the last). */
function spanOf(seconds, back) {
  if (back < 0) return {first: about.last + back + 1, last: about.last + back + 1, moment: true};
  return {first: Math.max(0, about.last - seconds / about.step_s + 1), last: about.last, moment: false};
}

/** Return a container's values in the selected steps; null if it did not run then. */
function valuesIn(one, span) {
  const from = Math.max(span.first, one.first), to = Math.min(span.last, one.first + one.used.length - 1);
  if (from > to) return null;
  const part = (name) => one[name].slice(from - one.first, to - one.first + 1);
  const steps = to - from + 1;
  return {
    steps, used: sum(part("used")) / steps, lent: sum(part("lent")) / steps,
    part: steps / (span.last - span.first + 1),
    guarantee: part("guarantee").at(-1), limit: part("limit").at(-1),
    memory: part("memory").at(-1), parked: part("parked").at(-1), memory_limit: part("memory_limit").at(-1),
    refused: sum(part("refused")),
    stays: to === span.last && (span.moment || !one.ended),
  };
}

/** Return the containers of a GPU that ran in the selected steps. */
function rowsOf(gpu, span) {
  return seriesOf(gpu).map((one) => ({one, had: valuesIn(one, span), number: numbers.get(one.key)}))
    .filter((row) => row.had !== null);
}
