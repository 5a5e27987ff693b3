"use strict";
// Formats numbers and names. All values from the governor are inserted as text, because container names are not
// trusted. The page does not use innerHTML, and its Content-Security-Policy forbids it.

const GIB = 2 ** 30, MIB = 2 ** 20;

/** Escape line breaks and invisible characters, such as marks that change the direction, in untrusted text. */
function plain(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu,
    (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
}

function short(text, most) {
  const signs = [...text];
  const half = (most - 1) >> 1;
  return signs.length <= most ? text : `${signs.slice(0, half).join("")}\u2026${signs.slice(-half).join("")}`;
}

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Return a node for an untrusted name, which may be written from right to left and have any length. */
function foreign(text, most = 96) {
  const whole = plain(text);
  const node = make("bdi", {}, short(whole, most));
  if ([...whole].length > most) node.title = whole;
  return node;
}

const percent = (value) => `${value.toFixed(1)}\u00a0%`;
const bytes = (value) => value >= GIB ? `${(value / GIB).toFixed(1)}\u00a0GiB` : `${Math.round(value / MIB)}\u00a0MiB`;
const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;
const two = (number) => String(number).padStart(2, "0");
const sum = (values) => values.reduce((all, one) => all + one, 0);
const clamp = (value, most = 100) => Math.min(most, Math.max(0, value));

/** Return the two parts of the used time as text; both are in percent of the GPU's time. */
const ownAndLent = (used, lent, whose) => `(${percent(used - lent)} of ${whose} own, ${percent(lent)} lent)`;

/** Return an upper bound of the waits as text; -1 stands for waits longer than the governor's last bound, 1 s. */
const bound = (ms) => ms < 0 ? "longer than 1\u00a0s" : `at most ${ms}\u00a0ms`;

function clock(seconds) {
  const at = new Date(seconds * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** Return a time of day, with the date if it is not today. */
function day(seconds) {
  const at = new Date(seconds * 1000);
  const date = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return at.toDateString() === new Date().toDateString() ? clock(seconds) : `${date} ${clock(seconds)}`;
}

function lasted(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
}
