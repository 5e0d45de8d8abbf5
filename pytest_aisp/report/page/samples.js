// The windows of a case: their distribution around the median, and their order of measurement.

// All windows in the order of measurement, as distances from the side's median. Sides of similar speed
// share one center.
function deviations(one) {
  const all = [];
  let at = 0;
  const ends = [], laps = [], drops = [], looks = [];
  one.processes.forEach((process, n) => {
    const blocks = process.shown || Array.from({ length: process.blocks }, (_, i) => i);
    const each = process.us.length / blocks.length;
    const place = (block) => at + each * blocks.filter((k) => k < block).length;
    process.laps.forEach((block) => laps.push(place(block)));
    process.dropped.forEach(([cause, block]) => drops.push([block === null ? null : place(block), cause]));
    (process.facts.looks || []).forEach(([block, ...seen]) => looks.push([place(block), ...seen]));
    process.us.forEach((us, k) => all.push({ at: at + k, side: process.sides[k], us, process: n }));
    at += process.us.length;
    ends.push(at);
  });
  const middle = {};
  for (const side of "bo") middle[side] = median(all.filter((w) => w.side === side).map((w) => w.us));
  const near = Math.abs(Math.log(middle.b / middle.o)) < 0.12;
  const zero = near ? { b: Math.sqrt(middle.b * middle.o), o: Math.sqrt(middle.b * middle.o) } : middle;
  for (const w of all) w.off = Math.log(w.us / zero[w.side]);
  const most = Math.max(0.002, ...all.map((w) => Math.abs(w.off))) * 1.15;
  return { all, ends, laps, drops, looks, middle, near, zero, most, count: at };
}

// A Gaussian kernel density. Silverman's width uses the interquartile range, so that an outlier does
// not widen it.
function density(values, low, high, count) {
  const sorted = [...values].sort((a, b) => a - b), n = sorted.length;
  const iqr = sorted[Math.floor(0.75 * (n - 1))] - sorted[Math.floor(0.25 * (n - 1))];
  const mean = sorted.reduce((a, b) => a + b, 0) / n;
  const sd = Math.sqrt(sorted.reduce((a, b) => a + (b - mean) ** 2, 0) / n);
  const width = Math.max(0.9 * Math.min(sd, iqr / 1.34 || sd) * n ** -0.2, (high - low) / 200);
  return Array.from({ length: count }, (_, i) => {
    const x = low + ((high - low) * i) / (count - 1);
    return [x, sorted.reduce((a, v) => a + Math.exp(-0.5 * ((x - v) / width) ** 2), 0) / n];
  });
}

const places = (most) => (most < 0.004 ? 2 : most < 0.06 ? 1 : 0);
const NAMES = { b: "baseline", o: "optimized" };

function distribution(host, one) {
  const d = deviations(one), lane = 92, top = 8;
  const nameOf = { b: one.baseline, o: one.variant };
  plot(host, 2 * lane + 44, (width) => {
    const x = linScale(-d.most, d.most, 26, width - 26), parts = [];
    for (const t of steps(-d.most, d.most, width < 420 ? 4 : 6)) {
      parts.push(line(x(t), top, x(t), top + 2 * lane, Math.abs(t) < 1e-12 ? "axisline" : "gridline"));
      parts.push(label(x(t), top + 2 * lane + 18, signed(t, places(d.most))));
    }
    [..."bo"].forEach((side, n) => {
      const own = d.all.filter((w) => w.side === side), base = top + n * lane + 58;
      const curve = density(own.map((w) => w.off), -d.most, d.most, 160);
      const peak = Math.max(...curve.map(([, y]) => y));
      const path = curve.map(([v, y]) => `${x(v).toFixed(1)} ${(base - (y / peak) * 36).toFixed(1)}`).join("L");
      parts.push(s("path", { d: `M${x(-d.most)} ${base}L${path}L${x(d.most)} ${base}z`, class: `${side}s` }));
      own.forEach((w, k) => parts.push(s("circle", { cx: x(w.off).toFixed(1), cy: base + 8 + (k % 4) * 4.5, r: 2.4, class: `${side}d` })));
      const middle = Math.log(d.middle[side] / d.zero[side]);
      parts.push(line(x(middle), base - 40, x(middle), base + 26, "median"));
      parts.push(s("text", { x: 26, y: base - 42, class: "strong" }, `${brief(nameOf[side], width / 12)}  `,
        s("tspan", { "font-weight": 400 }, duration(d.middle[side] * 1e-6))));
    });
    parts.push(label(width - 26, top + 2 * lane + 34, d.near ? "distance from the middle of both medians" : "distance from the side's own median", "end"));
    return parts;
  }, `Distribution of ${d.count} windows of both sides`);
  return d;
}

