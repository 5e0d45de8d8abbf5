"""Record trials of `--aisp-against-python`: each kernel in two environments, timed in turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from code_gate_record import CALLS, PAGE, SILENCE, Lost, Recorder

from pytest_aisp.results.messages import CaseTask, Reply, Result
from pytest_aisp.session.other_environment import import_path
from pytest_aisp.session.two_environments import time_in_turn
from pytest_aisp.timing.schedule import extra_calls
from pytest_aisp.worker.client import Worker, WorkerProcess

T = TypeVar("T", bound=CaseTask)
PLANTED = 0.02
"""The slowdown to plant. The gate of two environments promises to see 1.5 %."""


@dataclass
class Environments:
    """A process of each environment. Tasks that are not held windows go to today's process."""

    there: Worker
    here: Worker

    def ask(self, task: CaseTask, silence: float, progress: Callable[[str], None]) -> Reply:
        return self.here.ask(task, silence, progress)

    def close(self) -> None:
        self.there.close()
        self.here.close()


@dataclass
class EnvironmentsRecorder(Recorder):
    """Like `Recorder`. Each of its processes is a pair of processes, one of each environment."""

    def start(self) -> Any:
        gpus = [] if self.machine is None else self.machine.gpus
        variables = {"CUDA_VISIBLE_DEVICES": gpus[0] if gpus else ""}
        other = {**variables, "PYTHONPATH": import_path()}
        return Environments(WorkerProcess(other, python=[self.plan.python]), super().start())

    def window(self, kernel: str) -> float:
        """Return the seconds of a window in which 2 % are at least 4 calls."""
        return max(1e-3, 2 * CALLS * self.seconds[kernel])

    def share(self, kernel: str) -> float:
        return PLANTED

    def _timed(self, kernel: str, **changes: Any) -> dict[str, Any] | None:
        self.number += 1
        asked = changes.get("planted", 0.0)
        client = KernelClient(self, kernel)
        rng = random.Random(f"{self.plan.seed} {self.process} {self.number}")
        options = {"budget": changes.get("budget", {})}
        options["replicate"] = 1 + 1000 * self.process + self.number
        if self.plan.simulated:
            options["timer"] = self._timer(kernel)
            seconds = options["timer"]["options"]["seconds"]
            seconds[f"{kernel}@other"] = seconds[kernel]
            seconds[kernel] *= 1 + asked
        pair = self.worker.there, self.worker.here
        samples = time_in_turn(client, pair, rng, "optimized", planted=asked, **options)
        counted = samples.details["counted"]
        extra = extra_calls(counted[1], asked)
        calls = counted[1] * (1 + asked) if self.plan.simulated else counted[1] + extra
        samples.details.update(calls=[counted[0], calls], slots=None)
        return asdict(samples) | {"value": samples.value, "error": samples.error}

    def _others(self) -> None:
        """Other tools do not compare environments."""


@dataclass
class KernelClient:
    """Builds the tasks of one kernel."""

    recorder: EnvironmentsRecorder
    kernel: str

    def task(self, kind: type[T], **fields: Any) -> T:
        names = ("root", "module", "function", "variant", "size", "device", "rule", "seed")
        known = self.recorder.task(self.kernel)
        return kind(page=str(PAGE), **{n: getattr(known, n) for n in names}, **fields)

    def ask(self, task: CaseTask, kind: type[Result], worker: Worker | None = None) -> Result:
        reply: Reply = (worker or self.recorder.worker).ask(task, SILENCE, lambda doing: None)
        if reply.error is not None:
            self.recorder.write_error(self.kernel, reply)
            raise Lost  # a process may still hold a side
        return reply.read(kind)
