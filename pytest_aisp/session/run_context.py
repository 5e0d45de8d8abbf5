"""The state that all cases of a pytest process share: machine, worker processes, stored results."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..distributed.launcher import RankSet
from ..distributed.multi_node import Machines, SpanningRanks
from ..page.pair import Case
from ..results import store
from ..results.messages import Json, PeaksTask
from ..results.models import Stored
from ..results.store import StoreError
from ..results.task_results import PeaksResult
from ..results.verdict import DISTURBED, Cause, Finding
from ..timing import peaks as peaks_module
from ..util.device import Machine
from ..util.git import GitSnapshot
from ..util.gpu_lease import lease
from ..worker.client import Worker, WorkerProcess
from ..worker.server import InProcess
from .options import MAX_SEED, Settings
from .shared_workers import SharedWorkers

if TYPE_CHECKING:
    from .case import CaseRun
    from .other_environment import OtherEnvironment

T = TypeVar("T")
Variables = Mapping[str, str] | None
FIRST_PAUSE = 1.0
"""Seconds of the first wait of a disturbed case. Each following wait is twice as long."""
RUN_WAITS = 5
"""The limit on the waits of a whole run, as a multiple of the limit for one case."""


CAUSES: Mapping[str, Cause] = {"wrong": "code", DISTURBED: "machine"}
"""The causes of verdicts that do not depend on a measured time."""


class Failed(Exception):
    """A case is red. The message has the reason and the remedy.

    Attributes:
        finding: the finding to add to the case, or None if the case already has it.
    """

    def __init__(self, message: str, verdict: str | None = "fail", cause: Cause = "") -> None:
        super().__init__(message)
        reason = message.partition("\n")[0]
        cause = cause or CAUSES.get(verdict or "", "")
        self.finding = None if verdict is None else Finding(verdict, (reason,), cause)


class Unrecorded(Failed):
    """A replayed case needs more samples than the run recorded."""


class MachineDisturbed(Failed):
    """The machine disturbed the case, so the case has no verdict and is not red."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DISTURBED)


class Interrupted(Exception):
    """The suite's time limit has passed."""


class EndOfBody(Exception):
    """Nothing is timed here, so the test body has nothing left to do."""


