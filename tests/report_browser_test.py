"""The report in a browser: opened and clicked through, without one word on the console."""

from __future__ import annotations

import re
from urllib.parse import quote

import browsers
import pytest
from made_runs import case, laid, made

from pytest_aisp.report import write as report
from pytest_aisp.report.run import ReportRun

ODD = "ch01/odd_test.py::test_odd[</script> \"quoted\" 'so' 100% 이름 #?/\\]"
LONG = "odd" + "x" * 120
COUNT = 40
SEEN = ".filter(e => e.checkVisibility()).map(e => (e.innerText ?? e.textContent).trim())"


class Person:
    """Somebody who looks at the report: sizes, clicks, keys, and what is seen."""

    def __init__(self, driver, address):
        self.driver, self.address = driver, address

    def opens(self, part="", *, width=1280, scripts=True, dark=False):
        mobile = width < 500
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        self.driver.get("about:blank")
        self.driver.get(self.address + part)

    def js(self, expression, *args):
        return self.driver.execute_script(f"return {expression}", *args)

    def element(self, css):
        return self.driver.find_element("css selector", css)

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def clicks(self, css):
        self.js("arguments[0].scrollIntoView({block: 'center'})", self.element(css))
        self.element(css).click()

    def presses(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def waits(self, until):
        """Look until it is so: a busy browser takes its time."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30).until(lambda driver: until())

    def sees(self, css):
        """What is written there, as soon as something is."""
        self.waits(lambda: self.all(css))
        return self.js(f"[...document.querySelectorAll(arguments[0])]{SEEN}", css)

    @property
    def cases(self):
        """How many rows are shown."""
        return self.js(
            "[...document.querySelectorAll('#cases tbody tr')].filter(r => !r.hidden).length"
        )

    @property
    def too_wide(self):
        """By how many pixels the page can be scrolled sideways."""
        page = "document.documentElement"
        return self.js(f"{page}.scrollWidth - {page}.clientWidth")


@pytest.fixture
def person(tmp_path):
    results = made(COUNT)
    results["cases"] += [case(COUNT, id=ODD, verdict="fail", variant=LONG, baseline=LONG[::-1])]
    folder = laid(tmp_path / "run", results, pages=True)
    before = [ReportRun.of(made(COUNT, started=f"2026-11-{day}")) for day in (20, 21)]
    out = report.write(ReportRun.read(folder), tmp_path / "report.html", before, folder)
    with browsers.started() as driver:
        yield Person(driver, out.as_uri())


def test_a_person_clicks_through_it(person):
    steps = (
        *(opens_it, filters_it, orders_it, changes_the_scale, looks_at_the_roofline),
        *(opens_a_case, opens_an_odd_case, goes_by_keyboard),
        *(changes_the_theme, holds_a_phone, turns_scripts_off),
    )
    for step in steps:
        step(person)
        assert person.driver.get_log("browser") == [], step.__name__


def opens_it(person):
    person.opens()
    assert person.sees("h1") == ["NVIDIA H200"]
    assert person.cases == COUNT + 1
    assert person.sees("#count") == [f"{COUNT + 1} cases"]
    assert person.js("performance.getEntriesByType('resource').length") == 0
    shapes = person.js("[...document.querySelectorAll('defs g[id^=v-]')].map(g => g.innerHTML)")
    assert len(shapes) == len(set(shapes)) == 12  # no two verdicts differ in colour alone


def filters_it(person):
    wrong = len(person.all("tr.v-wrong"))
    person.clicks("#tally [data-verdict=wrong]")
    assert person.cases == wrong > 0
    assert person.element("#tally [data-verdict=wrong]").get_attribute("aria-pressed") == "true"
    person.clicks("#tally [data-verdict=fail]")
    assert person.cases == wrong + len(person.all("tr.v-fail"))
    person.clicks("#tally [data-verdict=wrong]")
    person.clicks("#tally [data-verdict=fail]")
    assert person.cases == COUNT + 1
    person.clicks("#chapter option[value=ch02]")
    in_chapter = person.cases
    assert 0 < in_chapter < COUNT
    assert all("ch02" in text for text in person.sees("#cases td.case"))
    assert person.sees("#count") == [f"{in_chapter} of {COUNT + 1} cases"]
    person.clicks("#chapter option[value='']")
    person.clicks("#bound option[value=tensor]")
    assert set(person.sees("#cases td.bound")) == {"tensor"}
    person.element("#search").send_keys("Nothing Like That")
    assert person.cases == 0
    person.clicks("#clear")
    assert person.cases == COUNT + 1
    person.element("#search").send_keys("DOUBLING3 n2048")
    assert 0 < person.cases < COUNT
    person.presses("\ue003" * 30)  # backspaces
    assert person.cases == COUNT + 1


def orders_it(person):
    person.clicks("#order option[value=speedup]")
    shown = [float(text.split("×")[0]) for text in person.sees("#cases td.number") if text]
    assert len(shown) > 20
    assert shown == sorted(shown, reverse=True)
    person.clicks("#order option[value=look]")
    assert person.sees("#cases td.verdict")[0] == "wrong"


def changes_the_scale(person):
    def marks():
        return [
            e.get_attribute("x") for e in person.all("tr.v-regressed .plot svg > use:last-child")
        ]

    assert "1×" in person.sees("svg.axis text")
    as_speedups = marks()
    person.clicks("#scale option[value=stored]")
    assert "stored" in person.sees("svg.axis text")
    assert any(text.startswith(("-", "+")) for text in person.sees("svg.axis text"))
    assert len(set(marks())) == 1  # each is made up to be 2 % slower than what is stored
    ticks = person.all("tr.v-regressed .plot .stored")
    (one,) = {tick.get_attribute("x1") for tick in ticks}
    assert one == person.element("#grid line.one").get_attribute("x1")
    person.clicks("#scale option[value=speedup]")
    assert marks() == as_speedups
    person.clicks("#tally [data-verdict=regressed]")
    assert marks() != as_speedups  # the axis is of what is shown
    person.clicks("#tally [data-verdict=regressed]")
    assert marks() == as_speedups


def looks_at_the_roofline(person):
    assert re.fullmatch(r"Arithmetic .*", person.sees("#arithmetic figcaption")[0])
    assert re.search(r"bf16 771 TFLOP/s", " ".join(person.sees("#arithmetic text")))
    assert re.search(r"copy 4\.24 TB/s", " ".join(person.sees("#bandwidth text")))
    person.clicks("#parts a[href='#roofline']")
    assert 0 <= person.js("document.getElementById('roofline').getBoundingClientRect().top") < 400
    dots = "#arithmetic use"
    everything = len(person.all(dots))
    person.clicks("#tally [data-verdict=regressed]")
    assert 0 < len(person.all(dots)) < everything
    assert " cases, as filtered; " in person.sees("#roofline-legend")[0]
    person.clicks("#tally [data-verdict=regressed]")
    assert len(person.all(dots)) == everything
    person.js("document.querySelector('#arithmetic svg').focus()")
    person.presses("\ue014")  # right
    assert re.search(r"FLOP/s \(added: .*FLOP/byte, bf16", person.sees("#tip")[0], re.DOTALL)
    person.presses("\ue007")  # enter
    assert person.sees("#case h1") == ["doubled"]
    person.clicks("#back")


def opens_a_case(person):
    person.clicks("#cases tr.v-regressed td.limit")
    assert person.js("location.hash").startswith("#case/")
    assert person.sees("#case .badge") == ["regressed"]
    assert not person.element("#overview").is_displayed()
    headings = person.sees("#case h2")
    assert headings == ["Samples", "History", "The page says", "Code", *headings[4:]]
    assert headings[4:] == ["Notes", "Profiles, torch", "Run it again"]
    assert "at least 1.5×, at_least on the page" in person.sees("#case .table td")
    rows = person.sees("#case .table tr")
    for goal in (
        r"memory beyond the inputs, at most 0.6 of the baseline's\s+4 KiB\s+2 KiB",
        r"launches\s+63\s+2",
        r"energy, at most 0.8 of the baseline's\s+2 mJ\s+1 mJ",
        r"share of time at compute, at least 50 %\s+20 %\s+70 %",
    ):
        assert any(re.search(goal, row) for row in rows), (goal, rows)
    assert len(person.all("#case .od")) > 200  # four processes, twice forty windows, and votes
    assert len(person.all("#case .drop")) == 4
    assert person.sees("#case pre .plus")[0].endswith("def doubled(x):")
    person.clicks("[role=tab]:nth-of-type(2)")
    assert "def added(x):" in person.element("[role=tabpanel]").text
    assert person.element("#case .points a").get_attribute("href").endswith("a%20b%231.json")
    person.clicks("#case .command button")
    person.waits(lambda: person.sees("#case .command button")[0] in ("Copied", "Selected"))
    there = person.js("location.hash")
    person.driver.back()
    assert person.element("#overview").is_displayed()
    person.opens(there)
    assert person.sees("#case .badge") == ["regressed"]
    assert person.too_wide == 0


def opens_an_odd_case(person):
    person.opens()
    person.clicks("#cases tr.v-fail a[href*=odd]")
    assert person.sees("#case h1") == [LONG]
    assert person.too_wide == 0
    assert "None of the 2 other runs given" in person.sees("#case .said")[-2]
    assert person.js("decodeURIComponent(location.hash)") == f"#case/{ODD}"
    assert person.sees("#case .command pre")[0].startswith("pytest 'ch01/odd_test.py::test_odd[<")
    person.opens("#case/no%20such%ZZ")
    assert person.element("#overview").is_displayed()
    person.opens("#roofline")
    assert person.js("scrollY") > 0


def goes_by_keyboard(person):
    person.opens()
    person.presses("/")
    assert person.js("document.activeElement.id") == "search"
    person.js("document.querySelector('#cases a').focus()")
    person.presses("\ue007")
    first = person.js("location.hash")
    person.presses("j")
    assert person.js("location.hash") != first
    person.presses("k")
    assert person.js("location.hash") == first
    person.presses("\ue00c")  # escape
    person.waits(lambda: person.element("#overview").is_displayed())
    assert person.js("document.activeElement.getAttribute('href')") == first
    # A hand so quick that nothing is shown between its keys.
    press = "key => document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))"
    person.presses("\ue007")
    person.waits(lambda: person.all("#case .badge"))
    second = person.element("#case .crumbs span a:last-child").get_attribute("href")
    person.js(f"[...'jjk', 'Escape'].forEach({press})")
    person.waits(lambda: person.element("#overview").is_displayed())
    assert person.js("document.activeElement.href") == second


def changes_the_theme(person):
    def ground():
        return person.js("getComputedStyle(document.body).backgroundColor")

    person.opens()
    light = ground()
    person.clicks("#theme")
    dark = ground()
    assert dark != light
    person.opens()
    assert ground() == dark  # it is remembered
    person.clicks("#theme")
    assert ground() == light
    person.js("localStorage.clear()")
    person.opens(dark=True)
    assert ground() == dark
    assert person.sees("#theme") == ["Light"]


def holds_a_phone(person):
    person.opens(width=375)
    assert person.too_wide == 0
    assert person.sees("#cases td.case")
    person.clicks("#cases tr.v-regressed td.case a")
    assert person.sees("#case .badge") == ["regressed"]
    assert person.too_wide == 0
    person.opens(f"#case/{quote(ODD)}", width=375)
    assert person.sees("#case h1") == [LONG]
    assert person.too_wide == 0


def turns_scripts_off(person):
    person.opens(scripts=False)
    texts = person.sees("#cases tbody tr")
    assert len(texts) == COUNT + 1
    assert person.sees("noscript p")
    assert not person.sees("#filters, #rooflines, #theme")


# Where there is no browser


def test_without_a_browser_need_and_fact_are_said(tmp_path):
    with pytest.raises(pytest.skip.Exception) as skipped:
        browsers.refuse({"PATH": str(tmp_path)})
    assert str(skipped.value).startswith(
        "needs a browser; not installed: chromium, chromedriver\n"
        "    apt-get install --no-install-recommends chromium chromium-driver"
    )


def test_where_a_browser_is_required_its_lack_is_a_failure(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="needs a browser; not installed: chromium"):
        browsers.refuse({"PATH": str(tmp_path), browsers.REQUIRED: "1"})
