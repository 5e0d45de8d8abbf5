"""What git says of a repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class GitError(Exception):
    """Git's own words for why it has no answer, or that it cannot be run."""


class NoGit(GitError):
    """Git cannot be run; the last line says what to do."""


def run_git(root: Path, *words: str, **variables: str) -> bytes:
    """Return what `git words` prints in the folder `root`, with environment `variables` set.

    Raises:
        GitError: where it fails; `NoGit` where it cannot be run.
    """
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=root,
            capture_output=True,
            check=False,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise NoGit(f"git cannot be run: {error}\nInstall git") from None
    if done.returncode:
        raise GitError(done.stderr.decode(errors="replace").strip())
    return done.stdout


def try_git(root: Path, *words: str) -> str | None:
    """Return what `git words` prints in the folder `root`, or None where it has no answer."""
    try:
        return run_git(root, *words).decode()
    except GitError:
        return None
