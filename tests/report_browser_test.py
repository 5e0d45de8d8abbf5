"""The report in a browser: every part is used, and the console stays empty."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import quote

import browsers
import pytest
from made_runs import case, laid, made

from pytest_aisp.report.html import write_report
from pytest_aisp.report.run import ReportRun
from pytest_aisp.results.task_results import HierarchyResult, Level

ODD = "ch01/odd_test.py::test_odd[</script> \"quoted\" 'so' 100% 이름 #?/\\]"
LONG = "odd" + "x" * 120
COUNT = 40
SHOWN = COUNT + 3
SEEN = ".filter(e => e.checkVisibility()).map(e => (e.innerText ?? e.textContent).trim())"


class User:
    """A user of the report: window sizes, clicks, keys, and visible text."""

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
        """Wait until `until` returns true. A busy browser is slow."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30).until(lambda driver: until())

    def sees(self, css):
        """Return the visible texts, as soon as there are any."""
        self.waits(lambda: self.all(css))
        return self.js(f"[...document.querySelectorAll(arguments[0])]{SEEN}", css)

    @property
    def cases(self):
        """The number of visible rows."""
        return self.js(
            "[...document.querySelectorAll('#cases tbody tr')].filter(r => !r.hidden).length"
        )

    @property
    def too_wide(self):
        """The number of pixels by which the page scrolls sideways."""
        page = "document.documentElement"
        return self.js(f"{page}.scrollWidth - {page}.clientWidth")


def precise(variant, precision, error):
    """Return a case of a page whose sides differ in precision, and so have a figure."""
    errors, page = {"exact": 1e-7, variant: error}, "ch01/precise_test.py"
    times = {"baseline": 1e-2, "optimized": 1e-3 if precision == "tf32" else 5e-4}
    names = {"id": f"{page}::{variant}", "page": page, "chapter": "ch01", "size": {"n": 8}}
    names |= {"baseline": "exact", "variant": variant, "verdict": "pass", "samples": None}
    return case(0, **names, seconds=times, errors=errors, precisions={variant: precision})


@pytest.fixture
def user(tmp_path):
    results = made(COUNT)
    results["cases"] += [case(COUNT, id=ODD, verdict="fail", variant=LONG, baseline=LONG[::-1])]
    results["cases"] += [precise("fast", "tf32", 3e-4), precise("faster", "fp8", 2e-2)]
    folder = laid(tmp_path / "run", results, pages=True)
    before = [ReportRun.of(made(COUNT, started=f"2026-11-{day}")) for day in (20, 21)]
    levels = [Level("L2", 16 << 20, 9.2e12, 1.7e-7), Level("DRAM", 2 << 30, 4.6e12, 3.4e-7)]
    run = replace(ReportRun.read(folder), hierarchy=HierarchyResult(levels, 265, 310))
    out = write_report(run, tmp_path / "report.html", before, folder)
    with browsers.started() as driver:
        yield User(driver, out.as_uri())


def test_every_part_of_the_report_works(user):
    steps = (
        *(
            opens_the_report,
            filters_the_list,
            orders_the_list,
            changes_the_scale,
            looks_at_the_roofline,
            looks_at_the_errors,
        ),
        *(opens_a_case, opens_an_odd_case, uses_the_keyboard),
        *(changes_the_theme, uses_a_phone, turns_scripts_off),
    )
    for step in steps:
        step(user)
        assert user.driver.get_log("browser") == [], step.__name__


def opens_the_report(user):
    user.opens()
    assert user.sees("h1") == ["NVIDIA H200"]
    assert user.cases == SHOWN
    assert user.sees("#count") == [f"{SHOWN} cases"]
    assert user.js("performance.getEntriesByType('resource').length") == 0
    shapes = user.js("[...document.querySelectorAll('defs g[id^=v-]')].map(g => g.innerHTML)")
    assert len(shapes) == len(set(shapes)) == 13  # no two verdicts differ in colour alone


def filters_the_list(user):
    wrong = len(user.all("tr.v-wrong"))
    user.clicks("#tally [data-verdict=wrong]")
    assert user.cases == wrong > 0
    assert user.element("#tally [data-verdict=wrong]").get_attribute("aria-pressed") == "true"
    user.clicks("#tally [data-verdict=fail]")
    assert user.cases == wrong + len(user.all("tr.v-fail"))
    user.clicks("#tally [data-verdict=wrong]")
    user.clicks("#tally [data-verdict=fail]")
    assert user.cases == SHOWN
    user.clicks("#chapter option[value=ch02]")
    in_chapter = user.cases
    assert 0 < in_chapter < COUNT
    assert all("ch02" in text for text in user.sees("#cases td.case"))
    assert user.sees("#count") == [f"{in_chapter} of {SHOWN} cases"]
    user.clicks("#chapter option[value='']")
    user.clicks("#bound option[value=tensor]")
    assert set(user.sees("#cases td.bound")) == {"tensor"}
    user.element("#search").send_keys("Nothing Like That")
    assert user.cases == 0
    user.clicks("#clear")
    assert user.cases == SHOWN
    user.element("#search").send_keys("DOUBLING3 n2048")
    assert 0 < user.cases < COUNT
    user.presses("\ue003" * 30)  # backspaces
    assert user.cases == SHOWN


