"use strict";
// What the governor said, and what of it is looked at.

const COLUMNS = ["used", "lent", "guarantee", "limit", "memory", "memory_limit", "refused"];

let state = null;     // the last answer of api/v1/state
let about = null;     // the head of the last answer of api/v1/history
let series = new Map();  // by number: what it is, its first step, and its columns
const numbers = new Map();  // of containers, by key: what each is called in bars, and what its colour is taken from

/** Join what came to what was there; a governor that started anew has begun anew. */
function join(answer) {
  const anew = about === null || about.started !== answer.started;
  const joined = new Map();
  for (const one of answer.series) {
    const before = anew ? undefined : series.get(one.series);
    // After a long silence there is a gap between the two.
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

/** Give each container the lowest number that is free; it keeps the number for as long as it is on the page. */
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

/** A GPU's containers, of all the time that is known; those that have ended come last. */
function seriesOf(gpu) {
  return [...series.values()].filter((one) => one.gpu === gpu.uuid)
    .sort((one, other) => one.ended - other.ended || numbers.get(one.key) - numbers.get(other.key));
}

/** The steps that are looked at: those of the last `seconds`, or the one that is `back` steps before now. */
function spanOf(seconds, back) {
  if (back < 0) return {first: about.last + back + 1, last: about.last + back + 1, moment: true};
  return {first: Math.max(0, about.last - seconds / about.step_s + 1), last: about.last, moment: false};
}

/** What a container had in the steps that are looked at; null if it was not there. */
function look(one, span) {
  const from = Math.max(span.first, one.first), to = Math.min(span.last, one.first + one.used.length - 1);
  if (from > to) return null;
  const part = (name) => one[name].slice(from - one.first, to - one.first + 1);
  const steps = to - from + 1;
  return {
    steps, used: sum(part("used")) / steps, lent: sum(part("lent")) / steps,
    part: steps / (span.last - span.first + 1),
    guarantee: part("guarantee").at(-1), limit: part("limit").at(-1),
    memory: part("memory").at(-1), memory_limit: part("memory_limit").at(-1), refused: sum(part("refused")),
    stays: to === span.last && (span.moment || !one.ended),
  };
}

/** The containers of a GPU that were there in the steps that are looked at. */
function rowsOf(gpu, span) {
  return seriesOf(gpu).map((one) => ({one, had: look(one, span), number: numbers.get(one.key)}))
    .filter((row) => row.had !== null);
}
