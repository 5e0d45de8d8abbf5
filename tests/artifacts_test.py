"""The folder of artifacts on a full disk, after a kill, and with other contents."""

from __future__ import annotations

import json
import os

import pytest

from pytest_aisp.results import run_reader, store
from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.row import Row

HEALTHY = ("first", "middle", "zenith")
CASE = "ch99/{}_test.py::test_doubling[doubled-n1001]"
WORKERS = {"alone": [], "n2": ["-n2"]}
# From the first result on, no file grows beyond 1.5 times its size, and nothing is synced.
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


@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_survives_a_full_disk_and_reports_it_once(page, gpu, pytester, workers):
    gpu(added=2e-5, doubled=1e-5)
    with open(pytester.path / "conftest.py", "a") as conftest:
        conftest.write(FULL)
    for name in HEALTHY:
        page(name=f"{name}_test.py")
    update = ["--aisp-update-expectations", "--aisp-processes=1"]
    options = WORKERS[workers] or update  # a run with workers records nothing
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept", *options)
    result.stdout.fnmatch_lines(
        [
            "=* aisp =*",
            *(_refused() if options is update else []),
            "NOT STORED: kept/samples lacks 2 of 3 results: [[]Errno 27] File too large",
            "kept/results.jsonl lacks 2 of 3 results: [[]Errno 27] File too large",
            "kept/results.json is not written: [[]Errno 27] File too large",
            "    Free space in kept, then run the same command again.",
            "=* 3 new in *",
        ]
    )
    written = result.stdout.str()
    assert "Traceback" not in written + result.stderr.str()
    assert written.count("NOT STORED") == (2 if options is update else 1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    rows = (pytester.path / "kept" / "results.jsonl").read_text()
    assert rows.endswith("}\n")
    assert [json.loads(row)["verdict"] for row in rows.splitlines()] == ["new"]
    if options is update:
        stored = store.load(pytester.path / "baselines" / "simulated-gpu" / "ch99.json")
        assert list(stored.results) == ["first_test.py::test_doubling[doubled-n1001]"]


def _refused():
    keys = [f"{name}_test.py::test_doubling[[]doubled-n1001]" for name in HEALTHY[1:]]
    fault = "could not be written and is unchanged: [[]Errno 28] No space left on device"
    return (
        f"NOT STORED: {', '.join(keys)}: */ch99.json {fault}",
        "    Free space in */baselines/simulated-gpu or make it writable, then run *",
    )


def row(case="test_f[v]", **size):
    """Return the row of a case that was timed once."""
    names = {"nodeid": f"ch99/a_test.py::{case}", "key": f"a_test.py::{case}"}
    names |= {"file": "baselines/simulated-gpu/ch99.json", "page": "ch99/a_test.py"}
    case = Row(**names, function="test_f", variant="v", size=size, bound="dram")
    case.timings.append({"value": 0.5})
    return case


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    artifacts = Artifacts(tmp_path / "made")
    artifacts.add(row(n=1))
    target, real = artifacts.path, artifacts.path
    real.rename(tmp_path / "rows")
    os.symlink("/dev/full", target)
    artifacts.add(row(n=2))
    target.unlink()
    (tmp_path / "rows").rename(real)
    artifacts.add(row(n=3))
    assert [json.loads(line)["size"] for line in real.read_text().splitlines()] == [
        {"n": 1},
        {"n": 3},
    ]
    assert artifacts.error == (
        f"{real} lacks 1 of 3 results: [Errno 28] No space left on device\n"
        f"    Free space in {real.parent}, then run the same command again."
    )


def test_a_healthy_disk_leaves_no_error(tmp_path):
    artifacts = Artifacts(tmp_path)
    artifacts.add(row(n=1))
    assert artifacts.error is None


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(page, pytester):
    page()
    result = pytester.runpytest_inprocess("--aisp-check", "--aisp-artifacts=/dev/full")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: --aisp-artifacts=/dev/full: cannot be written: [[]Errno 17] File exists: *",
            "Give a writable folder",
        ]
    )


# What is in the folder already


def refused(pytester, *options):
    """Return the lines with which a run is refused."""
    result = pytester.runpytest_inprocess("--aisp-check", "--aisp-artifacts=out", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    return result.errlines[:-1]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["manifest.json", "results.csv", "notes.md", "results.jsonl"])
def test_a_folder_of_something_else_is_refused_and_left_alone(page, pytester, name):
    page()
    folder = pytester.mkdir("out")
    (folder / name).write_text('{"name": "a web application"}')
    assert refused(pytester) == [
        "ERROR: --aisp-artifacts=out: it is not empty and contains no run, so it was left as it is",
        "Give another folder, or leave the name out to get one named after the time:",
        "    pytest --aisp-artifacts",
    ]
    assert contents(folder) == {name: b'{"name": "a web application"}'}


