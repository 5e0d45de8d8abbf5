// Every timed case against the measured peaks: FLOP/s over FLOP/byte, or, for cases without FLOPs,
// bytes/s over bytes per call.

const total = (table) => Object.values(table || {}).reduce((a, b) => a + b, 0);
const WIRES = ["pcie", "nvlink", "latency"];
const MEMORY = ["read", "write", "copy"];
const BYTE_RATES = [...MEMORY, "l2", "h2d", "d2h", "pcie_both", "peer", "busbw", "peer_both"];

function placed(one, i) {
  if (!one.seconds || !one.work) return null;
  const flops = total(one.work.flops), moved = (one.work.read || 0) + (one.work.write || 0);
  const wire = WIRES.includes(one.bound) ? one.work.wire || 0 : 0;
  const before = one.seconds.baseline, after = one.seconds.optimized;
  if (flops && moved && !wire) {
    const kind = Object.entries(one.work.flops).sort((a, b) => b[1] - a[1])[0][0];
    return { i, one, kind, x: flops / moved, y: flops / after, from: flops / before, unit: "FLOP/s" };
  }
  const carried = wire || moved;
  if (!carried) return null;
  const kind = wire ? "wire" : "memory";
  return { i, one, kind, x: carried, y: carried / after, from: carried / before, unit: "B/s" };
}

const points = data.cases.map(placed).filter(Boolean);
const computing = points.filter((p) => p.unit === "FLOP/s");
const moving = points.filter((p) => p.unit === "B/s");

// The rates of the product with the most points. Other products add rates that it lacks.
const rates = (() => {
  const count = {};
  for (const p of points) count[p.one.product] = (count[p.one.product] || 0) + 1;
  const order = Object.keys(data.peaks).sort((a, b) => (count[b] || 0) - (count[a] || 0));
  return Object.assign({}, ...order.reverse().map((product) => data.peaks[product].rates));
})();

const roofsOf = (kinds) => [...new Set(kinds)].filter((k) => rates[k]).map((k) => [k, rates[k]]);
const flat = roofsOf(computing.map((p) => p.kind)).sort((a, b) => b[1] - a[1]);
const limits = moving.map((p) => (p.one.limit || {}).name).filter((name) => BYTE_RATES.includes(name));
const widths = roofsOf([...limits, ...(moving.length && !limits.length ? MEMORY : [])]).sort((a, b) => b[1] - a[1]);

function bounds(list, roofs, rooms) {
  const xs = list.map((p) => p.x), ys = list.flatMap((p) => [p.y, p.from]).concat(roofs.map(([, r]) => r));
  const slope = rates.copy;
  if (slope && roofs === flat) xs.push(...roofs.map(([, r]) => r / slope));
  return { x: [Math.min(...xs) / rooms, Math.max(...xs) * rooms], y: [Math.min(...ys) / 1.6, Math.max(...ys) * 1.9] };
}

function axes(width, height, box, span, unitX, unitY) {
  const x = logScale(...span.x, box.left, width - box.right);
  const y = logScale(...span.y, height - box.bottom, box.top);
  const parts = [];
  const across = decades(...span.x), every = Math.ceil(across.length / Math.max(2, width / 90));
  across.forEach((t, n) => {
    parts.push(line(x(t), box.top, x(t), height - box.bottom, "gridline"));
    if (n % every === 0) parts.push(label(x(t), height - box.bottom + 18, t < 1 ? digits(t) : scaled(t, SI) + unitX));
  });
  for (const t of decades(...span.y)) {
    parts.push(line(box.left, y(t), width - box.right, y(t), "gridline"));
    parts.push(label(box.left - 8, y(t) + 4, scaled(t, SI).trim(), "end"));
  }
  parts.push(label(box.left, box.top - 8, unitY, "start"));
  return { x, y, parts };
}

