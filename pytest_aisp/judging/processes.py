"""New worker processes, which have run no code of a problem or a candidate yet."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..worker.client import WorkerProcess

COUNT = 2
"""Number of processes that each candidate needs, which are started in advance."""
MEMORY_SHARE = 0.5
"""The default memory limit of a process, as a share of the available host memory."""


class Processes:
    """New worker processes. Some processes are started before they are needed.

    Args:
        gpus: the UUIDs of the GPUs that the processes use, or nothing for the CPU.
        memory: bytes of host memory that a process may use, or None for the default.
    """

    def __init__(self, gpus: Sequence[str], memory: int | None) -> None:
        self.gpus, self.memory = gpus, memory or int(MEMORY_SHARE * _available_bytes())
        self._spares: list[WorkerProcess] = []

    def fresh(self) -> WorkerProcess:
        """Return a process that has run no task yet."""
        while True:
            try:
                worker = self._spares.pop(0)
            except IndexError:
                return self._start()
            if worker.alive:
                return worker
            worker.close()

    def start_spares(self) -> None:
        """Start the processes for the next candidate in advance, to hide the import of torch."""
        while len(self._spares) < COUNT:
            self._spares.append(self._start())

    def _start(self) -> WorkerProcess:
        changes: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        changes["TRITON_INTERPRET"] = None if self.gpus else "1"
        worker = WorkerProcess(changes)
        with suppress(ProcessLookupError):  # the process has ended already
            resource.prlimit(worker.pid, resource.RLIMIT_DATA, (self.memory, self.memory))
        return worker

    def close(self) -> None:
        """End the processes that `fresh` has not returned."""
        for worker in self._spares:
            worker.close()
        self._spares.clear()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int) -> int:
    """Return the peak host memory of a process in bytes, or 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0