function overTime(host, one, d) {
  const seen = d.looks.filter(([, mhz]) => mhz), tall = 190, strip = seen.length > 1 ? 54 : 0;
  plot(host, tall + strip + 40, (width) => {
    const box = { left: 52, right: 10, top: 18, bottom: tall };
    const x = linScale(-0.5, d.count - 0.5, box.left, width - box.right), y = linScale(-d.most, d.most, box.bottom, box.top);
    const parts = [];
    for (const t of steps(-d.most, d.most, 4)) {
      parts.push(line(box.left, y(t), width - box.right, y(t), "gridline"));
      parts.push(label(box.left - 8, y(t) + 4, signed(t, places(d.most)), "end"));
    }
    d.laps.forEach((at) => parts.push(line(x(at - 0.5), box.top, x(at - 0.5), box.bottom, "lap")));
    d.ends.forEach((end, n) => {
      if (n < d.ends.length - 1) parts.push(line(x(end - 0.5), box.top - 10, x(end - 0.5), box.bottom, "axisline"));
      if (d.ends.length > 1) parts.push(label(x((n ? d.ends[n - 1] : 0) - 0.5) + 3, box.top - 6, n ? `vote ${n}` : "first", "start"));
    });
    d.all.forEach((w) => parts.push(s("circle", { cx: x(w.at).toFixed(1), cy: y(w.off).toFixed(1),
      r: d.count > 300 ? 1.8 : 2.6, class: `${w.side}d` }, s("title", null, `${NAMES[w.side]} ${duration(w.us * 1e-6)}`))));
    d.drops.filter(([at]) => at !== null).forEach(([at, cause]) => parts.push(s("g", null,
      line(x(at - 0.5), box.top, x(at - 0.5), box.bottom, "drop"),
      s("path", { d: `M${x(at - 0.5)} ${box.top + 7}l-5 -8h10z`, class: "dropmark" }), s("title", null, `measured again: ${cause}`))));
    parts.push(label(width - box.right, box.bottom + strip + 20, "windows in the order of measurement", "end"));
    if (strip) parts.push(clocks(seen, x, width, box, tall));
    return parts;
  }, `${d.count} windows over time`);
}

// The SM clock at each reading, as a step curve.
function clocks(seen, x, width, box, top) {
  const mhz = seen.map(([, m]) => m), low = Math.min(...mhz), high = Math.max(...mhz);
  const y = linScale(low === high ? low - 1 : low, high, top + 46, top + 18);
  const path = seen.map(([at, m], n) => `${n ? "H" : "M"}${x(at - 0.5).toFixed(1)}${n ? "V" : " "}${y(m).toFixed(1)}`).join("");
  return [s("path", { d: `${path}H${width - box.right}`, class: "clock" }),
    label(box.left - 8, y(high) + 4, `${high}`, "end"), low !== high && label(box.left - 8, y(low) + 4, `${low}`, "end"),
    label(width - box.right, top + 12, "SM clock, MHz", "end")];
}

function samplesSection(one) {
  if (!one.processes) {
    const error = one.samples_error;
    return error ? h("section", null, h("h2", null, "Samples"), h("p", { class: "note" }, error)) : null;
  }
  const first = h("figure", null, h("figcaption", null, h("b", null, "Distribution"), " of windows, by side"));
  const second = h("figure", null, h("figcaption", null, h("b", null, "Over time"), ` hollow: ${one.baseline}, filled: ${one.variant}; dashed: both sides were built again`));
  const cut = one.processes.filter((p) => p.shown), shownOf = one.processes.length, of = one.processes[0].of;
  const words = [
    cut.length ? `${data.blocks} of ${cut[0].blocks} blocks per process are shown: those with the shortest and longest windows, and others at even distances.` : "Every window is shown as the mean of its calls.",
    shownOf < of ? `The first ${shownOf} of ${of} processes.` : "",
    ...new Set(one.processes.flatMap((p) => p.dropped.map(([cause]) => `Measured again: ${cause}.`))),
  ];
  return {
    element: h("section", null, h("h2", null, "Samples"), h("div", { class: "columns" }, first, second),
      h("p", { class: "note" }, words.filter(Boolean).join(" "))),
    draw: () => overTime(second, one, distribution(first, one)),
  };
}
