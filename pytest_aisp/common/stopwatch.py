"""Where the seconds of a case go: inputs, reference, check, build, time, verify."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Count seconds by phase. A phase inside another stops the outer one's count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what passes in the block as `name`."""
        outer = self._turn(name)
        try:
            yield
        finally:
            self._turn(outer)

    def _turn(self, name: str) -> str:
        now, before = time.perf_counter(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = name, now
        return before

    def start(self) -> None:
        """Forget what was counted: what follows is another request's."""
        self._since, self.seconds = time.perf_counter(), {}

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last reading, and begin anew."""
        self._turn(self._phase)
        seconds, self.seconds = self.seconds, {}
        return {name: round(value, 4) for name, value in seconds.items()}
