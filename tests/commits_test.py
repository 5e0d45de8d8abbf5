"""The commits that a search goes through, and those that change a page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_aisp.tools import commits
from pytest_aisp.util.cli_result import CliError


@pytest.fixture
def committed(pytester, git):
    """Make two commits, and return them."""
    shas = []
    for name in "ab":
        (pytester.path / name).write_text("")
        git("add", "-A")
        git("commit", "-qm", name)
        shas.append(git("rev-parse", "--short=8", "HEAD"))
    return shas


def refused(good, bad="HEAD"):
    with pytest.raises(CliError) as error:
        commits.commits_between(Path.cwd(), good, bad)
    assert error.value.code == 2
    return str(error.value).splitlines()


def test_commits_that_cannot_be_searched_are_refused(committed, git):
    first, second = committed
    assert refused("HEAD") == [f"--good=HEAD and --bad=HEAD are the same commit, {second}"]
    assert refused("HEAD", "HEAD~1") == [
        "--bad=HEAD~1 is older than --good=HEAD",
        "Exchange them:",
        f"    --good={first} --bad={second}",
    ]
    assert refused("nowhere") == ["--good=nowhere: there is no such commit in this clone"]
    assert refused("HEAD~1", "v9") == ["--bad=v9: there is no such commit in this clone"]


def test_a_rewritten_history_is_refused_with_the_last_common_commit(committed, git):
    first, second = committed
    git("commit", "-q", "--amend", "-m", "rewritten")
    why = "another branch, or a rewritten history"
    assert refused(f"{second}") == [
        f"--good={second} is not an ancestor of --bad=HEAD: {why}",
        "Their last commit in common:",
        f"    --good={first}",
    ]
    git("checkout", "-q", "--orphan", "alone")
    git("commit", "-qm", "alone")
    assert refused(f"{second}") == [
        f"--good={second} is not an ancestor of --bad=HEAD: {why}",
        "They have no commit in common",
    ]


def test_a_good_commit_of_another_root_is_refused(committed, git):
    first, _ = committed
    git("checkout", "-q", "--orphan", "alone")
    git("commit", "-qm", "alone")
    alone = git("rev-parse", "--short=8", "HEAD")
    git("checkout", "-q", "main")
    git("merge", "-q", "--allow-unrelated-histories", "-m", "both", "alone")
    assert refused(alone)[2] == f"    --good={first}"


def test_a_shallow_clone_names_the_command_that_deepens_it(
    committed, pytester, tmp_path, monkeypatch
):
    first, _ = committed
    clone = ["git", "clone", "-q", "--depth=1", f"file://{pytester.path}", str(tmp_path / "clone")]
    subprocess.run(clone, check=True)
    monkeypatch.chdir(tmp_path / "clone")
    assert refused(f"{first}") == [
        f"--good={first}: there is no such commit in this clone",
        "It is shallow:",
        "    git fetch --unshallow",
    ]


def test_it_is_refused_without_a_repository_or_git(pytester, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    assert refused("HEAD~1") == [
        f"{pytester.path} is in no git repository",
        "A search needs the commits; run it in a clone",
    ]
    monkeypatch.setenv("PATH", "")
    lines = refused("HEAD~1")
    assert lines[0].startswith("git cannot be run: ")
    assert lines[1] == "Install git"


PAGE = """
from .helper import twice
FILE = "table é.json"
"""
FILES = {"ch99/page_test.py": PAGE, "ch99/helper.py": "", "other.py": ""}


@pytest.fixture
def changing(pytester, git):
    """Commit a page below `bench`, then each change: a dictionary of files, or a git command."""

    def commit(*changes, opened=()):
        root = pytester.path / "bench"
        for number, change in enumerate([FILES, *changes]):
            if isinstance(change, dict):
                for name, text in change.items():
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_text(text)
            else:
                git(*change)
            git("add", "-A")
            git("commit", "-qm", str(number), "--allow-empty")
        first, line = commits.commits_between(root, f"HEAD~{len(changes)}", "HEAD")
        checked = []

        class Watched(commits.Worktree):
            def check_out(self, commit):
                checked.append(commit.subject)
                super().check_out(commit)

        with commits.worktree(root, first) as tree:
            watched = Watched(tree.top, tree.root)
            names = commits.page_names(tree.root, "ch99/page_test.py", [first, *line])
            every = [first, *line]
            found = commits.versions(watched, names, (".",), every, lambda text: None, opened)
        return [version.commit.subject for version in found], checked

    return commit


def test_only_commits_that_change_a_used_file_are_versions(changing):
    versions, checked = changing(
        {"other.py": "x = 1"},
        {"ch99/helper.py": "# a comment"},
        {"ch99/helper.py": "twice = 2"},
        {"../outside.txt": "1"},
        {"ch99/page_test.py": PAGE + "from . import more"},
        {"ch99/more.py": "x = 1"},
        {"ch99/table é.json": "[]"},
        {"ch99/table é.json": "[1]"},
    )
    assert versions == ["0", "3", "5", "6", "7", "8"]
    assert checked == ["0", "2", "3", "5", "6", "7", "8"]


def test_a_file_that_the_page_opened_when_it_was_recorded_is_used(changing):
    versions, checked = changing(
        {"ch99/new.json": "[1]"},
        {"other.py": "x = 1"},
        {"ch99/new.json": "[2]"},
        opened=["ch99/new.json"],
    )
    assert versions == ["0", "1", "3"]
    assert checked == ["0", "1", "3"]


def test_a_page_that_is_gone_for_a_while_is_a_version_without_files(changing):
    versions, _ = changing(
        ("rm", "-q", "bench/ch99/page_test.py"),
        {"ch99/helper.py": "twice = 2"},
        {"ch99/page_test.py": PAGE},
    )
    assert versions == ["0", "1", "3"]


def test_the_worktree_runs_no_hooks_and_is_removed(pytester, git, committed):
    hook = pytester.path / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    ran = pytester.path / "ran"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    first, [last] = commits.commits_between(pytester.path, "HEAD~1", "HEAD")
    with commits.worktree(pytester.path, first) as tree:
        (tree.root / "left.txt").write_text("")
        tree.check_out(last)
        assert sorted(path.name for path in tree.root.iterdir()) == [".git", ".gitignore", "a", "b"]
    assert not tree.top.exists()
    assert not ran.exists()
    assert len(git("worktree", "list").splitlines()) == 1


def test_a_worktree_that_git_refuses_is_an_error(pytester, committed):
    first, _ = commits.commits_between(pytester.path, "HEAD~1", "HEAD")
    lost = commits.Commit("1" * 40, first.parents, "t", "", "")
    with (
        pytest.raises(CliError, match=r"^git cannot add a worktree: "),
        commits.worktree(pytester.path, lost),
    ):
        pass
