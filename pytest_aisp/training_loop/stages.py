"""Time the stages of loading a batch: the dataset's items, transforms, and collate function.

If one stage calls another, the time of the inner stage is not part of the outer stage's time. The
counters are in memory that the DataLoader's worker processes share. Each process has its own cells.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import c_double
from dataclasses import dataclass
from multiprocessing import context, sharedctypes
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

if TYPE_CHECKING:
    from ctypes import Array

    from torch.utils.data import DataLoader

TRANSFORMS = ("transform", "target_transform", "transforms")
"""The attributes in which datasets and torchvision's Compose store their transforms."""
WRAPPED = ("dataset", "datasets")
"""The attributes in which Subset, ConcatDataset and similar datasets store the inner datasets."""
COLLATE, GETITEM = "collate", "__getitem__"

K = TypeVar("K", contravariant=True)
Work: TypeAlias = Callable[..., object]


@dataclass(frozen=True)
class Stage:
    """A stage, with its calls and its seconds per batch, summed over the worker processes."""

    name: str
    calls: float
    seconds: float


class Container(Protocol[K]):
    """A list, or the dictionary of an object's attributes."""

    def __getitem__(self, key: K, /) -> object: ...

    def __setitem__(self, key: K, value: object, /) -> None: ...


@dataclass(frozen=True)
class Place(Generic[K]):
    """A place where a callable is stored: a container and a key."""

    container: Container[K]
    key: K

    def get(self) -> object:
        return self.container[self.key]

    def put(self, value: object) -> None:
        self.container[self.key] = value


AnyPlace: TypeAlias = "Place[str] | Place[int]"


def places(dataset: object) -> list[AnyPlace]:
    """Return the places of the transforms of `dataset`. A Compose is replaced by its parts."""
    # torchvision's datasets store the same Compose twice, so remove duplicates.
    unique = {(id(place.container), place.key): place for place in _walk(dataset, ())}
    return list(unique.values())


def _attributes(owner: object) -> dict[str, object]:
    attributes = getattr(owner, "__dict__", None)
    # the `__dict__` of a class is read-only
    return attributes if isinstance(attributes, dict) else {}


def _wrapped_datasets(owner: object) -> list[object]:
    values = [_attributes(owner).get(name) for name in WRAPPED]
    flat = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in flat if value is not None]


def _walk(owner: object, above: tuple[int, ...]) -> Iterator[AnyPlace]:
    if id(owner) in above:
        return
    above, attributes = (*above, id(owner)), _attributes(owner)
    for dataset in _wrapped_datasets(owner):
        yield from _walk(dataset, above)
    for name in TRANSFORMS:
        if attributes.get(name) is not None:
            yield from _leaves(Place(attributes, name), above)


def _leaves(place: AnyPlace, above: tuple[int, ...]) -> Iterator[AnyPlace]:
    value = place.get()
    parts = [Place(value, i) for i in range(len(value))] if isinstance(value, list) else []
    inner = [leaf for part in parts for leaf in _leaves(part, above)] or list(_walk(value, above))
    if inner:
        yield from inner
    elif callable(value):
        yield place


def innermost(dataset: object, above: tuple[int, ...] = ()) -> list[object]:
    """Return the innermost datasets in `dataset`, which produce the items, or `dataset` itself."""
    if id(dataset) in above:
        return []
    inner = _wrapped_datasets(dataset)
    leaves = [leaf for one in inner for leaf in innermost(one, (*above, id(dataset)))]
    return list({id(leaf): leaf for leaf in leaves}.values()) if inner else [dataset]


def name_of(work: object) -> str:
    """Return a transform's name: the function's name, the lambda's line, or the class's name."""
    while isinstance(work, functools.partial):
        work = work.func
    name = getattr(work, "__name__", None) or type(work).__name__
    code = getattr(work, "__code__", None)
    if code is not None and name == "<lambda>":
        return f"lambda in {Path(code.co_filename).name}:{code.co_firstlineno}"
    return str(name)


class _InnerSeconds(threading.local):
    """The seconds that other stages ran inside the current stage."""

    seconds = 0.0


_inner = _InnerSeconds()


