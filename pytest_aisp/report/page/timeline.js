// The kernels and copies of both sides over time, from torch's profiler, with one lane per stream.

const LANE = 16, COPIES = /^Mem(cpy|set)\b/i;

function timelinePlot(host, one, sides) {
  const lanesOf = (side) => [...new Set(side.bars.map(([stream]) => stream))];
  const tall = sides.reduce((sum, [, , side]) => sum + 30 + LANE * lanesOf(side).length, 26);
  const end = Math.max(...sides.flatMap(([, , side]) => side.bars.map(([, , start, length]) => start + length)), 1e-3);
  plot(host, tall, (width) => {
    const x = linScale(0, end, 76, width - 14), parts = [];
    for (const t of steps(0, end, width < 420 ? 3 : 6)) {
      parts.push(line(x(t), 0, x(t), tall - 22, "gridline"), label(x(t), tall - 6, t ? duration(t * 1e-6) : "0"));
    }
    let top = 0;
    for (const [kind, name, side] of sides) {
      const lanes = lanesOf(side);
      parts.push(s("text", { x: 0, y: top + 18, class: "strong" }, brief(name, width / 8)));
      top += 26;
      lanes.forEach((stream, n) => parts.push(label(68, top + LANE * n + 11, `stream ${stream}`, "end")));
      for (const [stream, at, start, length] of side.bars) {
        const copied = COPIES.test(side.names[at]), y = top + LANE * lanes.indexOf(stream) + (copied ? 5 : 1);
        parts.push(s("rect", { x: x(start).toFixed(1), y, width: Math.max(1, x(start + length) - x(start)).toFixed(1),
          height: copied ? LANE - 10 : LANE - 3, class: copied ? "copied" : kind },
        s("title", null, `${side.names[at]}: ${duration(length * 1e-6)}, from ${duration(start * 1e-6)}`)));
      }
      top += LANE * lanes.length + 4;
    }
    return parts;
  }, `Kernels and copies of ${one.baseline} and ${one.variant} over time`);
}

function timelineSection(one) {
  const found = one.timeline;
  if (!found) return null;
  const sides = [["b", one.baseline || "baseline", found.baseline], ["o", one.variant, found.optimized]];
  const figure = h("figure", null, h("figcaption", null, h("b", null, `${found.calls} calls of each side`),
    ", one lane per stream; full height: kernels, low: copies and fills"));
  const cut = sides.filter(([, , side]) => side.bars.length < side.count)
    .map(([, name, side]) => `The first ${side.bars.length} of the ${side.count} kernels and copies of ${name} are shown.`);
  return {
    element: h("section", null, h("h2", null, "Timeline"), figure,
      h("p", { class: "note" }, ["Under torch's profiler, launches take longer than in the times above.", ...cut].join(" "))),
    draw: () => timelinePlot(figure, one, sides),
  };
}
