// The list of cases: filters and order. The rows are already in the page.

const rows = [...document.querySelectorAll("#cases tbody tr")];
const filters = { verdicts: new Set(), chapter: "", bound: "", words: [], order: "look" };
const listeners = [];
const onShown = (listener) => listeners.push(listener);
let shown = data.cases.map((_, i) => i);

const storedOf = (one) => (one.stored && one.stored.speedup) || null;
const claimOf = (one) => {
  const claim = one.claim && one.claim.at_least;
  return claim === "neutral" ? 1 : typeof claim === "number" ? claim : null;
};
const haystacks = data.cases.map((one) =>
  [one.id, one.page, one.variant, one.baseline, sizeWords(one), one.verdict, one.bound, one.product,
    ...(one.reasons || []), ...(one.remarks || []), (data.pages[one.page] || {}).title || ""]
    .join(" ").toLowerCase());

// The sort key of each order. The smallest key comes first, and cases without a key come last.
const KEYS = {
  look: (one, i) => i,
  speedup: (one) => one.speedup && -one.speedup.value,
  share: (one) => one.limit && -one.limit.share,
  margin: (one) => one.speedup && claimOf(one) && Math.log(one.speedup.value / claimOf(one)),
  time: (one) => one.seconds && -one.seconds.optimized,
  page: (one) => `${one.chapter}/${one.page}/${one.id}`,
};

function matches(one, i) {
  return (!filters.verdicts.size || filters.verdicts.has(one.verdict))
    && (!filters.chapter || one.chapter === filters.chapter)
    && (!filters.bound || one.bound === filters.bound)
    && filters.words.every((word) => haystacks[i].includes(word));
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : 1;
}

function refresh() {
  const keys = data.cases.map(KEYS[filters.order]);
  shown = data.cases.map((_, i) => i).filter((i) => matches(data.cases[i], i));
  shown.sort((a, b) => compare(keys[a], keys[b]) || a - b);
  const visible = new Set(shown);
  rows.forEach((row, i) => { row.hidden = !visible.has(i); });
  document.querySelector("#cases tbody").append(...shown.map((i) => rows[i]));
  byId("count").value = shown.length === rows.length
    ? `${rows.length} cases` : `${shown.length} of ${rows.length} cases`;
  byId("nothing").hidden = shown.length > 0;
  listeners.forEach((listener) => listener());
}

function options(select, name) {
  const values = [...new Set(data.cases.map((one) => one[name]).filter(Boolean))].sort();
  select.append(...values.map((value) => h("option", { value }, value)));
  select.addEventListener("change", () => { filters[name] = select.value; refresh(); });
}

function toggled(button) {
  const verdict = button.dataset.verdict;
  if (!filters.verdicts.delete(verdict)) filters.verdicts.add(verdict);
  button.setAttribute("aria-pressed", filters.verdicts.has(verdict));
  refresh();
}

function clearFilters() {
  const scale = byId("scale").value;
  byId("filters").reset();
  byId("scale").value = scale;
  Object.assign(filters, { verdicts: new Set(), chapter: "", bound: "", words: [], order: "look" });
  for (const button of document.querySelectorAll("#tally button")) button.setAttribute("aria-pressed", "false");
  refresh();
}

function startList() {
  for (const button of document.querySelectorAll("#tally button")) {
    button.disabled = false;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => toggled(button));
  }
  options(byId("chapter"), "chapter");
  options(byId("bound"), "bound");
  byId("order").addEventListener("change", (e) => { filters.order = e.target.value; refresh(); });
  byId("search").addEventListener("input", (e) => {
    filters.words = e.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    refresh();
  });
  byId("filters").addEventListener("submit", (e) => e.preventDefault());
  byId("clear").addEventListener("click", clearFilters);
  byId("filters").hidden = false;
  document.querySelector("#cases tbody").addEventListener("click", (e) => {
    const row = e.target.closest("tr");
    if (row && !e.target.closest("a") && !String(getSelection())) open(row.dataset.i);
  });
  byId("count").value = `${rows.length} cases`;
}
