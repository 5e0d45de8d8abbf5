"""`aisp results checksums` refuses edited results, and results that no given run recorded."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import fake_results
import pytest
from msgspec.structs import replace

from pytest_aisp.cli import app
from pytest_aisp.results import run_reader, store
from pytest_aisp.results.merge import merge
from pytest_aisp.results.row import Row
from pytest_aisp.session.recorder import Recorder

NAME = "baselines/nvidia-h200/ch07.json"
ADVICE = [
    "Restore the file, or record on the machine itself:",
    "    pytest --aisp-update-expectations",
]

NO_PROOF = [
    "A checksum does not show that anything was measured; the artifacts of the run do:",
    "    aisp results checksums --artifacts=FOLDER",
]


def git(*args):
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return a committed file of stored results, in a repository of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    git("init", "-q", ".")
    git("commit", "-q", "--allow-empty", "-m", "first")
    path = Path(NAME)
    path.parent.mkdir(parents=True)
    record(path, "one", date="2026-08-20")
    git("add", ".")
    git("commit", "-q", "-m", "recorded")
    return path


def record(path, session, *, key="a", speedup=2.0, **facts):
    """Write a result as a run of this session does."""
    commit = {"commit": git("rev-parse", "--short=12", "HEAD")}
    environment = {**fake_results.FACTS, **commit, **facts}
    result = fake_results.result(speedup, values=((0.7, 0.69),), environments=(session,))
    store.write(path, "nvidia-h200", {key: result}, {session: environment}, replace=True)


def edit(path, pattern, new):
    text, count = re.subn(pattern, new, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


def seals(capsys, *words):
    code = app.main(["seals", *words])
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def test_recorded_results_may_be_committed(file, capsys):
    record(file, "two", key="b", date="2026-08-21")
    git("add", ".")
    matches = "of stored results: unedited, the checksum of every line matches"
    assert seals(capsys) == (0, [f"1 file {matches}", *NO_PROOF])
    assert seals(capsys, NAME)[0] == 0
    record(file.with_name("ch08.json"), "two", date="2026-08-21")
    git("add", ".")
    assert seals(capsys) == (0, [f"2 files {matches}", *NO_PROOF])


def test_without_staged_files_nothing_is_checked(file, capsys):
    record(file, "two", key="b", date="2026-08-21")
    said = "no stored results staged below baselines differ from HEAD: nothing to refuse"
    assert seals(capsys) == (0, [said])
    file.with_name("peaks.json").write_text("{}")
    git("add", str(file.with_name("peaks.json")))
    said = "none of these files contains stored results: nothing to refuse"
    assert seals(capsys, str(file.with_name("peaks.json"))) == (0, [said])


@pytest.mark.parametrize(
    ("pattern", "new", "says"),
    [
        (r'"speedup": [\d.]+', '"speedup": 9.9', "must be 2.004, which its values give"),
        (r"0\.69", "0.71", "speedup=2.004 must be"),
        (r'"optimized_us": \d+', '"optimized_us": 1', "its seal is wrong"),
        (r'"seal": "..', '"seal": "zz', "its seal is wrong"),
        (r'"clock": "graph"', '"clock": "sundial"', "Invalid enum value 'sundial'"),
        ("580.65", "590.00", "'580.65'"),
        (r'"one": {', '"zero": {}, "one": {', "environments['zero']: commit=None is not a commit"),
    ],
)
def test_edited_results_are_refused(file, capsys, pattern, new, says):
    edit(file, pattern, new)
    git("add", ".")
    code, lines = seals(capsys)
    assert code == 1
    assert lines[0].startswith(NAME)
    assert says in lines[0]
    assert "restore" not in lines[0]
    assert lines[-2:] == ADVICE


def test_the_command_is_printed_once_for_all_files(file, capsys):
    other = file.with_name("ch08.json")
    record(other, "two", date="2026-08-21")
    for path in (file, other):
        edit(path, r'"optimized_us": \d+', '"optimized_us": 1')
    git("add", ".")
    code, lines = seals(capsys)
    assert (code, len(lines)) == (1, 4)
    assert lines[0].endswith("its seal is wrong: the line was changed after a run recorded it")
    assert lines[1].endswith("its seal is wrong: the line was changed after a run recorded it")
    assert lines[2:] == ADVICE


def test_a_merge_conflict_has_its_own_command(file, capsys):
    edit(file, r"^{", "<<<<<<< ours\n{")
    git("add", ".")
    code, lines = seals(capsys)
    assert code == 1
    assert lines == [
        f"{NAME} has a merge conflict in line 1; keep one side, then record the rest:",
        f"    git checkout --ours -- {NAME} && pytest --aisp-update-expectations=missing",
    ]


def test_a_binary_file_is_refused(file, capsys):
    file.write_bytes(b"\xff\xfe{}")
    git("add", ".")
    code, lines = seals(capsys)
    assert code == 1
    assert lines[0].startswith(f"{NAME} was not written by pytest-aisp: 'utf-8' codec can't decode")


def test_files_are_named_relative_to_the_working_directory(file, capsys, monkeypatch):
    record(file, "two", key="b", date="2026-08-21")
    git("add", ".")
    monkeypatch.chdir(file.parent)
    assert seals(capsys, "ch07.json")[0] == 0
    edit(Path("ch07.json"), r'"seal": "..', '"seal": "zz')
    git("add", ".")
    code, lines = seals(capsys, "ch07.json")
    assert code == 1
    assert lines[0].startswith("ch07.json was not written by pytest-aisp: results['a']: its seal")


def test_a_file_outside_a_product_folder_is_refused(file, capsys):
    git("mv", NAME, "ch07.json")
    code, lines = seals(capsys, "ch07.json")
    assert code == 1
    assert lines[0] == (
        f"ch07.json belongs to {Path.cwd().name}, but its results are of nvidia-h200;"
        " move the file:"
    )
    assert lines[1].startswith("    mv -n ch07.json ")
    assert len(lines) == 2


def test_a_session_of_an_unknown_commit_is_refused(file, capsys):
    record(file, "two", key="b", commit="0123456789ab")
    git("add", ".")
    code, lines = seals(capsys)
    assert code == 1
    assert lines[0] == (
        f"{NAME} environments['two']: commit='0123456789ab' is not a commit of this repository"
    )


def test_the_staged_file_is_checked_and_not_the_working_copy(file, capsys):
    record(file, "two", key="b")
    git("add", ".")
    edit(file, r'"optimized_us": \d+', '"optimized_us": 1')
    assert seals(capsys)[0] == 0


def test_a_branch_is_compared_with_its_base(file, capsys):
    edit(file, "580.65", "590.00")
    git("commit", "-q", "-a", "-m", "edited")
    assert seals(capsys)[0] == 0  # nothing is staged
    assert seals(capsys, "--against=HEAD~1")[0] == 1


def test_lines_may_be_removed_and_peaks_are_ignored(file, capsys):
    store.prune(file, ["a"])
    file.with_name("peaks.json").write_text("{}")
    git("add", ".")
    assert seals(capsys)[0] == 0


def test_outside_a_repository_the_check_cannot_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, lines = seals(capsys)
    assert code == 2
    assert lines[0].startswith("git diff fails: ")
    assert lines[1] == "Run it in a clone with that commit"
    monkeypatch.setenv("PATH", str(tmp_path))
    code, lines = seals(capsys)
    assert (code, lines[1]) == (2, "Install git")


RECORDED = {
    "baseline_us": 2.0,
    "optimized_us": 1.0,
    "clock": "graph",
    "values": [[0.693147, 0.691]],
    "sources": fake_results.SOURCES,
    "goals": {"memory": {"baseline": 4096, "optimized": 2048}},
}


def run(folder, *, key="b", board="one", **changes):
    """Record a result as a run that keeps its artifacts in `folder` does."""
    fake_results.artifacts(Path(folder), [], code=None)
    case = fake_results.case("ch07:b")
    row = fake_results.row(case, key=key, file=NAME, recorded={**RECORDED, **changes})
    settings = SimpleNamespace(artifacts=Path(folder), update="all", root=Path.cwd())
    hook = SimpleNamespace(pytest_aisp_result=lambda config, row: None)
    recorder = Recorder(settings, SimpleNamespace(hook=hook))
    recorder.artifacts.start(run_reader.manifest(Path(folder)))
    recorder.add(Row.of({**row, "environment": {**fake_results.FACTS, "board": board}}))
    assert recorder.errors == []
    git("add", "baselines")


def test_a_result_is_compared_with_the_run_that_recorded_it(file, capsys):
    run("out")
    [line] = [line for line in file.read_text().splitlines() if line.startswith('"b"')]
    [sample] = Path("out/samples").iterdir()
    assert f'"samples": "{hashlib.sha256(sample.read_bytes()).hexdigest()}"' in line
    code, lines = seals(capsys, "--artifacts=out")
    assert (code, lines[1:]) == (
        0,
        ["every changed result is one that a run recorded: out"],
    )
    run("again", key="c")
    assert seals(capsys, "--artifacts=out", "--artifacts=again")[0] == 0
    assert_unproved(capsys, "c", "its samples, ????????????..., are in none of these artifacts")


def test_further_sessions_are_compared_with_their_runs(file, capsys):
    goals = {"memory": {"baseline": 4096, "optimized": 3072}}
    for number, board in enumerate(("one", "two", "three")):
        run(f"out{number}", board=board, baseline_us=2.0 + number, goals=goals if number else {})
        assert seals(capsys, f"--artifacts=out{number}")[0] == 0
        git("commit", "-q", "-m", board)
    assert store.load(file).results["b"].sessions == 3


def assert_unproved(capsys, key, why):
    code, lines = seals(capsys, "--artifacts=out")
    assert code == 1
    assert fnmatch(lines[0], f"{NAME} results[[]'{key}']: {why}")
    assert lines[1:] == [
        "Give the folders of all runs that recorded these results, or record again:",
        "    pytest --aisp-update-expectations --aisp-artifacts",
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"optimized_us": 0.5}, "the run recorded other optimized_us"),
        ({"values": ((1.4, 1.38),)}, "the run recorded other values"),
        ({"clock": "queue"}, "the run recorded other clock"),
        ({"choices": {"BLOCK": 64}}, "the run recorded other choices"),
        ({"goals": {"memory": {"baseline": 9, "optimized": 1}}}, "the run recorded other memory"),
        ({"sources": {"baseline": "cc", "optimized": "1b"}}, "the run recorded other sources"),
        (
            {"samples": "0123456789abcdef"},
            "its samples, 0123456789ab..., are in none of these *",
        ),
        ({"samples": None}, "it names no samples, because the run that recorded it kept no *"),
    ],
)
def test_values_with_a_forged_checksum_are_refused(file, capsys, change, why):
    run("out")
    stored = store.load(file)
    forged = {**stored.results, "b": replace(stored.results["b"], **change)}
    file.write_text(store.dump(replace(stored, results=forged)))
    git("add", ".")
    assert seals(capsys)[0] == 0  # a checksum only proves that results are unedited
    assert_unproved(capsys, "b", why)


def test_a_forged_environment_is_refused(file, capsys):
    run("out")
    stored = store.load(file)
    facts = {n: {**e, "driver": "1"} if n != "one" else e for n, e in stored.environments.items()}
    file.write_text(store.dump(replace(stored, environments=facts)))
    git("add", ".")
    assert_unproved(capsys, "b", "the run recorded another environment")


def test_artifacts_that_cannot_be_read_are_named(file, capsys):
    run("out")
    shutil.rmtree("out/samples")
    code, lines = seals(capsys, "--artifacts=out")
    assert (code, lines[-1]) == (2, "Copy the whole folder of the run, including samples/")
    assert seals(capsys, "--artifacts=nowhere")[1][0] == "nowhere: there is no such folder"


def test_a_second_session_and_an_added_metric_name_the_run_that_added_them(file):
    first = replace(store.load(file).results["a"], samples="aa")
    stored = replace(store.load(file), results={"a": first})
    goals = {"memory": {"baseline": 2, "optimized": 1}}
    added = replace(first, goals=goals, samples="bb")
    [change] = merge(stored, {"a": added}, stored.environments, replace=False)[1]
    assert (change.new.samples, change.new.goals) == ("bb", goals)
    again = replace(first, samples="cc")
    assert merge(stored, {"a": again}, stored.environments, replace=False)[1] == []
