"""Time a side in two environments alternately, and judge the ratio of the two times.

One process of each environment keeps two copies of the side ready. `schedule.measure` runs in the
pytest process and treats the two processes like the two sides of a pair. It requests timing windows
in the order ABBA or BAAB, so only one process works at a time.
"""

from __future__ import annotations

import functools
import platform
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ..isolation.interference import Cause, Disturbed
from ..page.pair import ROLES, SideError
from ..results import verdict
from ..results.messages import (
    CaseTask,
    ChangedTask,
    CompareTask,
    DrawTask,
    FactsTask,
    HoldTask,
    Json,
    PrepareTask,
    ReleaseTask,
    Result,
    ShowTask,
    WindowTask,
)
from ..results.models import HOST_CLOCKS
from ..results.row import IN_BOTH
from ..results.task_results import Facts, HoldResult, PrepareResult, TimeResult, WindowResult
from ..results.verdict import Finding, Reading
from ..timing import schedule
from ..timing.schedule import Budget, Samples, join
from ..worker.client import Worker
from .case_client import CaseClient, reading
from .judge_case import judge_against
from .other_environment import OtherEnvironment
from .run_context import Failed, MachineDisturbed
from .stored_result import StoredResult

T = TypeVar("T", bound=CaseTask)

IDLE_SECONDS = 0.03
"""Seconds to wait before a window on a host clock.

The OpenMP threads of the other process spin for some milliseconds after its window.
"""
Processes = tuple[Worker, Worker]
"""A process of the other environment, and a process of today's environment."""


class Client(Protocol):
    """What builds the tasks of one case and asks a process for their results."""

    def task(self, kind: type[T], **fields: Json) -> T: ...

    def ask(self, task: CaseTask, kind: type[Result], worker: Worker | None = None) -> Result: ...


def judge_environments(client: CaseClient, stored: StoredResult) -> list[Finding]:
    """Compare each side's times in the other environment and in today's environment.

    A side that can run in only one of the environments is not timed. A remark names this side.
    """
    other, findings = client.run.other, list[Finding]()
    sides: dict[str, Callable[..., Reading]] = {}
    than = "its speed in the other environment of the recorded run"
    if client.run.replay is not None:
        found = client.ask(client.task(ChangedTask, past=None), dict[str, Json])
        recorded = [role for role in ROLES if role + IN_BOTH in found]
        sides = {r: functools.partial(client.time_against, r + IN_BOTH) for r in recorded}
    elif other is not None:
        case = _CaseInBoth(client, other)
        sides = {r: functools.partial(case.time, r) for r in case.comparable_roles()}
        than = f"its speed with {other.text()}"
    for role, measure in sides.items():
        name = client.side_name(role)
        try:
            first = measure(0)
        except MachineDisturbed:
            raise
        except Failed as failure:
            why = str(failure).partition("\n")[0]
            client.remarks.append(f"{name} is not compared with {than}: {why}")
            continue
        gate = verdict.code_gate(_spread(stored, client.against[-1][1].clock), first)
        findings += judge_against(client, name, first, gate, measure, than, "environment")
    return findings


def _spread(stored: StoredResult, clock: str) -> float:
    """Return the assumed spread of the ratio of a side's times in two processes.

    It is at least the clock's default. The recorded spread can be too small here: it comes from two
    times in the same process, where noise partly cancels.
    """
    return max(stored.spread(clock), verdict.DEFAULT_SPREAD[clock])


