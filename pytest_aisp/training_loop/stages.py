"""The stages of loading a batch by name: a dataset's items, its transforms, the collate function.

What one of them does inside another is the inner one's time alone. Their times go to memory that
worker processes share, one place for each, so nothing is lost between them and nothing has to be
sent.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double
from dataclasses import dataclass
from multiprocessing import context, sharedctypes
from pathlib import Path
from types import FunctionType
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


def _wrapped(owner: Any) -> list[Any]:
    """Return the datasets that a Subset, a ConcatDataset or the like wraps; of others nothing."""
    attributes = getattr(owner, "__dict__", {})
    inner = [attributes.get(name) for name in INNER]
    each = [x for one in inner for x in (one if isinstance(one, (list, tuple)) else [one])]
    return [one for one in each if one is not None]


def _walk(owner: Any, above: tuple[int, ...]) -> Iterator[Place]:
    if id(owner) in above:
        return
    above, attributes = (*above, id(owner)), getattr(owner, "__dict__", {})
    for one in _wrapped(owner):
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


def innermost(dataset: Any) -> list[Any]:
    """Return the datasets whose items `dataset` gives out: what Subset and the like wrap, else it.

    Each once, however often it is wrapped.
    """
    found: dict[int, Any] = {}

    def walk(owner: Any, above: tuple[int, ...]) -> None:
        if id(owner) in above:
            return
        inner = _wrapped(owner)
        for one in inner:
            walk(one, (*above, id(owner)))
        if not inner:
            found[id(owner)] = owner

    walk(dataset, ())
    return list(found.values())


def item_classes(datasets: Sequence[Any]) -> list[Any]:
    """Return the classes of `datasets` whose `__getitem__` is Python's, and can be replaced."""
    classes = dict.fromkeys(type(one) for one in datasets)
    return [c for c in classes if isinstance(getattr(c, "__getitem__", None), FunctionType)]


def name_of(work: Any) -> str:
    """Return what to call a transform: a function's name, a lambda's line, an object's class."""
    while isinstance(work, functools.partial):
        work = work.func
    code = getattr(work, "__code__", None)
    if code is not None and work.__name__ == "<lambda>":
        return f"lambda in {Path(code.co_filename).name}:{code.co_firstlineno}"
    return str(getattr(work, "__name__", None) or type(work).__name__)


class _Inner(threading.local):
    """Seconds that stages inside the one that is running have taken, in each thread."""

    seconds = 0.0


_inner = _Inner()


class Timed:
    """A callable that writes down how often it was called, and how long it took by itself.

    A copy is a copy of the callable itself: only a worker process, started by pickling, times on.
    """

    def __init__(self, work: Callable[..., Any], cells: Any, at: int, width: int) -> None:
        self._aisp = (work, cells, at, width)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        work, cells, at, width = self._aisp
        at += _process() * width
        before, _inner.seconds = _inner.seconds, 0.0
        since = time.perf_counter()
        try:
            return work(*args, **keywords)
        finally:
            took = time.perf_counter() - since
            cells[at + 1] += took - _inner.seconds
            cells[at] += 1
            _inner.seconds = before + took

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
        self._datasets = innermost(loader.dataset)
        self._classes = item_classes(self._datasets)
        self._names = [f"{one.__name__}.__getitem__" for one in self._classes]
        self._names += [*(name_of(place.get()) for place in self._places[:-1]), COLLATE]
        self._width = 2 * len(self._names)
        self._processes = loader.num_workers + 1
        self._cells = sharedctypes.RawArray(c_double, self._processes * self._width)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Time every stage in the block, and put back what was there."""
        originals = [place.get() for place in self._places]
        methods = [
            owner.__getitem__ for owner in self._classes
        ]  # an heir's, before its parent's is replaced
        for i, (place, work) in enumerate(zip(self._places, originals, strict=True)):
            place.put(self._timed(work, len(self._classes) + i))
        with contextlib.ExitStack() as items:
            for i, (owner, work) in enumerate(zip(self._classes, methods, strict=True)):
                items.enter_context(self._items(owner, work, i))
            try:
                yield
            finally:
                for place, work in zip(self._places, originals, strict=True):
                    place.put(work)

    def _timed(self, work: Callable[..., Any], number: int) -> Timed:
        return Timed(work, self._cells, 2 * number, self._width)

    @contextlib.contextmanager
    def _items(self, owner: Any, work: Callable[..., Any], number: int) -> Iterator[None]:
        """Time the items of this loader's datasets that are `owner`s; other instances' are not.

        A method is looked up in its class, so the class is what changes. A worker that was not
        forked imports it anew: its items are not timed.
        """
        own, timed, watched = (
            "__getitem__" in vars(owner),
            self._timed(work, number),
            self._datasets,
        )

        @functools.wraps(work)
        def item(self: Any, *args: Any, **keywords: Any) -> Any:
            how = timed if any(self is one for one in watched) else work
            return how(self, *args, **keywords)

        owner.__getitem__ = item
        try:
            yield
        finally:
            if own:
                owner.__getitem__ = work
            else:
                del owner.__getitem__

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
