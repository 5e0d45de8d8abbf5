// The diff of the sides, the code of both, and the docstring of the page.

const KINDS = { "+": "plus", "-": "minus", "@": "hunk" };

function diffLines(text) {
  return text.split("\n").slice(2).map((l) =>  // without the side names
    h("span", { class: KINDS[l[0]] }, l[0] === "@" ? "" : [h("i", null, l[0] === " " ? "" : l[0]), l.slice(1) || " "]));
}

const plain = (text) => text.split("\n").map((l) => h("span", null, l || " "));

function tabs(entries) {
  const body = h("div", { role: "tabpanel" });
  const buttons = entries.map(([name], n) => h("button", { type: "button", role: "tab", onclick: () => choose(n),
    onkeydown: (e) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (step) { const next = (n + step + entries.length) % entries.length; choose(next); buttons[next].focus(); e.stopPropagation(); }
    } }, name));
  function choose(n) {
    buttons.forEach((button, k) => { button.setAttribute("aria-selected", k === n); button.tabIndex = k === n ? 0 : -1; });
    body.replaceChildren(h("pre", { class: "code" }, entries[n][1]()));
  }
  choose(0);
  return h("div", null, h("div", { class: "tabs", role: "tablist" }, buttons), body);
}

function codeSection(one) {
  const page = data.pages[one.page];
  if (!page) return h("section", null, h("h2", null, "Code"), h("p", { class: "note" }, `${one.page} could not be read when this report was written.`));
  const entries = [];
  if (one.diff) entries.push(["What changed", () => diffLines(one.diff)]);
  for (const [role, name] of [["baseline", one.baseline], ["optimized", one.variant]]) {
    if (page.sides[name]) entries.push([`${name} (${role})`, () => plain(page.sides[name])]);
  }
  const missing = one.code_left_out ? "The code is left out to keep this file small." : "The page does not define its sides.";
  return [
    page.doc && h("section", null, h("h2", null, "The page says"), h("pre", { class: "doc" }, page.doc)),
    h("section", null, h("h2", null, "Code"),
      entries.length ? tabs(entries) : null,
      h("p", { class: "note" }, `${entries.length ? "" : missing + " "}${one.page}, as of the time of this report. A side is shown with everything it uses of its page and its kernel files.`)),
  ];
}