@dataclass
class RunContext:
    """The state that all cases of one pytest process share.

    Attributes:
        timer: a timer that a hook provides instead of the device's own, or None.
        emulator: a module from a hook that emulates CUDA C++ on the CPU, or None.
        xdist_worker: the number of this xdist worker, which determines its GPU.
        machines: this machine and the others on which this process's cases have ranks, or None.
        replay: the worker that replays a recorded run, or None.
        past: the pages at the commit of ``--aisp-against``.
        other: the environment of ``--aisp-against-python``.
        progress: a function that shows a message about the current work.
        announce: a function that shows why the run waits, even if `progress` shows nothing.
        times_cpu: True if a machine with a GPU also times sizes for CPUs.
        versions: the library versions that a worker process reported, or None before the report.
        canary_case: the case that this process's canary will use.
        shared: the worker processes that the cases share.
        cases_done: True after the last case, when the suite's time limit no longer applies.
        vote_seconds: time already spent on votes.
        wait_seconds: time already spent waiting for a disturbed machine.
    """

    settings: Settings
    machine: Machine
    timer: Mapping[str, Json] | None = None
    emulator: str | None = None
    xdist_worker: int = 0
    machines: Machines | None = None
    replay: Worker | None = None
    past: GitSnapshot | None = None
    other: OtherEnvironment | None = None
    progress: Callable[[str], None] = lambda text: None
    announce: Callable[[str], None] = lambda text: None
    times_cpu: bool = False
    versions: dict[str, Json] | None = None
    canary_case: CaseRun | None = None
    started: float = field(default_factory=time.monotonic)
    cases_done: bool = False
    vote_seconds: float = 0.0
    wait_seconds: float = 0.0
    shared: SharedWorkers = field(default_factory=SharedWorkers)
    _stored: dict[Path, Stored] = field(default_factory=dict)
    _trees: dict[str, GitSnapshot] = field(default_factory=dict)
    _peaks: dict[str, peaks_module.Peaks | None] = field(default_factory=dict)
    _caches: list[str] = field(default_factory=list)
    secret: int = field(default_factory=lambda: random.SystemRandom().randint(1, MAX_SEED))

    @property
    def seed(self) -> int:
        """The seed of the input values on which sides are checked. It is secret by default."""
        if self.settings.seed is not None:
            return self.settings.seed
        return 0 if self.settings.reproducible else self.secret

    @property
    def nodes(self) -> int:
        """The number of machines on which this process's cases have ranks."""
        return 1 if self.machines is None else self.machines.count

    def worker(
        self, device: str, number: int = 0, ranks: int = 1, variables: Variables = None
    ) -> Worker:
        """Return the shared worker process `number` for `device`, and start it if necessary.

        Args:
            ranks: the number of processes that work together as one worker.
            variables: environment variables to set in the worker.
        """
        if self.replay is not None:
            return self.replay
        place = device, number, ranks, tuple(sorted((variables or {}).items()))
        return self.shared.at(place) or self.shared.put(place, self.start(device, ranks, variables))

    def start(
        self, device: str, ranks: int = 1, variables: Variables = None, python: Sequence[str] = ()
    ) -> Worker:
        """Start a new worker: one process, run by the command `python`, or several ranks."""
        settings = self.settings
        if settings.in_process:
            if ranks > 1:
                raise Failed(
                    f"{ranks} ranks cannot run inside pytest; leave out --pdb and the like"
                )
            return InProcess()
        environment = {**self.environment(device, ranks), **(variables or {})}
        worker: WorkerProcess | RankSet
        if self.machines is not None and ranks == self.machines.ranks:
            worker = SpanningRanks(self.machines, environment)
        elif ranks > 1:
            worker = RankSet(ranks, environment)
        elif settings.sanitize and device == "cuda":
            from ..worker.nvidia_tools import SanitizedWorker

            worker = SanitizedWorker(settings.sanitize, environment)
        else:
            worker = WorkerProcess(environment, python=python)
        self.shared.printing.append(worker)
        return worker

    def environment(self, device: str, ranks: int = 1) -> dict[str, str | None]:
        """Return the environment variables to set for `device`. The value None removes one."""
        changes: dict[str, str | None] = {"TRITON_INTERPRET": None}
        if device == "cuda" and self.machine.gpus:
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus(ranks))
        if device != "cuda":
            changes["CUDA_VISIBLE_DEVICES"] = ""
        if device == "cpu":
            changes["TRITON_INTERPRET"] = "1"
            changes["AISP_CUDA_EMULATOR"] = self.emulator
        if self.settings.reproducible:
            changes["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if self.settings.cold_start:
            changes |= self._fresh_caches()
        return changes

    def _fresh_caches(self) -> dict[str, str | None]:
        folder = tempfile.mkdtemp(prefix="aisp-cold-")
        self._caches.append(folder)
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
        return {name: os.path.join(folder, name.lower()) for name in names}

    def gpus(self, count: int) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that this process uses for a case on `count` GPUs.

        A case on one GPU uses the GPU of this xdist worker. A case on several GPUs uses the
        machine's first GPUs, which are the same for all xdist workers.
        """
        gpus = self.machine.gpus
        if count == 1:
            return (gpus[self.xdist_worker % len(gpus)],)
        return tuple(sorted(gpus)[:count])

    def links(self, count: int) -> str | None:
        """Return the kinds of links between `count` GPUs, or None if there are too few GPUs."""
        from ..distributed import topology

        enough = len(self.machine.gpus) * self.nodes >= count
        here = topology.route_kinds(self.gpus(count)) if enough else None
        return here if self.nodes == 1 else f"{here or 'unknown'} in each of {self.nodes} machines"

    def stored(self, path: Path) -> Stored:
        """Return the stored results in `path`. Each file is read only once."""
        if path not in self._stored:
            try:
                self._stored[path] = store.load(path)
            except StoreError as error:
                raise Failed(str(error)) from None
        return self._stored[path]

    def peaks(self, product: str, *, measure: bool = True) -> peaks_module.Peaks | None:
        """Return the stored peaks of `product`, or None.

        Args:
            measure: True to measure peaks that are not stored yet. Only a run that records results
                measures peaks.
        """
        if product not in self._peaks:
            path = peaks_module.path_of(self.settings.baselines, product)
            measure = measure and self.settings.update is not None and self.timer is None
            try:
                if measure and not path.exists():
                    self._measure_peaks(path, product)
                self._peaks[product] = peaks_module.stored(path)
            except (peaks_module.PeaksError, OSError) as error:
                raise Failed(str(error)) from None
        return self._peaks[product]

    def _measure_peaks(self, path: Path, product: str) -> None:
        device = "cuda" if product == self.machine.product and self.machine.gpus else "cpu"
        self.progress(f"measure the peaks of {product}")
        task = PeaksTask(device=device)
        reply = self.worker(device).ask(task, self.settings.timeout, self.progress)
        if reply.error is not None:
            raise Failed(f"the peaks of {product} could not be measured: {reply.message}")
        path.parent.mkdir(parents=True, exist_ok=True)
        measured = reply.read(PeaksResult)
        peaks_module.save(path, peaks_module.Peaks(product, measured.rates, measured.facts))

    @contextlib.contextmanager
    def machine_locks(self, case: Case | None) -> Iterator[None]:
        """Hold the leases that `case` needs. Time limits exclude the wait for the leases.

        A case that is timed on the host's clock has exclusive use of the machine. All other cases
        share the host, but each has exclusive use of its GPUs. The locks are taken in a fixed
        order, which prevents deadlocks between runs.
        """
        settings = self.settings
        measures = not (settings.check or settings.compile) and self.replay is None
        on_host = case is not None and (case.pair.as_called or case.kind == "cpu")
        gpus: tuple[str, ...] = ()
        on_gpu = case is not None and case.kind == "gpu" and not settings.compile
        if case is not None and on_gpu and self.timer is None and self.machine.gpus:
            gpus = self.gpus(case.gpus)
        with contextlib.ExitStack() as locks:
            shared = not (on_host and measures)
            locks.enter_context(lease("host", shared=shared, waiting=self.progress))
            for gpu in sorted(gpus):
                locks.enter_context(lease(gpu, waiting=self.progress))
            if self.machines is not None:
                held = self.machines.leases(gpus=bool(gpus), shared=shared, waiting=self.progress)
                locks.enter_context(held)
            yield

    def when_quiet(self, measure: Callable[[], T], forget: Callable[[], None]) -> T:
        """Return the result of `measure`. If the machine disturbs it, wait and measure again.

        Each wait is twice as long as the previous one. All waits of a case together take at most
        `Settings.wait` seconds. All waits of a run together take at most `RUN_WAITS` times as long.

        Args:
            forget: discards the data of a disturbed measurement.

        Raises:
            MachineDisturbed: if the machine is still disturbed when the time for waits is used up.
        """
        remaining, pause = self.settings.wait, FIRST_PAUSE
        while True:
            try:
                return measure()
            except MachineDisturbed as disturbed:
                forget()
                in_run = RUN_WAITS * self.settings.wait - self.wait_seconds
                pause = min(pause, remaining, in_run)
                if pause <= 0 or self.replay is not None or self.settings.in_process:
                    raise
                why = f"waiting {pause:.0f} s for the machine: {disturbed}"
            self.announce(why)
            time.sleep(pause)
            self.check_time()
            self.wait_seconds += pause
            remaining, pause = remaining - pause, 2 * pause

    def recorded_tree(self, files: Mapping[str, str], page: Path, label: str) -> GitSnapshot:
        """Return a source tree with the recorded `files`. Each tree is unpacked only once.

        Raises:
            GitError: the files cannot be read.
        """
        key = f"{sorted(files.items())} {page} {label}"
        if key not in self._trees:
            self._trees[key] = GitSnapshot.of_files(self.settings.root, files, page, label)
        return self._trees[key]

    def check_time(self) -> None:
        """Raise `Interrupted` if the suite's time limit has passed."""
        limit = self.settings.suite_timeout
        if limit is not None and not self.cases_done and time.monotonic() - self.started > limit:
            raise Interrupted(f"aisp_suite_timeout: {limit:g} s have passed")

    def end_workers(self) -> None:
        """End every worker process, and delete its caches."""
        self.shared.close()
        if self.other is not None:
            self.other.close()
        for folder in self._caches:
            shutil.rmtree(folder, ignore_errors=True)
        self._caches.clear()

    def close(self) -> None:
        """End every worker process, and remove the checkouts of old code."""
        self.end_workers()
        for tree in [*([self.past] if self.past is not None else []), *self._trees.values()]:
            tree.folder.cleanup()
