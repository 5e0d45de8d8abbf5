"""Start a run: set up its context, its recorder, and its xdist workers."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec
import pytest

from ..results.artifacts import Unclaimable, stamped
from ..results.messages import Json
from ..results.models import SIMULATED
from ..results.results_json import Canary
from ..results.row import Row
from ..results.run_reader import folder_of
from ..results.verdict import RED
from ..util.device import Machine
from ..util.git import GitError, GitSnapshot
from ..util.gpu_lease import REMEDY
from ..worker.client import ReplayError, ReplayWorker
from .canary import CLOCKS, has_canary
from .collect import case_of
from .options import (
    LOCK_ERROR,
    MACHINE,
    MACHINES,
    PROFILERS,
    RECORDER,
    RUN,
    SETTINGS,
    Settings,
)
from .recorder import Recorder, build_manifest
from .run_context import RunContext
from .terminal import LiveProgress


def configure(config: pytest.Config) -> None:
    """Set up the run context in every process, and the recorder in the controller."""
    worker = getattr(config, "workerinput", None)
    settings = _of_controller(config, worker or {})
    if threading.current_thread() is threading.main_thread():
        _interrupt_on_sigterm()
    timer = _foreign_timer(config, settings)
    fleet = config.stash.get(MACHINE, None)
    machine = fleet or Machine.here()
    if timer is not None and fleet is None:
        machine = Machine(timer["arch"], timer["product"], timer["product"], ("simulated",))
    if settings.sanitize and (timer is not None or not machine.gpus):
        raise pytest.UsageError("--aisp-sanitize needs a GPU; there is none here")
    if settings.profile in PROFILERS[1:] and (timer is not None or not machine.gpus):
        raise pytest.UsageError(
            f"--aisp-profile={settings.profile} needs a GPU; there is none here\n"
            "torch's profiler works on a CPU, too:\n    pytest --aisp-profile=torch"
        )
    elapsed = float((worker or {}).get("aisp_elapsed", 0.0))
    config.stash[RUN] = run = RunContext(
        settings,
        machine,
        timer=timer,
        emulator=config.hook.pytest_aisp_cuda_emulator(config=config),
        xdist_worker=int(worker["workerid"].removeprefix("gw")) if worker else 0,
        machines=config.stash.get(MACHINES, None),
        times_cpu=_selects_cpu(config.option.markexpr),
        started=time.monotonic() - elapsed,
    )
    if settings.against is not None:
        try:
            run.past = GitSnapshot.at(settings.root, settings.against)
        except GitError as error:
            raise pytest.UsageError(str(error)) from None
    if settings.against_python is not None:
        from .other_environment import find

        run.other = find(settings.against_python, machine)
    if worker is None:
        config.pluginmanager.register(LiveProgress(config, run), "aisp-live")
    if settings.replay is not None:
        try:
            run.replay = recording = ReplayWorker(settings.replay)
        except ReplayError as error:
            raise pytest.UsageError(str(error)) from None
        run.machine = recording.machine or run.machine
    if worker is None:
        config.stash[RECORDER] = recorder = _recorder(config, run)
        if isinstance(run.replay, ReplayWorker):
            recorder.recorded_invalid = run.replay.invalid
            rows = run.replay.rows.values()
            recorder.recorded_red = [row.nodeid for row in rows if row.verdict in RED]
        config.pluginmanager.register(_Gather(recorder, run), "aisp-gather")
        if hasattr(config.option, "benchmark_disable"):  # pytest-benchmark is installed
            from . import benchmark_plugin

            config.pluginmanager.register(benchmark_plugin, "aisp-benchmarks")


def _foreign_timer(config: pytest.Config, settings: Settings) -> Mapping[str, Json] | None:
    """Return the timer of the hook `pytest_aisp_timer`, or None.

    Raises:
        pytest.UsageError: if its product could be mistaken for a real one, or a key is missing.
    """
    timer: Mapping[str, Json] | None = config.hook.pytest_aisp_timer(config=config)
    if timer is None:
        return None
    if lacking := [name for name in ("target", "arch", "product") if not timer.get(name)]:
        raise pytest.UsageError(
            f"pytest_aisp_timer: the timer lacks {', '.join(lacking)}\nReturn all of them:\n"
            '    {"target": "module:function", "arch": "sm90", "product": "simulated-gpu"}'
        )
    target, product = timer["target"], timer["product"]
    if not product.startswith(SIMULATED):
        raise pytest.UsageError(
            f"pytest_aisp_timer: the times of {target} would pass for measurements of {product}\n"
            f'Begin the product with {SIMULATED}:\n    "product": "{SIMULATED}{product}"'
        )
    if settings.untrusted:
        raise pytest.UsageError(
            f"--aisp-untrusted cannot be combined with the timer {target}: no other process can"
            " verify its times\nRemove the hook pytest_aisp_timer from conftest.py"
        )
    return timer


class XdistNode(Protocol):
    """The controller's object for an xdist worker."""

    gateway: XdistGateway
    workerinput: dict[str, Json]


