"""What a side must leave alone: global switches, threads, and the clocks that time it.

The references to clocks are taken when this module is imported, before any page is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from . import originals
from .leftovers import Running
from .protections import on
from .sides import SideError
from .switches import ENVIRONMENT, OWNED, flags, restore

now_ns = time.perf_counter_ns
now = time.perf_counter
"""The clocks that are read; a page may replace those in `time`, not these."""


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse a side `name` that leaves switches, threads or clocks other than it found them.

    Args:
        owns: what the page declares as its own: ``threads`` (processes too), ``tf32``, ``gc``,
            ``affinity``.

    Raises:
        SideError: naming what was changed.
    """
    before, running = flags(), Running.now()
    try:
        yield
        check_clocks(name)
        if on("global-flags"):
            _check_flags(name, before, [what for own in owns for what in OWNED.get(own, ())])
        if on("threads") and "threads" not in owns and (left := running.left()):
            raise SideError(f"{name} leaves {left}; what it does is not timed")
    finally:
        restore(before)


def check_clocks(name: str) -> None:
    """Refuse replaced clocks, waits and comparisons, and a tracer beside what is timed."""
    if on("own-clock") and (what := originals.replaced()):
        raise SideError(f"{name} replaced {what}: its times and results are worth nothing")
    if on("untraced") and (tracer := tracing()):
        raise SideError(f"{tracer} is on: it slows Python down many times\nMeasure without it")


def tracing() -> str | None:
    """Return who traces this process: a debugger, coverage, a profiler; or None."""
    hooks: dict[str, Callable[[], Any]] = {
        "a tracer (sys.settrace)": sys.gettrace,
        "a profiler (sys.setprofile)": sys.getprofile,
    }
    found = next((what for what, hook in hooks.items() if hook() is not None), None)
    monitoring = getattr(sys, "monitoring", None)
    if found is None and monitoring is not None:
        tools = filter(None, map(monitoring.get_tool, range(6)))
        found = next((f"{tool} (sys.monitoring)" for tool in tools), None)
    return found or ("torch's profiler" if _torch_profiles() else None)


def _torch_profiles() -> bool:
    import torch

    return bool(torch._C._autograd._profiler_enabled())


def _check_flags(name: str, before: Mapping[str, Any], owned: Sequence[str]) -> None:
    after = flags()
    for what, was in before.items():
        if after[what] == was or what in owned:
            continue
        how = f"at {after[what]}, it found {was}"
        if what == ENVIRONMENT:  # by name only: values may be secret
            how = "changed: " + ", ".join(sorted(dict(after[what].items() ^ was.items())))
        raise SideError(
            f"{name} leaves {what} {how}; a side that needs it otherwise sets it and puts it back"
        )
