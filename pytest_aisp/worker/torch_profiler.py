"""Profile a few calls of each side with torch's profiler: traces, tables, and allocated memory.

If a side uses `torch.compile`, the code that Inductor generated is also written. Profiling starts
after the verdict, in a separate worker process. That process is never used for timing, because the
profiler's hooks remain active.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ..checking.inputs import BoundSide, InputPool, alone, one_slot
from ..page.pair import Side
from ..results.row import duration
from ..results.task_results import Amounts, ProfileResult
from ..util.device_state import release, synchronizer
from ..util.process_group import current_group
from . import timeline
from .client import Progress

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import profile

WARMUP, CALLS = 2, 3
"""Numbers of warm-up calls, which compile and tune kernels, and of recorded calls."""
MAX_SNAPSHOT_EVENTS = 100_000
"""Maximum number of allocator events in a memory snapshot."""
TABLE_ROWS = 100
"""Maximum number of rows in the table that torch formats."""


def range_name(role: str) -> str:
    """Return the name of a side's range in all profilers, which needs no escaping in filters."""
    return f"aisp-{role}"


def profile_sides(
    pool: InputPool, sides: Mapping[str, Side], folder: Path, progress: Progress
) -> ProfileResult:
    """Profile `sides` one after the other, and write the results to `folder`.

    If there are several ranks, all ranks call the sides, but only rank 0 writes files.

    Returns: the `files` keyed by role or ``both``, the `differences` between the sides, their
        summary in `words`, and on a GPU the `memory` in bytes, keyed by role.
    """
    what = "kernels" if _on_gpu(pool) else "operators"
    writes = current_group().rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    usage: dict[str, dict[str, Usage]] = {}
    memory: dict[str, dict[str, Amounts]] = {}
    lanes: list[timeline.Lanes] = []
    files: dict[str, list[str]] = {}
    for role, side in sides.items():
        progress(f"profile {role}")
        graphs_before = _inductor_graphs()
        profiler = _profile(pool, side, role)
        usage[role] = usage_per_call(_events(profiler, pool), CALLS)
        files[role] = [f"{role}.trace.json", f"{role}.{what}.txt"]
        generated = inductor_code(graphs_before)
        if writes:
            profiler.export_chrome_trace(str(folder / files[role][0]))
            heading = f"{side.__name__}, by torch's profiler, {CALLS} calls after {WARMUP}"
            order = "self_device_time_total" if _on_gpu(pool) else "self_cpu_time_total"
            torch_table = profiler.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
            lines = [heading, "", *table_lines(what, usage[role]), "", torch_table]
            (folder / files[role][1]).write_text("\n".join(lines) + "\n")
        if _on_gpu(pool):
            lanes.append(timeline.lanes_of(_on_device(profiler, "CUDA")))
            progress(f"memory of {role}")
            files[role].append(f"{role}.memory.pickle")
            memory[role] = _memory(pool, side, folder / files[role][2])
        if generated:
            files[role].append(f"{role}.inductor.py")
        if generated and writes:
            (folder / files[role][-1]).write_text(generated)
    differences = Differences.between(what, *usage.values())
    files["both"] = ["differences.txt", *([timeline.FILE] if lanes else [])]
    if writes:
        if lanes:
            timeline.Timeline(CALLS, *lanes).write(folder)
        (folder / "differences.txt").write_text("\n".join(differences.lines()) + "\n")
    return ProfileResult(files, asdict(differences), differences.summary(), memory)


def replay_side(pool: InputPool, side: Side, role: str) -> None:
    """Call `side` a few times inside a named range, for a profiler that wraps this process.

    The CUDA profiler API starts the recording after the warm-up and stops it after the range.
    """
    import torch

    # An NVTX range covers only launches from its own thread. A backward pass normally launches
    # kernels from other threads, so autograd is limited to this thread.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with one_thread, _warm(pool, side) as bound:
        if _on_gpu(pool):
            torch.cuda.profiler.start()
        try:
            with _range(pool, role):
                _run(pool, bound, CALLS)
        finally:
            if _on_gpu(pool):
                torch.cuda.profiler.stop()


