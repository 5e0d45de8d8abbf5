"""Detect other processes that compute on the GPU while a case is measured.

Processes on one GPU run in turn, each for a time slice of about a millisecond. Containers and
virtual machines may hide the other processes, but cannot hide the lost time. So a chain of short
kernels reads the GPU's nanosecond counter continuously. If the counter jumps between two readings,
another process used the GPU in between. If possible, NVML names that process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ..isolation.interference import Disturbed
from ..page.pair import SideError
from ..util.cpu_load import CpuLoad
from ..util.process_group import current_group

KERNELS, KERNEL_NS = 20, 200_000
"""The number of kernels in a chain, and the length of each: 4 ms in total.

A chain is longer than a time slice, so it is interrupted if other processes wait. The kernels are
short, so the chain can also be interrupted between two kernels.
"""
SLICE_NS = 50_000
"""A pause shorter than this between two readings is not a time slice."""
COARSE = 20
"""A time slice takes at least this many steps of the counter, which may be coarse."""
GATE_CYCLES = 2_000_000
"""Length of the kernel behind which the chain is queued, in GPU cycles, about 1 ms."""
ATTEMPTS = 3
FEW, MANY = 1, 6
"""The number of chains: FEW in a routine check, and MANY after an error, uneven windows, or a busy
GPU."""
UNEVEN = 1.25
"""Windows are uneven if the longest window takes this many times the median."""
NAMED, NO_VERDICT = 0.05, 0.20
"""The shares of the GPU from which processes are named, and from which there is no verdict."""
EXCUSED = 0.01
"""If other processes use at least this share, contradictory times are not the side's fault."""


class Slices(NamedTuple):
    """Time slices of other processes, as detected by one chain.

    Attributes:
        lost: seconds in time slices of other processes.
        longest: the longest slice, in seconds.
        total: length of the chain in seconds.
    """

    lost: float
    longest: float
    total: float


NOTHING = Slices(0.0, 0.0, 0.0)


def slices(kernels: Sequence[Sequence[int]]) -> Slices:
    """Return the time slices of other processes in a chain.

    Args:
        kernels: for each kernel, five times in ns: the start, the end, the total of its slices, the
            longest slice, and the counter's shortest step.
    """
    finest = min(kernel[4] for kernel in kernels)
    least = max(SLICE_NS, COARSE * finest)
    breaks = [after[0] - before[1] for before, after in itertools.pairwise(kernels)]
    between = [gap for gap in breaks if gap >= least]
    inside = [kernel for kernel in kernels if kernel[3] >= least]
    lost = sum(between) + sum(kernel[2] for kernel in inside)
    longest = max([0, *between, *(kernel[3] for kernel in inside)])
    return Slices(lost * 1e-9, longest * 1e-9, (kernels[-1][1] - kernels[0][0]) * 1e-9)


@functools.cache
def slice_reader() -> Callable[[], Slices | None] | None:
    """Return a function that runs a chain, or None if this machine cannot compile its kernel.

    The function returns None if the host was too slow to queue the chain without a pause.
    """
    import torch

    from ..kernels.cuda_cpp import cuda_module
    from ..kernels.nvrtc import NoCompiler

    found = torch.zeros(KERNELS, 5, dtype=torch.int64, device="cuda")
    kernel = cuda_module("probes.cu").watch[1, 1]
    begun = torch.cuda.Event()

    def read() -> Slices | None:
        for _ in range(ATTEMPTS):
            torch.cuda._sleep(GATE_CYCLES)
            begun.record()
            for number in range(KERNELS):
                kernel(found, number, KERNEL_NS, SLICE_NS)
            late = begun.query()
            seen = slices(found.tolist())
            if not late:
                return seen
        return None

    try:
        read()  # compiles the kernel
    except NoCompiler:
        return None
    return read


@dataclass
class Neighbors:
    """Other processes on the GPU of this process.

    Attributes:
        read: a function that runs a chain of kernels, or None on a CPU.
        users: a function that returns each process's share of the GPU since the last call, by name,
            for all processes that NVML shows.
        seen: the time slices from all chains together.
        named: the largest share of each process that NVML names.
    """

    read: Callable[[], Slices | None] | None
    users: Callable[[], Mapping[str, float]] = dict
    seen: Slices = NOTHING
    named: dict[str, float] = field(default_factory=dict)

    def look(self, chains: int = FEW) -> None:
        """Search for time slices of other processes, and query NVML for their names."""
        if self.read is None:
            return
        for slices in filter(None, (self.read() for _ in range(chains))):
            lost, longest, total = self.seen
            longest = max(longest, slices.longest)
            self.seen = Slices(lost + slices.lost, longest, total + slices.total)
        for name, share in self.users().items():
            self.named[name] = max(share, self.named.get(name, 0.0))

    def before(self) -> None:
        """Search for neighbors before the first window. Raise `Disturbed` if the GPU is busy."""
        self.look()
        if self.share() >= NO_VERDICT:
            self.look(MANY)
        self.refuse(NO_VERDICT)

    def after_lap(self, *windows: Sequence[float], chains: int = FEW) -> None:
        """Search for neighbors after a lap, and longer if the `windows` of a side are uneven."""
        uneven = any(max(times) > UNEVEN * median(times) for times in windows)
        self.look(MANY if current_group().max(uneven) else chains)

    def share(self) -> float:
        """Return the share of the GPU that others use, or the largest share of several GPUs."""
        seen = self.seen.lost / self.seen.total if self.seen.total else 0.0
        return current_group().max(max([seen, *self.named.values()]))

    def refuse(self, share: float, why: str = "") -> None:
        """Raise `Disturbed` if others use at least this `share` of the GPU."""
        if self.share() >= share:
            text = current_group().broadcast(self.text())
            raise Disturbed(f"{text}; {why}" if why else text)

    def text(self) -> str:
        """Return the shares of the GPU that other processes use, as text."""
        share = self.share()
        names = [name for name, used in self.named.items() if used >= NAMED]
        who = f"{' and '.join(names) or 'another process'} use{'s' * (len(names) < 2)}"
        slices = self.seen.longest
        length = f" in time slices of up to {slices * 1e3:.2g} ms" if slices else ""
        return f"{who} {share:.0%} of this GPU{length}"

    def details(self) -> dict[str, object]:
        """Return the share and the text if other processes use enough of the GPU to be reported."""
        share = self.share()
        return {"neighbor": {"share": share, "text": self.text()}} if share >= NAMED else {}

    @contextmanager
    def excusing(self) -> Iterator[None]:
        """Inside the block, blame a busy machine for a side's contradictory times.

        Raises:
            Disturbed: if a side was refused while something else used the machine.
        """
        load = CpuLoad()
        try:
            yield
        except SideError as error:
            why = f"meanwhile: {str(error).partition(chr(10))[0]}"
            self.look(MANY)
            self.refuse(EXCUSED, why)
            if busy := current_group().first_message(load.look()):
                raise Disturbed(f"{busy}; {why}") from error
            raise
