"""One case as a client of worker processes: its tasks, their answers, and its row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..page.pair import Case
from ..results.messages import CaseTask, ChangedTask, FactsTask, PageSource, Reply, TimeTask
from ..results.models import HOST_CLOCKS
from ..results.row import ratio, size_text
from ..results.verdict import VOTES, Reading
from ..util.device import VERSIONS, Machine, cpu_machine
from ..worker.client import START_SECONDS, Worker
from .git_snapshot import SnapshotError
from .placement import Placement
from .run_context import Failed, RunContext, Unrecorded
from .terminal import rerun_commands

CANARY = 1000
"""First number of the processes of a run's canary, beyond those that measure and record."""


def key_of(case: Case, where: Mapping[str, str]) -> str:
    """Return the name of a case's stored result in its chapter's file."""
    return f"{Path(where['page']).name}::{where['function']}[{case.id}]"


T = TypeVar("T", bound=CaseTask)


class CaseClient:
    """One case on one machine, as its worker processes see it.

    Attributes:
        placement: where the case can be shown.
        path: the file of its stored result.
        rule: the rule of comparison that its check was asked with; None before.
        timings, against: the full answers of all processes that timed it, and that timed a changed
            side against its version at a commit.
        missing_votes: why votes were not taken.
        notes, remarks: what else there is to say; remarks are shown without ``-vv``, too.
    """

    def __init__(
        self, run: RunContext, case: Case, where: Mapping[str, str], placement: Placement
    ) -> None:
        self.run, self.case, self.where, self.placement = run, case, where, placement
        self.timeout = run.settings.timeout
        self.machine = self._machine()
        product = self.machine.with_count(case.gpus)
        self.path = run.settings.baselines / product / f"{where['folder']}.json"
        self.rule: dict[str, Any] | None = None
        self.timings: list[dict[str, Any]] = []
        self.against: list[dict[str, Any]] = []
        self.missing_votes: list[str] = []
        self.notes: list[str] = []
        self.remarks: list[str] = []

    def _machine(self) -> Machine:
        run, on_gpu = self.run, self.placement.kind == "time" and self.placement.device == "cuda"
        recorded = run.replay is not None and run.machine.arch == "cpu"  # maybe by another CPU
        return run.machine if on_gpu or recorded or run.timer is not None else cpu_machine()

    def task(self, kind: type[T], **changes: Any) -> T:
        """Return a task of the type `kind` for this case."""
        where, settings = self.where, self.run.settings
        given: dict[str, Any] = {
            "page": where["page"],
            "root": str(settings.root),
            "module": where["module"],
            "function": where["function"],
            "variant": self.case.variant_name,
            "case": self.case.id,
            "size": dict(self.case.size),
            "gpus": self.case.gpus,
            "device": self.placement.device,
            "rule": self.rule or {},
            "seed": self.run.seed,
            "reproducible": settings.reproducible,
        }
        return kind(**{**given, **changes})

    def ask(self, task: CaseTask, worker: Worker | None = None) -> dict[str, Any]:
        """Return the result of `task`; raise `Failed` with its verdict for an error."""
        self.run.check_time()
        worker = worker or self.worker()
        reply = worker.ask(task, self.timeout, self.run.progress)
        if reply.error is not None:
            self._fail(reply, task.seed)
        return dict(reply.result)

    def _fail(self, reply: Reply, seed: int) -> NoReturn:
        verdicts = {"wrong": "wrong", "disturbed": "invalid"}
        size = reply.at or size_text(1, self.case.size)
        where = f"{self.case.variant_name} at {size}" if size else self.case.variant_name
        plain = reply.error in ("wrong", "page", "unrecorded")
        parts = [reply.message if plain else f"{where}: {reply.message}"]
        parts += [reply.trace.rstrip()] if reply.trace else []
        failed = Unrecorded if reply.error == "unrecorded" else Failed
        message = "\n".join([*parts, *self.commands(seed)])
        raise failed(message, verdict=verdicts.get(reply.error or "", "fail"))

    def commands(self, seed: int = 0) -> list[str]:
        """Return the lines that say how to run this case again, on the values of `seed`."""
        return rerun_commands(self.run.settings, self.where["typed"], seed)

    def time(self, replicate: int, worker: Worker | None = None) -> dict[str, Any]:
        """Return the answer of timing process number `replicate`, and keep it."""
        versus = "self" if self.run.settings.aa else "baseline"
        task = self.task(
            TimeTask,
            timer=self.run.timer,
            versus=versus,
            replicate=replicate,
            budget=self._budget(),
            audit=self.run.settings.audit and replicate == 0,
        )
        result = self.ask(task, worker)
        self.timings.append(result)
        return result

    def changed_sides(self) -> list[str]:
        """Return which sides differ from the commit of ``--aisp-against``: of those both had."""
        old = self.run.past
        if old is not None and (why := old.unreached(Path(self.where["page"]))):
            self.remarks.append(f"not compared with its version at the commit: {why}")
            return []
        past = self._past()
        if past is None:
            return []
        found = self.ask(self.task(ChangedTask, past=past))
        if found["why"]:
            self.remarks.append(f"not compared with its version at the commit: {found['why']}")
        return [role for role in ("baseline", "optimized") if found[role]]

    def time_against(self, role: str, replicate: int, worker: Worker | None = None) -> Reading:
        """Return what one process says of the side `role` against itself as it was."""
        task = self.task(
            TimeTask,
            timer=self.run.timer,
            versus="old",
            side=role,
            past=self._past(),
            replicate=replicate,
            budget=self._budget(),
        )
        result = self.ask(task, worker)
        self.against.append({"side": role, **result})
        return reading(result)

    def time_itself(
        self, planted: float, number: int, worker: Worker | None = None
    ) -> tuple[Reading, float]:
        """Return what one process says of the optimized side against itself, slowed by `planted`.

        Also returns the share of calls that was planted indeed, which is a whole number of calls.
        """
        task = self.task(
            TimeTask,
            timer=self.run.timer,
            versus="self",
            planted=planted,
            replicate=CANARY + number,
            keep=True,
            budget=self._budget(),
        )
        result = self.ask(task, worker)
        details = result["details"]
        return reading(result), details["calls"][1] / details["counted"][1] - 1

    def worker(self, number: int = 0) -> Worker:
        """Return worker process `number` for this case, or its ranks."""
        return self.run.worker(self.placement.device, number, self.ranks, self._variables)

    def start_recording_processes(self) -> None:
        """Start the processes that record after the first: they import torch while it checks."""
        if self.placement.device == "cuda" and self.run.timer is None:
            for number in range(1, self.run.settings.processes):
                self.worker(number)

    def fresh_worker(self) -> Worker:
        """Start one more worker process for this case's device, or its ranks."""
        return self.run.start(self.placement.device, self.ranks, self._variables)

    @property
    def _variables(self) -> Mapping[str, str]:
        """Environment variables of this case's ranks."""
        return self.case.pair.environment if self.ranks > 1 else {}

    @property
    def ranks(self) -> int:
        """Processes that this case's sides run on; kernels are assembled in one."""
        alone = self.placement.kind not in ("time", "check") or self.run.timer is not None
        return 1 if alone else self.case.gpus

    def _past(self) -> PageSource | None:
        past = self.run.past
        try:
            page = past.page(Path(self.where["page"])) if past is not None and past.moved else None
        except SnapshotError as error:
            raise Failed(str(error)) from None
        if past is None or page is None:
            return None
        module = f"aisp_past_{past.sha[:12]}.{self.where['module']}"
        return PageSource(page=str(page), root=str(past.tree), module=module)

    def _budget(self) -> dict[str, Any]:
        settings = self.run.settings
        budget: dict[str, Any] = {}
        if settings.blocks is not None:
            budget |= {"blocks": settings.blocks, "least": min(6, settings.blocks)}
        if settings.window is not None:
            budget["window"] = settings.window
        if settings.warmup is not None:
            budget["warmup"] = settings.warmup
        return budget

    def vote(self, number: int, worker: Worker) -> Reading:
        """Return what process `number` says of the case."""
        return reading(self.time(number, worker))

    def environment(self) -> dict[str, Any]:
        """Return what a stored result depends on besides its sources."""
        if self.run.replay is not None:
            return self._asked_facts(self.run.replay)
        facts = {**self.machine.versions, **self.machine.facts, **self._libraries()}
        return facts if self.ranks == 1 else {**facts, "links": self.run.links(self.ranks)}

    def _libraries(self) -> dict[str, Any]:
        run = self.run
        if run.timer is not None:
            return {"torch": "simulated", **run.timer.get("environment", {})}
        if run.versions is None:
            found = self._asked_facts(run.worker(self.placement.device))
            run.versions = {k: v for k, v in found.items() if k in VERSIONS}
        return run.versions

    def _asked_facts(self, worker: Worker) -> dict[str, Any]:
        task = self.task(FactsTask, seed=0)
        reply = worker.ask(task, START_SECONDS + self.timeout, self.run.progress)
        if reply.error is not None:
            self._fail(reply, task.seed)
        return dict(reply.result)


