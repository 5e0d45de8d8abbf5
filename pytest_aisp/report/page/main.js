// Show the page in the address, set the theme, and start the other scripts.

const address = (one) => `#case/${encodeURIComponent(one.id)}`;
const open = (i) => { location.hash = address(data.cases[i]); };
let leftAt = 0, opened = null;

function addressed() {
  const match = /^#case\/(.*)$/s.exec(location.hash);
  if (!match) return -1;
  try { return data.cases.findIndex((one) => one.id === decodeURIComponent(match[1])); } catch { return -1; }
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
  const i = addressed();
  if (i < 0) {
    const part = location.hash.slice(1), heading = ["speedups", "curves", "errors", "roofline", "hierarchy"].includes(part) ? byId(part) : null;
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

// Use the system's theme until the button is pressed.
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
const storedTheme = (value) => {
  try { return value ? localStorage.setItem("aisp-theme", value) : localStorage.getItem("aisp-theme"); } catch { return null; }
};
function labelTheme() { byId("theme").textContent = theme() === "dark" ? "Light" : "Dark"; }

function startTheme() {
  const before = storedTheme();
  if (before === "dark" || before === "light") document.documentElement.dataset.theme = before;
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    storedTheme(theme());
    labelTheme();
  });
  dark.addEventListener("change", labelTheme);
  labelTheme();
}

function keys(e) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName);
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const at = addressed();  // quick key presses arrive before `route` has run
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
startCurves();
startErrors();
startRoofline();
startHierarchy();
addEventListener("hashchange", route);
addEventListener("keydown", keys);
route();