class XdistGateway(Protocol):
    """The connection to an xdist worker."""

    id: object


def _of_controller(config: pytest.Config, workerinput: Mapping[str, Json]) -> Settings:
    """Return the settings. An xdist worker gets its folders from its controller."""
    settings = config.stash[SETTINGS]
    folders = {name: Path(path) for name, path in workerinput.get("aisp_folders", {}).items()}
    if settings.replay is not None:  # resolve the link `latest` before this run replaces it
        folders = {"replay": folder_of(settings.replay), **folders}
    artifacts = folders.get("artifacts", settings.artifacts)
    replay = folders.get("replay", settings.replay)
    config.stash[SETTINGS] = settings = replace(settings, artifacts=artifacts, replay=replay)
    return settings


def _recorder(config: pytest.Config, run: RunContext) -> Recorder:
    """Return the recorder. If artifacts are requested, create their folder."""
    settings = run.settings
    try:
        if settings.timestamped is not None:
            settings = replace(settings, artifacts=stamped(settings.timestamped))
            run.settings = config.stash[SETTINGS] = settings
        recorder = Recorder(settings, config)
        if recorder.artifacts is not None:
            recorder.artifacts.claim()
            recorder.artifacts.start(build_manifest(config, run))
    except Unclaimable as error:
        raise pytest.UsageError(f"--aisp-artifacts={settings.artifacts}: {error}") from None
    except OSError as error:
        where = settings.artifacts or settings.timestamped
        raise pytest.UsageError(
            f"--aisp-artifacts={where}: cannot be written: {error}\nGive a writable folder"
        ) from None
    return recorder


class _Gather:
    """A pytest plugin of the controller, which passes the rows in reports to the recorder."""

    def __init__(self, recorder: Recorder, run: RunContext) -> None:
        self._recorder, self._run = recorder, run
        self._judged: dict[object, list[str]] = {}  # the keys of each xdist worker's cases

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: XdistNode) -> None:
        """Send the run's folders and elapsed time to an xdist worker that starts."""
        node.workerinput["aisp_elapsed"] = time.monotonic() - self._run.started
        settings = self._run.settings
        folders = {"artifacts": settings.artifacts, "replay": settings.replay}
        node.workerinput["aisp_folders"] = {k: str(v) for k, v in folders.items() if v}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = getattr(report, "aisp", None)
        if plain is not None:
            row = Row.of(plain)
            self._recorder.add(row)
            if row.value is not None and row.clock in CLOCKS:
                self._judged.setdefault(getattr(report, "node", None), []).append(row.key)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: XdistNode, error: object) -> None:
        """Record the canary of an xdist worker. If there is none, record the worker's cases."""
        output = getattr(node, "workeroutput", {})
        self._recorder.unused.update(output.get("aisp_unused", ()))
        found = output.get("aisp_canary")
        judged = self._judged.pop(node, [])  # xdist calls twice for an interrupted worker
        if found is not None:
            self._recorder.add_canary(msgspec.convert(found, Canary))
        elif judged and has_canary(self._run):
            self._recorder.without_canary.append((str(node.gateway.id), judged))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """Record the crash of an xdist worker. The case that it was running has no row."""
        self._recorder.crashes.append(str(report.longrepr))


def _interrupt_on_sigterm() -> None:
    """Interrupt pytest on SIGTERM. Slurm sends it some time before it kills the process."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, interrupt)


def _selects_cpu(expression: str) -> bool:
    words = expression.replace("(", " ").replace(")", " ").split()
    return "aisp_cpu" in words and "not aisp_cpu" not in expression


@contextlib.contextmanager
def lock_machine(item: pytest.Item) -> Iterator[None]:
    """Hold the leases that the case of `item` needs."""
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(item.config.stash[RUN].machine_locks(case_of(item)))
        except OSError as error:  # raising it here would end the whole run
            item.stash[LOCK_ERROR] = f"the machine cannot be leased: {error}\n{REMEDY}"
        yield
