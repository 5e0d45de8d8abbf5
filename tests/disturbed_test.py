"""Cases that the machine disturbed: no verdict, exit code 17, and nothing is stored."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_aisp.tools import ci_gate_runs

ALWAYS = {"throttle": 1.0}
WHO = "20 blocks were disturbed: thermal slowdown (simulated)"


@pytest.fixture
def restless(page, gpu, pytester):
    """A page of two cases on a GPU that throttles and so disturbs both. No pauses."""

    def write(*, noise=ALWAYS, wait="0", **parts):
        gpu(added=2e-5, doubled=1e-5, noise=noise)
        page(**parts)
        ini = pytester.path / "tox.ini"
        ini.write_text(f"{ini.read_text()}\naisp_wait = {wait}\n")

    return write


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_a_disturbed_case_is_not_red_and_the_run_exits_17(restless, pytester, workers):
    restless(at_least="99.0")
    result = pytester.runpytest_subprocess(*workers, "-v", "--junitxml=j.xml", "--aisp-artifacts=a")
    result.stdout.fnmatch_lines(
        [
            f"*DISTURBED: {WHO}*",
            f"disturbed: *test_doubling[[]doubled-n1001[]]: {WHO}",
            "DISTURBED: 1 of 1 case got no verdict, because something else used the machine"
            " (exit code 17 if no case is red). Find out what:",
            "    aisp machine doctor",
            "*1 disturbed*",
        ]
    )
    assert result.ret == 17
    assert "RUN INVALID" not in result.stdout.str()
    [case] = ElementTree.parse(pytester.path / "j.xml").iter("testcase")
    assert case.find("skipped").attrib["message"] == f"disturbed: {WHO}"
    assert case.find(".//property[@name='aisp_verdict']").attrib["value"] == "disturbed"
    run = json.loads((pytester.path / "a" / "results.json").read_text())
    assert run["run"]["verdicts"] == {"disturbed": 1}
    [written] = run["cases"]
    assert (written["verdict"], written["speedup"], written["reasons"]) == (
        "disturbed",
        None,
        [WHO],
    )
    assert WHO in (pytester.path / "a" / "report.html").read_text()
    found = ci_gate_runs.read(pytester.path / "a")
    assert found.status == f"1 of 1 cases were disturbed ({WHO})"
    missing = ci_gate_runs.judge([found], ["simulated-gpu"])  # nothing timed that product
    assert missing.exit_code == 1
    assert ci_gate_runs.judge([found], []).exit_code == 17
    replayed = pytester.runpytest_subprocess("--aisp-replay=a", "-v")
    replayed.stdout.fnmatch_lines([f"*DISTURBED: {WHO}*"])
    assert replayed.ret == 17


def test_a_red_case_beside_a_disturbed_one_is_still_red(restless, pytester):
    restless()
    (pytester.path / "ch99" / "wrong_test.py").write_text(
        (pytester.path / "ch99" / "doubling_test.py")
        .read_text()
        .replace("return 2 * x\n", "return x\n")
    )
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*1 failed, 1 disturbed*"])
    assert result.ret == 1


def test_a_disturbed_case_is_not_stored(restless, pytester):
    restless()
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=2")
    assert result.ret == 17
    assert "stored:" not in result.stdout.str()
    assert not (pytester.path / "baselines").exists()


COMES_AND_GOES = """
from pathlib import Path
from pytest_aisp.timing import fake_device

def simulate(baseline, optimized, options, budget, seed):
    count = Path("timings")
    number = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (number + 1))
    disturbed = options["details"]["from"] <= number < options["details"]["to"]
    options = {**options, "noise": {"throttle": 1.0 if disturbed else 0.0}}
    return fake_device.simulate(baseline, optimized, options, budget, seed)
"""


@pytest.mark.parametrize("pages", ["aisp_pages = .", ""])
def test_a_case_is_measured_again_when_the_machine_is_quiet(restless, pytester, pages):
    restless(at_least="1.5", wait="30")
    ini = pytester.path / "tox.ini"  # without `pages`, the plugin starts with the first case
    ini.write_text(ini.read_text().replace("aisp_pages = .", pages))
    pytester.makepyfile(comes_and_goes=COMES_AND_GOES)
    conftest = pytester.path / "conftest.py"
    text = conftest.read_text().replace("pytest_aisp.timing.fake_device:", "comes_and_goes:")
    conftest.write_text(text.replace("'details': {}", "'details': {'from': 0, 'to': 1}"))
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(
        [
            f"*::test_doubling[[]doubled-n1001[]]: waiting 1 s for the machine: {WHO}",
            "*NEW 2.0*",
            "*1 new*",
        ]
    )
    assert result.ret == 0


def test_a_vote_that_is_disturbed_gives_no_verdict(restless, pytester):
    restless(at_least="3.0")
    pytester.makepyfile(comes_and_goes=COMES_AND_GOES)
    conftest = pytester.path / "conftest.py"
    text = conftest.read_text().replace("pytest_aisp.timing.fake_device:", "comes_and_goes:")
    conftest.write_text(text.replace("'details': {}", "'details': {'from': 2, 'to': 9}"))
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines([f"*DISTURBED: {WHO}*"])
    assert result.ret == 17


def test_the_waits_of_a_case_and_of_the_run_are_limited(restless, pytester, monkeypatch):
    restless(wait="0.2", variants="[doubled] * 1", more="")
    result = pytester.runpytest_subprocess()
    said = [line for line in result.outlines if "waiting" in line]
    assert len(said) == 1  # the first pause is a second, but only 0.2 s are allowed
    assert result.ret == 17


def test_a_wait_is_a_number(page, pytester):
    page()
    result = pytester.runpytest_subprocess("-o", "aisp_wait=soon")
    result.stderr.fnmatch_lines(
        ["*aisp_wait = soon: give a number at least 0, as in aisp_wait = 120"]
    )
