"""Import a page by path, under the name pytest gave it, in whatever process needs it."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ..kernels.fake_gpu import drive_interpreter, interpreting
from ..page.pair import MARK, ROLES, Pair, Precision, Side, is_plain
from ..page.sources import libraries
from ..results.messages import CaseTask, PageSource


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


DeclaredSide: TypeAlias = tuple[Side, Precision | None]
"""A side and the lower precision that it declares."""
FIXED_SIZES = 3
"""Most of a page's listed check sizes that are checked before a case is timed."""


class PageError(Exception):
    """A page that cannot be run as declared; the message says what to change."""


@dataclass(frozen=True)
class TaskContext:
    """One task's part of a page; a page is imported when something of it is asked for."""

    task: CaseTask
    past: PageSource | None = None

    @cached_property
    def pair(self) -> Pair:
        """The pair of the page as it is."""
        page = load_page(self.task.page, self.task.root, self.task.module)
        pair = pair_of(getattr(page, self.task.function, None))
        if pair is None:
            raise PageError(f"{self.task.page} has no test {self.task.function!r} with @compare")
        return pair

    @property
    def sides(self) -> tuple[DeclaredSide, DeclaredSide]:
        """Baseline and variant."""
        variant = self.pair.variant(self.task.variant)
        return (self.pair.baseline, None), (variant.side, variant.precision)

    def side(self, role: str) -> DeclaredSide:
        """Return the side with this role."""
        return self.sides[ROLES.index(role)]

    @property
    def sizes(self) -> list[Mapping[str, Any]]:
        """The sizes at which the task's sides are shown right; the last is the case's own."""
        listed = [s for s in self.pair.check_sizes if is_plain(s)]
        if self.task.at == "check":
            return listed or [*self.pair.cpu_sizes, dict(self.task.size)][:1]
        return [*listed[:FIXED_SIZES], dict(self.task.size)]

    def sources(self) -> dict[str, str]:
        """Return by role the digest of each side's source."""
        from ..page.sources import digest

        sides = (side for side, _ in self.sides)
        return {r: digest(s, self.task.root) for r, s in zip(ROLES, sides, strict=True)}

    def need_interpreter(self) -> None:
        """Refuse Triton kernels on a CPU without its interpreter; worker processes are given it."""
        from ..page.sources import triton_kernels

        sides, on_cpu = [side for side, _ in self.sides], self.task.device == "cpu"
        if on_cpu and not interpreting() and triton_kernels(sides, self.task.root):
            raise PageError(
                f"{self.task.variant} launches Triton kernels, which without a GPU run in Triton's"
                " interpreter; it must be chosen before pytest starts when sides run inside pytest"
                "\n    TRITON_INTERPRET=1 pytest --pdb ..."
            )

    @cached_property
    def old(self) -> Pair | None:
        """The pair of the page as it was at the commit of `past`, or None."""
        assert self.past is not None
        past = self.past
        page = load_past(past.page, past.root, past.module, self.task.root)
        return pair_of(getattr(page, self.task.function, None))

    def old_pair(self) -> Pair:
        """Return the pair as it was, where there must be one."""
        if self.old is None:
            raise PageError(f"{self.task.function} has no pair in the old page")
        return self.old

    def old_side(self, role: str) -> Side:
        """Return the side with this role, as it was."""
        then = self._then(self.pair, self.old_pair())
        return next(old for name, _, old in then if name == role)

    def changed(self) -> dict[str, Any]:
        """Return which sides of the case are not as they were.

        An old page that cannot be imported today, or only with files of today's, has no sides to
        compare with, nor has a side that would import today's when it is called: `why` says so.
        """
        from ..page.sources import digest, imported_late

        assert self.past is not None
        pair = self.pair  # before the old page, which is imported past what is there
        found: dict[str, Any] = {"baseline": False, "optimized": False, "why": ""}
        try:
            old = self.old
        except MixedTreesError as error:
            return {**found, "why": str(error)}
        except Exception as error:
            why = f"the old page cannot be imported: {type(error).__name__}: {error}"
            return {**found, "why": why}
        root = self.task.root
        for role, now, then in () if old is None else self._then(pair, old):
            late = imported_late(then, self.past.root)
            if late := [name for name in late if leads_to(name, root)]:
                found["why"] = f"{then.__name__} imports {', '.join(late)} when it is called"
                continue
            before = digest(then, self.past.root, constants=True)
            found[role] = digest(now, root, constants=True) != before
        return found

    def _then(self, pair: Pair, old: Pair) -> Iterator[tuple[str, Side, Side]]:
        """Yield role, side now and side then, where there were such sides."""
        yield "baseline", pair.baseline, old.baseline
        name = self.task.variant
        if name in [variant.name for variant in old.variants]:
            yield "optimized", pair.variant(name).side, old.variant(name).side
