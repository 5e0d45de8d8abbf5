// The time per call against the error, for pages whose sides differ in precision. Each point is a side.

const scatters = (() => {
  const found = {};
  data.cases.forEach((one, i) => {
    const errors = one.errors || {}, precisions = one.precisions || {};
    if (!one.seconds) return;
    const fixed = sizeWords(one), group = JSON.stringify([one.page, one.function, one.product, fixed]);
    const into = (found[group] ||= { one, fixed, sides: {} });
    const add = (name, time, i) => {
      const side = { name, time, i, error: errors[name], precision: precisions[name] || "" };
      if (side.error > 0) into.sides[name] ||= side;
    };
    add(one.baseline, one.seconds.baseline, null);
    add(one.variant, one.seconds.optimized, i);
  });
  const all = Object.values(found).map((group) => ({ ...group, sides: Object.values(group.sides) }));
  return all.filter((group) => new Set(group.sides.map((side) => side.precision)).size > 1);
})();

function errorPlot(figure, { one, fixed, sides }) {
  const spanX = roomy(sides.map((side) => side.error), 30), spanY = roomy(sides.map((side) => side.time), 1.2);
  figure.append(h("figcaption", null, h("b", null, `${one.chapter} / ${stem(one)}`), ` ${one.function}, ${fixed}`));
  plot(figure, 260, (width, tall) => {
    const x = logScale(...spanX, 60, width - 16), y = logScale(...spanY, tall - 34, 16), parts = [];
    for (const t of ratioTicksOf(spanY)) parts.push(line(52, y(t), width - 10, y(t), "gridline"), label(46, y(t) + 4, duration(t), "end"));
    for (const t of ratioTicksOf(spanX)) parts.push(line(x(t), 10, x(t), tall - 34, "gridline"), label(x(t), tall - 12, Number(t.toPrecision(2)).toExponential()));
    let above = -Infinity;
    for (const side of [...sides].sort((a, b) => b.time - a.time)) {
      const [at, down] = [x(side.error), y(side.time)], left = at > width / 2;
      const kind = side.i === null ? "base" : `c${sides.filter((each) => each.i !== null).indexOf(side) % 4}`;
      const words = side.precision ? `${side.name}, ${side.precision}` : side.name;
      above = Math.max(above + 14, down + 4); // no label on another
      parts.push(s("g", { class: `curve ${kind}`, onclick: side.i === null ? null : () => open(side.i) },
        s("circle", { cx: at, cy: down, r: 5 }, s("title", null, `${words}: ${duration(side.time)}, error ${side.error.toExponential(1)}`))),
      label(at + (left ? -9 : 9), above, words, left ? "end" : "start"));
    }
    return parts;
  }, `Time per call against error of ${one.function}`);
}

function startErrors() {
  if (!scatters.length) return;
  byId("errors-part").hidden = byId("parts").hidden = byId("errors-link").hidden = false;
  for (const group of scatters) {
    const figure = h("figure");
    byId("errors-figures").append(figure);
    errorPlot(figure, group);
  }
}