def _inductor_graphs() -> list[ModuleType]:
    """Return the modules that Inductor has generated and loaded, one for each compiled graph."""
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    # Modules of single kernels have no `call`. A graph's module contains the code of its kernels.
    return [module for module in getattr(cache, "modules", ()) if hasattr(module, "call")]


def inductor_code(before: Sequence[ModuleType]) -> str:
    """Return the code of the graphs that Inductor has loaded since `before`, or an empty string.

    Graphs from Inductor's cache are included. A graph whose file the side has deleted is left out.
    """
    known = {id(module) for module in before}
    new = [module for module in _inductor_graphs() if id(module) not in known]
    found = [path for module in new if (path := Path(module.__file__ or "")).is_file()]
    paths = list(dict.fromkeys(found))
    heads = (
        f"# Graph {n} of {len(paths)}, generated by Inductor." for n in range(1, len(paths) + 1)
    )
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return "\n".join(f"{head}\n\n{text}" for head, text in zip(heads, texts, strict=True))


def _on_gpu(pool: InputPool) -> bool:
    return pool.device.startswith("cuda")


@contextmanager
def _warm(pool: InputPool, side: Side) -> Iterator[BoundSide]:
    """Bind `side` to one slot of inputs, run the warm-up calls, and yield the bound side."""
    with alone(pool, side) as bound:
        _run(pool, bound, WARMUP)
        bound.restore()
        yield bound


def _run(pool: InputPool, bound: BoundSide, calls: int) -> None:
    bound.cycle(calls)
    synchronizer(pool.device)()


@contextmanager
def _range(pool: InputPool, role: str) -> Iterator[None]:
    """Open a named range for torch's profiler and, on rank 0's GPU, for NVIDIA's profilers."""
    import torch

    with ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(range_name(role)))
        if _on_gpu(pool) and current_group().rank == 0:
            ranges.enter_context(torch.cuda.nvtx.range(range_name(role)))
        yield


def _profile(pool: InputPool, side: Side, role: str) -> profile:
    """Record `CALLS` calls of `side` with torch's profiler, and return the profiler."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if _on_gpu(pool) else []
    recording = profile(activities=activities, record_shapes=True, profile_memory=True)
    with _warm(pool, side) as bound, recording, _range(pool, role):
        _run(pool, bound, CALLS)
    return recording


def _events(profiler: profile, pool: InputPool) -> Iterable[tuple[str, float]]:
    """Yield the name and the seconds of each kernel, copy and fill, or of each operator on a CPU.

    The time of an operator excludes the time of the operators that it calls.
    """
    on_gpu = _on_gpu(pool)
    for event in _on_device(profiler, "CUDA" if on_gpu else "CPU"):
        microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        yield str(event.name), microseconds * 1e-6


def _on_device(profiler: profile, device: str) -> Iterator[FunctionEvent]:
    """Yield the events of device type `device`, ``CUDA`` or ``CPU``. Skip named ranges."""
    for event in profiler.events() or []:
        if event.device_type.name == device and not event.is_user_annotation:
            yield event


def _memory(pool: InputPool, side: Side, snapshot: Path) -> dict[str, Amounts]:
    """Return the allocator's bytes before `side` is built and after its calls.

    The history of the allocator between these two points is written to `snapshot`. Recording is a
    separate pass, because the stack trace of each allocation takes time.
    """
    import torch

    with one_slot(pool):
        release(pool.device)
        before = _allocated()
        torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_EVENTS)
        try:
            with closing(pool.bind(side)) as bound:
                _run(pool, bound, CALLS)
                after = _allocated()
                if current_group().rank == 0:
                    torch.cuda.memory._dump_snapshot(str(snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    return {"before": before, "after": after}


def _allocated() -> Amounts:
    """Return the bytes used by tensors, the bytes reserved on the GPU, and their difference."""
    import torch

    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"allocated": allocated, "reserved": reserved, "difference": reserved - allocated}


@dataclass(frozen=True)
class Usage:
    """The count and the total seconds of one kernel or operator in one call of a side."""

    count: float
    seconds: float


def usage_per_call(events: Iterable[tuple[str, float]], calls: int) -> dict[str, Usage]:
    """Return the usage per call, keyed by name, with the largest total time first.

    Args:
        events: ``(name, seconds)`` of each event in `calls` calls.
    """
    usage: dict[str, Usage] = {}
    for name, seconds in events:
        before = usage.get(name, Usage(0.0, 0.0))
        usage[name] = Usage(before.count + 1 / calls, before.seconds + seconds / calls)
    return dict(sorted(usage.items(), key=lambda item: -item[1].seconds))


def table_lines(what: str, usage: Mapping[str, Usage]) -> list[str]:
    """Return a side's table: count and time per call, share of the total time, and full name."""
    total = sum(one.seconds for one in usage.values())
    lines = [f"{'a call':>8}  {'time a call':>12}  {'share':>6}  {what}"]
    for name, one in usage.items():
        share = one.seconds / total if total else 0.0
        lines.append(f"{one.count:8.4g}  {duration(one.seconds):>12}  {share:6.1%}  {name}")
    return lines


