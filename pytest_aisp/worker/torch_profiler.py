"""Both sides under torch's profiler, a few calls each: traces, tables, what memory they hold.

It runs in a bench process that measures nothing, after the verdict: a profiler that was on once
leaves its hooks in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..common.peers import here
from ..common.quiet import release, waiter
from ..pages.pair import Side
from ..proof.sides import Subject
from ..proof.workbench import Workbench, alone, one_slot
from ..results.profiles import Differences, Seen, gathered, table

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
    bench: Workbench, sides: Mapping[str, Side], folder: Path, tell: Callable[[str], Any]
) -> dict[str, Any]:
    """Profile `sides`, by role, one after the other, and write what was seen below `folder`.

    On several ranks each calls its sides, and rank 0 writes what it saw itself.

    Returns: plain types: `files` by role and of ``both``, `differences` and the `words` for them,
        and on a GPU `memory` by role, in bytes.
    """
    what = "kernels" if _on_gpu(bench) else "operators"
    writes = here().rank == 0
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


def replay_side(bench: Workbench, side: Side, role: str) -> None:
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


def _on_gpu(bench: Workbench) -> bool:
    return bench.device.startswith("cuda")


@contextmanager
def _warm(bench: Workbench, side: Side) -> Iterator[Subject]:
    """Yield `side` on one slot, called often enough to be steady."""
    with alone(bench, side) as subject:
        _run(bench, subject, WARMUP)
        subject.restore()
        yield subject


def _run(bench: Workbench, subject: Subject, calls: int) -> None:
    subject.cycle(calls)
    waiter(bench.device)()


@contextmanager
def _range(bench: Workbench, role: str) -> Iterator[None]:
    """Name what happens inside for torch's profiler and, on a GPU, for NVIDIA's."""
    import torch

    with ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(range_name(role)))
        if _on_gpu(bench):
            ranges.enter_context(torch.cuda.nvtx.range(range_name(role)))
        yield


def _traced(bench: Workbench, side: Side, role: str) -> Any:
    """Return torch's profiler after it has seen `CALLS` calls of `side`."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if _on_gpu(bench) else []
    looks = profile(activities=activities, record_shapes=True, profile_memory=True)
    with _warm(bench, side) as subject, looks as profiler, _range(bench, role):
        _run(bench, subject, CALLS)
    return profiler


def _events(profiler: Any, bench: Workbench) -> Iterable[tuple[str, float]]:
    """Return name and seconds of each kernel, copy and fill, or on a CPU of each operator.

    An operator's seconds are its own, without those of the operators that it calls.
    """
    where = "CUDA" if _on_gpu(bench) else "CPU"
    events = [e for e in profiler.events() or [] if e.device_type.name == where]
    own = [e for e in events if not e.is_user_annotation]
    if where == "CUDA":
        return [(str(e.name), e.time_range.elapsed_us() * 1e-6) for e in own]
    return [(str(e.name), e.self_cpu_time_total * 1e-6) for e in own]


def _torchs_own(profiler: Any, bench: Workbench) -> str:
    """Return torch's own table, operators and kernels together."""
    by = "self_device_time_total" if _on_gpu(bench) else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=by, row_limit=ROWS))


def _memory(bench: Workbench, side: Side, snapshot: Path) -> dict[str, dict[str, int]]:
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
                if here().rank == 0:
                    torch.cuda.memory._dump_snapshot(str(snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    return {"before": before, "after": after}


def _held() -> dict[str, int]:
    """Return the bytes that tensors hold, those taken from the GPU, and the difference."""
    import torch

    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {"allocated": allocated, "reserved": reserved, "difference": reserved - allocated}
