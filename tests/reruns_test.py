"""Votes, reruns of cases, and cases that run under a tracer or debugger."""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest

from pytest_aisp.isolation import monkeypatches
from pytest_aisp.results import run_reader
from pytest_aisp.results.verdict import Reading
from pytest_aisp.session.case_client import CaseClient
from pytest_aisp.session.judge_case import remeasuring

CASE = "ch99/doubling_test.py::test_doubling[[]doubled-n1001[]]"
TIMES = {"added": 2e-5, "doubled": 1e-5}


def append(pytester, text):
    with open(pytester.path / "conftest.py", "a") as conftest:
        conftest.write(text)


def rows(pytester):
    return list(run_reader.load(pytester.path / "kept").rows())


# Votes


def test_every_vote_is_stored_and_printed(timed_page, pytester):
    timed_page(at_least="{'sm90': 3.0}")
    result = pytester.runpytest_subprocess("-vv", "--aisp-artifacts=kept")
    vote = (
        "test_doubling[[]doubled[]]: vote of fresh process {}: [12].???x, error 0.??%, graph clock"
    )
    result.stdout.fnmatch_lines([vote.format(number) for number in (1, 2, 3)])
    [row] = rows(pytester)
    assert [timing["value"] for timing in row.timings[1:]] == row.votes
    assert len(row.votes) == 3
    assert all(timing["error"] > 0 and timing["clock"] == "graph" for timing in row.timings)


@pytest.mark.parametrize(
    ("clock", "ranks", "starts"),
    [("graph", 1, [3, 3, 3, 4]), ("host", 1, [1, 2, 3, 4]), ("graph", 2, [1, 2, 3, 4])],
)
def test_voting_processes_start_together_on_a_gpu_clock(clock, ranks, starts):
    started, closed, world = [], [], ranks

    class Client(CaseClient):
        def __init__(self):
            self.timings, self.against, self.notes = [SimpleNamespace(clock=clock)], [], []
            settings = SimpleNamespace(confirm_budget=60)
            context = SimpleNamespace(
                replay=None, vote_seconds=0.0, settings=settings, progress=len
            )
            self.run = context

        ranks = world

        def fresh_worker(self):
            bench = SimpleNamespace(close=lambda: closed.append(bench))
            started.append(bench)
            return bench

    def measure(number, bench):
        used.append(bench)
        counts.append(len(started))
        return Reading(0.5)

    client, used, counts = Client(), [], []
    with remeasuring(client, measure) as vote:
        for _ in range(4):
            assert vote() == Reading(0.5)
    assert counts == starts
    assert used == started == closed

    del used[:], started[:], closed[:]
    with contextlib.suppress(KeyError), remeasuring(client, measure) as vote:
        vote()
        raise KeyError
    assert len(closed) == len(started) == counts[0]  # what was not asked is not left behind

    client.run.vote_seconds = 61.0
    with remeasuring(client, measure) as vote:
        assert vote() is None
    assert len(started) == counts[0]


DIES = """
import os

from pytest_aisp.timing import fake_device

def simulate(baseline, optimized, *args):
    if "voting" in os.listdir() and baseline != optimized:  # the canary lives
        os._exit(3)
    open("voting", "w").close()
    return fake_device.simulate(baseline, optimized, *args)
"""