function roofLines(width, box, span, x, y) {
  const parts = [], slope = rates.copy, right = width - box.right;
  const top = flat.length ? flat[0][1] : 0;
  if (slope && top) {
    const start = Math.max(span.x[0], span.y[0] / slope);
    parts.push(line(x(start), y(start * slope), x(top / slope), y(top), "roof"));
    const at = Math.sqrt(start * (top / slope)), turn = Math.atan2(y(top) - y(start * slope), x(top / slope) - x(start));
    parts.push(s("text", { class: "roofname", "text-anchor": "middle",
      transform: `translate(${x(at)} ${y(at * slope)}) rotate(${(turn * 180) / Math.PI}) translate(0 -7)` },
      `copy ${rate(slope, "B/s")}`));
  }
  for (const [, value] of flat) parts.push(line(slope ? x(value / slope) : box.left, y(value), right, y(value), "roof"));
  return [...parts, ...roofNames(flat, right, y, "FLOP/s")];
}

// Labels above their lines. Lines that are too close share one label above the highest line.
function roofNames(roofs, right, y, unit) {
  const groups = [];
  for (const [kind, value] of roofs) {
    const last = groups[groups.length - 1], text = `${kind} ${rate(value, unit)}`;
    if (last && y(value) - last.y < 18) last.texts.push(text);
    else groups.push({ y: y(value), texts: [text] });
  }
  return groups.map((g) => label(right, g.y - 7, g.texts.join(" · "), "end", "roofname"));
}

function widthLines(width, box, y) {
  const right = width - box.right;
  return [...widths.map(([, value]) => line(box.left, y(value), right, y(value), "roof")), ...roofNames(widths, right, y, "B/s")];
}

function tipOf(p) {
  const one = p.one, limit = one.limit;
  return [
    h("b", null, one.variant), ` ${one.chapter} / ${stem(one)}`, h("br"), h("small", null, sizeWords(one)), h("br"),
    `${rate(p.y, p.unit)} (${one.baseline}: ${rate(p.from, p.unit)})`, h("br"),
    p.unit === "FLOP/s" ? `${digits(p.x, 3)} FLOP/byte, ${p.kind}` : `${bytes(p.x)} per call`,
    limit ? [h("br"), `${percent(limit.share)} of the ${limit.name} limit`] : "",
    h("br"), one.speedup ? `${ratio(one.speedup.value)}, ` : "", one.verdict,
  ].flat();
}

// Points that follow the pointer and the arrow keys: left and right move, Enter opens.
function pointed(figure, list, box, span, height, unitX, unitY, roofs, words) {
  let scale, chosen = null;
  const seen = () => { const set = new Set(shown); return list.filter((p) => set.has(p.i)); };
  const over = s("g");
  const made = plot(figure, height, (width, tall) => {
    const { x, y, parts } = axes(width, tall, box, span, unitX, unitY);
    scale = { x, y };
    const dots = seen().map((p) => s("use", { href: `#v-${verdictOf(p.one)}`, class: `v-${verdictOf(p.one)}`,
      x: x(p.x).toFixed(1), y: y(p.y).toFixed(1) }));
    const stems = seen().map((p) => line(x(p.x).toFixed(1), y(p.from).toFixed(1), x(p.x).toFixed(1), y(p.y).toFixed(1), "stem"));
    over.replaceChildren();
    return [...parts, s("g", null, stems), ...roofs(width, x, y), s("g", null, dots), over];
  }, words);
  const svg = made.svg;
  const choose = (p, at) => {
    chosen = p;
    over.replaceChildren();
    if (!p) { hideTip(); return; }
    const x = scale.x(p.x), y = scale.y(p.y), from = scale.y(p.from), area = svg.getBoundingClientRect();
    over.append(line(x, from, x, y, "link"), s("circle", { cx: x, cy: from, r: 4, class: "from" }),
      s("circle", { cx: x, cy: y, r: 10, class: "halo" }));
    const [left, top] = at || [area.left + x, area.top + y];
    showTip(left, top, tipOf(p));
  };
  const nearest = (e) => {
    const area = svg.getBoundingClientRect();
    const away = (p) => Math.hypot(scale.x(p.x) - (e.clientX - area.left), scale.y(p.y) - (e.clientY - area.top));
    const best = seen().reduce((a, p) => (!a || away(p) < away(a) ? p : a), null);
    return best && away(best) < 26 ? best : null;
  };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", (e) => {
    if (e.pointerType === "touch") return;
    choose(nearest(e));
    svg.style.cursor = chosen ? "pointer" : "";
  });
  svg.addEventListener("pointerleave", () => choose(null));
  svg.addEventListener("blur", () => choose(null));
  svg.addEventListener("click", (e) => {
    const p = nearest(e), touched = e.pointerType === "touch" && p !== chosen;
    if (p && !touched) { choose(null); open(p.i); } else choose(p);
  });
  svg.addEventListener("keydown", (e) => {
    const order = seen().sort((a, b) => a.x - b.x || a.y - b.y);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (step && order.length) {
      const next = chosen ? order.indexOf(chosen) + step : step > 0 ? 0 : order.length - 1;
      choose(order[(next + order.length) % order.length]);
    } else if (e.key === "Enter" && chosen) {
      const p = chosen; choose(null); open(p.i);
    } else if (e.key === "Escape") choose(null);
    else return;
    e.preventDefault();
  });
  onShown(made.redraw);
}

