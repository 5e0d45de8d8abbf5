"""`aisp results checksums`: what is staged and was recorded by no run is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import fake_results
import pytest

from pytest_aisp.cli import app
from pytest_aisp.results import store

NAME = "baselines/nvidia-h200/ch07.json"
ADVICE = [
    "Restore the file, or record on the machine itself:",
    "    pytest --aisp-update-expectations",
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
    assert seals(capsys) == (0, ["1 file of stored results is as runs recorded it"])
    assert seals(capsys, NAME)[0] == 0
    record(file.with_name("ch08.json"), "two", date="2026-08-21")
    git("add", ".")
    assert seals(capsys) == (0, ["2 files of stored results are as runs recorded them"])


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
    assert lines[0].endswith("its seal is wrong: the line is not as a run recorded it")
    assert lines[1].endswith("its seal is wrong: the line is not as a run recorded it")
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
