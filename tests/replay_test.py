"""Judging a recorded run again, with the samples of each case."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.messages import CheckTask
from pytest_aisp.results.results_json import MachineFacts, Manifest
from pytest_aisp.results.row import Row
from pytest_aisp.util.device import cpu_machine
from pytest_aisp.worker.client import ReplayWorker

CASES = [("ch01", "v-n1", 1), ("ch99", "v-n1", 1), ("ch99", "v-cpu-n1", 1), ("ch99", "v-n1", 2)]
"""Chapter, id and GPUs of cases of one function, variant and size."""


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
    assert again.ret == 0
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "-o", "aisp_inconclusive=fail")
    again.stdout.fnmatch_lines([f"E *AssertionError: {why}"])
    assert again.ret == 1
