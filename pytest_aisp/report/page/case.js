// The page of one case.

function head(one) {
  const speedup = one.speedup;
  return h("div", { class: "title" },
    h("div", null, h("div", { class: `badge v-${verdictOf(one)}` }, glyph(one), one.verdict || "no verdict"),
      h("h1", null, one.variant || one.id),
      h("p", null, `${one.chapter} / ${stem(one)} · ${one.function}`, h("br"), sizeWords(one))),
    speedup ? h("div", null, h("div", { class: "big" }, ratio(speedup.value)),
      h("p", null, `99 % interval ${ratio(speedup.low)} – ${ratio(speedup.high)}`)) : h("p", null, one.not_timed));
}

// The times of both sides as bars on one scale, with the least time that this machine's peaks allow.
function bars(one) {
  if (!one.seconds) return null;
  const { baseline, optimized } = one.seconds;
  const most = Math.max(baseline, optimized), least = one.limit && one.limit.share * optimized;
  const bar = (name, seconds, kind) => {
    const part = (78 * seconds) / most;
    return h("div", null, h("span", null, name), s("svg", { role: "img", "aria-label": `${name} ${duration(seconds)}` },
      s("rect", { x: 0, y: 3, width: `${part}%`, height: 20, rx: 2, class: kind }),
      least && kind === "o" && line(`${(78 * least) / most}%`, -2, `${(78 * least) / most}%`, 28, "least"),
      s("text", { x: `${part}%`, dx: 8, y: 18 }, duration(seconds))));
  };
  return h("div", { class: "bars" }, bar(one.baseline, baseline, "b"), bar(one.variant, optimized, "o"),
    least && h("p", { class: "note" }, `Dashed: ${duration(least)}, the least time for the declared work at the measured ${one.limit.name} rate.`));
}

const UNITS = { memory: bytes, reserved: bytes, fragmentation: bytes, energy: joules, goodput: percent };
const CALLS = { memory: "memory beyond the inputs", reserved: "memory taken from the GPU", fragmentation: "memory taken and unused", goodput: "share of time at compute" };
const SHARES = ["memory", "reserved", "fragmentation", "energy"];

// A table of the time, memory and graph nodes per call of each side.
function costs(one) {
  const facts = one.processes ? one.processes[0].facts : {}, goals = one.goals || {}, lines = [];
  if (one.seconds) lines.push([`time (${one.clock} clock)`, duration(one.seconds.baseline), duration(one.seconds.optimized)]);
  if (one.predicted) {
    const time = (side, seconds) => `${duration(seconds)}${(one.unexplained || []).includes(side) ? ", unexplained" : ""}`;
    lines.push(["predicted time", time(one.baseline, one.predicted.baseline), time(one.variant, one.predicted.optimized)]);
  }
  for (const [name, words] of [["as_called", "time as called"], ["gpu_only", "time on the GPU alone"]]) {
    if (Array.isArray(facts[name])) lines.push([words, ...facts[name].map(duration)]);
  }
  for (const [name, both] of Object.entries(goals)) {
    const unit = UNITS[name] || digits;
    const limit = (value) => (SHARES.includes(name) ? `${digits(value)} of the baseline's` : unit(value));
    const words = typeof both.limit === "number" ? `, at ${name === "goodput" ? "least" : "most"} ${limit(both.limit)}` : "";
    lines.push([`${CALLS[name] || name}${words}`, unit(both.baseline), unit(both.optimized)]);
  }
  const peak = facts.peak_bytes;
  if (peak && !goals.memory && "baseline" in peak && "optimized" in peak) lines.push([CALLS.memory, bytes(peak.baseline), bytes(peak.optimized)]);
  const nodes = facts.graph_nodes;
  if (nodes && nodes.baseline && nodes.optimized) {
    for (const kind of new Set([...Object.keys(nodes.baseline), ...Object.keys(nodes.optimized)])) {
      lines.push([`${kind} nodes in the graph`, digits(nodes.baseline[kind] || 0), digits(nodes.optimized[kind] || 0)]);
    }
  }
  if (!lines.length) return null;
  return h("table", { class: "table" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, "A call takes"),
    h("th", { scope: "col", class: "n" }, one.baseline || "baseline"), h("th", { scope: "col", class: "n" }, one.variant))),
    h("tbody", null, lines.map(([name, b, o]) => h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "n" }, b), h("td", { class: "n" }, o)))));
}

function range(processes, name, unit) {
  const seen = processes.flatMap((p) => p.facts[name] || []).filter((v) => v !== null);
  if (!seen.length) return null;
  const low = Math.min(...seen), high = Math.max(...seen);
  return low === high ? `${low} ${unit}` : `${low}–${high} ${unit}`;
}

