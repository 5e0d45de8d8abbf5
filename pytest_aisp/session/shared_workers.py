"""The worker processes that cases share, with a list of the cases that ran in each process."""

from __future__ import annotations

from ..distributed.launcher import RankSet
from ..worker.client import Worker, WorkerProcess
from ..worker.output_capture import STREAMS, Chunk, StreamName, format_output

Place = tuple[str, int, int, tuple[tuple[str, str], ...]]
"""The device, number, ranks and environment variables of a shared worker."""


class SharedWorkers:
    """The shared workers, keyed by place. Workers that have ended are removed.

    Attributes:
        printing: all processes whose output is shown, even if cases do not share them.
    """

    def __init__(self) -> None:
        self.printing: list[WorkerProcess | RankSet] = []
        self._workers: dict[Place, Worker] = {}
        self._cases: dict[Place, list[str]] = {}

    def at(self, place: Place) -> Worker | None:
        """Return the worker at `place` if it is still running, or None."""
        current = self._workers.get(place)
        if isinstance(current, (WorkerProcess, RankSet)) and not current.alive:
            current.close()
            del self._workers[place]
            return None
        return current

    def put(self, place: Place, worker: Worker) -> Worker:
        """Store a new worker under `place`, and return the worker."""
        self._workers[place], self._cases[place] = worker, []
        return worker

    def place_of(self, worker: Worker) -> Place | None:
        """Return the place of `worker`, or None if it is not a shared worker."""
        return next((place for place, w in self._workers.items() if w is worker), None)

    def earlier_cases(self, place: Place, nodeid: str) -> list[str]:
        """Register the case `nodeid` at `place`. Return the other cases that ran in that worker."""
        cases = self._cases[place]
        if nodeid not in cases:
            cases.append(nodeid)
        return [case for case in cases if case != nodeid]

    def take_output(self, most: int | None = None) -> dict[StreamName, str]:
        """Return the output of all processes since the last call, keyed by stream.

        Args:
            most: the maximum number of lines per process, or None for all lines. The processes of
                votes count as one process.
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