@dataclass
class _CaseInBoth:
    """One case in both environments."""

    client: CaseClient
    other: OtherEnvironment

    def comparable_roles(self) -> list[str]:
        """Return the roles of the sides that give right results in both environments.

        Remarks name the other sides. The outputs of the other environment are compared with the
        reference in today's environment, for the same inputs.
        """
        client, roles = self.client, []
        if why := self._refused():
            client.remarks.append(f"not timed with {self.other.python}: {why}")
            return []
        for role in ROLES:
            try:
                with self._processes(None) as processes:
                    self._note_versions(processes)
                    self._check(role, processes)
                roles.append(role)
            except MachineDisturbed:
                raise
            except Failed as failure:
                name, why = client.side_name(role), str(failure).partition("\n")[0]
                client.remarks.append(f"{name} is not timed with {self.other.python}: {why}")
        return roles

    def _refused(self) -> str:
        if self.client.case.gpus > 1:
            return "cases on several GPUs are timed in one environment only"
        if hasattr(self.client.case.pair.baseline, "environment"):
            return "each sample of a process side is a separate process"
        return ""

    def _processes(self, today: Worker | None) -> AbstractContextManager[Processes]:
        return self.other.processes(self.client.run, self.client.placement.device, today)

    def _note_versions(self, processes: Processes) -> None:
        if self.other.differences is not None:
            return
        task = self.client.task(FactsTask)
        there, here = (self.client.ask(task, Facts, worker) for worker in processes)
        there = {"python": self.other.found.python, **there}
        here = {"python": platform.python_version(), **here}
        self.other.differences = {
            n: (there.get(n), v) for n, v in here.items() if there.get(n) != v
        }

    def _check(self, role: str, processes: Processes) -> None:
        """Compare a side's outputs in the other environment with today's reference."""
        ask, task = self.client.ask, self.client.task
        there, here = processes
        with tempfile.TemporaryDirectory(prefix="aisp-environments-") as folder:
            values, outputs = str(Path(folder, "values.pt")), str(Path(folder, "outputs.pt"))
            ask(task(DrawTask, values=values), dict[str, Json], here)
            prepare = task(PrepareTask, side=role, clock="", counted=1, slots=1)
            ask(prepare, PrepareResult, there)
            show = task(ShowTask, side=role, values=values, outputs=outputs, slots=(0,))
            ask(show, dict[str, Json], there)
            compare = task(CompareTask, side=role, outputs=outputs, steps=1)
            ask(compare, dict[str, Json], here)

    def time(self, role: str, number: int, today: Worker | None = None) -> Reading:
        """Time the side `role` in both environments. Return ln of the ratio of the two times.

        The logarithm is negative if the side is slower in today's environment.
        """
        client = self.client
        rng = random.Random(f"{client.location.nodeid}{role}{number}")
        options: dict[str, Json] = {"replicate": number, "timer": client.run.timer}
        options["budget"] = client.budget()
        with self._processes(today) as processes:
            try:
                samples = time_in_turn(client, processes, rng, role, **options)
            except Disturbed as error:
                raise MachineDisturbed(str(error)) from None
            except SideError as error:
                raise Failed(str(error)) from None
        samples.details.update(python=self.other.python, versions=self.other.differences)
        result = TimeResult(**asdict(samples), value=samples.value, error=samples.error)
        client.against.append((role + IN_BOTH, result))
        return reading(result)


def time_in_turn(
    client: Client,
    processes: Processes,
    rng: random.Random,
    role: str,
    planted: float = 0.0,
    **options: Json,
) -> Samples:
    """Time all laps of the side `role`. The two processes take turns building the side first.

    Args:
        planted: the slowdown to plant in the second process.
        options: further fields of each `HoldTask`.
    """
    share = budget = Budget(**options.get("budget", {}))
    parts, laps = list[Samples](), 1
    known: tuple[str, list[int]] | None = None
    while len(parts) < laps:
        lap, windows = len(parts), dict[int, _RemoteWindow]()
        for index in (lap % 2, 1 - lap % 2):
            fields = {**options, "side": role, "planted": planted if index else 0.0}
            task = client.task(HoldTask, other=index == 0, lap=lap, known=known, **fields)
            held = client.ask(task, HoldResult, processes[index])
            windows[index] = _RemoteWindow(client, processes[index], held)
            known = known or (held.clock, held.counted)
        if lap == 0:
            laps, share = held.laps, budget.lap(held.laps)
        timer = _BothTimer(held.clock, (windows[0], windows[1]))
        parts.append(schedule.measure(timer, share, rng, lap % 2))
        for worker in processes:
            release = client.task(ReleaseTask, last=len(parts) == laps)
            client.ask(release, dict[str, Json], worker)
        share = share.exactly(len(parts[0].blocks))
    return join(parts)


class _RemoteWindow:
    """Times a side in one process, alternating between that process's two copies of the side."""

    def __init__(self, client: Client, worker: Worker, held: HoldResult) -> None:
        self._client, self._worker, self._turn = client, worker, 0
        self._clock = held.clock
        self.calls = self.counted = max(held.counted)
        self.repeats = held.repeats
        self.refresh = ""
        self.cause: Cause | None = None

    def __call__(self) -> float:
        if self._clock in HOST_CLOCKS:
            time.sleep(IDLE_SECONDS)
        task = self._client.task(WindowTask, copy=self._turn % 2, refresh=self.refresh)
        result = self._client.ask(task, WindowResult, self._worker)
        self._turn, self.refresh = self._turn + 1, ""
        if result.disturbed:
            self.cause = Cause(result.disturbed, result.by_machine)
        return result.seconds


@dataclass
class _BothTimer:
    """A `schedule.PairTimer` that compares one side in two processes."""

    clock: str
    windows: tuple[_RemoteWindow, _RemoteWindow]

    def refresh(self, *, last: bool) -> None:
        for window in self.windows:
            window.refresh = "last" if last else "values"

    def disturbance(self) -> Cause | None:
        causes = [window.cause for window in self.windows if window.cause is not None]
        for window in self.windows:
            window.cause = None
        return causes[0] if causes else None

    def details(self) -> dict[str, object]:
        return {"counted": [window.counted for window in self.windows]}