// The evidence for the verdict.
function evidence(one) {
  const claim = one.claim, stored = one.stored, processes = one.processes || [], lines = [];
  if (claim) lines.push(["claim", `${typeof claim.at_least === "number" ? `at least ${digits(claim.at_least)}×${claim.versus ? ` of ${claim.versus}` : ""}` : claim.at_least}${claim.from ? `, ${claim.from}` : ""}`]);
  lines.push(["stored", stored ? `${ratio(stored.speedup)}, ${stored.from || ""}` : "no result for this product yet"]);
  if (one.votes) lines.push(["votes of fresh processes", one.votes.map(ratio).join(", ")]);
  if (one.limit) lines.push(["share of limit", `${percent(one.limit.share, 1)} of ${one.limit.name}`]);
  if (one.detectable) lines.push(["smallest detectable loss", percent(one.detectable, 1)]);
  if (one.spread) lines.push(["spread of a process", percent(one.spread, 2)]);
  const readings = [range(processes, "sm_mhz", "MHz"), range(processes, "watts", "W"), range(processes, "celsius", "°C")];
  if (readings.some(Boolean)) lines.push(["while timed", readings.filter(Boolean).join(" · ")]);
  lines.push(["machine", [one.product, one.arch].filter(Boolean).join(", ")], ["bound", one.bound]);
  if (one.wall) lines.push(["time for the whole case", `${digits(one.wall, 3)} s`]);
  return h("table", { class: "table" }, h("thead", null, h("tr", null, h("th", { scope: "col", colspan: 2 }, "Evidence for the verdict"))),
    h("tbody", null, lines.filter(([, v]) => v).map(([name, v]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, v)))));
}

const listed = (title, lines) => lines && lines.length
  ? h("section", null, h("h2", null, title), h("ul", { class: "points" }, lines.map((l) => h("li", null, String(l))))) : null;

// The counters of ncu, as means over the kernels of a side, weighted by time.
function countersTable(one) {
  if (!one.counters) return null;
  const sides = ["baseline", "optimized"].map((role) => one.counters[role]);
  const share = (name) => (c) => (typeof c[name] === "number" ? percent(c[name]) : "");
  const lines = [["achieved occupancy", share("occupancy")], ["issue slots used", share("issue_slots")],
    ["most frequent stall", (c) => (c.stall ? `${c.stall}, ${percent(c.stall_share)}` : "")], ["kernels", (c) => String(c.kernels)]];
  return h("section", null, h("h2", null, "Counters"), h("table", { class: "table" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Means over a side's kernels by time, by ncu"),
      h("th", { scope: "col", class: "n" }, one.baseline || "baseline"), h("th", { scope: "col", class: "n" }, one.variant))),
    h("tbody", null, lines.map(([name, of]) => h("tr", null, h("th", { scope: "row" }, name), sides.map((c) => h("td", { class: "n" }, c ? of(c) : "")))))));
}

function profiles(one) {
  const files = one.profile && one.profile.files;
  if (!files) return null;
  const link = (path) => h("li", null, /^([a-z][a-z0-9+.-]*:|\/\/|\\)/i.test(path) ? path : h("a", { href: encodeURI(path).replace(/[?#]/g, encodeURIComponent) }, path));
  return h("section", null, h("h2", null, `Profiles, ${one.profile.tool}`), h("ul", { class: "points" }, files.map(link)));
}

function reproduce(one) {
  const button = h("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(one.command); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(button.previousSibling); button.textContent = "Selected"; }
  });
  return h("section", null, h("h2", null, "Run it again"), h("div", { class: "command" }, h("pre", null, one.command), button));
}

function crumbs(i) {
  const at = shown.indexOf(i), to = (n) => data.cases[shown[n]];
  const link = (one, words) => h("a", { href: address(one) }, words);
  return h("nav", { class: "crumbs", "aria-label": "Cases" }, h("a", { href: "#", id: "back" }, "← All cases"),
    h("span", null, at > 0 && link(to(at - 1), "Previous"), at >= 0 && at < shown.length - 1 && link(to(at + 1), "Next")));
}

const noHistory = (one) => h("section", null, h("h2", null, "History"), h("p", { class: "note" },
  `None of the ${data.runs} other runs timed this case on ${one.product || "this machine"}.`));

// The runs at which the level changed, as `aisp results history` names them.
function changesOf(one) {
  const lines = one.history.map((run) => run.change).filter(Boolean);
  return lines.length ? h("ul", { class: "points" }, lines.map((l) => h("li", null, l))) : null;
}

function showCase(i) {
  const one = data.cases[i], host = byId("case"), samples = samplesSection(one), lanes = timelineSection(one), draws = [];
  const close = h("figure"), past = h("figure", null, h("figcaption", null, "Value and 99 % interval by run; ring: this run"));
  const why = [...(one.reasons || []), ...(one.cause ? [`cause: ${one.cause}`] : [])];
  const red = why.length
    ? h("ul", { class: `reasons v-${verdictOf(one)}` }, why.map((l) => h("li", null, String(l)))) : null;
  if (one.speedup) draws.push(() => intervalPlot(close, one));
  if (samples && samples.draw) draws.push(samples.draw);
  if (lanes) draws.push(lanes.draw);
  if (one.history) draws.push(() => historyPlot(past, one));
  host.replaceChildren(...[
    crumbs(i), head(one), red,
    one.speedup && h("section", { class: "columns" }, bars(one), close),
    h("section", { class: "columns" }, evidence(one), costs(one)),
    samples && (samples.element || samples),
    lanes && lanes.element, countersTable(one),
    one.history ? h("section", null, h("h2", null, "History"), past, changesOf(one)) : data.runs > 0 && noHistory(one),
    codeSection(one), listed("Remarks", one.remarks), listed("Notes", one.notes), profiles(one), reproduce(one),
  ].flat().filter(Boolean));
  byId("overview").hidden = true;
  document.querySelector("header").hidden = true;
  host.hidden = false;
  draws.forEach((draw) => draw());
}
