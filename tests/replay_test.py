"""Judging a recorded run again: each case on samples of its own, and on no more than there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_aisp.bench.replay import Recording
from pytest_aisp.common.device import cpu_machine
from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.messages import Task
from pytest_aisp.results.row import Row

CASES = [("ch01", "v-n1", 1), ("ch99", "v-n1", 1), ("ch99", "v-cpu-n1", 1), ("ch99", "v-n1", 2)]
"""Chapter, id and GPUs of cases of one function, variant and size."""


@pytest.fixture
def recording(tmp_path):
    """Return the folder of a run of `CASES`, each with its place among them as its only check."""
    manifest = {"root": "/then", "started": "", "invalid": [], "git": None, "peaks": {}}
    artifacts = Artifacts(tmp_path / "kept")
    artifacts.start({**manifest, "machine": cpu_machine().to_json()})
    for number, (chapter, case, gpus) in enumerate(CASES):
        key, page = f"a_test.py::test_f[{case}]", f"/then/{chapter}/a_test.py"
        row = Row(f"{chapter}/{key}", "", key, page, "test_f", "v", {"n": 1}, "dram", gpus)
        artifacts.add(replace(row, checks=[{"number": number}]).to_json())
    return artifacts.folder


def task(chapter, case, gpus):
    """Return a request for the checks of a case, in a checkout elsewhere."""
    where = {"page": f"/now/{chapter}/a_test.py", "root": "/now"}
    names = {"function": "test_f", "variant": "v", "case": case, "size": {"n": 1}, "gpus": gpus}
    return Task(kind="check", **where, **names)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_case_is_its_page_below_the_root_its_id_and_its_gpus(recording: Path, manifest):
    if not manifest:
        (recording / "manifest.json").unlink()
    bench = Recording(recording)
    found = [bench.ask(task(*case), 1.0, str).result["number"] for case in CASES]
    assert found == [0, 1, 2, 3]
    lacking = bench.ask(task("ch07", "v-n1", 1), 1.0, str)
    assert lacking.message == "the recording holds no test_f[v] at {'n': 1}"
