// The plots of the rows on one axis over the visible cases: speedups, or the ratio of each speedup to
// its claim or its stored result.

const REFERENCES = { speedup: () => 1, claim: claimOf, stored: storedOf };
const drawn = rows.map((row) => {
  const svg = row.querySelector(".plot svg"), find = (css) => svg.querySelector(css);
  return svg && { mark: svg.lastElementChild, claim: find(".claim"), stored: find(".stored"), interval: find(".interval") };
});

function parts(one, scale) {
  const by = one.speedup && REFERENCES[scale](one);
  if (!by) return null;
  const { value, low, high } = one.speedup, over = (v) => (v ? v / by : null);
  return { value: value / by, low: low / by, high: high / by, claim: over(claimOf(one)), stored: over(storedOf(one)) };
}

// On the scales of claim and stored result, the axis covers only the intervals. The other mark may be
// far away.
function spanOf(seen, scale) {
  const all = seen.flatMap((p) => [p.low, p.high, ...(scale === "speedup" ? [p.claim, p.stored] : [])]).filter(Boolean);
  return roomy([1, ...all], 1.004, 0.06);
}

// Move an element to `from`, and a line's other end to `to`. Hide the element if it is off the axis.
function move(element, from, to = from) {
  if (!element) return;
  const beyond = !Number.isFinite(from) || to < -1 || from > 101;
  element.setAttribute("visibility", beyond ? "hidden" : "visible");
  if (beyond) return;
  const ends = element.tagName === "use" ? { x: from } : { x1: from, x2: to };
  for (const [name, at] of Object.entries(ends)) element.setAttribute(name, `${at.toFixed(2)}%`);
}

// The label of a tick: 1.2×, or the distance from the claim or stored result in percent.
function tickWords(t, scale, span) {
  if (scale === "speedup") return `${digits(t)}×`;
  if (Math.abs(t - 1) < 1e-9) return scale;
  return span[1] / span[0] < 4 ? signed(t - 1, span[1] / span[0] < 1.05 ? 1 : 0) : `${digits(t)}×`;
}

function drawAxis() {
  const scale = byId("scale").value, all = data.cases.map((one) => parts(one, scale));
  const seen = shown.map((i) => all[i]).filter(Boolean);
  const span = spanOf(seen, scale), x = logScale(...span, 0, 100);
  const ticks = ratioTicks(...span, 5).map((t) => [t, `${x(t).toFixed(2)}%`]);
  document.querySelector("svg.axis").replaceChildren(
    ...ticks.map(([t, at]) => s("text", { x: at, y: 14, "text-anchor": "middle" }, tickWords(t, scale, span))));
  byId("grid").replaceChildren(
    ...ticks.map(([t, at]) => s("line", { class: Math.abs(t - 1) < 1e-9 && "one", x1: at, x2: at, y1: 0, y2: "100%" })));
  for (const i of shown.filter((n) => drawn[n])) {
    const marks = drawn[i], p = all[i] || {};
    move(marks.mark, x(p.value));
    move(marks.interval, x(p.low), x(p.high));
    move(marks.claim, p.claim ? x(p.claim) : NaN);
    move(marks.stored, p.stored ? x(p.stored) : NaN);
  }
}

function startAxis() {
  byId("scale").addEventListener("change", drawAxis);
  let before = "";
  onShown(() => { // a new order does not change the axis
    const now = [...shown].sort((a, b) => a - b).join();
    if (now !== before) drawAxis();
    before = now;
  });
}
