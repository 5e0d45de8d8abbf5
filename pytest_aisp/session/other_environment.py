"""The other environment of ``--aisp-against-python``: its interpreter, versions and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from ..results.messages import Json
from ..util.device import Machine
from ..util.plugin_digest import own_digest
from ..worker.client import Worker, WorkerProcess, worker_environment
from .run_context import RunContext

OPTION = "--aisp-against-python"
PROBE_SECONDS = 60
PROBE = """
import contextlib, importlib.metadata, importlib.util, json, os, runpy, sys
sys.path[:] = [path for path in sys.path if path]
found = {"python": sys.version.split()[0], "safe_path": sys.version_info >= (3, 11)}
plugin, torch = map(importlib.util.find_spec, ("pytest_aisp", "torch"))
if plugin and plugin.origin:
    found["folder"] = os.path.dirname(plugin.origin)
    with contextlib.suppress(ImportError):
        found["version"] = importlib.metadata.version("pytest-aisp")
    try:
        import pytest_aisp.page.declare, pytest_aisp.results.messages
    except ImportError as error:
        found["lacks"] = str(error)
if torch:
    facts = runpy.run_path(os.path.join(os.path.dirname(torch.origin), "version.py"))
    found.update(torch=str(facts["__version__"]), cuda=facts["cuda"])
print(json.dumps(found))
"""
"""The program that the other interpreter runs first. It neither loads torch nor uses a GPU."""


class Found(Struct):
    """The output of `PROBE`.

    Attributes:
        python, torch, cuda: the versions. `cuda` is the version of CUDA that torch was built for.
        safe_path: whether the interpreter has the option ``-P``.
        folder, version: this plugin's folder, and the version of its installed package.
        lacks: the error raised by importing the plugin, or empty.
    """

    python: str
    safe_path: bool
    folder: str = ""
    version: str = "of unknown version"
    lacks: str = ""
    torch: str = ""
    cuda: str | None = None


@dataclass
class OtherEnvironment:
    """The other environment, and the pairs of processes that the cases share.

    Attributes:
        python: the interpreter, as the user gave it.
        differences: for each library that differs, its version in the other environment and in
            today's. None until both are known.
    """

    python: str
    found: Found
    differences: dict[str, tuple[Json, Json]] | None = None
    _shared: dict[str, tuple[Worker, Worker]] = field(default_factory=dict)

    @contextmanager
    def processes(
        self, run: RunContext, device: str, today: Worker | None
    ) -> Iterator[tuple[Worker, Worker]]:
        """Yield a process of the other environment and a process of today's environment.

        Args:
            today: a fresh process of today's environment. This process is paired with a fresh
                process of the other environment. If None, the shared pair is used. A shared pair
                that fails is ended, because its processes may still hold a side.
        """
        if today is None:
            try:
                yield self._shared_pair(run, device)
            except BaseException:
                self._end(device)
                raise
            return
        there = self._start(run, device)
        try:
            yield there, today
        finally:
            there.close()

    def _shared_pair(self, run: RunContext, device: str) -> tuple[Worker, Worker]:
        pair = self._shared.get(device, ())
        if not pair or not all(isinstance(w, WorkerProcess) and w.alive for w in pair):
            self._end(device)
            self._shared[device] = self._start(run, device), run.start(device)
        return self._shared[device]

    def _start(self, run: RunContext, device: str) -> Worker:
        command = [self.python, *["-P"] * self.found.safe_path]
        return run.start(device, variables={"PYTHONPATH": import_path()}, python=command)

    def _end(self, device: str) -> None:
        for worker in self._shared.pop(device, ()):
            worker.close()

    def close(self) -> None:
        """End the shared processes."""
        for device in list(self._shared):
            self._end(device)

    def text(self) -> str:
        """Return the interpreter and the version changes, like ``python (torch 2.10 -> 2.11)``."""
        known = (self.differences or {}).items()
        changes = [f"{name} {there} -> {here}" for name, (there, here) in known]
        return f"{self.python} ({', '.join(changes) or 'the same versions'})"


def import_path() -> str:
    """Return the `PYTHONPATH` for the other interpreter.

    This path has the folders of `sys.path` outside this environment, such as the folders of the ini
    key `pythonpath`. The other interpreter must import its own libraries.
    """
    own = tuple(os.path.realpath(p) + os.sep for p in (sys.prefix, sys.base_prefix))
    libraries = {"site-packages", "dist-packages"}
    return os.pathsep.join(
        path
        for path in sys.path
        if os.path.isdir(path)
        and not f"{os.path.realpath(path)}{os.sep}".startswith(own)
        and not libraries & set(Path(path).parts)
    )


def find(python: str, machine: Machine) -> OtherEnvironment:
    """Return the environment of the interpreter `python`.

    Args:
        machine: the machine that the cases are timed on.

    Raises:
        pytest.UsageError: if the environment cannot be compared with today's on this machine.
    """
    found = _probe(python)
    if why := _problem(found, machine):
        raise pytest.UsageError(f"{OPTION}={python}: {why.format(python=python)}")
    return OtherEnvironment(python, found)


def _probe(python: str) -> Found:
    hint = f"Give the Python of an environment:\n    pytest {OPTION}=/old/venv/bin/python"
    try:
        done = subprocess.run(
            [python, "-c", PROBE],
            env=worker_environment({"PYTHONPATH": import_path()}),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or f"no answer within {PROBE_SECONDS} s"
        raise pytest.UsageError(f"{OPTION}={python}: no such interpreter: {why}\n{hint}") from None
    with suppress(ValueError):
        return msgspec.json.decode(done.stdout, type=Found)
    last = [*done.stderr.strip().splitlines(), "it printed no versions"][-1 if done.stderr else 0]
    raise pytest.UsageError(f"{OPTION}={python}: not a usable Python: {last}\n{hint}")


def _problem(found: Found, machine: Machine) -> str:
    """Return the reason why the environment cannot be used and a remedy, or an empty string."""
    needed = metadata.version("pytest-aisp")
    install = (
        f"\nInstall the same version there:\n    {{python}} -m pip install pytest-aisp=={needed}"
    )
    if not found.folder:
        return f"it has no pytest-aisp; this run needs {needed} there{install}"
    if own_digest(Path(found.folder)) != own_digest():
        same = found.version == needed
        other = "with files that differ from those here" if same else f"and this run needs {needed}"
        return f"it has pytest-aisp {found.version}, {other}{install}"
    if found.lacks:
        return f"its pytest-aisp cannot be imported: {found.lacks}{install}"
    if not found.torch:
        return "it has no torch\nInstall it there:\n    {python} -m pip install torch"
    driver = machine.versions.get("cuda")
    if driver is None:
        return ""
    if found.cuda is None:
        return f"its torch {found.torch} was built without CUDA, and the cases run on a GPU"
    if int(found.cuda.partition(".")[0]) > int(driver.partition(".")[0]):
        return (
            f"its torch {found.torch} needs a driver for CUDA {found.cuda}, and this driver"
            f" supports CUDA {driver}: both environments must work with one driver"
        )
    return ""
