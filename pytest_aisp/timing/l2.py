"""Flush the L2 cache between blocks, and check that a round of calls leaves it cold.

Each call uses a different slot of inputs. All slots together are five times as large as the L2, so
the slots should evict each other. The latency of dependent loads shows whether old data were
evicted. The loads mark cache lines as evict-first. Some sides (some matrix-vector products, for
example) mark their own data as evict-first, and would not evict lines without this mark.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..isolation.protections import enabled
from ..page.pair import SideError

if TYPE_CHECKING:
    from .cuda_graph import GraphWindow

LINES, LINE = 16384, 32
"""Number of cache lines in the buffer, and of int32 elements in a line of 128 bytes."""
STEPS = 1024
"""Number of lines that one reading loads, 128 KiB in total."""
COLD_RATIO, COLD_SHARE = 1.25, 0.85
"""A load after a flush usually takes twice as long as a load from the L2. If this ratio is below
the first number, the check says nothing. A round of calls must add at least the second number times
the latency that a flush adds. On an H200, repeated reads of 24 MiB add 0.62 times that latency, and
reads of 256 MiB add 0.99 times.
"""
ATTEMPTS = 3


def flush_l2(l2_bytes: int) -> None:
    """Evict dirty lines and the last window's data by reading a buffer of twice the L2's size."""
    import torch

    torch.empty(2 * l2_bytes // 4, dtype=torch.float32, device="cuda").sum()


class Latency(NamedTuple):
    """Cycles of a load in three situations.

    Attributes:
        warm: directly after the same cache line was read.
        after: after a round of a side's calls.
        flushed: after a flush of the L2.
    """

    warm: float
    after: float
    flushed: float

    @property
    def cold(self) -> bool:
        """True if the calls evicted the lines from the L2, or if even a flush evicts none."""
        if self.flushed < COLD_RATIO * self.warm:
            return True
        return self.after - self.warm >= COLD_SHARE * (self.flushed - self.warm)


def measure(
    work: Callable[[], object], read: Callable[[], float], flush: Callable[[], object]
) -> Latency:
    """Measure the latency with `read` after `work`. Return the coldest attempt.

    All three latencies are measured right after the work, on the warm GPU. A warm GPU may lower its
    clock rate, and a load from DRAM then takes fewer cycles than on an idle GPU.
    """
    attempts = []
    for _ in range(ATTEMPTS):
        read()
        work()
        after, warm = read(), read()
        flush()
        attempts.append(Latency(warm, after, read()))
        if attempts[-1].cold:
            break
    return max(attempts, key=lambda latency: latency.after / latency.warm)


def pointer_chain(lines: int, seed: int = 0) -> list[int]:
    """Return one random cycle through all lines, as the offset of each line's successor."""
    order = list(range(1, lines))
    random.Random(seed).shuffle(order)
    order = [0, *order]
    chain = [0] * lines
    for line, following in zip(order, [*order[1:], 0], strict=True):
        chain[line] = following * LINE
    return chain


@functools.cache
def latency_reader() -> Callable[[], float] | None:
    """Return a function that measures the cycles of a load, or None if there is no compiler."""
    import torch

    from ..kernels.cuda_cpp import cuda_module
    from ..kernels.nvrtc import NoCompiler

    chain = torch.zeros(LINES, LINE, dtype=torch.int32)
    chain[:, 0] = torch.tensor(pointer_chain(LINES), dtype=torch.int32)
    lines = chain.reshape(-1).cuda()
    cycles = torch.zeros(2, dtype=torch.int64, device="cuda")
    chase = cuda_module("probes.cu").chase[1, 1]

    def read() -> float:
        chase(lines, STEPS, cycles)
        return float(cycles[0].item())

    try:
        read()  # compiles the kernel
    except NoCompiler:
        return None
    return read


def check_cold(windows: Iterable[GraphWindow], slots: int, l2_bytes: int) -> dict[str, object]:
    """Refuse a side if data stay in the L2 during a round of its calls.

    A side with long calls (`schedule.LONG`) is never refused, because a window does not use all
    `slots`.
    """
    if not enabled("cold-l2"):
        return {}
    read = latency_reader()
    if read is None:
        return {"l2_cycles": None}
    cycles = {}
    for window in windows:
        flush = functools.partial(flush_l2, l2_bytes)
        name, latency = window.side.name, measure(window, read, flush)
        cycles[name] = list(latency)
        if not latency.cold and window.counted >= slots:
            raise SideError(
                f"{name}: the L2 is not cold: a load takes {latency.warm:.0f} cycles when its line"
                f" was just read, {latency.after:.0f} after a round of calls, and"
                f" {latency.flushed:.0f} after a flush; declare l2='warm' or a larger size"
            )
    return {"l2_cycles": cycles}