def orders_the_list(user):
    user.clicks("#order option[value=speedup]")
    shown = [float(text.split("×")[0]) for text in user.sees("#cases td.number") if text]
    assert len(shown) > 20
    assert shown == sorted(shown, reverse=True)
    user.clicks("#order option[value=look]")
    assert user.sees("#cases td.verdict")[0] == "wrong"


def changes_the_scale(user):
    def marks():
        return [e.get_attribute("x") for e in user.all("tr.v-regressed .plot svg > use:last-child")]

    assert "1×" in user.sees("svg.axis text")
    as_speedups = marks()
    user.clicks("#scale option[value=stored]")
    assert "stored" in user.sees("svg.axis text")
    assert any(text.startswith(("-", "+")) for text in user.sees("svg.axis text"))
    assert len(set(marks())) == 1  # each stored result is 2 % faster
    ticks = user.all("tr.v-regressed .plot .stored")
    (one,) = {tick.get_attribute("x1") for tick in ticks}
    assert one == user.element("#grid line.one").get_attribute("x1")
    user.clicks("#scale option[value=speedup]")
    assert marks() == as_speedups
    user.clicks("#tally [data-verdict=regressed]")
    assert marks() != as_speedups  # the axis covers the visible rows
    user.clicks("#tally [data-verdict=regressed]")
    assert marks() == as_speedups


def looks_at_the_roofline(user):
    assert re.fullmatch(r"Arithmetic .*", user.sees("#arithmetic figcaption")[0])
    assert re.search(r"bf16 771 TFLOP/s", " ".join(user.sees("#arithmetic text")))
    assert re.search(r"copy 4\.24 TB/s", " ".join(user.sees("#bandwidth text")))
    user.clicks("#parts a[href='#roofline']")
    assert 0 <= user.js("document.getElementById('roofline').getBoundingClientRect().top") < 400
    assert user.sees("#level-bandwidth text") == [
        "L2, 16 MiB",
        "9.2 TB/s",
        "DRAM, 2 GiB",
        "4.6 TB/s",
    ]
    assert user.sees("#level-latency text")[1::2] == ["170 ns", "340 ns"]
    dots = "#arithmetic use"
    everything = len(user.all(dots))
    user.clicks("#tally [data-verdict=regressed]")
    assert 0 < len(user.all(dots)) < everything
    assert " cases, as filtered; " in user.sees("#roofline-legend")[0]
    user.clicks("#tally [data-verdict=regressed]")
    assert len(user.all(dots)) == everything
    user.js("document.querySelector('#arithmetic svg').focus()")
    user.presses("\ue014")  # right
    assert re.search(r"FLOP/s \(added: .*FLOP/byte, bf16", user.sees("#tip")[0], re.DOTALL)
    user.presses("\ue007")  # enter
    assert user.sees("#case h1") == ["doubled"]
    user.clicks("#back")


def looks_at_the_errors(user):
    assert user.sees("#errors-figures b") == ["ch01 / precise"]  # the only page of two precisions
    figure = "#errors-figures svg"
    for words in ("exact", "fast, tf32", "faster, fp8", "1 ms", "1e-6"):
        assert words in user.sees(f"{figure} text"), words
    assert "error 3.0e-4" in user.js(f"document.querySelector('{figure} .c0 title').textContent")
    assert len(user.all(f"{figure} circle")) == 3
    user.clicks("#parts a[href='#errors']")
    user.clicks(f"{figure} .c1 circle")
    assert user.sees("#case h1") == ["faster"]
    user.clicks("#back")


