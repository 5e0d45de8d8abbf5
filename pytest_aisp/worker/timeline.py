"""The kernels and copies of both sides over time, for the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

FILE = "timeline.json"
MAX_BARS, MAX_LANES, MAX_NAME = 200, 16, 120
"""The maximum numbers of bars and streams per side, and of characters in a name."""
MAX_BYTES = 200_000
"""The largest file that is read. Even a file with the most bars and longest names is smaller."""

Positive = Annotated[float, Meta(ge=0)]


class Bar(Struct, array_like=True):
    """A kernel, copy or fill: the stream, the index of the name, the start and the length in us."""

    stream: int
    name: Annotated[int, Meta(ge=0)]
    start: Positive
    length: Positive


class Lanes(Struct):
    """The kernels and copies of one side on the GPU, from the first one on.

    Attributes:
        bars: the first bars in the order of their starts.
        names: the names that the bars refer to.
        count, streams: the numbers of bars and of streams before any were left out.
    """

    bars: list[Bar]
    names: list[str]
    count: int
    streams: int


class Timeline(Struct):
    """Both sides over time. `calls` is the number of calls of each side."""

    calls: Annotated[int, Meta(ge=1)]
    baseline: Lanes
    optimized: Lanes

    @property
    def interesting(self) -> bool:
        """Whether a side uses several streams, or runs several kernels and copies in a call."""
        sides = (self.baseline, self.optimized)
        return any(lanes.streams > 1 or lanes.count > self.calls for lanes in sides)

    def write(self, folder: Path) -> None:
        """Write the timeline to `folder`.

        Raises:
            OSError: if the file cannot be written.
        """
        (folder / FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path, most: int = MAX_BARS) -> Timeline | None:
        """Return the timeline in `folder`, with at most `most` bars per side.

        Returns: None if the timeline is missing, malformed, or not `interesting`.
        """
        path = folder / FILE
        try:
            if path.stat().st_size > MAX_BYTES:
                return None
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None
        for lanes in (found.baseline, found.optimized):
            if any(bar.name >= len(lanes.names) for bar in lanes.bars):
                return None
            del lanes.bars[most:]
            # the names are in the order of their first bars
            del lanes.names[max((bar.name + 1 for bar in lanes.bars), default=0) :]
        return found if found.interesting else None


def lanes_of(events: Iterable[FunctionEvent]) -> Lanes:
    """Return the bars of `events`, which are kernels, copies and fills on a GPU."""
    spans = sorted(
        (
            (event.time_range.start, event.device_resource_id, event.name, event.time_range.end)
            for event in events
        ),
        key=lambda span: span[:2],
    )
    streams = list(dict.fromkeys(stream for _, stream, _, _ in spans))
    kept = set(streams[:MAX_LANES])
    first = spans[0][0] if spans else 0.0
    names: dict[str, int] = {}
    bars: list[Bar] = []
    for start, stream, name, end in spans:
        if stream in kept and len(bars) < MAX_BARS:
            number = names.setdefault(str(name)[:MAX_NAME], len(names))
            bars.append(Bar(stream, number, round(start - first, 3), round(end - start, 3)))
    return Lanes(bars, list(names), len(spans), len(streams))
