// Which page is shown, by the address; the theme; the start.

const address = (one) => `#case/${encodeURIComponent(one.id)}`;
const open = (i) => { location.hash = address(data.cases[i]); };
let leftAt = 0, opened = null;

function asked() {
  const found = /^#case\/(.*)$/s.exec(location.hash);
  if (!found) return -1;
  try { return data.cases.findIndex((one) => one.id === decodeURIComponent(found[1])); } catch { return -1; }
}

function showOverview() {
  byId("case").hidden = true;
  byId("case").replaceChildren();
  document.querySelector("header").hidden = false;
  byId("overview").hidden = false;
  document.title = title;
  scrollTo(0, leftAt);
  if (opened !== null && !rows[opened].hidden) rows[opened].querySelector("a").focus({ preventScroll: true });
  opened = null;
}

function route() {
  hideTip();
  const i = asked();
  if (i < 0) {
    const part = location.hash.slice(1), heading = part === "speedups" || part === "roofline" ? byId(part) : null;
    if (!byId("case").hidden) showOverview();
    if (heading) heading.scrollIntoView();
    return;
  }
  if (byId("case").hidden) leftAt = scrollY;
  opened = i;
  showCase(i);
  document.title = `${data.cases[i].variant} · ${title}`;
  scrollTo(0, 0);
  byId("case").focus({ preventScroll: true });
}

// As the system says, until the button is pressed.
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
const kept = (value) => {
  try { return value ? localStorage.setItem("aisp-theme", value) : localStorage.getItem("aisp-theme"); } catch { return null; }
};
function label_theme() { byId("theme").textContent = theme() === "dark" ? "Light" : "Dark"; }

function startTheme() {
  const before = kept();
  if (before === "dark" || before === "light") document.documentElement.dataset.theme = before;
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    kept(theme());
    label_theme();
  });
  dark.addEventListener("change", label_theme);
  label_theme();
}

function keys(e) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName);
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const at = asked();  // a quick hand is ahead of `route`, and of what it has opened
  if (e.key === "Escape" && !typing && at >= 0) { opened = at; location.hash = ""; }
  else if (e.key === "/" && !typing && at < 0) { byId("search").focus(); e.preventDefault(); }
  else if (at >= 0 && !typing && (e.key === "j" || e.key === "k")) {
    const next = shown[shown.indexOf(at) + (e.key === "j" ? 1 : -1)];
    if (next !== undefined) open(next);
  }
}

const title = document.title;
document.documentElement.classList.add("js");
startTheme();
startList();
startAxis();
startRoofline();
addEventListener("hashchange", route);
addEventListener("keydown", keys);
route();
