"""Import a page by path, under the name pytest gave it, in whatever process needs it."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from ..kernels.standin import drive_interpreter
from ..pages.pair import MARK, Pair
from ..pages.sources import libraries


def load_page(path: str, root: str, module: str) -> types.ModuleType:
    """Import the page at `path` as `module`, its relative imports included.

    Parent packages that have no file are made up, as pytest's importlib mode does. Where the page
    launches Triton kernels and no GPU is, it finds Triton's interpreter ready.
    """
    if module not in sys.modules:
        _import(path, root, module)
    drive_interpreter()
    return sys.modules[module]


def _import(path: str, root: str, module: str) -> None:
    if root not in sys.path:
        sys.path.append(root)
    _make_parents(module, Path(path).parent)
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    page = importlib.util.module_from_spec(spec)
    sys.modules[module] = page
    try:
        spec.loader.exec_module(page)
    except BaseException:
        del sys.modules[module]
        raise


def load_past(path: str, root: str, module: str, today: str) -> types.ModuleType:
    """Import the page at `path` of an old tree `root`, with that tree's helpers.

    Modules of today's tree `today` are out of the way meanwhile, all but libraries, which are the
    same for both.
    """
    if module in sys.modules:
        return sys.modules[module]
    hidden = _modules_under(today)
    before = list(sys.path)
    for name in hidden:
        del sys.modules[name]
    sys.path[:] = [root, *(entry for entry in before if entry != today)]
    try:
        return load_page(path, root, module)
    finally:
        for name in _modules_under(root).keys() - {module}:
            del sys.modules[name]
        sys.modules.update(hidden)
        sys.path[:] = before


def _modules_under(root: str) -> dict[str, types.ModuleType]:
    """Return by name the imported modules whose files lie under `root`, libraries left out."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(root.rstrip("/") + "/") and not file.startswith(libraries()):
            found[name] = module
    return found


def _make_parents(module: str, folder: Path) -> None:
    names = module.split(".")[:-1]
    while names:
        name = ".".join(names)
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
        names, folder = names[:-1], folder.parent


def pair_of(function: Any) -> Pair | None:
    """Return the pair that `compare` attached to a test function, or None."""
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == MARK:
            return mark.kwargs["pair"]  # type: ignore[no-any-return]
    return None
