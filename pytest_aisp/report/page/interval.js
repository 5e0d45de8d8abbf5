// The speedup of a case in detail, and its speedups in other runs.

function intervalPlot(host, one) {
  const { value, low, high } = one.speedup, claim = claimOf(one), stored = storedOf(one), votes = one.votes || [];
  const all = [low, high, ...votes, ...[claim, stored].filter(Boolean)];
  const span = roomy(all);
  const words = `${ratio(value)}, interval ${ratio(low)} to ${ratio(high)}`;
  plot(host, 118, (width) => {
    const x = logScale(...span, 8, width - 8), parts = [], y = 52;
    const anchor = (v) => (x(v) < 70 ? "start" : x(v) > width - 70 ? "end" : "middle");
    for (const t of ratioTicks(...span, width < 420 ? 4 : 7)) {
      parts.push(line(x(t), 22, x(t), 84, "gridline"), label(x(t), 108, `${digits(t)}×`));
    }
    if (claim) parts.push(line(x(claim), 18, x(claim), y - 8, "claim"), label(x(claim), 12, `claim ${digits(claim)}×`, anchor(claim)));
    if (stored) parts.push(line(x(stored), y + 8, x(stored), 80, "stored"), label(x(stored), 94, `stored ${ratio(stored)}`, anchor(stored)));
    votes.forEach((v) => parts.push(s("circle", { cx: x(v), cy: y - 14, r: 2.6, class: "od" }, s("title", null, `vote ${ratio(v)}`))));
    parts.push(s("g", { class: `v-${verdictOf(one)}` }, line(x(low), y, x(high), y, "interval"),
      line(x(low), y - 5, x(low), y + 5, "interval"), line(x(high), y - 5, x(high), y + 5, "interval"),
      s("use", { href: `#v-${verdictOf(one)}`, x: x(value), y })));
    return parts;
  }, words);
}

function historyPlot(host, one) {
  const runs = one.history, claim = claimOf(one), values = runs.flatMap((run) => [run.speedup.low, run.speedup.high]);
  if (claim && claim > Math.min(...values) / 1.3) values.push(claim);
  const span = roomy(values);
  plot(host, 170, (width, tall) => {
    const x = linScale(0, Math.max(runs.length - 1, 1), 66, width - 24), y = logScale(...span, tall - 34, 14), parts = [];
    for (const t of ratioTicks(...span, 4)) {
      parts.push(line(52, y(t), width - 10, y(t), "gridline"), label(44, y(t) + 4, `${digits(t)}×`, "end"));
    }
    if (claim && claim >= span[0]) parts.push(line(52, y(claim), width - 10, y(claim), "least"), label(54, y(claim) - 5, "claim", "start"));
    parts.push(s("path", { class: "gridline", fill: "none", d: runs.map((run, n) => `${n ? "L" : "M"}${x(n)} ${y(run.speedup.value)}`).join("") }));
    runs.forEach(({ change }, n) => change && parts.push(s("g", { class: "changed" },
      line(x(n - 0.5), 14, x(n - 0.5), tall - 34, "least"), s("title", null, change))));
    runs.forEach(({ started, commit, speedup: { value, low, high }, verdict, current }, n) => parts.push(
      s("g", { class: `v-${verdict || "none"}` }, line(x(n), y(low), x(n), y(high), "interval"),
        s("use", { href: `#v-${verdict || "none"}`, x: x(n), y: y(value) }),
        current && s("circle", { cx: x(n), cy: y(value), r: 9, class: "halo" }),
        s("title", null, `${started.slice(0, 16).replace("T", " ")} ${commit} ${ratio(value)} [${ratio(low)}, ${ratio(high)}] ${verdict}`))));
    const every = Math.ceil(runs.length / Math.max(2, Math.floor(width / 100)));
    runs.forEach(({ started }, n) => {
      if (n % every === 0) parts.push(label(x(n), tall - 10, day(started), n ? (n === runs.length - 1 ? "end" : "middle") : "start"));
    });
    return parts;
  }, `Speedup in ${runs.length} runs`);
}
