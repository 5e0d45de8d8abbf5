"""Both sides under torch's profiler, a few calls each: traces, tables, what memory they hold.

It runs in a worker process that measures nothing, after the verdict: a profiler that was on once
leaves its hooks in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checking.inputs import BoundSide, InputPool, alone, one_slot
from ..page.pair import Side
from ..results.row import duration
from ..util.device_state import release, synchronizer
from ..util.process_group import current_group

WARMUP, CALLS = 2, 3
"""Calls before the profiler looks, in which kernels are compiled and tuned; calls that it sees."""
ENTRIES = 100_000
"""Events of the allocator that a snapshot keeps."""
ROWS = 100
"""Rows of torch's own table."""


def range_name(role: str) -> str:
    """Return the name of a side's range in every profiler; one that no filter must escape."""
    return f"aisp-{role}"


def profile_sides(
    bench: InputPool, sides: Mapping[str, Side], folder: Path, tell: Callable[[str], Any]
) -> dict[str, Any]:
    """Profile `sides`, by role, one after the other, and write what was seen below `folder`.

    On several ranks each calls its sides, and rank 0 writes what it saw itself.

    Returns: plain types: `files` by role and of ``both``, `differences` and the `words` for them,
        and on a GPU `memory` by role, in bytes.
    """
    what = "kernels" if _on_gpu(bench) else "operators"
    writes = current_group().rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    seen: dict[str, dict[str, Seen]] = {}
    memory: dict[str, Any] = {}
    files: dict[str, list[str]] = {}
    for role, side in sides.items():
        tell(f"profile {role}")
        profiler = _traced(bench, side, role)
        seen[role] = gathered(_events(profiler, bench), CALLS)
        files[role] = [f"{role}.trace.json", f"{role}.{what}.txt"]
        if writes:
            profiler.export_chrome_trace(str(folder / files[role][0]))
            heading = f"{side.__name__}, by torch's profiler, {CALLS} calls after {WARMUP}"
            text = [heading, "", *table(what, seen[role]), "", _torchs_own(profiler, bench)]
            (folder / files[role][1]).write_text("\n".join(text) + "\n")
        if _on_gpu(bench):
            tell(f"memory of {role}")
            files[role].append(f"{role}.memory.pickle")
            memory[role] = _memory(bench, side, folder / files[role][2])
    found = Differences.between(what, *seen.values())
    files["both"] = ["differences.txt"]
    if writes:
        (folder / "differences.txt").write_text("\n".join(found.lines()) + "\n")
    said = {"files": files, "differences": asdict(found), "words": found.words()}
    return {**said, "memory": memory} if memory else said


def replay_side(bench: InputPool, side: Side, role: str) -> None:
    """Call `side` a few times in a range of its role, for a profiler around this process.

    The range alone is between the start and the stop of CUDA's profiler; warm-up is before it.
    """
    import torch

    # An NVTX range holds what its own thread launches, and backward has threads of its own.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with one_thread, _warm(bench, side) as subject:
        if _on_gpu(bench):
            torch.cuda.profiler.start()
        try:
            with _range(bench, role):
                _run(bench, subject, CALLS)
        finally:
            if _on_gpu(bench):
                torch.cuda.profiler.stop()


def _on_gpu(bench: InputPool) -> bool:
    return bench.device.startswith("cuda")


@contextmanager
def _warm(bench: InputPool, side: Side) -> Iterator[BoundSide]:
    """Yield `side` on one slot, called often enough to be steady."""
    with alone(bench, side) as subject:
        _run(bench, subject, WARMUP)
        subject.restore()
        yield subject


def _run(bench: InputPool, subject: BoundSide, calls: int) -> None:
    subject.cycle(calls)
    synchronizer(bench.device)()


@contextmanager
def _range(bench: InputPool, role: str) -> Iterator[None]:
    """Name what happens inside for torch's profiler and, on a GPU, for NVIDIA's."""
    import torch

    with ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(range_name(role)))
        if _on_gpu(bench):
            ranges.enter_context(torch.cuda.nvtx.range(range_name(role)))
        yield


def _traced(bench: InputPool, side: Side, role: str) -> Any:
    """Return torch's profiler after it has seen `CALLS` calls of `side`."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if _on_gpu(bench) else []
    looks = profile(activities=activities, record_shapes=True, profile_memory=True)
    with _warm(bench, side) as subject, looks as profiler, _range(bench, role):
        _run(bench, subject, CALLS)
    return profiler


def _events(profiler: Any, bench: InputPool) -> Iterable[tuple[str, float]]:
    """Return name and seconds of each kernel, copy and fill, or on a CPU of each operator.

    An operator's seconds are its own, without those of the operators that it calls.
    """
    where = "CUDA" if _on_gpu(bench) else "CPU"
    events = [e for e in profiler.events() or [] if e.device_type.name == where]
    own = [e for e in events if not e.is_user_annotation]
    if where == "CUDA":
        return [(str(e.name), e.time_range.elapsed_us() * 1e-6) for e in own]
    return [(str(e.name), e.self_cpu_time_total * 1e-6) for e in own]


def _torchs_own(profiler: Any, bench: InputPool) -> str:
    """Return torch's own table, operators and kernels together."""
    by = "self_device_time_total" if _on_gpu(bench) else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=by, row_limit=ROWS))


