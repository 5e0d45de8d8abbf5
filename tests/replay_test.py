"""Judging a recorded run again, with the samples of each case."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from conftest import BODY
from pytest_aisp.results import run_reader
from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.messages import CheckTask
from pytest_aisp.results.results_json import MachineFacts, Manifest
from pytest_aisp.results.row import JournalLine, Row
from pytest_aisp.session import case_report
from pytest_aisp.util.device import cpu_machine
from pytest_aisp.worker.client import ReplayWorker

CASES = [("ch01", "v-n1", 1), ("ch99", "v-n1", 1), ("ch99", "v-cpu-n1", 1), ("ch99", "v-n1", 2)]
"""Chapter, id and GPUs of cases of one function, variant and size."""
CASE = "ch99/doubling_test.py::test_doubling[[]doubled-n1001]"
GREEN = "def test_something_else():\n    pass\n"
LACKING = "NOT REPLAYED (exit code 17 if no case is red):"
UNEXPLAINED = "in the recorded run, for a reason that this replay does not judge"


@pytest.fixture
def recording(tmp_path):
    """Return the folder of a run of `CASES`, each with its place among them as its only check."""
    machine = msgspec.convert(cpu_machine().to_json(), MachineFacts)
    facts = {"started": "", "complete": False, "invalid": [], "git": None, "peaks": {}}
    artifacts = Artifacts(tmp_path / "kept")
    artifacts.start(Manifest(root="/then", machine=machine, **facts))
    for number, (chapter, case, gpus) in enumerate(CASES):
        key, page = f"a_test.py::test_f[{case}]", f"/then/{chapter}/a_test.py"
        row = Row(f"{chapter}/{key}", "", key, page, "test_f", "v", {"n": 1}, "dram", gpus)
        row.checks.append({"number": number})
        artifacts.add(row)
    return artifacts.folder


def task(chapter, case, gpus):
    """Return a request for the checks of a case, in a checkout elsewhere."""
    where = {"page": f"/now/{chapter}/a_test.py", "root": "/now"}
    names = {"function": "test_f", "variant": "v", "case": case, "size": {"n": 1}, "gpus": gpus}
    return CheckTask(**where, **names)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_recorded_case_is_found_by_page_id_and_gpus(recording: Path, manifest):
    if not manifest:
        (recording / "manifest.json").unlink()
    bench = ReplayWorker(recording)
    found = [bench.ask(task(*case), 1.0, str).result["number"] for case in CASES]
    assert found == [0, 1, 2, 3]
    lacking = bench.ask(task("ch07", "v-n1", 1), 1.0, str)
    assert lacking.message == "the recording holds no test_f[v] at {'n': 1}"


def test_a_replay_without_enough_votes_is_inconclusive(page, gpu, recorded, pytester):
    page()
    gpu(added=2e-5, doubled=1e-5)
    pytester.runpytest_subprocess("--aisp-artifacts=kept")
    gpu(added=2e-5, doubled=0.7e-5)
    recorded()
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    case = "inconclusive: doubling_test.py::test_doubling[[]doubled-n1001]: "
    why = "the recording holds 1 timing of it, and one more is needed"
    again.stdout.fnmatch_lines(
        [
            "doubling *2.0??x *inconclusive",
            f"{case}{why}",
            f"{case}2.0??x against 2.8??x (stored in *votes of fresh processes: none -> open",
            "=* 1 inconclusive in *",
        ]
    )
    again.stdout.fnmatch_lines([LACKING, f"    {CASE}: the recording holds too few samples"])
    again.stdout.no_fnmatch_line("*cause: *")  # no votes that disagree
    assert again.ret == 17
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "-o", "aisp_inconclusive=fail")
    again.stdout.fnmatch_lines([f"E *AssertionError: {why}"])
    assert again.ret == 1


@pytest.fixture
def red(page, gpu, pytester):
    """Record a red run of a simulated GPU, and return what replays it."""

    def record(*options, **parts):
        gpu(added=2e-5, doubled=1e-5)
        page(**parts)
        run = pytester.runpytest_subprocess("--aisp-artifacts=kept", *options)
        assert run.ret == 1
        return lambda *more: pytester.runpytest_subprocess("--aisp-replay=kept", *more)

    return record


def test_a_replay_of_a_missed_claim_is_green_with_a_claim_that_holds(red, page, pytester):
    replay = red(at_least="3.0")
    [row] = run_reader.load(pytester.path / "kept").rows()
    assert (row.verdict, row.missed_limit) == ("fail", True)
    assert replay().ret == 1
    page(at_least="1.5")
    assert replay().ret == 0


def test_a_failed_assertion_of_the_recorded_run_stays_red(red, page):
    replay = red(body=f"{BODY}\nassert pair.speedup > 3, 'too slow'")
    page()
    again = replay()
    assert again.ret == 1
    again.stdout.fnmatch_lines([f"*fail {UNEXPLAINED}:", "AssertionError: too slow"])


@pytest.mark.parametrize("word", ["wrong", "fail", "invalid"])
def test_a_red_verdict_that_a_replay_cannot_judge_stays_red(timed_page, pytester, word):
    """The errors of sides and sandboxes are in the recorded verdict alone."""
    timed_page()
    assert pytester.runpytest_subprocess("--aisp-artifacts=kept").ret == 0
    journal = pytester.path / "kept" / "results.jsonl"
    row = json.loads(journal.read_text())
    assert row["missed_limit"] is False
    row |= {"verdict": word, "cause": "code", "reasons": ["doubled failed in its sandbox"]}
    journal.write_text(json.dumps(row) + "\n")
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "--aisp-artifacts=again")
    assert again.ret == 1
    advice = "Run the case again, without --aisp-replay"
    lines = [f"*{word} {UNEXPLAINED}:", "doubled failed in its sandbox", advice]
    again.stdout.fnmatch_lines([*lines, "*1 failed in *"])
    [row] = run_reader.load(pytester.path / "again").rows()
    assert (row.verdict, row.cause, row.reasons[0]) == (word, "code", f"{word} {UNEXPLAINED}")


def test_a_red_verdict_of_a_speed_that_no_machine_has_is_judged_again():
    row = JournalLine(
        *("ch99/a_test.py::test_f[v]", "", "", "", "test_f", "v", {}, "dram"),
        schema=1,
        samples=None,
        verdict="invalid",
    )
    too_fast = "1 us is less than the 2 us that this machine's copy rate allows for the declared"
    assert case_report._is_replayed(replace(row, reasons=[f"{too_fast} work:"]))
    assert not case_report._is_replayed(replace(row, reasons=["doubled was traced"]))


def test_a_red_case_that_a_replay_does_not_time_stays_red(red, page):
    replay = red(at_least="3.0")
    page(at_least="1.0", body="pair.assert_equivalent()\npair.assert_launches(at_most=3)")
    assert replay().ret == 1


def test_a_red_case_that_no_longer_exists_makes_the_replay_invalid(red, page, pytester):
    replay = red(at_least="3.0")
    page().write_text(GREEN)
    again = replay("ch99")
    again.stdout.fnmatch_lines([LACKING, f"    {CASE}: red in the recorded run, and not run again"])
    assert again.ret == 17


def test_a_replay_of_selected_cases_ignores_the_other_red_cases(red, page, pytester):
    replay = red(at_least="3.0")
    page(at_least="1.5", name="other_test.py")
    pytester.runpytest_subprocess("--aisp-artifacts=kept")
    for selection in ("-kother",), ("ch99/other_test.py",):
        again = replay(*selection)
        again.stdout.no_fnmatch_line("NOT REPLAYED*")
        assert again.ret == 0