SUMMARY_NAMES, SUMMARY_WIDTH = 4, 60
"""The summary's maximum number of names of each kind, and the maximum length of a name."""


@dataclass(frozen=True)
class Differences:
    """The differences between the sides per call, keyed by the name of a kernel or operator.

    Attributes:
        what: ``kernels`` or ``operators``.
        new: the counts of kernels or operators that only the optimized side runs.
        gone: the counts of kernels or operators that only the baseline runs.
        counts: the baseline's count and the optimized side's count of kernels or operators that
            both sides run, but not equally often.
    """

    what: str
    new: dict[str, float]
    gone: dict[str, float]
    counts: dict[str, tuple[float, float]]

    @classmethod
    def between(
        cls, what: str, baseline: Mapping[str, Usage], optimized: Mapping[str, Usage]
    ) -> Differences:
        """Return the differences between two sides. Counts that differ by up to 1e-6 are equal."""
        both = {n: (baseline[n].count, optimized[n].count) for n in baseline if n in optimized}
        return cls(
            what,
            {n: one.count for n, one in optimized.items() if n not in baseline},
            {n: one.count for n, one in baseline.items() if n not in optimized},
            {n: counts for n, counts in both.items() if abs(counts[0] - counts[1]) > 1e-6},
        )

    def summary(self) -> str:
        """Return one line with the first names of each kind of difference, shortened."""
        changes = {
            "new": {name: f"{count:g}" for name, count in self.new.items()},
            "gone": {name: f"{count:g}" for name, count in self.gone.items()},
            "other counts": {name: f"{a:g} -> {b:g}" for name, (a, b) in self.counts.items()},
        }
        parts = [_summarize(kind, counts) for kind, counts in changes.items() if counts]
        return "; ".join(parts) or f"both sides run the same {self.what} equally often"

    def lines(self) -> list[str]:
        """Return the lines of the file, which lists all differences with full names."""
        lines = [f"{self.what} a call: baseline -> optimized"]
        lines += [f"new    0 -> {count:g}  {name}" for name, count in self.new.items()]
        lines += [f"gone   {count:g} -> 0  {name}" for name, count in self.gone.items()]
        lines += [f"count  {a:g} -> {b:g}  {name}" for name, (a, b) in self.counts.items()]
        return lines if len(lines) > 1 else [*lines, self.summary()]


def _summarize(kind: str, counts: Mapping[str, str]) -> str:
    names = [f"{name[:SUMMARY_WIDTH]} ({count})" for name, count in counts.items()]
    if len(names) > SUMMARY_NAMES:
        names[SUMMARY_NAMES:] = [f"{len(names) - SUMMARY_NAMES} more"]
    return f"{kind}: {', '.join(names)}"
