"""Collectives on the ranks that this process belongs to: checked on known values, then timed.

The engine's answer to a `collectives` task. On GPUs a window is a CUDA graph of K calls, as it is
for pages, and K calls on the host's clock where NCCL cannot be captured; on CPUs the latter. The
slowest rank counts. Sizes and bandwidths are as nccl-tests defines them (its PERFORMANCE.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from ..checking.inputs import BoundSide
from ..checking.numerics import Wrong
from ..util.cli_result import size_text, with_progress
from ..util.process_group import current_group
from .schedule import calls_for
from .windows import WINDOW, GraphWindow, Uncapturable, host_window, on_all_ranks

if TYPE_CHECKING:
    import torch

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ONE_SHOT = "one_shot"
ONE_SHOT_MOST = 16 << 20
"""Every rank reads the whole of every other's buffer: past this size nobody would take it."""
WINDOWS = 7
ITEM = 4
"""Bytes of a float32."""


def bus_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw: what a rank's link carries, as a multiple of the size."""
    return (2 if op in ("all_reduce", ONE_SHOT) else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class Collective:
    """One collective on its buffers: `run` starts it; `sent`, `out` and `expected` prove it."""

    name: str
    nbytes: int
    run: Callable[[], object]
    sent: torch.Tensor
    fill: torch.Tensor
    out: Callable[[], torch.Tensor]
    expected: torch.Tensor

    def check(self) -> None:
        """Run once on known values. Raises Wrong where a rank gets others than it should."""
        self.sent.copy_(self.fill)
        self.run()
        parts = self.out().view(self.expected.numel(), -1)
        off = (parts != self.expected[:, None]).flatten()
        if bool(off.any()):
            at = int(off.int().argmax())
            got, right = float(parts.flatten()[at]), float(self.expected[at // parts.shape[1]])
            size = size_text(self.nbytes)
            raise Wrong(f"{self.name} of {size} is wrong: element {at} is {got:g}, not {right:g}")


def sweep(
    ops: Sequence[str], sizes: Sequence[int], device: str, tell: Callable[[str], Any]
) -> dict[str, Any]:
    """Return seconds by collective and size, and what they were taken with.

    Sizes are bytes: of the buffer that is reduced, gathered into, scattered from or exchanged,
    rounded down to a whole number of elements for each rank.
    """
    import torch.distributed as dist

    found: list[dict[str, Any]] = []
    notes: list[str] = []
    makers: dict[str, Any] = {op: partial(_collective, op) for op in ops}
    if "all_reduce" in ops:
        refused = _one_shot_refused(device)
        if refused is None:
            makers[ONE_SHOT] = _one_shot
        else:
            notes.append(f"one-shot all-reduce in symmetric memory is not available: {refused}")
    wanted = [(op, n) for op in makers for n in sizes if op != ONE_SHOT or n <= ONE_SHOT_MOST]
    for op, nbytes in wanted:
        tell(with_progress(f"{op} of {size_text(nbytes)}", len(found), len(wanted)))
        found.append(_timed(makers[op](nbytes, device), device))
    return {
        "rows": found,
        "notes": notes,
        "ranks": current_group().world,
        "backend": dist.get_backend(),
        **_versions(device),
    }


def _versions(device: str) -> dict[str, str]:
    import torch

    if not device.startswith("cuda"):
        return {"torch": str(torch.__version__)}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": str(torch.__version__), "nccl": nccl, "device": torch.cuda.get_device_name()}


def _collective(op: str, nbytes: int, device: str) -> Collective:
    """Return `op` on `nbytes` a rank; its values say which rank and which chunk they are."""
    import torch
    import torch.distributed as dist

    rank, world = current_group().rank, current_group().world
    each = _each(nbytes)
    make = partial(torch.empty, dtype=torch.float32, device=device)
    whole, part = make(world * each), make(each)
    chunks = torch.arange(world, dtype=torch.float32, device=device)
    total = world * (world + 1) / 2
    mine = torch.full((1,), rank + 1.0, device=device)
    sums = torch.full((1,), total, device=device)
    every = partial(Collective, op, whole.numel() * ITEM)
    if op == "all_reduce":
        run: Any = partial(dist.all_reduce, whole)
        return every(run, whole, mine.expand_as(whole), lambda: whole, sums)
    if op == "all_gather":
        run = partial(dist.all_gather_into_tensor, whole, part)
        return every(run, part, mine.expand_as(part), lambda: whole, chunks + 1)
    if op == "reduce_scatter":
        run = partial(dist.reduce_scatter_tensor, part, whole)
        return every(run, whole, mine.expand_as(whole), lambda: part, sums)
    got = make(world * each)
    run = partial(dist.all_to_all_single, got, whole)
    fill = (rank * world + chunks).repeat_interleave(each)  # chunk j goes to rank j
    return every(run, whole, fill, lambda: got, chunks * world + rank)


def _each(nbytes: int) -> int:
    """Return the elements of a rank's part of `nbytes`: whole 16 bytes, as one-shot takes them."""
    return max(1, nbytes // (4 * ITEM * current_group().world)) * 4


def _one_shot_refused(device: str) -> str | None:
    """Return why no rank can use symmetric memory, or None; all ranks return the same."""
    try:
        if not device.startswith("cuda"):
            raise RuntimeError("it needs GPUs")
        _one_shot(1024, device)  # not run: a rank alone in it would wait on its GPU for ever
        refused = None
    except Exception as error:  # a driver, a container or torch refuses, each in its own way
        refused = (str(error) or type(error).__name__).splitlines()[0]
    return current_group().first_message(refused)


def _one_shot(nbytes: int, device: str) -> Collective:
    """Return torch's one-shot all-reduce: every rank reads and sums everyone's symmetric buffer."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    group, world = dist.group.WORLD, current_group().world
    assert group is not None
    all_reduce = torch.ops.symm_mem.one_shot_all_reduce
    count, mine = world * _each(nbytes), torch.device(device, torch.cuda.current_device())
    buffer = symmetric.empty(count, dtype=torch.float32, device=mine)
    symmetric.rendezvous(buffer, group.group_name)
    last: list[torch.Tensor] = []

    def run() -> None:
        last[:] = [all_reduce(buffer, "sum", group.group_name)]

    fill = torch.full((1,), current_group().rank + 1.0, device=device).expand_as(buffer)
    sums = torch.full((1,), world * (world + 1) / 2, device=device)
    return Collective(ONE_SHOT, count * ITEM, run, buffer, fill, lambda: last[0], sums)


def _timed(collective: Collective, device: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames; 2.9 has the old names
        collective.check()
        collective.sent.zero_()  # sums of sums would overflow; links carry any bits alike
        subject = BoundSide(collective.run, [()])
        clock, seconds = _seconds(subject, device)
    return {"op": collective.name, "size": collective.nbytes, "seconds": seconds, "clock": clock}


def _seconds(subject: BoundSide, device: str) -> tuple[str, float]:
    """Return the clock and the seconds of a call: the median window, each by its slowest rank."""
    for clock, make in _clocks(device):
        try:
            probe = on_all_ranks(partial(make, subject, 1))
            calls = calls_for(min(probe() for _ in range(3)), WINDOW[clock], 1)
            window = on_all_ranks(partial(make, subject, calls))
        except Uncapturable:
            continue
        window()
        return clock, median(window() for _ in range(WINDOWS))
    raise AssertionError("the host's clock captures nothing and cannot refuse")


def _clocks(device: str) -> Iterator[tuple[str, Any]]:
    if device.startswith("cuda"):
        yield "graph", GraphWindow
    yield "host", partial(host_window, device=device)


def bandwidths(row: Mapping[str, Any], ranks: int) -> tuple[float, float]:
    """Return algbw and busbw of a row in bytes/s."""
    algbw = row["size"] / row["seconds"]
    return algbw, algbw * bus_factor(row["op"], ranks)
