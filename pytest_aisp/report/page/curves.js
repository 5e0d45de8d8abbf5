// The curves of pages that sweep one key of their size: time per call and speedup over that key.

const curveOf = (one) => {
  const { [one.sweep]: at, ...rest } = one.size, fixed = sizeWords({ gpus: one.gpus, size: rest });
  return { at, fixed, group: JSON.stringify([one.page, one.function, one.product, fixed]) };
};

// One group per figure. A group has the points of the baseline and of each variant.
const groups = (() => {
  const found = {};
  data.cases.forEach((one, i) => {
    if (!one.sweep || !one.seconds || !one.speedup) return;
    const { at, fixed, group } = curveOf(one);
    const into = (found[group] ||= { one, fixed, variants: {}, baseline: {}, values: new Set() });
    into.values.add(at);
    (into.variants[one.variant] ||= []).push({ at, one, i });
    into.baseline[at] = one.seconds.baseline;
  });
  return Object.values(found).filter((group) => group.values.size > 2);
})();

// The position of each value: logarithmic if the values span a factor of 8, or else linear. Values
// that are not numbers are in order.
function placer(values, from, to) {
  const numbers = values.every((v) => typeof v === "number");
  if (!numbers) return (v) => from + (values.indexOf(v) / Math.max(1, values.length - 1)) * (to - from);
  const low = Math.min(...values), high = Math.max(...values);
  return low > 0 && high / low > 8 ? logScale(low, high, from, to) : linScale(low, high, from, to);
}

function curvePlot(figure, group, caption, lines, spanY, ticksY, words) {
  const values = [...group.values].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : 0));
  figure.append(h("figcaption", null, h("b", null, caption), ` over ${group.one.sweep}`));
  plot(figure, 260, (width, tall) => {
    const x = placer(values, 60, width - 16), y = logScale(...spanY, tall - 34, 16), parts = [];
    for (const [t, text] of ticksY) parts.push(line(52, y(t), width - 10, y(t), "gridline"), label(46, y(t) + 4, text, "end"));
    let right = -Infinity;
    for (const v of values) {
      if (x(v) - right < 46) continue;
      right = x(v);
      parts.push(label(x(v), tall - 12, typeof v === "number" && v >= 1e5 ? scaled(v, SI) : String(v)));
    }
    lines.forEach(({ name, kind, points }, n) => {
      const sorted = [...points].sort((a, b) => values.indexOf(a.at) - values.indexOf(b.at));
      parts.push(s("g", { class: `curve ${kind || `c${n % 4}`}` },
        s("path", { d: sorted.map((p, k) => `${k ? "L" : "M"}${x(p.at).toFixed(1)} ${y(p.y).toFixed(1)}`).join("") }),
        sorted.map((p) => s("circle", { cx: x(p.at), cy: y(p.y), r: 3.5 }, s("title", null, `${name} at ${p.at}: ${words(p)}`)))));
    });
    return parts;
  }, `${caption} of ${group.one.function} over ${group.one.sweep}`);
}

function startCurves() {
  if (!groups.length) return;
  byId("curves-part").hidden = byId("parts").hidden = byId("curves-link").hidden = false;
  for (const group of groups) {
    const names = Object.keys(group.variants), place = h("div", { class: "roofs" }), [time, speed] = [h("figure"), h("figure")];
    const key = (name, kind) => h("span", { class: `curve ${kind}` }, s("svg", { class: "sample" }, line(2, 12, 38, 12)), name);
    byId("curves-part").append(
      h("h3", null, `${group.one.chapter} / ${stem(group.one)}`, group.fixed ? h("small", null, ` ${group.fixed}`) : null),
      h("p", { class: "legend" }, key(group.one.baseline, "base"), names.map((name, n) => key(name, `c${n % 4}`))), place);
    place.append(time, speed);
    const variants = names.map((name) => ({ name, points: group.variants[name] }));
    const times = variants.map((v) => ({ ...v, points: v.points.map((p) => ({ ...p, y: p.one.seconds.optimized })) }));
    const base = { name: group.one.baseline, kind: "base", points: Object.entries(group.baseline).map(([at, y]) => ({ at: [...group.values].find((v) => String(v) === at), y })) };
    const speeds = variants.map((v) => ({ ...v, points: v.points.map((p) => ({ ...p, y: p.one.speedup.value })) }));
    const all = [...times, base].flatMap((l) => l.points.map((p) => p.y)), ratios = speeds.flatMap((l) => l.points.map((p) => p.y));
    const spanT = roomy(all, 1.2), spanS = roomy([1, ...ratios], 1.05);
    curvePlot(time, group, "Time per call", [...times, base], spanT, ratioTicksOf(spanT).map((t) => [t, duration(t)]), (p) => duration(p.y));
    curvePlot(speed, group, "Speedup", speeds, spanS, ratioTicks(...spanS).map((t) => [t, `${digits(t)}×`]), (p) => ratio(p.y));
  }
}

// Round ticks of a logarithmic axis of seconds.
function ratioTicksOf([low, high]) {
  const power = 10 ** Math.floor(Math.log10(low));
  return ratioTicks(low / power, high / power).map((t) => t * power);
}
