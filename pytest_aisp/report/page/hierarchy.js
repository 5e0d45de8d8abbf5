// The measured memory hierarchy: bandwidth and latency of each level.

function levelPlot(figure, caption, valueOf, words) {
  const levels = data.hierarchy.levels, row = 24, span = roomy(levels.map(valueOf), 10, 0.25);
  figure.append(h("figcaption", null, h("b", null, caption), ", on a logarithmic axis"));
  plot(figure, row * levels.length + 8, (width) => {
    const left = 190, x = logScale(...span, left, width - 90);
    return levels.map((level, n) => {
      const y = row * n + 14, name = level.working_set ? `${level.name}, ${bytes(level.working_set)}` : level.name;
      return [label(left - 10, y + 4, name, "end"), line(left, y, x(valueOf(level)), y, "stem"),
        s("circle", { cx: x(valueOf(level)), cy: y, r: 4, class: "od" }), label(x(valueOf(level)) + 9, y + 4, words(valueOf(level)), "start")];
    });
  }, `${caption} of each level of the memory hierarchy`);
}

function startHierarchy() {
  if (!data.hierarchy) return;
  byId("hierarchy-part").hidden = byId("parts").hidden = byId("hierarchy-link").hidden = false;
  levelPlot(byId("level-bandwidth"), "Bandwidth of all SMs", (level) => level.bandwidth, (value) => rate(value, "B/s"));
  levelPlot(byId("level-latency"), "Latency of one load", (level) => level.latency, duration);
}