def test_a_crashed_vote_is_reported(timed_page, pytester):
    timed_page(at_least="{'sm90': 3.0}")
    pytester.makepyfile(dies=DIES)
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("pytest_aisp.timing.fake_device", "dies"))
    result = pytester.runpytest_subprocess("-vv")
    died = "doubled at n=1001: the worker process ended with exit code 3 during: time"
    result.stdout.fnmatch_lines(
        [f"E *{died}", f"test_doubling[[]doubled[]]: vote of fresh process 1: {died}"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


# Reruns

COUNTED = "open('attempts', 'a').write('x')\npair.assert_equivalent()"
OTHER = """
def test_other():
    with open("others", "a") as file:
        file.write("x")
    assert False
"""


def attempts(pytester, name="attempts"):
    file = pytester.path / name
    return len(file.read_text()) if file.exists() else 0


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_reruns_skip_cases_and_repeat_other_tests(page, pytester, workers):
    path = page("3 * x", body=COUNTED)
    eager = "import pytest\n\n\n@pytest.mark.flaky(reruns=2)\n@compare("
    path.write_text(path.read_text().replace("@compare(", eager))
    pytester.makepyfile(other_test=OTHER)
    options = ["--aisp-check", "--reruns=3", "-vv", workers]
    result = pytester.runpytest_subprocess(*options)
    result.stdout.fnmatch_lines(
        [
            "*: --reruns=3 does not rerun cases: the first verdict stands",
            "=* 2 failed, 3 rerun in *",
        ]
    )
    assert (attempts(pytester), attempts(pytester, "others")) == (1, 4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("option", ["--force-reruns=2", "--reruns-mode=append"])
def test_options_that_rerun_cases_are_refused(page, pytester, option):
    page()
    result = pytester.runpytest_inprocess("--aisp-check", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            f"ERROR: {option.removesuffix('=2')} reruns cases too, and a rerun would turn a red *",
            "Use --reruns, which does not rerun cases",
        ]
    )


AGAIN = """
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    for attempt in (1, 2):
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.failed and attempt == 1:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_a_second_attempt_at_a_case_is_an_error(page, pytester):
    page("x if open('attempts', 'a').write('x') and len(open('attempts').read()) == 1 else 2 * x")
    append(pytester, AGAIN)
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "ch99/doubling_test.py:*: this case was already judged in this run: a rerun must not *",
            "Exclude cases from whatever reruns tests",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


# Tracers, debuggers, coverage

TRACES = """

import sys


def trace(*args):
    return None


def pytest_runtest_call(item):
    sys.settrace(trace)
"""
TRACED = "{} (sys.settrace) traces the process that measures: it slows Python down many times"


def test_a_case_that_is_traced_is_invalid_and_names_the_tracer(timed_page, pytester):
    timed_page()
    append(pytester, TRACES)
    result = pytester.runpytest_subprocess("--aisp-in-process", "-v")
    result.stdout.fnmatch_lines(
        [
            f"*{CASE} INVALID*",
            f"E  *AssertionError: doubled at n=1001: {TRACED.format('conftest')}",
            "doubling *doubled *invalid",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_traced_case_can_be_checked(page, pytester):
    page()
    append(pytester, TRACES)
    result = pytester.runpytest_subprocess("--aisp-in-process", "--aisp-check")
    result.stdout.fnmatch_lines(["=* 1 checked in *"])


# Coverage's .pth file starts coverage in each process of a user in the same way.
EVERYWHERE = """
import os, sys

if "COVERAGE_PROCESS_START" in os.environ:
    import coverage_of_a_kind

    sys.settrace(coverage_of_a_kind.trace)
"""


@pytest.mark.new_processes  # what a process reads when it starts
def test_coverage_in_worker_processes_is_named(timed_page, pytester, monkeypatch):
    timed_page()
    path = pytester.mkdir("site")
    (path / "sitecustomize.py").write_text(EVERYWHERE)
    (path / "coverage_of_a_kind.py").write_text("def trace(*args):\n    return None\n")
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{before}")
    monkeypatch.setenv("COVERAGE_PROCESS_START", ".coveragerc")
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        [
            f"E  *doubled at n=1001: {TRACED.format('coverage_of_a_kind')}",
            "E  *Measure without it: unset COVERAGE_PROCESS_START",
            "doubling *doubled *invalid",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_monitoring_tool_is_named(monkeypatch):
    tools = SimpleNamespace(get_tool=["", "coverage", None, None, None, None].__getitem__)
    monkeypatch.setattr(sys, "monitoring", tools, raising=False)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert monkeypatches.active_tracer() == "coverage (sys.monitoring)"


def test_a_python_profiler_is_named_by_its_module(monkeypatch):
    class Profiler:
        __module__ = "yappi"

        def hook(self, *args):
            """Called for every call."""

    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(sys, "getprofile", lambda: Profiler().hook)
    assert monkeypatches.active_tracer() == "yappi (sys.setprofile)"


@pytest.mark.parametrize(
    ("ini", "ends"), [("pass", "1 inconclusive"), ("fail", "1 failed")], ids=["pass", "fail"]
)
def test_a_case_timed_under_a_debugger_is_inconclusive(timed_page, pytester, ini, ends):
    timed_page(at_least="9")
    command = [sys.executable, "-m", "pytest", "--pdb", "-o", f"aisp_inconclusive={ini}"]
    result = pytester.run(*command, stdin=b"c\n")
    reason = "timed inside pytest (--pdb), not in a separate process: no verdict"
    result.stdout.fnmatch_lines([f"*{reason}", f"=* {ends} in *"])


def test_a_case_that_is_stepped_through_is_invalid(timed_page, pytester):
    timed_page()
    steps = b"n\n" * 9 + b"c\n"
    result = pytester.run(sys.executable, "-m", "pytest", "--trace", stdin=steps)
    result.stdout.fnmatch_lines(
        [f"E  *{TRACED.format('_pytest.debugging')}", "doubling *doubled *invalid"]
    )


def test_recording_inside_pytest_is_refused(page, pytester):
    page()
    result = pytester.runpytest_inprocess("--aisp-update-expectations", "--pdb")
    result.stderr.fnmatch_lines(
        ["ERROR: --aisp-update-expectations cannot be combined with --pdb: stored results *"]
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