def reading(timed: Mapping[str, Any]) -> Reading:
    """Return what a process's answer says of the pair."""
    return Reading(float(timed["value"]), float(timed.get("error", 0.0)))


Measure = Callable[[int, Worker], Reading]
"""Returns what process number so-and-so, a fresh one, says."""


@contextmanager
def remeasuring(client: CaseClient, measure: Measure) -> Iterator[Callable[[], Reading | None]]:
    """Yield what returns each time what `measure` finds in a fresh process.

    It returns None when the run's budget for votes is spent, or the recording that is judged
    again holds no more. Where a clock of the GPU judges, as many as a verdict takes at least
    start together: importing torch is most of what a vote costs.
    """
    run, waiting, taken = client.run, list[Worker](), 0

    def process() -> Worker:
        if run.replay is not None:
            return run.replay
        if taken == 0 and client.ranks == 1 and _clock(client) not in HOST_CLOCKS:
            waiting.extend(client.fresh_worker() for _ in range(VOTES))
        return waiting.pop(0) if waiting else client.fresh_worker()

    def fresh() -> Reading | None:
        nonlocal taken
        if run.confirmed > run.settings.confirm_budget:
            client.notes.append("aisp_confirm_budget is spent: no more votes in this run")
            return None
        worker = process()
        taken += 1
        return _vote(client, measure, worker)

    try:
        yield fresh
    finally:
        for worker in waiting:
            worker.close()


def _vote(client: CaseClient, measure: Measure, worker: Worker) -> Reading | None:
    run, start = client.run, time.monotonic()
    number = len(client.timings) + len(client.against)
    name = f"vote of fresh process {number}"
    run.progress(f"vote {number} in a fresh process")
    try:
        found = measure(number, worker)
        said = f"{ratio(found.value)}, error {found.error:.2%}, {_clock(client)} clock"
        client.notes.append(f"{name}: {said}")
        return found
    except Unrecorded as failure:
        client.missing_votes.append(str(failure).splitlines()[0])
        return None
    except Failed as failure:
        client.notes.append(f"{name}: {str(failure).splitlines()[0]}")
        raise
    finally:
        if run.replay is None:
            worker.close()
        run.confirmed += time.monotonic() - start


def _clock(client: CaseClient) -> str:
    return str((client.against or client.timings)[-1]["clock"])
