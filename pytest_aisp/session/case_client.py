"""The client of one case. It sends tasks to worker processes and collects their replies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from msgspec import convert
from msgspec.structs import replace

from ..distributed.launcher import RankSet
from ..page.pair import Case
from ..results.messages import (
    CaseTask,
    CheckTask,
    CompileTask,
    FactsTask,
    Json,
    PageSource,
    Reply,
    Result,
    TimeTask,
)
from ..results.row import JournalLine, size_text
from ..results.task_results import CompileResult, Facts, TimeResult
from ..results.verdict import Cause, Reading
from ..util.device import VERSIONS, Machine, cpu_machine
from ..util.git import SnapshotError
from ..worker.client import START_SECONDS, ReplayWorker, Worker, WorkerProcess, name_of_task
from .collect import CaseLocation
from .placement import COMPILER, Placement
from .run_context import Failed, MachineDisturbed, RunContext, Unrecorded
from .terminal import rerun_commands

CANARY = 1000
"""The number of a canary's first process. No other kind of process has a number this large."""

T = TypeVar("T", bound=CaseTask)


class CaseClient:
    """Sends the tasks of one case to worker processes.

    Attributes:
        path: the file of the case's stored result.
        rule: the arguments of `numerics.Rule` that the check used; None before the check.
        timings: the full replies of all processes that timed the case.
        against: the full replies of all processes that timed a changed side against its old
            version.
        past: the source tree with the old versions of changed sides, or None.
        unchanged: roles of changed sides that launch the same machine code as their old version.
        machine_code: for each role, a digest of the machine code that the side launches; None until
            it is needed.
        missing_votes: the reasons why votes are missing.
        neighbors: for each timing during which another process used the GPU, that process's share
            of the GPU, and a message about that process.
        notes, remarks: further facts. Notes are shown only with ``-vv``, remarks always.
    """

    def __init__(
        self, run: RunContext, case: Case, location: CaseLocation, placement: Placement
    ) -> None:
        self.run, self.case, self.location, self.placement = run, case, location, placement
        self.timeout = run.settings.timeout
        self.machine = self._machine()
        product = self.machine.with_count(case.gpus, run.nodes)
        self.path = run.settings.baselines / product / f"{location.chapter}.json"
        self.rule: Mapping[str, float | None] | None = None
        self.timings: list[TimeResult] = []
        self.against: list[tuple[str, TimeResult]] = []
        self.past = run.past
        self.unchanged: list[str] = []
        self.machine_code: dict[str, str] | None = None
        self.missing_votes: list[str] = []
        self.neighbors: list[tuple[float, str]] = []
        self.notes: list[str] = []
        self.remarks: list[str] = []

    def _machine(self) -> Machine:
        run, on_gpu = self.run, self.placement.kind == "time" and self.placement.device == "cuda"
        recorded = run.replay is not None and run.machine.arch == "cpu"  # maybe on another CPU
        return run.machine if on_gpu or recorded or run.timer is not None else cpu_machine()

    def side_name(self, role: str) -> str:
        """Return the name of the side with this role."""
        return self.case.variant_name if role == "optimized" else self.case.pair.baseline.__name__

    def task(self, kind: type[T], **fields: Json) -> T:
        """Return a task of the type `kind` for this case."""
        settings = self.run.settings
        same: dict[str, Json] = {
            "page": str(self.location.page),
            "root": str(settings.root),
            "module": self.location.module,
            "function": self.location.function,
            "variant": self.case.variant_name,
            "case": self.case.id,
            "size": dict(self.case.size),
            "gpus": self.case.gpus,
            "device": self.placement.device,
            "rule": self.rule or {},
            "seed": self.run.seed,
            "reproducible": settings.reproducible,
        }
        return kind(**{**same, **fields})

    def recorded_row(self) -> JournalLine | None:
        """Return the case's row in the replayed run, or None."""
        replay = self.run.replay
        name = name_of_task(self.task(FactsTask, seed=0))
        return replay.rows.get(name) if isinstance(replay, ReplayWorker) else None

    def ask(self, task: CaseTask, kind: type[Result], worker: Worker | None = None) -> Result:
        """Return the result of `task`, which has the type `kind`. Raise `Failed` for an error."""
        self.run.check_time()
        reply = self._reply(task, worker or self.worker())
        if reply.error is not None:
            self._fail(self._blame(reply, task), task.seed)
        return reply.read(kind)

    def _reply(self, task: CaseTask, worker: Worker) -> Reply:
        """Return the reply to `task`. After an error, the process is replaced.

        If earlier cases ran in the process, their leftovers may have caused the error. So the task
        runs again in a new process, and the new reply counts.
        """
        run, place = self.run, self.run.shared.place_of(worker)
        earlier = run.shared.earlier_cases(place, self.location.nodeid) if place else []
        reply = worker.ask(task, self.timeout, run.progress)
        if reply.error is None or not isinstance(worker, (WorkerProcess, RankSet)):
            return reply
        worker.kill()
        if place is None or not earlier or reply.error == "disturbed":
            return reply
        device, number, ranks, variables = place
        again = self._reply(task, run.worker(device, number, ranks, dict(variables)))
        if again.error is None:
            name = earlier[-1].rpartition("::")[2]
            more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
            self.remarks.append(
                f"passed in a new process; in the process that had run {name}{more} before:"
                f" {reply.message.splitlines()[0]}"
            )
        return again

    def _blame(self, reply: Reply, task: CaseTask) -> Reply:
        """Return `reply`. If the baseline failed, its message also says whether it passes alone."""
        run, first = self.run, reply.message.partition("\n")[0]
        name, variant = self.case.pair.baseline.__name__, self.case.variant_name
        blamed = re.search(rf"\b{re.escape(name)}\b", first) and variant not in first
        ran = isinstance(task, (CheckTask, TimeTask)) and reply.error != "timeout"
        if not (blamed and ran) or run.replay is not None or run.settings.in_process:
            return reply
        with contextlib.closing(self.fresh_worker()) as worker:
            alone = self.task(CheckTask, at=task.at, baseline_alone=True)
            if worker.ask(alone, self.timeout, run.progress).error is not None:
                return reply
        message = f"{name} passes its check alone, but not after {variant} ran: {reply.message}"
        return replace(reply, message=message)

    def _fail(self, reply: Reply, seed: int) -> NoReturn:
        if reply.error == "disturbed":
            raise MachineDisturbed(reply.message)
        verdicts = {"wrong": "wrong", "traced": "invalid"}
        size = reply.at or size_text(1, self.case.size)
        where = f"{self.case.variant_name} at {size}" if size else self.case.variant_name
        plain = reply.error in ("wrong", "page", "unrecorded")
        parts = [reply.message if plain else f"{where}: {reply.message}"]
        parts += [reply.trace.rstrip()] if reply.trace else []
        failed = Unrecorded if reply.error == "unrecorded" else Failed
        message = "\n".join([*parts, *self.commands(seed)])
        cause: Cause = "environment" if reply.error == "traced" else ""
        if reply.error == "unrecorded" and (then := self.recorded_row()) is not None:
            cause = convert(then.cause, Cause)
        raise failed(message, verdicts.get(reply.error or "", "fail"), cause)

    def commands(self, seed: int = 0) -> list[str]:
        """Return the commands that run this case again, with the input values of `seed`."""
        return rerun_commands(self.run.settings, self.location.typed, seed)

    def _time(self, worker: Worker | None, **fields: Json) -> TimeResult:
        task = self.task(TimeTask, timer=self.run.timer, budget=self.budget(), **fields)
        result = self.ask(task, TimeResult, worker)
        if (neighbor := result.details.get("neighbor")) is not None:
            self.neighbors.append((neighbor["share"], neighbor["text"]))
        return result

    def neighbor(self) -> str:
        """Return a note on the process that took the most GPU time from a timing, or no text."""
        return max(self.neighbors)[1] if self.neighbors else ""

    def time(self, replicate: int, worker: Worker | None = None) -> TimeResult:
        """Time the case in process `replicate`. Return the result and add it to `timings`."""
        settings = self.run.settings
        versus = "self" if settings.aa else "baseline"
        audit = settings.audit and replicate == 0
        result = self._time(worker, versus=versus, replicate=replicate, audit=audit)
        self.timings.append(result)
        return result

    def vote(self, number: int, worker: Worker) -> Reading:
        """Time the case in process `number`, and return the reading."""
        return reading(self.time(number, worker))

    def note_kernel_resources(self, result: TimeResult) -> None:
        """Add each kernel's resources on this arch to the notes, and to a timing's `result`."""
        if self.run.replay is not None or self.run.settings.in_process:
            return  # no process can compile
        task = self.task(CompileTask, archs=(self.machine.arch,))
        reply = self.run.worker(COMPILER).ask(task, self.timeout, self.run.progress)
        if reply.error is None:
            compiled = reply.read(CompileResult)
            result.assembled = compiled.assembled
            self.notes += compiled.words
        else:
            why = (reply.message.splitlines() or [reply.error])[0]
            self.notes.append(f"the resources of its kernels are unknown: {why}")

    def time_against(self, role: str, replicate: int, worker: Worker | None = None) -> Reading:
        """Time the side `role` against its old version in one process."""
        past = self.past_page()
        result = self._time(worker, versus="old", side=role, past=past, replicate=replicate)
        self.against.append((role, result))
        return reading(result)

    def time_itself(
        self, planted: float, number: int, worker: Worker | None = None
    ) -> tuple[Reading, float]:
        """Time the optimized side against itself in one process.

        Returns:
            The reading, and the planted slowdown, which is `planted` rounded to whole calls.
        """
        number += CANARY
        result = self._time(worker, versus="self", planted=planted, replicate=number, keep=True)
        details = result.details
        return reading(result), details["calls"][1] / details["counted"][1] - 1

    def worker(self, number: int = 0) -> Worker:
        """Return worker process `number` for this case. With several ranks, return all of them."""
        return self.run.worker(self.placement.device, number, self.ranks, self._variables)

    def start_recording_processes(self) -> None:
        """Start all recording processes at once, because each one needs time to import torch."""
        if self.placement.device == "cuda" and self.run.timer is None:
            for number in range(1, self.run.settings.processes):
                self.worker(number)

    def fresh_worker(self) -> Worker:
        """Start one more worker process for this case. With several ranks, start all of them."""
        return self.run.start(self.placement.device, self.ranks, self._variables)

    @property
    def _variables(self) -> Mapping[str, str]:
        """The environment variables of this case's ranks; empty for a single process."""
        return self.case.pair.environment if self.ranks > 1 else {}

    @property
    def ranks(self) -> int:
        """The number of processes in which the sides run; 1 if kernels are only compiled."""
        alone = self.placement.kind not in ("time", "check") or self.run.timer is not None
        return 1 if alone else self.case.gpus

    def past_page(self) -> PageSource | None:
        """Return the page in `past`, or None."""
        past = self.past
        try:
            page = past.page(self.location.page) if past is not None and past.moved else None
        except SnapshotError as error:
            raise Failed(str(error)) from None
        if past is None or page is None:
            return None
        module = f"aisp_past_{past.sha[:12]}.{self.location.module}"
        return PageSource(page=str(page), root=str(past.tree), module=module)

    def budget(self) -> dict[str, float]:
        """Return the arguments for `schedule.Budget` that the ini file sets."""
        settings = self.run.settings
        budget: dict[str, float] = {}
        if settings.blocks is not None:
            budget["blocks"], budget["least"] = settings.blocks, min(6, settings.blocks)
        if settings.window is not None:
            budget["window"] = settings.window
        if settings.warmup is not None:
            budget["warmup"] = settings.warmup
        return budget

    def environment(self) -> dict[str, Json]:
        """Return the versions and facts that a stored result depends on, without its sources."""
        if self.run.replay is not None:
            return self._ask_facts(self.run.replay)
        facts = {**self.machine.versions, **self.machine.facts, **self._libraries()}
        return facts if self.ranks == 1 else {**facts, "links": self.run.links(self.ranks)}

    def _libraries(self) -> dict[str, Json]:
        run = self.run
        if run.timer is not None:
            facts = run.timer.get("environment", {})
            return {"torch": "simulated", **facts, "timer": run.timer["target"]}
        if run.versions is None:
            facts = self._ask_facts(run.worker(self.placement.device))
            run.versions = {name: fact for name, fact in facts.items() if name in VERSIONS}
        return run.versions

    def _ask_facts(self, worker: Worker) -> dict[str, Json]:
        task = self.task(FactsTask, seed=0)
        reply = worker.ask(task, START_SECONDS + self.timeout, self.run.progress)
        if reply.error is not None:
            self._fail(reply, task.seed)
        return reply.read(Facts)


def reading(timed: TimeResult) -> Reading:
    """Return ln(speedup) and its error from the result of a timing process."""
    return Reading(timed.value, timed.error)