def test_an_empty_journal_does_not_block_a_run(tmp_path):
    (tmp_path / "results.jsonl").touch()
    artifacts = Artifacts(tmp_path)
    artifacts.claim()
    artifacts.release()


def test_a_folder_has_one_run_at_a_time(page, pytester, forked_processes):
    page()
    pytester.runpytest_subprocess("--aisp-check", "--aisp-artifacts=out")
    before = contents(pytester.path / "out")
    other = Artifacts(pytester.path / "out")
    other.claim()
    assert refused(pytester) == [
        "ERROR: --aisp-artifacts=out: another run is writing to it",
        "Wait for its end, or give another folder",
    ]
    assert contents(pytester.path / "out") == before
    other.release()
    again = pytester.runpytest_inprocess("--aisp-check", "--aisp-artifacts=out")
    assert again.ret == 0
    other.claim()  # the run has released it
    other.release()


@pytest.mark.parametrize(
    ("more", "code"), [(["ch98"], 4), (["-k", "nothing"], 5), (["-p", "interrupts"], 2)]
)
def test_a_run_without_a_case_leaves_the_results_of_the_one_before(page, pytester, more, code):
    page()
    text = "def pytest_runtest_setup(item):\n    raise KeyboardInterrupt\n"
    pytester.makepyfile(interrupts=text)
    pytester.runpytest_subprocess("--aisp-check", "--aisp-artifacts=out")
    before = contents(pytester.path / "out")
    result = pytester.runpytest_subprocess("--aisp-check", "--aisp-artifacts=out", *more)
    assert result.ret == code
    result.stdout.fnmatch_lines(["out still holds the earlier run: no case finished"])
    assert contents(pytester.path / "out") == before


def test_a_run_whose_every_case_is_skipped_replaces_the_one_before(page, pytester):
    page()
    pytester.runpytest_subprocess("--aisp-check", "--aisp-artifacts=out")
    pytester.makeconftest("import pytest\n\n\ndef pytest_runtest_setup():\n    pytest.skip('all')")
    result = pytester.runpytest_subprocess("--aisp-check", "--aisp-artifacts=out")
    assert result.ret == 0
    run = run_reader.load(pytester.path / "out")
    assert (run.manifest.complete, run.cases) == (True, [])


def test_an_unusable_lock_folder_fails_the_case_with_a_way_out(page, pytester, monkeypatch):
    page()
    blocked = pytester.makefile(".txt", blocked="in the folder's place")
    monkeypatch.setenv("AISP_LEASES", str(blocked))
    result = pytester.runpytest_subprocess("--aisp-check")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "ch99/doubling_test.py:*: the machine cannot be leased: [[]Errno 17] File exists: *",
            "Point AISP_LEASES at a writable folder, *",
        ]
    )


# Half a line, as left by a run that was killed while it wrote the line


def test_a_half_written_line_is_reported_and_the_others_are_replayed(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    for name in ("first", "second"):
        page(name=f"{name}_test.py")
    pytester.runpytest_subprocess("--aisp-artifacts=kept")
    rows = (pytester.path / "kept" / "results.jsonl").read_text()
    (pytester.path / "kept" / "torn.jsonl").write_text(rows[:-99])
    result = pytester.runpytest_subprocess("--aisp-replay=kept/torn.jsonl")
    case = CASE.format("second").replace("[", "[[]")
    says = f"its last line, of {case}, is incomplete and was left out"
    result.stdout.fnmatch_lines([f"aisp: --aisp-replay=kept/torn.jsonl: {says}"])
    name = "test_doubling[[]doubled] at {'n': 1001}"
    result.stdout.fnmatch_lines([f"E *AssertionError: the recording holds no {name}; {says}"])
    result.stdout.fnmatch_lines(["first *new", "second *fail", "=* 1 failed, 1 new in *"])


@pytest.mark.parametrize("text", ['{"key": "a"}\n{"ke\n{"key": "b"}\n', '{"ke'])
def test_a_broken_line_before_the_last_is_refused(page, pytester, text):
    page()
    (pytester.path / "torn.jsonl").write_text(text)
    result = pytester.runpytest_inprocess("--aisp-replay=torn.jsonl")
    result.stderr.fnmatch_lines(
        ["ERROR: --aisp-replay=torn.jsonl: no run to judge again: torn.jsonl: was not *"]
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
