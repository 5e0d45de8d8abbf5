"""Judge candidates against a problem. Each candidate runs in its own processes.

A `Judge` keeps one worker process, the referee, which runs the problem and never a candidate. For
each candidate, the `Judge` starts two more processes. The first process checks the candidate and
times it against the baseline. The second process is a sandbox, which receives inputs and returns
outputs. The referee compares these outputs with the expected ones, and the `Judge`'s own process
times the sandbox from outside. So a candidate in the sandbox cannot access the expected outputs or
the clock.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from ..isolation.monkeypatches import now
from ..page.pair import ROLES, Precision
from ..results.messages import (
    CaseTask,
    CheckTask,
    CompareTask,
    DrawTask,
    Json,
    PerformTask,
    PrepareTask,
    ShowTask,
    TimeTask,
)
from ..results.task_results import CheckResult, PrepareResult, TimeResult
from ..util.cli_result import CliError
from ..util.device import Machine
from ..util.gpu_lease import lease
from ..worker.client import WorkerProcess
from ..worker.sandbox import seconds_per_call
from .candidate_verdict import BY_ERROR, Refused, Verdict, refused_by, set_speedup
from .processes import Processes, peak_bytes

T = TypeVar("T")

LIMIT = {"graph": 1.25, "host": 1.5, "cpu": 1.5}
"""The largest allowed ratio of the speedup to the speedup measured from outside, by clock.

The clock ``queue`` has no limit, because its calls wait behind a blocking kernel and cannot be
timed from outside.
"""
ATTEMPTS = 3
"""Number of attempts to confirm a time. The machine may be busy during some attempts."""
LEAST, TIMES = 0.02, 3
"""The minimum duration of one timing from outside, in seconds, and the number of timings."""
MOST_SEED = 2**31 - 1

PAGE = """from pytest_aisp.judging.problem import page_of

