"""The worker processes that the cases of a run share, and which cases ran in each of them."""

from __future__ import annotations

from ..distributed.launcher import RankSet
from ..worker.client import Worker, WorkerProcess
from ..worker.output_capture import STREAMS, Chunk, StreamName, format_output

Place = tuple[str, int, int, tuple[tuple[str, str], ...]]
"""The device, number, ranks and environment variables of a shared worker."""


class SharedWorkers:
    """The shared workers by place. A process that has ended has no place any more.

    Attributes:
        printing: the processes whose output is shown, shared or not.
    """

    def __init__(self) -> None:
        self.printing: list[WorkerProcess | RankSet] = []
        self._workers: dict[Place, Worker] = {}
        self._cases: dict[Place, list[str]] = {}

    def at(self, place: Place) -> Worker | None:
        """Return the worker at `place`, or None if none is alive there."""
        current = self._workers.get(place)
        if isinstance(current, (WorkerProcess, RankSet)) and not current.alive:
            current.close()
            del self._workers[place]
            return None
        return current

    def put(self, place: Place, worker: Worker) -> Worker:
        """Put a new worker at `place`, and return it."""
        self._workers[place], self._cases[place] = worker, []
        return worker

    def place_of(self, worker: Worker) -> Place | None:
        """Return the place of `worker`, or None if the cases do not share it."""
        return next((place for place, w in self._workers.items() if w is worker), None)

    def earlier_cases(self, place: Place, nodeid: str) -> list[str]:
        """Note that the case `nodeid` runs at `place`. Return the cases that ran there before."""
        cases = self._cases[place]
        if nodeid not in cases:
            cases.append(nodeid)
        return [case for case in cases if case != nodeid]

    def take_output(self, most: int | None = None) -> dict[StreamName, str]:
        """Return the output of this run's processes since the last call.

        Args:
            most: the most lines per process, or None for all lines. All votes together are
                treated as one process.
        """
        outputs = [(o, o.label) for worker in self.printing for o in worker.outputs]
        self.printing = [worker for worker in self.printing if not worker.closed]
        texts: dict[StreamName, str] = {}
        for name in STREAMS:
            chunks: dict[str, list[Chunk]] = {}
            for output, label in outputs:
                chunks.setdefault(label, []).append(output.take(name))
            texts[name] = "".join(
                format_output(each, label, most) for label, each in chunks.items()
            )
        return texts

    def close(self) -> None:
        """End all shared workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
