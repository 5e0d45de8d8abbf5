"""`aisp fleet start` starts Ray on this machine. `aisp fleet resume` continues a run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..util.cli_result import CliError, CliResult
from .checkpoint import FILE, FOLDER, Checkpoint
from .nodes import LABEL, RayNode, refusal
from .probe import Facts

PORT = 6379


@dataclass(frozen=True)
class StartCommand:
    """The command that starts Ray on a machine, and the variables to set for it."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def line(self) -> str:
        """The command as it is typed in a shell."""
        return " ".join([*(f"{k}={v}" for k, v in self.variables.items()), *self.arguments])


def start_command(
    facts: Facts, *, head: bool, address: str | None, gpus: int = 0, block: bool = False
) -> StartCommand:
    """Return the command for a machine with these facts.

    Args:
        gpus: the number of simulated GPUs, if the machine has no real ones.
        block: whether the command waits until Ray ends.

    Raises:
        CliError: if both or neither of `head` and `address` are given, or if a fleet would refuse
            the machine.
    """
    if head == (address is not None):
        raise CliError(
            "say where this machine belongs:\n"
            "    aisp fleet start --head                  # the first machine\n"
            f"    aisp fleet start --address=HEAD:{PORT}    # every other one"
        )
    count = len(facts["gpus"]) or gpus
    if not head and not facts["product"]:
        raise CliError("NVML finds no GPU here, so no case could run\n    nvidia-smi")
    if facts["product"]:
        own = {**facts, "nice": 0, "time": 0.0}  # Ray's niceness is set below
        if why := refusal(RayNode("", "", count, {}), own, now=0.0):
            raise CliError(f"this machine cannot take part: {why}")
    where = ["--head", f"--port={PORT}"] if head else [f"--address={address}"]
    label = [f"--labels={LABEL}={facts['product']}"] if facts["product"] else []
    options = [*where, *label, f"--num-gpus={count}", "--disable-usage-stats"]
    options += ["--block"] * block
    return StartCommand(("ray", "start", *options), {"RAY_worker_niceness": "0"})


def start_result(command: StartCommand, *, show: bool) -> CliResult:
    """Start Ray on this machine, or only show the command.

    Raises:
        CliError: if Ray is not installed.
    """
    if show:
        return CliResult([command.line])
    if importlib.util.find_spec("ray") is None:
        raise CliError("Ray is not installed\n    pip install 'pytest-aisp[fleet]'")
    program = [sys.executable, "-m", "ray.scripts.scripts", *command.arguments[1:]]
    done = subprocess.run(program, env={**os.environ, **command.variables}, check=False)
    return CliResult([command.line], code=2 if done.returncode else 0)


def resume_command(folder: Path, address: str | None) -> tuple[list[str], Path]:
    """Return the command that continues the run interrupted in `folder`, and its working folder.

    Args:
        address: the address of a cluster to use instead of the run's own, or None.

    Raises:
        CliError: if no run was interrupted in `folder` or a parent folder.
    """
    for above in (folder, *folder.parents):
        file = above / ".pytest_cache" / "d" / FOLDER / FILE
        if file.exists():
            checkpoint = Checkpoint.read(file)
            other = [] if address is None else [f"--aisp-fleet={address}"]
            command = [*checkpoint.arguments, "--aisp-fleet-resume", *other]
            return [sys.executable, "-m", "pytest", *command], Path(checkpoint.folder)
    raise CliError(
        "no fleet run was interrupted here, or pytest keeps no cache (-p no:cacheprovider)"
    )


def resume(folder: Path, address: str | None) -> int:
    """Continue the interrupted run, and return pytest's exit code."""
    command, where = resume_command(folder, address)
    with subprocess.Popen(command, cwd=where) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # pytest gets Ctrl-C too, and ends the seats
                time.sleep(0.1)
