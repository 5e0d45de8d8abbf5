"""The recorded code is read from git, or a message says why it is not there."""

from __future__ import annotations

import subprocess

import pytest

from pytest_aisp.page.sources import git_blob
from pytest_aisp.util.git import GitSnapshot, SnapshotError

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]


@pytest.fixture
def git(tmp_path):
    """Run git in a folder, which is a new repository at first."""

    def run(*args, folder=tmp_path / "work"):
        if not folder.exists():
            subprocess.run([*GIT, "init", "-q", "-b", "main", str(folder)], check=True)
        subprocess.run([*GIT, *args], cwd=folder, check=True, capture_output=True)
        return folder

    return run


@pytest.fixture
def recorded(git):
    """Commit a page twice. Return the repository and the blobs of the first version."""
    page = git("status") / "page_test.py"
    page.write_text("recorded = 1\n")
    files = {page.name: git_blob(page)}
    commit(git)
    page.write_text("today = 1\n")
    commit(git)
    return page.parent, files


def commit(git):
    git("add", "-A")
    git("commit", "-qm", "a commit")


def past_page(root, files):
    snapshot = GitSnapshot.of_files(root, files, root / "page_test.py", "in a file")
    with snapshot.folder:
        return (snapshot.tree / "page_test.py").read_text()


def test_recorded_code_is_read_from_its_blobs(recorded):
    assert past_page(*recorded) == "recorded = 1\n"


def test_code_that_a_rewritten_history_lost_must_be_recorded_again(recorded, git):
    git("checkout", "-q", "--orphan", "rewritten")
    commit(git)
    git("branch", "-D", "main")
    git("reflog", "expire", "--expire=now", "--all")
    git("gc", "--quiet", "--prune=now")
    with pytest.raises(SnapshotError, match=r"^the recorded code is gone: .*; record it again$"):
        past_page(*recorded)


def test_code_that_was_never_committed_must_be_recorded_again(recorded):
    root, files = recorded
    with pytest.raises(SnapshotError, match=r"^the recorded code is gone: "):
        past_page(root, {**files, "helper.py": "0" * 40})


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("--depth=1", "this clone lacks the recorded code\n    git fetch --unshallow"),
        (
            "--filter=blob:none",
            "this partial clone lacks the recorded code, and its remote did not send it\n"
            "    git fetch --refetch --no-filter",
        ),
    ],
)
def test_an_incomplete_clone_without_its_remote_says_what_to_do(recorded, git, tmp_path, how, why):
    (root, files), clone = recorded, tmp_path / "clone"
    git("config", "uploadpack.allowFilter", "true")
    git("clone", "-q", how, f"file://{root}", str(clone))
    (root / ".git").rename(root / "moved")
    with pytest.raises(SnapshotError) as caught:
        past_page(clone, files)
    assert str(caught.value) == why


def test_a_partial_clone_fetches_what_it_lacks(recorded, git, tmp_path):
    (root, files), clone = recorded, tmp_path / "clone"
    git("config", "uploadpack.allowFilter", "true")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    git("clone", "-q", "--filter=blob:none", f"file://{root}", str(clone))
    assert past_page(clone, files) == "recorded = 1\n"
