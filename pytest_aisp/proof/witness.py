"""What a side must leave alone: global switches, threads, and the clocks that time it.

The references to clocks are taken when this module is imported, before any page is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..common.protections import on
from ..guard import originals
from ..guard.leftovers import Running
from ..guard.switches import ENVIRONMENT, OWNED, flags, restore
from ..pages.pair import SideError

now_ns = time.perf_counter_ns
now = time.perf_counter
"""The clocks that are read; a page may replace those in `time`, not these."""
STARTS_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE")
"""The variables with which coverage and pytest-cov start in every process of a user's."""


class Traced(RuntimeError):
    """A tracer runs along with what was to be timed."""


@contextmanager
def watching(name: str, owns: Sequence[str] = ()) -> Iterator[None]:
    """Refuse a side `name` that leaves switches, threads or clocks other than it found them.

    Args:
        owns: what the page declares as its own: ``threads`` (processes too), ``tf32``, ``gc``,
            ``affinity``.

    Raises:
        SideError: naming what was changed.
    """
    before, running, tracer = flags(), Running.now(), tracing()
    try:
        yield
        check_clocks(name)
        if on("untraced") and (now_on := tracing()) and now_on != tracer:
            raise SideError(f"{now_on} was switched on while {name} ran\nMeasure without it")
        if on("global-flags"):
            _check_flags(name, before, [what for own in owns for what in OWNED.get(own, ())])
        if on("threads") and "threads" not in owns and (left := running.left()):
            raise SideError(f"{name} leaves {left}; what it does is not timed")
    finally:
        restore(before)


def check_clocks(name: str) -> None:
    """Refuse replaced clocks, waits and comparisons."""
    if on("own-clock") and (what := originals.replaced()):
        raise SideError(f"{name} replaced {what}: its times and results are worth nothing")


def refuse_tracers() -> None:
    """Refuse to time anything where a debugger, coverage or a profiler runs along.

    Raises:
        Traced: naming who, and what to do.
    """
    if on("untraced") and (tracer := tracing()):
        started = next((name for name in STARTS_COVERAGE if name in os.environ), None)
        raise Traced(
            f"{tracer} traces the process that measures: it slows Python down many times\n"
            "Measure without it" + (f": unset {started}" if started else "")
        )


def tracing() -> str | None:
    """Return who traces this process's Python: a debugger, coverage, a profiler; or None."""
    hooks = {"settrace": sys.gettrace(), "setprofile": sys.getprofile()}
    names = (f"{_owner(hook)} (sys.{by})" for by, hook in hooks.items() if hook is not None)
    found = next(names, None)
    monitoring = getattr(sys, "monitoring", None)
    if found is None and monitoring is not None:
        tools = filter(None, map(monitoring.get_tool, range(6)))
        found = next((f"{tool} (sys.monitoring)" for tool in tools), None)
    return found or ("torch's profiler" if _torch_profiles() else None)


def _owner(hook: Any) -> str:
    """Return the module that a hook is from: ``pdb``, ``coverage.tracer``."""
    owner = getattr(hook, "__self__", hook)
    return str(getattr(owner, "__module__", None) or type(owner).__module__)


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
