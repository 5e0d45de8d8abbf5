"""What a worker process keeps from one task to the next, and what memory it gives back.

Cases are ordered size by size, so those of a ladder share what is expected of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checking.check import CheckResult
from ..checking.inputs import InputPool
from ..checking.numerics import Rule
from ..checking.reference import Reference
from ..page.pair import Pair, size_words
from ..results.messages import CaseTask
from ..timing import cuda_graph
from ..util.device_state import Stopwatch, free_bytes, release
from ..util.process_group import current_group

CPU_ORACLES = 4
"""Most expected results kept on a CPU."""
KEPT, KEPT_BY_RANK = 1 / 8, 1 / 64
"""Share of a GPU's memory that a process may keep between two tasks; sets of ranks are many."""


@dataclass
class Cache:
    """The oracles and checks of one engine.

    Attributes:
        watch: times what the oracles take.
        oracles, checked: what is expected of a page at a size, and what checking a case found.
        exhausted: whether the process holds memory that it cannot give back.
    """

    watch: Stopwatch
    oracles: dict[str, Reference] = field(default_factory=dict)
    checked: dict[str, CheckResult] = field(default_factory=dict)
    exhausted: bool = False

    def oracle(self, task: CaseTask, pair: Pair, size: Mapping[str, Any]) -> Reference:
        """Return what is expected at `size`, made once for check and timing.

        The timed size has fixed values, so that a stored result is measured again on the same
        ones; its unseen set and every other size are drawn from the task's seed.
        """
        page = f"{task.page}{task.function}{task.device}"
        fixed = task.at == "case" and size == task.size
        salt = "time" if fixed else f"check{task.seed}"
        exact = Rule(**task.rule).exact
        key = f"{page}{size_words(size)}{salt}{exact}"
        if key not in self.oracles:
            self._make_room(page, task.device)
            seed, unseen = (seed_of(task, s) for s in (salt, f"unseen{task.seed}"))
            with self.watch.phase("inputs"):
                bench = InputPool(pair, dict(size), task.device, seed, unseen)
                self.oracles[key] = Reference(bench, self.watch, exact)
        return self.oracles[key]

    def _make_room(self, page: str, device: str) -> None:
        """Forget what other pages expected, and this page's too where memory is short."""
        import torch

        if not device.startswith("cuda"):
            scarce = len(self.oracles) >= CPU_ORACLES
        else:
            scarce = free_bytes() < 0.5 * torch.cuda.mem_get_info()[1]
        for key in [k for k in self.oracles if scarce or not k.startswith(page)]:
            del self.oracles[key]
        release(device)

    def leave_memory(self, device: str) -> None:
        """Leave a GPU's memory to the other processes of a case, but for what is kept.

        Of that no more than some gigabytes: the next case of a page needs what is expected again,
        and so does each process its part of the GPU. A few small tensors can hold a large segment;
        a process that cannot give back its memory says that it is exhausted.
        """
        import torch

        if not device.startswith("cuda"):
            return

        def keeps_over(share: float) -> bool:
            release(device)
            most = share * torch.cuda.mem_get_info()[1]
            return current_group().max(torch.cuda.memory_reserved() > most) > 0

        if keeps_over(KEPT if current_group().world == 1 else KEPT_BY_RANK):
            self.oracles.clear()
            self.exhausted = keeps_over(KEPT)
        self.exhausted |= bool(cuda_graph.abandoned)


def seed_of(task: CaseTask, salt: str) -> int:
    """Return a seed of `task`'s page for one purpose."""
    return zlib.crc32(f"{task.function}{salt}".encode())