test_judged = page_of({problem!r}, {candidate!r}, **{settings!r})
"""


class Judge:
    """A problem that is ready to judge candidates. Threads must not share a `Judge`.

    Args:
        problem: the file of the problem.
        sizes: constants of the problem to replace, by name.
        seeds: number of random draws of weights and inputs on which outputs are compared.
        device: ``cuda`` or ``cpu``. The default is the GPU, if there is one.
        timed: whether candidates are timed.
        untrusted: whether candidates also run in a sandbox. Without a sandbox, a candidate can
            cheat: it can read the expected outputs or change the clock in its own process.
        precision: the lower precision that candidates may use, such as ``bf16``.
        timeout: seconds without progress after which a process is killed.
        memory: bytes of host memory that a process may use.
        timer: a timer that simulates the device, for tests.
        processes: the pool of worker processes, if several judges share one.

    Raises:
        FileNotFoundError: if the file does not exist.
        CliError: if `device` is ``cuda``, but there is no GPU.
    """

    def __init__(
        self,
        problem: str | os.PathLike[str],
        *,
        sizes: Mapping[str, Json] | None = None,
        seeds: int = 3,
        device: str | None = None,
        timed: bool = True,
        untrusted: bool = True,
        precision: Precision | None = None,
        timeout: float = 120.0,
        memory: int | None = None,
        timer: Mapping[str, Json] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.problem = Path(problem).resolve(strict=True)
        self.sizes, self.seeds, self.precision = dict(sizes or {}), seeds, precision
        gpus = Machine.here().gpus[:1] if device != "cpu" else ()
        if device == "cuda" and not gpus:
            raise CliError("there is no GPU here that the plugin knows\n    aisp machine doctor")
        self.device, self._gpus = device or ("cuda" if gpus else "cpu"), gpus
        self.timed, self.untrusted, self.timer = timed, untrusted, timer
        self.timeout, self._processes = timeout, processes or Processes(gpus, memory)
        self._folder = tempfile.TemporaryDirectory(prefix="aisp-judge-")
        self._referee: WorkerProcess | None = None
        self._pages = 0
        self._random = random.SystemRandom()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove all files."""
        self._drop_referee()
        self._processes.close()
        self._folder.cleanup()

    def judge(self, candidate: str | os.PathLike[str]) -> Verdict:
        """Return the verdict on the file `candidate`. A bad candidate raises no exception.

        Raises:
            FileNotFoundError: if there is no such file.
        """
        file, start = Path(candidate).resolve(strict=True), time.monotonic()
        try:
            with self._alone():
                if self._referee is None or not self._referee.alive:
                    self._start_referee(file)
                verdict = self._judge_when_quiet(file)
        except Refused as refused:
            verdict = Verdict(reason=refused.reason, message=str(refused), trace=refused.trace)
        verdict.candidate = str(candidate)
        verdict.spent = time.monotonic() - start
        self._processes.start_spares()
        return verdict

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the GPU, or the host for timing on the CPU, against other judges and runs."""
        on_host = self.timed and not self._gpus and self.timer is None
        with ExitStack() as leases:
            leases.enter_context(lease("host", shared=not on_host))
            for gpu in self._gpus:
                leases.enter_context(lease(gpu))
            yield

    def _judge_when_quiet(self, file: Path) -> Verdict:
        try:
            return self._judge(file)
        except Refused as refused:
            if refused.reason != "disturbed":
                raise
            return self._judge(file)

    def _judge(self, file: Path) -> Verdict:
        page, verdict = self._write_page(file), Verdict(accepted=True, reason="accepted")
        timing: TimeResult | None = None
        if self.device != "cpu":
            self._processes.start_spares()  # on a CPU, starting processes would disturb the timing
        with closing(self._processes.fresh()) as worker:
            self._ask(worker, page, CheckTask, CheckResult)
            if self.timed:
                timing = self._ask(worker, page, TimeTask, TimeResult, timer=self.timer)
            verdict.memory["process"] = peak_bytes(worker.pid)
        if timing is not None:
            set_speedup(verdict, timing)
        if self.untrusted:
            with closing(self._processes.fresh()) as worker:
                # The times of a simulated device are made up.
                self._run_sandboxed(worker, page, timing if self.timer is None else None)
                verdict.memory["process"] = peak_bytes(worker.pid)  # the sandbox runs no reference
        return verdict

    def _run_sandboxed(
        self, sandbox: WorkerProcess, page: _Page, timing: TimeResult | None
    ) -> None:
        """Run the candidate in the sandbox. Compare its outputs and times with the referee's."""
        referee = self._referee
        assert referee is not None
        folder, clock = Path(self._folder.name), timing.clock if timing is not None else ""
        details = timing.details if timing is not None else {}
        counted, slots = details.get("counted", (1, 1)), int(details.get("slots", 2))
        values, workers, units = str(folder / "values.pt"), (referee, sandbox), []
        self._ask_referee(page, DrawTask, values=values)
        for role, worker, calls in zip(ROLES, workers, counted, strict=True):
            fields = {"side": role, "clock": clock, "counted": calls, "slots": slots}
            prepared = self._ask(worker, page, PrepareTask, PrepareResult, **fields)
            units.append(prepared.unit)
            outputs, steps = str(folder / f"{role}.pt"), calls if clock == "graph" else 1
            shown = tuple(sorted({0, self._random.randrange(slots)}))
            show = {"side": role, "values": values, "outputs": outputs, "slots": shown}
            self._ask(worker, page, ShowTask, dict[str, Json], **show)
            self._ask_referee(page, CompareTask, side=role, outputs=outputs, steps=steps)
            Path(outputs).unlink()  # the candidate must not find the baseline's outputs
        if timing is not None and clock in LIMIT:
            self._confirm(page, workers, units, math.exp(timing.value), LIMIT[clock])

    def _confirm(
        self,
        page: _Page,
        workers: tuple[WorkerProcess, WorkerProcess],
        units: list[int],
        speedup: float,
        limit: float,
    ) -> None:
        """Time each side from outside, in its own process. Refuse a candidate without a confirmed
        speedup.
        """

        def seconds(role: str, worker: WorkerProcess, unit: int) -> float:
            def work(count: int) -> float:
                start = now()
                self._ask(worker, page, PerformTask, dict[str, Json], side=role, units=count)
                return now() - start

            return seconds_per_call(work, unit, at_least=LEAST, times=TIMES)

        seen = 0.0
        for _ in range(ATTEMPTS):
            baseline, candidate = map(seconds, ROLES, workers, units)
            seen = max(seen, baseline / candidate)
            if speedup <= limit * seen:
                return
        raise Refused(
            "protection",
            f"the candidate is {speedup:.3g} times as fast as the baseline by the clock of its own"
            f" process, but only {seen:.3g} times by the clock of another process",
        )

    def _ask(
        self,
        worker: WorkerProcess,
        page: _Page,
        kind: type[CaseTask],
        result: type[T],
        **fields: Json,
    ) -> T:
        reply = worker.ask(page.task(kind, self.device, **fields), self.timeout, lambda text: None)
        if reply.error is not None:
            if worker is self._referee:
                self._drop_referee()
                raise refused_by(reply, "problem_error")
            raise refused_by(reply, reply.code or BY_ERROR.get(reply.error, "disturbed"))
        return reply.read(result)

    def _ask_referee(self, page: _Page, kind: type[CaseTask], **fields: Json) -> None:
        """Send the referee a task with the secret seed, which no candidate's process gets."""
        assert self._referee is not None
        task = page.task(kind, self.device, **fields, seed=page.secret)
        reply = self._referee.ask(task, self.timeout, lambda text: None)
        if reply.error == "wrong" and fields.get("side") == ROLES[1]:
            raise refused_by(reply, reply.code or "wrong_values")
        if reply.error is not None:
            self._drop_referee()
            raise refused_by(reply, "problem_error")

    def _start_referee(self, file: Path) -> None:
        """Start the referee, and check that the problem can be judged."""
        self._drop_referee()
        self._referee = self._processes.fresh()
        self._processes.start_spares()  # they start while the problem is checked
        page = self._write_page(file)
        self._ask(self._referee, page, CheckTask, CheckResult, baseline_alone=True)

    def _drop_referee(self) -> None:
        if self._referee is not None:
            self._referee.close()
            self._referee = None

    def _write_page(self, file: Path) -> _Page:
        self._pages += 1
        seeds = [self._random.randint(1, MOST_SEED) for _ in range(self.seeds)]
        settings: dict[str, Json] = {"sizes": self.sizes, "seeds": seeds, "device": self.device}
        settings["precision"] = self.precision
        path = Path(self._folder.name) / f"page_{self._pages}.py"
        both = {"problem": str(self.problem), "candidate": str(file)}
        path.write_text(PAGE.format(**both, settings=settings))
        return _Page(path=path, seed=seeds[0], secret=self._random.randint(1, MOST_SEED))


