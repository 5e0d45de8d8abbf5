"""The canary: a side timed against itself, unchanged and slowed down. If it fails, exit code 17."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace

import pytest

from pytest_aisp.results import run_reader, verdict
from pytest_aisp.results.verdict import Reading
from pytest_aisp.session.canary import Canary, judge
from pytest_aisp.timing import schedule
from pytest_aisp.timing.fake_device import Noise, Process
from pytest_aisp.timing.schedule import Budget

SPEEDS = {"added": 2e-5, "doubled": 1e-5}
INVALID = 17
DEAF = """
from pytest_aisp.timing import fake_device

def simulate(baseline, optimized, options, budget, seed):
    return fake_device.simulate(baseline, optimized, {**options, "planted": 0.0}, budget, seed)
"""
BROKEN = """
from pytest_aisp.timing import fake_device

def simulate(baseline, optimized, *rest):
    if baseline == optimized:
        raise RuntimeError("the context is lost")
    return fake_device.simulate(baseline, optimized, *rest)
"""


@pytest.fixture
def timer(gpu, pytester):
    """Put a timer of the test's own in place of the simulated one."""

    def install(text):
        gpu(**SPEEDS)
        pytester.makepyfile(own=text)
        conftest = pytester.path / "conftest.py"
        text = conftest.read_text().replace(
            "pytest_aisp.timing.fake_device:simulate", "own:simulate"
        )
        conftest.write_text(text)

    return install


def test_a_run_prints_and_stores_its_canary(timed_page, pytester):
    timed_page()
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "canary: test_doubling[[]doubled-n1001[]] on the graph clock: against itself *x,"
            " with 1.5% planted 0.98*x"
        ]
    )
    [line] = (pytester.path / "kept" / "canaries.jsonl").read_text().splitlines()
    assert json.loads(line)["wrong"] == ""


def test_a_side_that_differs_from_itself_makes_the_run_invalid(page, gpu, pytester):
    gpu(**SPEEDS, session=0.03)
    page()
    result = pytester.runpytest_subprocess()
    assert result.ret == INVALID
    result.stdout.fnmatch_lines(
        [
            "RUN INVALID (canary): test_doubling[[]doubled-n1001[]] on the graph clock: a side"
            " differs from its copy: 0.97*x, 0.97*x, 0.97*x; no verdict of this run counts"
            " (exit code 17)"
        ]
    )


def test_the_replay_of_an_invalid_run_is_invalid(page, gpu, pytester):
    gpu(**SPEEDS, session=0.03)
    page()
    assert pytester.runpytest_subprocess("--aisp-artifacts=kept").ret == INVALID
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    assert again.ret == INVALID
    again.stdout.fnmatch_lines(["RUN INVALID (canary): *"])


def test_an_invalid_run_says_how_to_restore_the_stored_results(page, gpu, pytester, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    gpu(**SPEEDS, session=0.03)
    page()
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=2")
    assert result.ret == INVALID
    result.stdout.fnmatch_lines(
        [
            "stored: *",
            "RUN INVALID (canary): *",
            "this run is invalid, but its results were stored. To restore the old ones:",
            "    git checkout -- baselines",
        ]
    )


def test_an_unseen_planted_slowdown_makes_the_run_invalid(page, timer, pytester):
    timer(DEAF)
    page()
    result = pytester.runpytest_subprocess()
    assert result.ret == INVALID
    result.stdout.fnmatch_lines(
        [
            "RUN INVALID (canary): *: a planted slowdown of 0.0% was not detected: *x, *x, *x, *x;"
            " no verdict of this run counts (exit code 17)"
        ]
    )


def test_a_canary_that_fails_makes_the_run_invalid(page, timer, pytester):
    timer(BROKEN)
    page()
    result = pytester.runpytest_subprocess()
    assert result.ret == INVALID
    result.stdout.fnmatch_lines(["RUN INVALID (canary): *cannot be timed again: *context is lost*"])


def test_the_suite_timeout_does_not_stop_the_canary(timed_page, pytester):
    timed_page()
    late = "\n    config.stash[RUN].started -= 1e6\n"
    with (pytester.path / "conftest.py").open("a") as conftest:
        conftest.write("\n\nfrom pytest_aisp.plugin import RUN\n\n\n")
        conftest.write(f"def pytest_aisp_result(config, row):{late}")
    result = pytester.runpytest_subprocess("-o", "aisp_suite_timeout=100000")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["canary: *", "=* 1 new in *"])


def test_each_xdist_worker_runs_its_own_canary(page, gpu, pytester):
    gpu(**SPEEDS, session=0.03)
    for name in "abcd":
        page(name=f"{name}_test.py")
    result = pytester.runpytest_subprocess("-n2")
    assert result.ret == INVALID
    lines = [line for line in result.outlines if line.startswith("RUN INVALID (canary)")]
    assert len(lines) == 2


DIES = """
pair.assert_equivalent()
if os.environ.get("JUDGED") and os.environ["PYTEST_XDIST_WORKER"] == "gw0":
    os._exit(1)
pair.assert_speedup()
os.environ["JUDGED"] = "a case of this process"
"""


