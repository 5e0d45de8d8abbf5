"""`--aisp-untrusted`: a case's sides once more, in processes that hold neither clock nor answer."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..isolation.monkeypatches import now
from ..results.messages import CaseTask, CompareTask, DrawTask, PerformTask, PrepareTask, ShowTask
from ..results.row import duration
from ..worker.client import Worker
from ..worker.sandbox import seconds_per_call
from .case_client import CaseClient
from .options import MAX_SEED
from .run_context import Failed

if TYPE_CHECKING:
    from .measurement import Timing

ROLES = ("baseline", "optimized")
LIMIT = {"graph": 1.25, "host": 1.5, "cpu": 1.5}
"""By clock: how far apart the judging process's clock and this one's may be. Calls behind a
blocking kernel cannot be timed from outside."""
LEAST, TIMES = 0.25, 5
ATTEMPTS = 3
"""A machine that is busy for a moment accuses nobody."""


def run_sandboxed(client: CaseClient, timing: Timing | None) -> None:
    """Run both sides of `client` apart: their outputs must be right, and their times those told.

    Args:
        timing: what the worker process measured, or None where nothing was timed.

    Raises:
        Failed: for a wrong output (`wrong`) or a time that is not true (`invalid`).
    """
    side = client.case.pair.baseline
    if hasattr(side, "environment"):
        client.notes.append("not run apart: each of its samples is a process of its own")
        return
    if client.ranks > 1:
        raise Failed(
            f"--aisp-untrusted: the sides run on {client.ranks} ranks, which cannot be run apart;"
            " leave the option out for pages that you trust",
            verdict="invalid",
        )
    with tempfile.TemporaryDirectory(prefix="aisp-apart-") as folder:
        _Sandbox(client, timing, Path(folder)).run()


def untrue(apart: float, told: float, clock: str) -> bool:
    """Return whether seconds per call measured apart and those told contradict each other."""
    return not 1 / LIMIT[clock] <= apart / told <= LIMIT[clock]


class _Sandbox:
    def __init__(self, client: CaseClient, timing: Timing | None, folder: Path) -> None:
        self.client, self.folder = client, folder
        # A simulated device has times of its own; its sides run on the CPU.
        self.timing = timing = None if client.run.timer is not None else timing
        details = timing.details if timing is not None else {}
        self.clock = timing.clock if timing is not None else ""
        self.slots = int(details.get("slots", 2))
        self.counted = [int(n) for n in details.get("counted", (1, 1))]
        given = client.run.settings.seed  # else no process of the sides has ever known it
        self.secret = random.SystemRandom().randint(1, MAX_SEED) if given is None else given

    def run(self) -> None:
        referee = self.client.fresh_worker()
        try:
            values = str(self.folder / "values.pt")
            self._ask(referee, DrawTask, seed=self.secret, values=values)
            for number, role in enumerate(ROLES):
                self._side(referee, role, number, values)
        finally:
            referee.close()

    def _side(self, referee: Worker, role: str, number: int, values: str) -> None:
        performer = self.client.fresh_worker()
        try:
            prepared = self._ask(
                performer,
                PrepareTask,
                side=role,
                clock=self.clock,
                counted=self.counted[number],
                slots=self.slots,
            )
            unit = int(prepared["unit"])
            if self.timing is not None and self.clock in LIMIT:
                told = self.timing.pair_seconds[number]
                self._time(performer, role, told, unit)
            outputs = str(self.folder / f"{role}.pt")
            kept = sorted({0, random.SystemRandom().randrange(self.slots)})
            self._ask(
                performer, ShowTask, side=role, values=values, outputs=outputs, slots=tuple(kept)
            )
        finally:
            performer.close()
        steps = self.counted[number] if self.clock == "graph" else 1
        self._ask(referee, CompareTask, side=role, seed=self.secret, outputs=outputs, steps=steps)
        self.client.notes.append(f"{role} run apart: its outputs are right")

    def _ask(
        self, worker: Worker, kind: type[CaseTask], *, seed: int = 0, **changes: Any
    ) -> dict[str, Any]:
        at = "case" if self.client.placement.kind == "time" else "check"
        return self.client.ask(self.client.task(kind, at=at, seed=seed, **changes), worker)

    def _time(self, performer: Worker, role: str, told: float, unit: int) -> None:
        """Refuse a side whose time by this process's clock is not the one that was told."""

        def work(units: int) -> float:
            start = now()
            self._ask(performer, PerformTask, side=role, units=units)
            return now() - start

        for _ in range(ATTEMPTS):
            apart = seconds_per_call(work, unit, at_least=LEAST, times=TIMES)
            if not untrue(apart, told, self.clock):
                self.client.notes.append(f"{role} run apart: {duration(apart)} a call")
                return
        message = (
            f"{role} takes {duration(apart)} by the clock of a process that it does not run in,"
            f" and {duration(told)} by that of its own"
        )
        raise Failed("\n".join([message, *self.client.commands()]), verdict="invalid")