class _Page(Struct, frozen=True):
    """The page of one judgement. The seed `secret` is never sent to a candidate's process."""

    path: Path
    seed: int
    secret: int

    def task(self, kind: type[CaseTask], device: str, **fields: Json) -> CaseTask:
        same: dict[str, Json] = {
            "device": device,
            "page": str(self.path),
            "root": str(self.path.parent),
            "module": f"aisp_{self.path.stem}",
            "function": "test_judged",
            "variant": "candidate",
            "case": "candidate",
            "size": {"seed": self.seed},
            "seed": self.seed,
        }
        return kind(**{**same, **fields})


_warm: dict[object, Judge] = {}
"""The judge of the last problem, keyed by the problem's file and options."""


def judge(
    problem: str | os.PathLike[str], candidate: str | os.PathLike[str], **options: Json
) -> Verdict:
    """Return the verdict on a candidate for a problem.

    The worker processes are kept for the next candidate of the same problem with the same options.

    Args:
        problem: the file of the problem.
        candidate: the file of the candidate.
        options: the keyword arguments of `Judge`, such as ``sizes={"batch": 8}``.

    Raises:
        FileNotFoundError: if one of the files does not exist.
    """
    file = Path(problem).resolve(strict=True)
    key = file, file.stat().st_mtime_ns, repr(sorted(options.items()))
    if key not in _warm:
        close_warm()
        _warm[key] = Judge(file, **options)
    return _warm[key].judge(candidate)


@atexit.register
def close_warm() -> None:
    """End the worker processes that `judge` keeps."""
    while _warm:
        _warm.popitem()[1].close()