def opens_a_case(user):
    user.clicks("#cases tr.v-regressed td.limit")
    assert user.js("location.hash").startswith("#case/")
    assert user.sees("#case .badge") == ["regressed"]
    assert not user.element("#overview").is_displayed()
    headings = user.sees("#case h2")
    assert headings[:4] == ["Samples", "Timeline", "Counters", "History"]
    assert headings[4:] == ["The page says", "Code", *headings[6:]]
    assert headings[6:] == ["Notes", "Profiles, torch", "Run it again"]
    assert "at least 1.5×, at_least on the page" in user.sees("#case .table td")
    rows = user.sees("#case .table tr")
    for goal in (
        r"memory beyond the inputs, at most 0.6 of the baseline's\s+4 KiB\s+2 KiB",
        r"launches\s+63\s+2",
        r"energy, at most 0.8 of the baseline's\s+2 mJ\s+1 mJ",
        r"share of time at compute, at least 50 %\s+20 %\s+70 %",
        r"achieved occupancy\s+25 %\s+50 %",
        r"most frequent stall\s+wait, 60 %\s+wait, 60 %",
    ):
        assert any(re.search(goal, row) for row in rows), (goal, rows)
    assert len(user.all("#case .od")) > 200  # four processes, twice forty windows, and votes
    assert len(user.all("#case .drop")) == 4
    figure = "#case svg[aria-label='Kernels and copies of added and doubled over time']"
    assert [len(user.all(f"{figure} .{kind}")) for kind in ("b", "o", "copied")] == [8, 5, 2]
    assert user.sees(f"{figure} text").count("stream 7") == 2
    assert user.js(f'document.querySelector("{figure} title").textContent').startswith("Memcpy")
    assert user.sees("#case pre .plus")[0].endswith("def doubled(x):")
    user.clicks("[role=tab]:nth-of-type(2)")
    assert "def added(x):" in user.element("[role=tabpanel]").text
    assert user.element("#case .points a").get_attribute("href").endswith("a%20b%231.json")
    user.clicks("#case .command button")
    user.waits(lambda: user.sees("#case .command button")[0] in ("Copied", "Selected"))
    there = user.js("location.hash")
    user.driver.back()
    assert user.element("#overview").is_displayed()
    user.opens(there)
    assert user.sees("#case .badge") == ["regressed"]
    assert user.too_wide == 0


def opens_an_odd_case(user):
    user.opens()
    user.clicks("#cases tr.v-fail a[href*=odd]")
    assert user.sees("#case h1") == [LONG]
    assert user.too_wide == 0
    assert "None of the 2 other runs timed" in user.sees("#case .note")[-2]
    assert user.js("decodeURIComponent(location.hash)") == f"#case/{ODD}"
    assert user.sees("#case .command pre")[0].startswith("pytest 'ch01/odd_test.py::test_odd[<")
    user.opens("#case/no%20such%ZZ")
    assert user.element("#overview").is_displayed()
    user.opens("#roofline")
    assert user.js("scrollY") > 0


def uses_the_keyboard(user):
    user.opens()
    user.presses("/")
    assert user.js("document.activeElement.id") == "search"
    user.js("document.querySelector('#cases a').focus()")
    user.presses("\ue007")
    first = user.js("location.hash")
    user.presses("j")
    assert user.js("location.hash") != first
    user.presses("k")
    assert user.js("location.hash") == first
    user.presses("\ue00c")  # escape
    user.waits(lambda: user.element("#overview").is_displayed())
    assert user.js("document.activeElement.getAttribute('href')") == first
    # Keys pressed so quickly that nothing is drawn between them.
    press = "key => document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))"
    user.presses("\ue007")
    user.waits(lambda: user.all("#case .badge"))
    second = user.element("#case .crumbs span a:last-child").get_attribute("href")
    user.js(f"[...'jjk', 'Escape'].forEach({press})")
    user.waits(lambda: user.element("#overview").is_displayed())
    assert user.js("document.activeElement.href") == second


def changes_the_theme(user):
    def ground():
        return user.js("getComputedStyle(document.body).backgroundColor")

    user.opens()
    light = ground()
    user.clicks("#theme")
    dark = ground()
    assert dark != light
    user.opens()
    assert ground() == dark  # it is remembered
    user.clicks("#theme")
    assert ground() == light
    user.js("localStorage.clear()")
    user.opens(dark=True)
    assert ground() == dark
    assert user.sees("#theme") == ["Light"]


def uses_a_phone(user):
    user.opens(width=375)
    assert user.too_wide == 0
    assert user.sees("#cases td.case")
    user.clicks("#cases tr.v-regressed td.case a")
    assert user.sees("#case .badge") == ["regressed"]
    assert user.too_wide == 0
    user.opens(f"#case/{quote(ODD)}", width=375)
    assert user.sees("#case h1") == [LONG]
    assert user.too_wide == 0


def turns_scripts_off(user):
    user.opens(scripts=False)
    texts = user.sees("#cases tbody tr")
    assert len(texts) == SHOWN
    assert user.sees("noscript p")
    assert not user.sees("#filters, #rooflines, #theme")


# Without a browser


def test_skip_without_a_browser_says_what_to_install(tmp_path):
    with pytest.raises(pytest.skip.Exception) as skipped:
        browsers.refuse({"PATH": str(tmp_path)})
    assert str(skipped.value).startswith(
        "needs a browser; not installed: chromium, chromedriver\n"
        "    apt-get install --no-install-recommends chromium chromium-driver"
    )


def test_missing_required_browser_is_a_failure(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="needs a browser; not installed: chromium"):
        browsers.refuse({"PATH": str(tmp_path), browsers.REQUIRED: "1"})
