// Elements and formatted numbers. Text is always set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

const h = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Four digits without trailing zeros: 1.25, 0.0125, 1250.
const digits = (value, count = 4) => String(Number(value.toPrecision(count)));
// A value in the largest unit in which it is at least 1, by default with three digits.
const scaled = (value, units, count) => {
  const [unit, scale] = units.find(([, least]) => Math.abs(value) >= least) || units[units.length - 1];
  return `${digits(value / scale, count || (Math.abs(value / scale) >= 1000 ? 4 : 3))} ${unit}`;
};
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const BYTES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const SI = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];

const duration = (seconds) => scaled(seconds, TIMES, 4);
const bytes = (count) => scaled(count, BYTES);
const JOULES = [["J", 1], ["mJ", 1e-3], ["µJ", 1e-6], ["nJ", 1e-9]];
const joules = (value) => scaled(value, JOULES);
const rate = (value, unit) => scaled(value, SI) + unit;
const ratio = (value) => `${value < 9.9995 ? value.toFixed(3) : value.toFixed(1)}×`;
const percent = (share, places = 0) => `${(100 * share).toFixed(places)} %`;
const signed = (share, places = 2) => `${share > 0 ? "+" : ""}${(100 * share).toFixed(places)} %`;
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
const sizeWords = (one) => [...(one.gpus > 1 ? [`${one.gpus} GPUs`] : []), ...Object.entries(one.size || {}).map(([k, v]) => `${k} ${v}`)].join(" · ");
const stem = (one) => one.page.split("/").pop().replace(/(_test)?\.py$/, "");
const brief = (words, most) => (words.length > most ? `${words.slice(0, Math.max(1, most - 1))}…` : words);
const day = (stamp) => (stamp || "").slice(0, 10);
