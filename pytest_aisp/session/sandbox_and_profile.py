"""Run the sides of a case again, in processes that do not contribute to the measured speedup.

`--aisp-untrusted` runs the sides in a sandbox without access to the clock or the expected results.
`--aisp-profile` runs the sides under a profiler after the verdict.
"""

from __future__ import annotations

import random
import re
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from ..isolation.monkeypatches import now
from ..page.pair import ROLES
from ..results.messages import (
    CaseTask,
    CompareTask,
    DrawTask,
    Json,
    PerformTask,
    PrepareTask,
    ProfileTask,
    ShowTask,
)
from ..results.row import Profile, duration
from ..results.task_results import PrepareResult, ProfileResult
from ..worker.client import Worker
from ..worker.ncu_counters import Counters
from ..worker.sandbox import seconds_per_call
from .case_client import CaseClient
from .options import MAX_SEED
from .run_context import Failed

if TYPE_CHECKING:
    from .case import CaseRun
    from .measurement import Timing

LIMIT = {"graph": 1.25, "host": 1.5, "cpu": 1.5}
"""For each clock, how far a side's time in the sandbox may differ from its judged time, as a ratio.

The clock ``queue`` has no limit, because its calls wait behind a blocking kernel, and another
process cannot time them.
"""
LEAST, TIMES = 0.25, 5
ATTEMPTS = 3
"""Number of attempts to confirm a time, because the machine may be busy during an attempt."""
SEED = 0
"""The seed of profiled inputs. It is not secret, because a file next to the report has it."""
LONGEST = 120
"""The maximum length of a case's part of a folder name. File systems allow 255 bytes."""


def run_sandboxed(client: CaseClient, timing: Timing | None) -> None:
    """Run both sides of a case in a sandbox, and compare their outputs and times.

    Args:
        timing: the judged timing, or None if nothing was timed.

    Raises:
        Failed: with the verdict `wrong` for a wrong output, or `invalid` for a wrong time.
    """
    if hasattr(client.case.pair.baseline, "environment"):
        client.notes.append("not sandboxed: each of its samples is a separate process")
        return
    if client.ranks > 1:
        raise Failed(
            f"--aisp-untrusted: the sides run on {client.ranks} ranks, which cannot be sandboxed;"
            " leave the option out for pages that you trust",
            verdict="invalid",
        )
    with tempfile.TemporaryDirectory(prefix="aisp-sandbox-") as folder:
        _Sandbox(client, timing, Path(folder)).run()


def contradicts(sandboxed: float, judged: float, clock: str) -> bool:
    """Return whether the seconds per call in the sandbox contradict the judged seconds per call."""
    return not 1 / LIMIT[clock] <= sandboxed / judged <= LIMIT[clock]


