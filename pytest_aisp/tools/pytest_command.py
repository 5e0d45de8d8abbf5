"""Runs of pytest: the command that stands for what was asked, shown before it is run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from subprocess import Popen

from ..util.cli_result import CliError
from ..worker import nvidia_tools
from ..worker.replay import ReplayBench, ReplayError

PROFILES = ("none", "minimal", "full")
PYTHON = ("python", "-m", "pytest")
"""As it is shown; what is run is this Python, wherever it is."""


def shown(words: Sequence[str]) -> str:
    """Return the command as one types it."""
    return shlex.join([*PYTHON, *words])


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Show a pytest command, run it, return its exit code."""
    say(f"$ {shown(words)}")
    process = Popen([sys.executable, *PYTHON[1:], *words])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has told pytest too, which closes its run
        code = process.wait()
    return code if code >= 0 else 128 - code  # as a shell says it: ended by a signal


def worst(commands: Sequence[Sequence[str]], say: Callable[[str], None]) -> int:
    """Run each of `commands`, whatever the others say; return the highest exit code."""
    return max(run(words, say) for words in commands)


def measuring(
    paths: Sequence[str], profile: str, artifacts: Path | None, more: Sequence[str]
) -> list[list[str]]:
    """Return the commands that measure `paths`: one, and one more for each further profiler.

    A run has one profiler, and each one's reports need a folder of their own: `minimal` is torch's,
    `full` also `nsys` and `ncu` where they are installed.
    """
    if profile == "none":
        return [[*_kept(artifacts), *more, *paths]]
    tools = [
        name
        for name in ("nsys", "ncu")
        if profile == "full" and nvidia_tools.profiler_installed(name)
    ]
    commands = [["--aisp-profile=torch", *_kept(artifacts), *more, *paths]]
    for tool in tools:
        folder = None if artifacts is None else artifacts / tool
        commands.append([f"--aisp-profile={tool}", *_kept(folder), *more, *paths])
    return commands


def replaying(folder: Path, root: Path, paths: Collection[str], more: Sequence[str]) -> list[str]:
    """Return the command that judges the recorded cases in `folder` again, and no others.

    Args:
        root: pytest's, which recorded ids are relative to.
        paths: pages to which it is restricted, relative to `root`; none means all.

    Raises:
        Unanswerable: where nothing is recorded, or nothing of `paths`.
    """
    try:
        ids = [str(row["nodeid"]) for row in ReplayBench(folder).rows.values()]
    except ReplayError as error:
        raise CliError(str(error)) from None
    ids = [i for i in ids if not paths or i.partition("::")[0] in paths]
    if not ids:
        raise CliError(f"{folder} holds no case of what was asked for\n    aisp replay {folder}")
    return [f"--aisp-replay={folder}", *more, *(_from_here(root, i) for i in ids)]


def _from_here(root: Path, nodeid: str) -> str:
    """Return a case's id, relative to pytest's root, as one writes it in this folder."""
    path, colons, case = nodeid.partition("::")
    return f"{os.path.relpath(root / path)}{colons}{case}"


def _kept(folder: Path | None) -> list[str]:
    return [] if folder is None else [f"--aisp-artifacts={folder}"]


def verifying(paths: Sequence[str], more: Sequence[str]) -> list[list[str]]:
    """Return the commands that prove `paths` without timing: collect, check, compile."""
    stages = (["--collect-only", "-q"], ["--aisp-check"], ["--aisp-compile"])
    return [[*stage, *more, *paths] for stage in stages]
