"""What a run leaves behind is whole lines, be the disk full or the run's end a sudden one."""

from __future__ import annotations

import json
import os

import pytest

from pytest_aisp.artifacts import Artifacts

HEALTHY = ("first", "middle", "zenith")
CASE = "ch99/{}_test.py::test_doubling[doubled-n1001]"
WORKERS = {"alone": [], "n2": ["-n2"]}
# From the first result on: no file grows beyond one and a half of it, and nothing is synced.
FULL = """


def pytest_aisp_result(config, row):
    import errno, os, resource

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    most = int(1.5 * os.path.getsize("kept/results.jsonl"))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    os.fsync = full
"""


@pytest.fixture(params=WORKERS)
def full(request, page, gpu, pytester, kept):
    """A run whose disk is full after its first result; without workers it records."""
    if request.param not in kept:
        gpu(added=2e-5, doubled=1e-5)
        with open(pytester.path / "conftest.py", "a") as conftest:
            conftest.write(FULL)
        for name in HEALTHY:
            page(name=f"{name}_test.py")
        update = ["--aisp-update-expectations", "--aisp-processes=1"]
        options = ["--aisp-artifacts=kept", *(WORKERS[request.param] or update)]
        result = pytester.runpytest_subprocess(*options)
        rows = (pytester.path / "kept" / "results.jsonl").read_text()
        stored = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
        kept[request.param] = result, rows, stored.read_text() if stored.exists() else None
    return kept[request.param]


def test_a_full_disk_ends_no_run_and_no_run_green(full):
    result, _, _ = full
    result.stdout.fnmatch_lines(["=* aisp =*", "*", "=* 3 new in *"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_the_artifacts_lack_is_said_once(full):
    result, rows, _ = full
    says = "kept/results.jsonl lacks 2 of 3 results: [[]Errno 27] File too large"
    after = "    Free space in kept, then run the same command again."
    result.stdout.fnmatch_lines([f"NOT STORED: {says}", after])
    assert result.stdout.str().count("results.jsonl") == 1
    assert rows.endswith("}\n")
    assert [json.loads(row)["verdict"] for row in rows.splitlines()] == ["new"]


@pytest.mark.parametrize("full", ["alone"], indirect=True)
def test_results_that_are_not_stored_are_said_once_and_what_was_stored_stays(full):
    result, _, stored = full
    keys = [f"{name}_test.py::test_doubling[[]doubled-n1001]" for name in HEALTHY[1:]]
    result.stdout.fnmatch_lines(
        [
            f"NOT STORED: {', '.join(keys)}: */ch99.json could not be written, and is as it was:"
            " [[]Errno 28] No space left on device",
            "    Free space in */baselines/simulated-gpu or make it writable, then run *",
        ]
    )
    assert list(json.loads(stored)["results"]) == ["first_test.py::test_doubling[doubled-n1001]"]


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    artifacts = Artifacts(tmp_path / "made")
    artifacts.add({"n": 1})
    target, real = artifacts.path, artifacts.path
    real.rename(tmp_path / "rows")
    os.symlink("/dev/full", target)
    artifacts.add({"n": 2})
    target.unlink()
    (tmp_path / "rows").rename(real)
    artifacts.add({"n": 3})
    assert real.read_text() == '{"n": 1}\n{"n": 3}\n'
    assert artifacts.error == (
        f"{real} lacks 1 of 3 results: [Errno 28] No space left on device\n"
        f"    Free space in {real.parent}, then run the same command again."
    )


def test_without_a_fault_nothing_is_lacking(tmp_path):
    artifacts = Artifacts(tmp_path)
    artifacts.add({"n": 1})
    assert artifacts.error is None


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(page, pytester):
    page()
    result = pytester.runpytest_inprocess("--aisp-check", "--aisp-artifacts=/dev/full")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: --aisp-artifacts=/dev/full: cannot be written: [[]Errno 17] File exists: *",
            "Give a folder that can be written",
        ]
    )


def test_a_lease_that_cannot_be_taken_is_no_crash_of_the_run(page, pytester, monkeypatch):
    page()
    blocked = pytester.mkdir("blocked")
    (blocked / f"pytest-aisp-{os.getuid()}").write_text("in the folder's place")
    monkeypatch.setenv("TMPDIR", str(blocked))
    result = pytester.runpytest_subprocess("--aisp-check")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "ch99/doubling_test.py:*: the machine cannot be leased: [[]Errno 17] File exists: *",
            "Point TMPDIR at a folder that can be written",
        ]
    )


# Half a line, as a run leaves it that was killed while it wrote one


@pytest.fixture
def torn(page, gpu, pytester, kept):
    """A recording of two cases whose second line is cut off."""
    gpu(added=2e-5, doubled=1e-5)
    for name in ("first", "second"):
        page(name=f"{name}_test.py")
    if "rows" not in kept:
        pytester.runpytest_subprocess("--aisp-artifacts=kept")
        kept["rows"] = (pytester.path / "kept" / "results.jsonl").read_text()
    (pytester.path / "torn.jsonl").write_text(kept["rows"][:-99])


def test_the_other_lines_are_replayed_and_the_torn_one_is_said(torn, pytester):
    result = pytester.runpytest_subprocess("--aisp-replay=torn.jsonl")
    case = CASE.format("second").replace("[", "[[]")
    says = f"its last line, of {case}, is half written and was left out"
    result.stdout.fnmatch_lines([f"aisp: --aisp-replay=torn.jsonl: {says}"])
    name = "test_doubling[[]doubled] at {'n': 1001}"
    result.stdout.fnmatch_lines([f"E *AssertionError: the recording holds no {name}; {says}"])
    result.stdout.fnmatch_lines(["first *new", "second *fail", "=* 1 failed, 1 new in *"])


def test_a_broken_line_before_the_last_is_refused(torn, pytester):
    file = pytester.path / "torn.jsonl"
    file.write_text(f"{file.read_text()}\n{{}}\n")
    result = pytester.runpytest_inprocess("--aisp-replay=torn.jsonl")
    result.stderr.fnmatch_lines(
        ["ERROR: --aisp-replay=torn.jsonl: not the results.jsonl of a run*"]
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
