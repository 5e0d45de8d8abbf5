// Marks and axes of all plots, and redrawing at a new width.

const verdictOf = (one) => one.verdict || "none";

const glyph = (one) =>
  s("svg", { class: "glyph", "aria-hidden": "true" }, s("use", { href: `#v-${verdictOf(one)}`, x: 8, y: 8 }));

const logScale = (low, high, from, to) => {
  const span = Math.log(high / low) || 1;
  return (value) => from + (Math.log(value / low) / span) * (to - from);
};
const linScale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

// The span of a logarithmic axis: all `values`, at least a factor of `least`, plus margins.
const roomy = (values, least = 1.01, power = 0.12) => {
  const low = Math.min(...values), high = Math.max(...values), room = Math.max(high / low, least) ** power;
  return [low / room, high * room];
};

const decades = (low, high) => {
  const ticks = [];
  for (let p = Math.ceil(Math.log10(low) - 1e-9); 10 ** p <= high * (1 + 1e-9); p++) ticks.push(10 ** p);
  return ticks;
};

// About `count` round steps.
const steps = (low, high, count = 5) => {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-6; n++) ticks.push(n * step);
  return ticks;
};

// Ticks of a logarithmic axis of ratios, from one percent to a factor of a thousand.
const ratioTicks = (low, high, count = 6) => {
  if (high / low < 4) return steps(low, high, count);
  const ticks = [];
  for (const d of decades(low / 10, high)) for (const m of [1, 2, 5]) ticks.push(m * d);
  const seen = ticks.filter((t) => t >= low && t <= high);
  return seen.length > count + 2 ? seen.filter((t) => /^1e/.test(t.toExponential(0))) : seen;
};

const line = (x1, y1, x2, y2, kind) => s("line", { x1, y1, x2, y2, class: kind });
const label = (x, y, words, anchor = "middle", kind) =>
  s("text", { x, y, "text-anchor": anchor, class: kind }, words);

// Draw into `host` at its current width, and again when the width changes.
function plot(host, height, draw, words) {
  const svg = s("svg", { role: "img", "aria-label": words, class: "labels" });
  host.append(svg);
  let before = 0;
  const redraw = (force) => {
    const width = Math.floor(host.clientWidth);
    if (!width || (width === before && force !== true)) return;
    before = width;
    const tall = typeof height === "function" ? height(width) : height;
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    svg.setAttribute("height", tall);
    svg.replaceChildren(...[draw(width, tall)].flat(4).filter(Boolean));
  };
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(host);
  redraw();
  return { svg, redraw: () => redraw(true) };
}

const tip = byId("tip");
function showTip(x, y, children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - box.height - 8))}px`;
}
const hideTip = () => { tip.hidden = true; };
