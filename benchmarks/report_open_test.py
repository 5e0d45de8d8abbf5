"""How long a browser takes to open a report, and how large the report is.

    pytest benchmarks/report_open_test.py

The browser is a headless Chromium with an empty profile. The time is from the start of the
navigation to the first frame after the load event. The result is the median of five. The report is
designed for 300 cases.
"""

from __future__ import annotations

from statistics import median

import browsers
import pytest
from made_runs import laid, made

from pytest_aisp.report.html import write_report
from pytest_aisp.report.run import ReportRun

SECONDS = {300: 1.0, 2000: 10.0}
OPENED = """
    const done = arguments[0];
    requestAnimationFrame(() => setTimeout(() => done(performance.now())));
"""


@pytest.fixture(scope="module")
def driver():
    with browsers.started() as driver:
        yield driver


@pytest.mark.parametrize("cases", SECONDS)
def test_a_report_opens(cases, driver, tmp_path, capsys):
    folder = laid(tmp_path / "run", made(cases), pages=True)
    history = [ReportRun.of(made(cases, started=f"2026-11-{day:02}")) for day in range(1, 6)]
    out = write_report(ReportRun.read(folder), tmp_path / "report.html", history, folder)
    taken = []
    for _ in range(5):
        driver.get("about:blank")
        driver.get(out.as_uri())
        taken.append(driver.execute_async_script(OPENED) * 1e-3)
    size = out.stat().st_size
    with capsys.disabled():
        print(
            f"\n{cases} cases: {size / 1e6:.2f} MB, {median(taken):.2f} s (most {max(taken):.2f} s)"
        )
    assert median(taken) < SECONDS[cases]
    assert cases > 300 or size < 5e6
