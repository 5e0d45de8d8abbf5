"""The stages of loading a batch, timed by name: a dataset's transforms and the collate function.

Their times go to memory that worker processes share, one place for each, so nothing is lost
between them and nothing has to be sent.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double
from dataclasses import dataclass
from multiprocessing import context, sharedctypes
from pathlib import Path
from typing import Any, NamedTuple

ATTRIBUTES = ("transform", "target_transform", "transforms")
"""Where datasets keep their transforms, torchvision's and its Compose among them."""
INNER = ("dataset", "datasets")
"""Where Subset, ConcatDataset and the like keep what they wrap."""
COLLATE = "collate"


@dataclass(frozen=True)
class Stage:
    """One stage: its name, calls a batch, seconds a batch, summed over the worker processes."""

    name: str
    calls: float
    seconds: float


class Place(NamedTuple):
    """Where a callable is kept: an attribute's name, or an index of a list."""

    owner: Any
    key: str | int

    def get(self) -> Any:
        """Return what is kept there."""
        return self.owner[self.key] if isinstance(self.key, int) else vars(self.owner)[self.key]

    def put(self, value: Any) -> None:
        """Keep something else there."""
        if isinstance(self.key, int):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


def places(dataset: Any) -> list[Place]:
    """Return where `dataset` keeps the callables it applies, the inner ones of a Compose each."""
    # One Compose may be reached on two ways: torchvision's datasets keep it twice.
    found = {(id(place.owner), place.key): place for place in _walk(dataset, ())}
    return list(found.values())


def _walk(owner: Any, above: tuple[int, ...]) -> Iterator[Place]:
    if id(owner) in above:
        return
    above, attributes = (*above, id(owner)), getattr(owner, "__dict__", {})
    for name in INNER:
        inner = attributes.get(name)
        for one in inner if isinstance(inner, (list, tuple)) else [inner]:
            yield from _walk(one, above)
    for name in ATTRIBUTES:
        if attributes.get(name) is not None:
            yield from _leaves(Place(owner, name), above)


def _leaves(place: Place, above: tuple[int, ...]) -> Iterator[Place]:
    value = place.get()
    listed = isinstance(value, list)
    parts = [Place(value, i) for i in range(len(value))] if listed else []
    inner = [p for part in parts for p in _leaves(part, above)] or list(_walk(value, above))
    if inner:
        yield from inner
    elif callable(value):
        yield place


def name_of(work: Any) -> str:
    """Return what to call a transform: a function's name, a lambda's line, an object's class."""
    while isinstance(work, functools.partial):
        work = work.func
    code = getattr(work, "__code__", None)
    if code is not None and work.__name__ == "<lambda>":
        return f"lambda in {Path(code.co_filename).name}:{code.co_firstlineno}"
    return str(getattr(work, "__name__", None) or type(work).__name__)


class Timed:
    """A callable that writes down how often it was called and for how long.

    A copy is a copy of the callable itself: only a worker process, started by pickling, times on.
    """

    def __init__(self, work: Callable[..., Any], cells: Any, at: int, width: int) -> None:
        self._aisp = (work, cells, at, width)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        work, cells, at, width = self._aisp
        at += _process() * width
        since = time.perf_counter()
        try:
            return work(*args, **keywords)
        finally:
            cells[at + 1] += time.perf_counter() - since
            cells[at] += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._aisp[0], name)

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            return _same, (self._aisp[0],)
        return Timed, self._aisp


def _same(work: Any) -> Any:
    return work


def _process() -> int:
    """Return 0 in the loop's own process, else the worker's number and one."""
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    return 0 if worker is None else int(worker.id) + 1


class Stages:
    """The stages of one DataLoader, timed while `attached`."""

    def __init__(self, loader: Any) -> None:
        self._places = [*places(loader.dataset), Place(loader, "collate_fn")]
        self._names = [*(name_of(place.get()) for place in self._places[:-1]), COLLATE]
        self._width = 2 * len(self._names)
        self._processes = loader.num_workers + 1
        self._cells = sharedctypes.RawArray(c_double, self._processes * self._width)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Time every stage in the block, and put back what was there."""
        originals = [place.get() for place in self._places]
        for i, (place, work) in enumerate(zip(self._places, originals, strict=True)):
            place.put(Timed(work, self._cells, 2 * i, self._width))
        try:
            yield
        finally:
            for place, work in zip(self._places, originals, strict=True):
                place.put(work)

    def read(self) -> tuple[Stage, ...]:
        """Return what was counted, the slowest first; nothing where no batch was made."""
        sums = [sum(self._cells[i :: self._width]) for i in range(self._width)]
        batches = sums[-2]
        if not batches:
            return ()
        rows = [row for row in zip(self._names, sums[0::2], sums[1::2], strict=True) if row[1]]
        names = _numbered([name for name, _, _ in rows])
        counted = zip(names, rows, strict=True)
        stages = [Stage(name, n / batches, s / batches) for name, (_, n, s) in counted]
        return tuple(sorted(stages, key=lambda stage: -stage.seconds))


def _numbered(names: Sequence[str]) -> list[str]:
    """Return `names` with #2, #3 behind those that were there before."""
    before = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{n} #{k + 1}" if k else n for n, k in zip(names, before, strict=True)]
