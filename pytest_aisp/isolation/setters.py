"""Record each change of a CPU setting, even if a side restores the setting before its call ends.

A comparison of the settings before and after a call does not detect such a change. So before a page
is imported, `install` wraps the functions that change settings. The wrapped functions still work.
Libraries such as `torch.export` also change these settings, so changes by libraries are not
recorded.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..page.sources import libraries


@dataclass(frozen=True)
class Change:
    """A change of a setting: the old and the new value, and the place in the code.

    Attributes:
        setting: the name of the setting in `global_state`.
    """

    setting: str
    old: object
    new: object
    place: str

    def __str__(self) -> str:
        return f"{self.setting} from {self.old} to {self.new} inside its call, {self.place}"


_changes: list[Change] = []
_installed: list[bool] = []


def changes_inside() -> Sequence[Change]:
    """Return all recorded changes, the oldest first."""
    return _changes


def install() -> None:
    """Wrap the functions that change settings, once in this process."""
    import torch

    if _installed:
        return
    _installed.append(True)
    _wrap("torch's threads", torch.get_num_threads, (torch, "set_num_threads"))
    # An assignment to torch.backends.mkldnn.enabled calls a setter that torch stored when it was
    # imported.
    enabled = vars(type(torch.backends.mkldnn))["enabled"]
    places = (torch._C, "_set_mkldnn_enabled"), (enabled, "setter")
    _wrap("torch's oneDNN", torch._C._get_mkldnn_enabled, *places)
    _wrap("Python's switch interval", sys.getswitchinterval, (sys, "setswitchinterval"))
    if hasattr(os, "sched_setaffinity"):
        _wrap("the CPU affinity", lambda: os.sched_getaffinity(0), (os, "sched_setaffinity"))


def _wrap(setting: str, read: Callable[[], object], *places: tuple[Any, str]) -> None:
    """Replace a setter at all `places`. The new setter records changes of the value `read()`."""
    owner, name = places[0]
    original = getattr(owner, name)

    @functools.wraps(original)
    def setter(*args: object, **kwargs: object) -> object:
        before = read()
        result = original(*args, **kwargs)
        if (after := read()) != before and (place := _place_of_caller()):
            _changes.append(Change(setting, before, after, place))
        return result

    for owner, name in places:
        setattr(owner, name, setter)


def _place_of_caller() -> str | None:
    """Return the function, file and line of the caller, or None if the caller is a library."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_managers()):
        frame = frame.f_back
    code = frame.f_code
    if code.co_filename.startswith(libraries()):
        return None
    return f"in {code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


@functools.cache
def _managers() -> tuple[str, ...]:
    """Return the files of torch and Python that call setters on behalf of a page."""
    import contextlib

    import torch

    return os.path.dirname(torch.backends.__file__), str(contextlib.__file__)
