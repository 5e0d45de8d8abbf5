"""Settings of torch that a page changes when it is imported. They apply to this page alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isclass, isfunction
from types import ModuleType

from ..isolation.global_state import restore, snapshot
from ..page.sources import libraries

_LASTING = "torch's modes", "torch's dispatch modes", "torch's module hooks"
"""Settings that can be ended, but not set again."""

_at_start: dict[str, object] = {}
_changed: dict[str, dict[str, object]] = {}
"""The settings that changed when a page was imported, by this page and by each module that it
imported first. A later page that uses such a module gets them too."""


@contextmanager
def settings_of(module: str, root: str) -> Iterator[None]:
    """Apply the settings of the page `module`, which the ``with`` block imports, and no others."""
    if not _at_start:
        _at_start.update(_settings())
    restore(_at_start)
    known = set(sys.modules)
    yield
    after = _settings()
    changed = {name: value for name, value in after.items() if value != _at_start.get(name, value)}
    if changed:
        new = sys.modules.keys() - known
        _changed.update({name: changed for name in new if _is_under(sys.modules[name], root)})
    used = {module, *_modules_in(sys.modules[module])}
    own = [settings for name, settings in _changed.items() if name in used]
    restore({**_at_start, **{name: value for each in own for name, value in each.items()}})


def _settings() -> dict[str, object]:
    settings = snapshot()
    return {k: v for k, v in settings.items() if k.startswith("torch's ") and k not in _LASTING}


def _is_under(module: ModuleType, root: str) -> bool:
    file = str(getattr(module, "__file__", ""))
    return file.startswith(root + os.sep) and not file.startswith(libraries())


def _modules_in(page: ModuleType) -> Iterator[str]:
    """Yield the names of the modules whose functions and classes a page uses."""
    for value in vars(page).values():
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isfunction(value) or isclass(value):
            yield value.__module__
