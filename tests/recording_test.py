"""Recording: one run, two runs at once, and pages that changed or were deleted."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from pytest_aisp.results import store
from pytest_aisp.results.row import Recording, Row
from pytest_aisp.session import recorder
from pytest_aisp.session.case_client import CaseClient
from pytest_aisp.session.recorder import Recorder

UPDATE = ["--aisp-update-expectations", "--aisp-processes=1"]
FACTS = {"driver": "580.65", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0"}


@pytest.fixture
def make(tmp_path):
    """Return a recorder as the controller of a recording run has one."""

    def make():
        hook = SimpleNamespace(pytest_aisp_result=lambda config, row: None)
        settings = SimpleNamespace(artifacts=None, update="missing", root=tmp_path)
        return Recorder(settings, SimpleNamespace(hook=hook))

    return make


@pytest.fixture
def row(tmp_path):
    """Return the row of a recorded case."""

    def row(name="first", **fields):
        times = {"values": [[0.7]], "clock": "graph", "baseline_us": 2.0, "optimized_us": 1.0}
        path = tmp_path / "baselines" / "gpu" / "ch01.json"
        key = f"{name}_test.py::test_it[{name}-n1]"
        return Row(
            nodeid=f"ch01/{key}",
            file=str(path),
            key=key,
            page=f"ch01/{name}_test.py",
            function="test_it",
            variant=name,
            size={"n": 1},
            bound="dram",
            product="gpu",
            environment=FACTS,
            recorded=Recording(sources={"baseline": "0a", "optimized": "1b"}, **times | fields),
        )

    return row


def stored(row):
    return store.load(recorder.Path(row().file))


def test_a_commit_during_a_run_loses_no_result(make, row, monkeypatch):
    commits = iter(["c0ffee", "facade"])
    monkeypatch.setattr(recorder, "_commit", lambda root: next(commits))
    controller = make()
    controller.add(row("first"))
    controller.add(row("second"))
    assert controller.errors == []
    assert len(stored(row).results) == 2
    assert [facts["commit"] for facts in stored(row).environments.values()] == ["c0ffee"]


def test_an_invalid_result_is_reported_and_the_next_is_stored(make, row):
    controller = make()
    controller.add(row("first", baseline_us=0.0))
    controller.add(row("second"))
    assert controller.errors == [
        "first_test.py::test_it[first-n1]: Expected `float` >= 1e-06 - at `$.baseline_us`"
    ]
    assert list(stored(row).results) == ["second_test.py::test_it[second-n1]"]


def test_a_conflicting_environment_key_is_reported(make, row, monkeypatch):
    first, second = make(), make()
    for controller, commit in ((first, "c0ffee"), (second, "facade")):
        facts = {"date": "2026-08-20", "commit": commit}
        controller._sessions[None] = "2026-08-20T101112Z", facts
    first.add(row("first"))
    second.add(row("second"))
    [error] = second.errors
    assert error.startswith("second_test.py::test_it[second-n1]: the environment '2026-08-20T1011")
    assert list(stored(row).results) == ["first_test.py::test_it[first-n1]"]


def test_two_concurrent_recordings_lose_no_result(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    for name in ("first", "second", "shared"):
        page(name=f"{name}_test.py")
    command = [sys.executable, "-m", "pytest", *UPDATE]
    runs = [
        pytester.popen(
            [*command, f"ch99/{name}_test.py", "ch99/shared_test.py"],
            subprocess.DEVNULL,
            subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        for name in ("first", "second")
    ]
    assert [run.wait() for run in runs] == [0, 0]
    folder = pytester.path / "baselines" / "simulated-gpu"
    stored_file = store.load(folder / "ch99.json")
    keys = [f"{name}_test.py::test_doubling[doubled-n1001]" for name in ("first", "second")]
    assert set(stored_file.results) == {*keys, "shared_test.py::test_doubling[doubled-n1001]"}
    assert [file.name for file in folder.iterdir()] == ["ch99.json"]


def test_the_result_of_a_deleted_page_stays(timed_page, pytester, make, row):
    timed_page(name="here_test.py")
    file = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    deleted = row("gone")
    deleted.file, deleted.product = str(file), "simulated-gpu"
    make().add(deleted)
    [before] = [line for line in file.read_text().splitlines() if line.startswith('"gone_test')]
    update = ["--aisp-update-expectations=all", "--aisp-processes=1"]
    result = pytester.runpytest_subprocess(*update)
    result.stdout.fnmatch_lines(["stored: here_test.py::*: new -> *", "=* 1 new in *"])
    assert f"{before}," in file.read_text().splitlines()


@pytest.mark.parametrize(
    ("device", "timer", "started"), [("cuda", None, [1, 2]), ("cpu", None, []), ("cuda", {}, [])]
)
def test_recording_processes_start_together_on_a_gpu(device, timer, started):
    workers = []
    case = SimpleNamespace(
        placement=SimpleNamespace(device=device),
        run=SimpleNamespace(timer=timer, settings=SimpleNamespace(processes=3)),
        worker=workers.append,
    )
    CaseClient.start_recording_processes(case)
    assert workers == started


def test_a_changed_side_is_reported_as_not_stored(timed_page, pytester):
    path = timed_page()
    assert pytester.runpytest_subprocess(*UPDATE).ret == 0
    path.write_text(path.read_text().replace("return 2 * x\n", "return x * 2\n"))
    file = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    before = file.read_bytes()
    key = "doubling_test.py::test_doubling[[]doubled-n1001[]]"
    result = pytester.runpytest_subprocess(*UPDATE)
    assert (result.ret, file.read_bytes()) == (0, before)
    result.stdout.fnmatch_lines(
        [
            f"not stored: {key}: it differs from the stored result in optimized source;"
            " --aisp-update-expectations=all replaces it"
        ]
    )
    result = pytester.runpytest_subprocess("--aisp-update-expectations=all", UPDATE[1])
    result.stdout.fnmatch_lines([f"stored: {key}: 2.*x -> *"])
    result.stdout.no_fnmatch_line("not stored:*")


def test_a_second_run_within_hours_is_reported_as_not_stored(timed_page, pytester):
    timed_page()
    assert pytester.runpytest_subprocess(*UPDATE).ret == 0
    result = pytester.runpytest_subprocess(*UPDATE)
    assert result.ret == 0
    soon = "not stored: *: a stored session is less than 6 hours away and not known to be *"
    result.stdout.fnmatch_lines([soon])