@pytest.mark.parametrize("mode", ["", "--aisp-aa"])
def test_verdicts_of_a_crashed_worker_are_listed_as_without_a_canary(page, gpu, pytester, mode):
    gpu(**SPEEDS)
    for name in "abcdef":
        page(name=f"{name}_test.py", defs="import os", body=DIES.strip())
    result = pytester.runpytest_subprocess("-n2", "--aisp-artifacts=kept", *filter(None, [mode]))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    without_canary = json.loads((pytester.path / "kept/manifest.json").read_text())["no_canary"]
    assert len(without_canary) == (0 if mode else 1)
    result.stdout.fnmatch_lines(["NO VERDICT: worker 'gw0' crashed while running *"])
    if mode:
        return result.stdout.no_fnmatch_line("NO CANARY: *")
    result.stdout.fnmatch_lines(
        [
            "NO CANARY: worker 'gw0' ended before its canary; its verdicts:"
            " ?_test.py::test_doubling[[]doubled-n1001[]]",
            "canary: *",
            "=* 1 failed, 5 new in *",
        ]
    )
    assert re.fullmatch(
        r"worker 'gw0': [a-f]_test\.py::test_doubling\[doubled-n1001\]", without_canary[0]
    )


INTERRUPTED = """
from pytest_aisp.session import canary


def interrupted(client):
    raise KeyboardInterrupt


canary.run_canary = interrupted
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_an_interrupt_during_the_canary_keeps_the_results(timed_page, pytester, workers):
    timed_page()
    with open(pytester.path / "conftest.py", "a") as conftest:
        conftest.write(INTERRUPTED)
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept", workers)
    result.stdout.fnmatch_lines(["=* aisp =*", "doubling *new", "*1 new in *"])
    run = run_reader.load(pytester.path / "kept")
    assert [case["verdict"] for case in run.cases] == ["new"]
    assert (pytester.path / "kept" / "results.json").exists()
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    if workers == "-n0":
        result.stdout.fnmatch_lines(["!* KeyboardInterrupt !*"])
        assert result.ret == pytest.ExitCode.INTERRUPTED
        assert (run.manifest.complete, run.manifest.exit_code) == (False, 2)


@pytest.mark.parametrize("mode", ["--aisp-check", "--aisp-aa"])
def test_modes_without_verdicts_run_no_canary(timed_page, pytester, mode):
    timed_page()
    result = pytester.runpytest_subprocess(mode)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("canary:*")


def test_the_case_with_the_shortest_call_is_used(page, gpu, pytester):
    gpu(**SPEEDS, quick=1e-6)
    page(name="slow_test.py")
    quick = page(name="quick_test.py")
    quick.write_text(quick.read_text().replace("doubled", "quick"))
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["canary: test_doubling[[]quick-n1001[]] *"])


NOISES = {
    "white": Noise(window=0.0020, capture=0.0015, process=0.0004),
    "heavy tail": Noise(window=0.0020, capture=0.0015, process=0.0004, heavy=True),
    "dips": Noise(window=0.0020, capture=0.0015, process=0.0004, dip=0.5),
    "rogue processes": Noise(window=0.0020, capture=0.0015, process=0.0004, rogue=0.05),
}


def simulated(noise, rng, seconds=1e-5):
    """Return a `TimeItself` on a simulated device; each call is a fresh process."""

    def time_itself(planted, fresh):
        process = Process((seconds, seconds), noise, rng, planted=planted)
        samples = process.measure(Budget())
        counted, calls = samples.details["counted"][1], samples.details["calls"][1]
        return Reading(samples.value, samples.error), calls / counted - 1

    return time_itself


@pytest.mark.parametrize("name", NOISES)
def test_chance_alone_does_not_make_a_run_invalid(name):
    rng = random.Random(name)
    spread = 0.0010
    for _ in range(150):
        canary = Canary("case", "graph")
        judge(canary, spread, simulated(NOISES[name], rng))
        assert canary.wrong == ""


def test_the_planted_slowdown_is_a_whole_number_of_calls():
    quiet = replace(NOISES["white"], window=0, capture=0, process=0)
    for seconds in (1e-6, 1e-5, 3e-4):
        reading, planted = simulated(quiet, random.Random(1), seconds)(0.01, False)
        assert planted >= 0.01
        assert reading.value == pytest.approx(-math.log1p(planted), abs=1e-6)


@pytest.mark.parametrize(
    ("calls", "slots", "planted", "expected"),
    [(500, 2, 0.0, 500), (104, 4, 0.01, 100), (96, 19, 0.01, 95), (1, 1, 0.01, 1)],
)
def test_a_window_has_enough_calls_for_the_planted_share(calls, slots, planted, expected):
    assert schedule.calls_to_plant(calls, slots, planted) == expected


def test_the_planted_share_is_one_percent_or_the_detectable_loss():
    assert verdict.planted_share(0.0001) == 0.01
    assert verdict.planted_share(0.01) == pytest.approx(0.0618, abs=1e-4)