class _Sandbox:
    def __init__(self, client: CaseClient, timing: Timing | None, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.timing = timing
        details = timing.details if timing is not None else {}
        self.clock = timing.clock if timing is not None else ""
        self.slots = int(details.get("slots", 2))
        self.counted = [int(n) for n in details.get("counted", (1, 1))]
        # This secret seed is never sent to the processes that run the sides.
        self.seed = client.run.settings.seed or random.SystemRandom().randint(1, MAX_SEED)

    def run(self) -> None:
        """Draw inputs and compare outputs in one process. Run each side in a separate process."""
        checker = self.client.fresh_worker()
        try:
            values = str(self.folder / "values.pt")
            self._do(checker, DrawTask, seed=self.seed, values=values)
            for role, counted in zip(ROLES, self.counted, strict=True):
                outputs = self._run_side(role, counted, values)
                steps = counted if self.clock == "graph" else 1
                self._do(
                    checker, CompareTask, side=role, seed=self.seed, outputs=outputs, steps=steps
                )
                Path(outputs).unlink()  # the next side must not find the right outputs
                self.client.notes.append(f"{role} sandboxed: its outputs are right")
        finally:
            checker.close()

    def _run_side(self, role: str, counted: int, values: str) -> str:
        """Time a side, run it on the inputs in the file `values`, and return the outputs' file."""
        worker = self.client.fresh_worker()
        try:
            fields = {"side": role, "clock": self.clock, "counted": counted, "slots": self.slots}
            prepared = self.client.ask(self._task(PrepareTask, **fields), PrepareResult, worker)
            if self.timing is not None and self.clock in LIMIT:
                judged = self.timing.pair_seconds[ROLES.index(role)]
                self._compare_times(worker, role, judged, prepared.unit)
            outputs = str(self.folder / f"{role}.pt")
            slots = tuple(sorted({0, random.SystemRandom().randrange(self.slots)}))
            self._do(worker, ShowTask, side=role, values=values, outputs=outputs, slots=slots)
        finally:
            worker.close()
        return outputs

    def _task(self, kind: type[CaseTask], **fields: Json) -> CaseTask:
        at = "case" if self.client.placement.kind == "time" else "check"
        return self.client.task(kind, **{"at": at, "seed": 0, **fields})

    def _do(self, worker: Worker, kind: type[CaseTask], **fields: Json) -> None:
        self.client.ask(self._task(kind, **fields), dict[str, Json], worker)

    def _compare_times(self, worker: Worker, role: str, judged: float, unit: int) -> None:
        """Fail the case if a side's time on this process's clock contradicts the `judged` time."""

        def work(units: int) -> float:
            start = now()
            self._do(worker, PerformTask, side=role, units=units)
            return now() - start

        for _ in range(ATTEMPTS):
            seconds = seconds_per_call(work, unit, at_least=LEAST, times=TIMES)
            if not contradicts(seconds, judged, self.clock):
                self.client.notes.append(f"{role} sandboxed: {duration(seconds)} a call")
                return
        message = (
            f"{role} takes {duration(seconds)} on the clock of another process,"
            f" and {duration(judged)} on the clock of its own"
        )
        raise Failed("\n".join([message, *self.client.commands()]), verdict="invalid")


def profile(case: CaseRun) -> None:
    """Profile both sides of `case`, and add the written files to its row.

    A case that failed its check is skipped, because it would also fail in the profiler.
    """
    tool = case.run.settings.profile
    if case.timing is None and case.verdict not in ("checked", "compiled") and not case.metrics:
        return
    try:
        _profile(case, tool)
    except Exception as error:  # keep the verdict, and continue the run
        case.remarks.append(f"not profiled ({tool}): {error}")
    finally:
        case.run.progress("")


def folder_of(client: CaseClient) -> Path:
    """Return the folder for the case's profiles, named after chapter, page, test and case."""
    place = client.location
    full = f"{place.chapter}.{place.page.stem}.{place.function}.{client.case.id}"
    name = re.sub(r"[^\w.=,-]", "_", full)[:LONGEST]
    if name != full:
        name += f"-{zlib.crc32(full.encode()):08x}"
    return client.run.settings.profiles / name


def _profile(case: CaseRun, tool: str) -> None:
    client = case.client
    if (why := _why_not(client, tool)) is not None:
        raise Failed(why)
    client.run.check_time()
    folder = folder_of(client)
    if tool == "torch":
        result = asdict(_profile_with_torch(client, folder))
    else:
        result = {"files": _profile_with_nsight(client, tool, folder)}
    case.profile = Profile(tool=tool, folder=str(folder), **result)
    case.notes.append(f"profile ({tool}): {folder}")
    case.notes += profile_notes(case.profile)
    if tool == "ncu":
        case.notes += counter_notes(folder)


def _why_not(client: CaseClient, tool: str) -> str | None:
    """Return the reason why `tool` cannot profile this case, or None."""
    if client.placement.kind not in ("time", "check"):
        return "its kernels are only compiled here, so nothing runs"
    if hasattr(client.case.pair.baseline, "environment"):
        return "each of its samples is a separate process"
    way_out = "\n    pytest --aisp-profile=torch"
    if tool == "nsys" and client.ranks > 1:
        return f"its sides run on {client.ranks} ranks, but {tool} profiles only one{way_out}"
    if tool != "torch" and client.placement.device != "cuda":
        return f"it runs on the CPU, and {tool} profiles only GPUs{way_out}"
    return None


def _task(client: CaseClient, **fields: Json) -> ProfileTask:
    at = "case" if client.placement.kind == "time" else "check"
    return client.task(ProfileTask, at=at, seed=SEED, **fields)


def _profile_with_torch(client: CaseClient, folder: Path) -> ProfileResult:
    """Profile both sides in a fresh worker process, because profiling would distort timings."""
    task = _task(client, folder=str(folder.absolute()))
    worker = client.fresh_worker()
    try:
        reply = worker.ask(task, client.timeout, client.run.progress)
    finally:
        worker.close()
    if reply.error is not None:
        raise Failed(reply.message)
    return reply.read(ProfileResult)


def _profile_with_nsight(client: CaseClient, tool: str, folder: Path) -> dict[str, list[str]]:
    from ..worker.nvidia_tools import profile_side

    ranks = client.ranks
    variables = client.case.pair.environment if ranks > 1 else {}
    environment = {**client.run.environment(client.placement.device, ranks), **variables}
    files = {}
    for role in ROLES:
        client.run.progress(f"profile {role} under {tool}")
        task = _task(client, side=role)
        where = folder.absolute()
        files[role] = profile_side(tool, task, where, environment, client.timeout, ranks)
    return files


def profile_notes(profile: Profile) -> list[str]:
    """Return notes on the sides' differences, and on their memory before and after the calls."""
    notes = [f"profile: {profile.words}"] if profile.words else []
    for role, memory in profile.memory.items():
        sizes = [
            f"{when} {', '.join(f'{k} {n / 2**20:.4g} MiB' for k, n in memory[when].items())}"
            for when in ("before", "after")
        ]
        notes.append(f"profile: memory of {role}: {'; '.join(sizes)}")
    return notes


def counter_notes(folder: Path) -> list[str]:
    """Return a note for each side on the counters in ncu's reports in `folder`."""
    found = {role: Counters.read(folder, role) for role in ROLES}
    return [
        f"profile: counters of {role}: {one.words() if one else 'none in the report of ncu'}"
        for role, one in found.items()
    ]