function startRoofline() {
  if (!points.length) return;
  byId("rooflines").hidden = byId("parts").hidden = false;
  const tall = (width) => (width < 420 ? 320 : 420);
  const known = Object.keys(rates).length > 0;
  if (computing.length) {
    const box = { left: 46, right: 12, top: 26, bottom: 40 }, span = bounds(computing, flat, 1.7), figure = byId("arithmetic");
    figure.append(h("figcaption", null, h("b", null, "Arithmetic"), " FLOP/s over FLOP/byte of the declared work"));
    pointed(figure, computing, box, span, tall, "", "FLOP/s", (w, x, y) => roofLines(w, box, span, x, y),
      `Roofline of ${computing.length} cases with arithmetic`);
  } else byId("arithmetic").hidden = true;
  if (moving.length) {
    const box = { left: 46, right: 12, top: 26, bottom: 40 }, span = bounds(moving, widths, 2), figure = byId("bandwidth");
    figure.append(h("figcaption", null, h("b", null, "Bandwidth"), " bytes/s over bytes per call, cases without FLOPs"));
    pointed(figure, moving, box, span, tall, "B", "B/s", (w, x, y) => widthLines(w, box, y),
      `Bandwidth of ${moving.length} cases without arithmetic`);
  } else byId("bandwidth").hidden = true;
  if (!computing.length || !moving.length) document.querySelector(".roofs").style.gridTemplateColumns = "minmax(0, 1fr)";
  const legend = () => {
    const visible = new Set(shown), seen = points.filter((p) => visible.has(p.i)).length;
    byId("roofline-legend").textContent = `${seen === points.length ? "" : `${seen} of ${points.length} cases, as filtered; `}`
      + "a line leads from the baseline to the optimized side; point at it, or use the arrow keys";
  };
  onShown(legend);
  legend();
  const sources = Object.values(data.peaks).map((p) => p.from + (p.date ? ` (${p.date})` : "")).filter(Boolean);
  const without = data.cases.length - points.length;
  byId("roofline-note").textContent = [
    known ? `Roofs are rates measured on this machine: ${sources.join(", ") || "from the run"}.` : "No peaks were measured for this product, so there are no roofs. The first recording measures them: pytest --aisp-update-expectations.",
    moving.length ? "Cases that declare no FLOPs have no arithmetic intensity. The bandwidth plot shows them." : "",
    "Data that stays in a cache may exceed the DRAM roof.",
    without ? `Not shown: ${without} cases that were not timed or declare no work.` : "",
  ].join(" ");
}
