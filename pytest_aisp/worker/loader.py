"""Import a page by path, under the name pytest gave it, in whatever process needs it."""

from __future__ import annotations

import importlib.util
import os
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


class MixedTreesError(ImportError):
    """An old page that imports a file of today's tree; the message says which."""


def load_past(path: str, root: str, module: str, today: str) -> types.ModuleType:
    """Import the page at `path` of an old tree `root`, with that tree's helpers.

    Modules of today's tree `today` are out of the way meanwhile, all but libraries, which are the
    same for both; what `sys.path` names in today's tree is looked for in the old one.

    Raises:
        MixedTreesError: where an import found its way into today's tree all the same.
    """
    if module in sys.modules:
        return sys.modules[module]
    hidden = _modules_under(today)
    before = list(sys.path)
    for name in hidden:
        del sys.modules[name]
    sys.path[:] = [root, *(_as_it_was(entry, today, root) for entry in before)]
    mixed: set[str] = set()
    try:
        page = load_page(path, root, module)
        mixed = _modules_under(today).keys() - _modules_under(root).keys()
    finally:
        own = module.partition(".")[0]
        old = {n for n in _modules_under(root) if n.partition(".")[0] != own}
        for name in old | mixed | ({module} if mixed else set()):
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        sys.path[:] = before
    if mixed:
        raise MixedTreesError(f"the old page imports {', '.join(sorted(mixed))} as of today")
    return page


def leads_to(name: str, root: str) -> bool:
    """Return whether an import of `name` by now finds it under `root`, and in no library."""
    top = name.partition(".")[0]
    if top in sys.modules:
        return any(_is_under(place, root) for place in _places(sys.modules[top]))
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    located = [spec.origin] if spec.has_location else spec.submodule_search_locations
    return any(_is_under(place, root) for place in located or () if place)


def _as_it_was(entry: str, today: str, root: str) -> str:
    """Return where `entry` of `sys.path` lies in the old tree, if it lies in today's."""
    real = os.path.realpath(entry)
    if not _is_under(real, today):
        return entry
    return os.path.normpath(os.path.join(root, os.path.relpath(real, os.path.realpath(today))))


def _modules_under(root: str) -> dict[str, types.ModuleType]:
    """Return by name the imported modules that lie under `root`, libraries left out.

    Packages without a file count by their folders: what is imported next is looked for there.
    """
    modules = list(sys.modules.items())
    return {n: m for n, m in modules if any(_is_under(place, root) for place in _places(m))}


def _places(module: object) -> list[str]:
    # Of its dictionary: `torch.ops` and lazy modules make up an answer to whatever is asked.
    known = getattr(module, "__dict__", {})
    if isinstance(known.get("__file__"), str):
        return [known["__file__"]]
    try:
        return [place for place in known.get("__path__") or () if isinstance(place, str)]
    except KeyError:  # a namespace whose parent is no longer imported
        return []


def _is_under(place: str, root: str) -> bool:
    """Return whether a file or folder lies under `root`, and in no library."""
    if f"{place}{os.sep}".startswith(libraries()):
        return False
    real = f"{os.path.realpath(place)}{os.sep}"
    return real.startswith(os.path.realpath(root) + os.sep) and not real.startswith(libraries())


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