def _memory(bench: InputPool, side: Side, snapshot: Path) -> dict[str, dict[str, int]]:
    """Return what the allocator holds before `side` is made ready and after its calls.

    Between the two it records its history, which goes to `snapshot`. A pass of its own: recording
    takes a stack at each allocation.
    """
    import torch

    with one_slot(bench):
        release(bench.device)
        before = _held()
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        try:
            with closing(bench.subject(side)) as subject:
                _run(bench, subject, CALLS)
                after = _held()
                if current_group().rank == 0:
                    torch.cuda.memory._dump_snapshot(str(snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    return {"before": before, "after": after}


def _held() -> dict[str, int]:
    """Return the bytes that tensors hold, those taken from the GPU, and the difference."""
    import torch

    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"allocated": allocated, "reserved": reserved, "difference": reserved - allocated}


SHOWN, CUT = 4, 60
"""Names in one line of words, and characters of each; the files have all of them."""


@dataclass(frozen=True)
class Seen:
    """How often a call of a side runs one kernel or operator, and its seconds in that call."""

    count: float
    seconds: float


def gathered(events: Iterable[tuple[str, float]], calls: int) -> dict[str, Seen]:
    """Return by name what ``(name, seconds)`` events of `calls` calls are in one, longest first."""
    found: dict[str, Seen] = {}
    for name, seconds in events:
        before = found.get(name, Seen(0.0, 0.0))
        found[name] = Seen(before.count + 1 / calls, before.seconds + seconds / calls)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def table(what: str, seen: Mapping[str, Seen]) -> list[str]:
    """Return the lines of a side's table: count and time a call, share of all time, full name."""
    total = sum(one.seconds for one in seen.values())
    lines = [f"{'a call':>8}  {'time a call':>12}  {'share':>6}  {what}"]
    for name, one in seen.items():
        share = one.seconds / total if total else 0.0
        lines.append(f"{one.count:8.4g}  {duration(one.seconds):>12}  {share:6.1%}  {name}")
    return lines


@dataclass(frozen=True)
class Differences:
    """What differs between the sides, by name, a call.

    Attributes:
        what: ``kernels`` or ``operators``.
        new, gone: what only the optimized side runs, and only the baseline; how often.
        counts: what both run, but not as often: the baseline's count, the optimized side's.
    """

    what: str
    new: dict[str, float]
    gone: dict[str, float]
    counts: dict[str, tuple[float, float]]

    @classmethod
    def between(
        cls, what: str, baseline: Mapping[str, Seen], optimized: Mapping[str, Seen]
    ) -> Differences:
        """Return the differences of two sides' tables; counts within 1e-6 are the same."""
        both = {n: (baseline[n].count, optimized[n].count) for n in baseline if n in optimized}
        return cls(
            what,
            {n: one.count for n, one in optimized.items() if n not in baseline},
            {n: one.count for n, one in baseline.items() if n not in optimized},
            {n: pair for n, pair in both.items() if abs(pair[0] - pair[1]) > 1e-6},
        )

    def words(self) -> str:
        """Return one line: the first names of each kind, cut."""
        parts = [_named("new", self.new), _named("gone", self.gone)]
        changed = {n: f"{a:g} -> {b:g}" for n, (a, b) in self.counts.items()}
        parts.append(_named("other counts", changed))
        said = "; ".join(filter(None, parts))
        return said or f"both sides run the same {self.what}, as often"

    def lines(self) -> list[str]:
        """Return the lines of the file: everything, full names."""
        lines = [f"{self.what} a call: baseline -> optimized"]
        lines += [f"new    0 -> {count:g}  {name}" for name, count in self.new.items()]
        lines += [f"gone   {count:g} -> 0  {name}" for name, count in self.gone.items()]
        lines += [f"count  {a:g} -> {b:g}  {name}" for name, (a, b) in self.counts.items()]
        return lines if len(lines) > 1 else [*lines, self.words()]


def _named(kind: str, found: Mapping[str, object]) -> str:
    if not found:
        return ""
    names = [f"{name[:CUT]} ({_count(count)})" for name, count in list(found.items())[:SHOWN]]
    more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return f"{kind}: {', '.join([*names, *more])}"


def _count(count: object) -> str:
    return f"{count:g}" if isinstance(count, float) else str(count)
