"""The proof that the L2 is cold: lines that were in it are gone after one round of a side's calls.

Slots that together cover five L2 caches should see to that; whether they do is measured, by the
latency of loads that each wait for the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

LINES, LINE = 16384, 32
"""Lines of the buffer, and int32 in a line of 128 bytes."""
STEPS = 1024
"""Lines that are looked for: 128 KiB."""
SLOWER = 1.25
"""Loads from memory take at least this many times as long as from the L2; twice, as a rule."""
ATTEMPTS = 3


class Latency(NamedTuple):
    """Cycles of a load: just after the line was read, and after a round of a side's calls."""

    warm: float
    after: float

    @property
    def cold(self) -> bool:
        """Whether the round has driven the lines out of the L2."""
        return self.after >= SLOWER * self.warm


def measure(work: Callable[[], None], read: Callable[[], float]) -> Latency:
    """Return what `read`, the cycles of a load, says before and after `work`; the best of three."""
    found = Latency(1.0, 0.0)
    for _ in range(ATTEMPTS):
        read()
        warm = read()
        work()
        found = max(found, Latency(warm, read()), key=lambda f: f.after / f.warm)
        if found.cold:
            break
    return found


def path(lines: int, seed: int = 0) -> list[int]:
    """Return for each line where the next one begins: one random cycle through all of them."""
    import random

    order = list(range(1, lines))
    random.Random(seed).shuffle(order)
    order = [0, *order]
    following = [0] * lines
    for line, after in zip(order, [*order[1:], 0], strict=True):
        following[line] = after * LINE
    return following


@functools.cache
def reader() -> Callable[[], float] | None:
    """Return what reads the lines and returns the cycles of a load, or None without a compiler."""
    import torch

    from ..kernels.cuda_cpp import cuda_module
    from ..kernels.nvrtc import NoCompiler

    following = torch.zeros(LINES, LINE, dtype=torch.int32)
    following[:, 0] = torch.tensor(path(LINES), dtype=torch.int32)
    lines = following.reshape(-1).cuda()
    found = torch.zeros(2, dtype=torch.int64, device="cuda")
    chase: Any = cuda_module("probes.cu").chase[1, 1]

    def read() -> float:
        chase(lines, STEPS, found)
        return float(found[0].item())

    try:
        read()  # compiles
    except NoCompiler:
        return None
    return read