class Timed:
    """A callable that adds its calls and seconds to shared memory.

    In all other respects, the object behaves like the original callable. A copy or a pickle of it
    is the original callable, except when multiprocessing pickles it for a new worker process.
    """

    def __init__(self, work: Work, cells: Array[c_double], at: int, width: int) -> None:
        self._aisp = (work, cells, at, width)

    def __call__(self, *args: object, **keywords: object) -> object:
        work, cells, at, width = self._aisp
        at += _process() * width
        outer, _inner.seconds = _inner.seconds, 0.0
        since = time.perf_counter()
        try:
            return work(*args, **keywords)
        finally:
            seconds = time.perf_counter() - since
            cells[at + 1] += seconds - _inner.seconds
            cells[at] += 1
            _inner.seconds = outer + seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._aisp[0], name)

    def __reduce__(self) -> tuple[object, ...]:
        if context.get_spawning_popen() is None:
            return _identity, (self._aisp[0],)
        return Timed, self._aisp


def _identity(work: object) -> object:
    return work


def _process() -> int:
    """Return 0 in the loop's own process, and n + 1 in the DataLoader's worker n."""
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    return 0 if worker is None else int(worker.id) + 1


def is_dataloader(loader: object) -> TypeGuard[DataLoader[object]]:
    data = sys.modules.get("torch.utils.data")  # do not import PyTorch just for this check
    return data is not None and isinstance(loader, data.DataLoader)


class Stages:
    """The stages of one DataLoader, timed while `attached`."""

    def __init__(self, loader: DataLoader[object]) -> None:
        collate: AnyPlace = Place(vars(loader), "collate_fn")
        self._places = [*places(loader.dataset), collate]
        self._datasets = innermost(loader.dataset)
        classes = dict.fromkeys(type(dataset) for dataset in self._datasets)
        # Only a __getitem__ written in Python can be replaced.
        self._classes = [c for c in classes if isinstance(getattr(c, GETITEM, None), FunctionType)]
        self._names = [f"{one.__name__}.{GETITEM}" for one in self._classes]
        self._names += [*(name_of(place.get()) for place in self._places[:-1]), COLLATE]
        self._width = 2 * len(self._names)
        self._cells = sharedctypes.RawArray(c_double, (loader.num_workers + 1) * self._width)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Time every stage inside the block, and restore the originals after it."""
        # Get all methods before replacing any, because a subclass could inherit a replaced method.
        methods = [getattr(owner, GETITEM) for owner in self._classes]
        with contextlib.ExitStack() as restore:
            for i, (owner, method) in enumerate(zip(self._classes, methods, strict=True)):
                if GETITEM in vars(owner):
                    restore.callback(setattr, owner, GETITEM, method)
                else:
                    restore.callback(delattr, owner, GETITEM)
                setattr(owner, GETITEM, self._timed_getitem(method, i))
            for i, place in enumerate(self._places, start=len(self._classes)):
                work = place.get()
                assert callable(work)
                restore.callback(place.put, work)
                place.put(self._timed(work, i))
            yield

    def _timed(self, work: Work, number: int) -> Timed:
        return Timed(work, self._cells, 2 * number, self._width)

    def _timed_getitem(self, method: Work, number: int) -> Work:
        """Return a `__getitem__` that times only this loader's datasets, not other instances.

        A spawned worker process imports the original class, so items are not timed there.
        """
        timed, datasets = self._timed(method, number), self._datasets

        @functools.wraps(method)
        def getitem(self: object, *args: object, **keywords: object) -> object:
            call = timed if any(self is dataset for dataset in datasets) else method
            return call(self, *args, **keywords)

        return getitem

    def read(self) -> tuple[Stage, ...]:
        """Return the stages that ran, the slowest first. If no batch was collated, return none."""
        sums = [sum(self._cells[i :: self._width]) for i in range(self._width)]
        batches = sums[-2]
        if not batches:
            return ()
        seen: dict[str, int] = {}
        stages = []
        for name, calls, seconds in zip(self._names, sums[0::2], sums[1::2], strict=True):
            if calls:
                seen[name] = seen.get(name, 0) + 1
                unique = name if seen[name] == 1 else f"{name} #{seen[name]}"
                stages.append(Stage(unique, calls / batches, seconds / batches))
        return tuple(sorted(stages, key=lambda stage: -stage.seconds))
