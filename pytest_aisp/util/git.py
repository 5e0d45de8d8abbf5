"""Run git in a repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class GitError(Exception):
    """Git failed; the message is git's own."""


class NoGit(GitError):
    """Git cannot be run."""


def run_git(root: Path, *arguments: str, **variables: str) -> bytes:
    """Return what git prints in the folder `root`, with environment `variables` set.

    Raises:
        GitError: git fails.
        NoGit: git cannot be run.
    """
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, env=environment)
    except OSError as error:
        raise NoGit(f"git cannot be run: {error}\nInstall git") from None
    if done.returncode:
        raise GitError(done.stderr.decode(errors="replace").strip())
    return done.stdout


def try_git(root: Path, *arguments: str) -> str | None:
    """Return what git prints in the folder `root`, or None if it fails."""
    try:
        return run_git(root, *arguments).decode()
    except GitError:
        return None
