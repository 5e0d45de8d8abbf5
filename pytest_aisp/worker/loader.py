"""Load the objects that a task needs: the page, its current or old sides, and references."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ..checking.check import CheckResult
from ..checking.inputs import InputPool
from ..checking.numerics import Rule
from ..checking.reference import Reference
from ..isolation.global_state import settings_of
from ..kernels.fake_gpu import drive_interpreter, interpreting
from ..page.pair import MARK, ROLES, PageError, Pair, Precision, Side, Size, is_plain, size_words
from ..page.sources import digest, libraries, triton_kernels
from ..results.messages import CaseTask, PageSource
from ..timing import cuda_graph
from ..util.device_state import Stopwatch, free_bytes, release
from ..util.process_group import current_group
from .opened_files import OPENED


def load_page(path: str, root: str, module: str) -> types.ModuleType:
    """Import the page at `path` as `module`, so that its relative imports work.

    Missing parent packages are created, as in pytest's importlib mode. On a machine without a GPU,
    Triton's interpreter is prepared for the page's kernels.
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


def _make_parents(module: str, folder: Path) -> None:
    while module := module.rpartition(".")[0]:
        if module not in sys.modules:
            package = types.ModuleType(module)
            package.__path__ = [str(folder)]
            sys.modules[module] = package
        folder = folder.parent


def pair_of(function: object) -> Pair | None:
    """Return the pair that `compare` attached to a test function, or None."""
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == MARK:
            pair: Pair = mark.kwargs["pair"]
            return pair
    return None


class MixedTreesError(ImportError):
    """An old page imports modules of the current tree. The message names the modules."""


def load_old_page(path: str, root: str, module: str, today: str) -> types.ModuleType:
    """Import the page at `path` in the old tree `root`, together with that tree's helpers.

    During the import, `sys.modules` contains libraries, but no modules of the current tree. Folders
    of the current tree in `sys.path` are replaced with the same folders of the old tree.

    Raises:
        MixedTreesError: if the page still imported a module of the current tree.
    """
    if module in sys.modules:
        return sys.modules[module]
    hidden = _modules_under(today)
    before = list(sys.path)
    for name in hidden:
        del sys.modules[name]
    sys.path[:] = [root, *(_in_old_tree(entry, today, root) for entry in before)]
    mixed: set[str] = set()
    try:
        page = load_page(path, root, module)
        mixed = _modules_under(today).keys() - _modules_under(root).keys()
    finally:
        package = module.partition(".")[0]
        old = {n for n in _modules_under(root) if n.partition(".")[0] != package}
        for name in old | mixed | ({module} if mixed else set()):
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        sys.path[:] = before
    if mixed:
        names = ", ".join(sorted(mixed))
        raise MixedTreesError(f"the old page imports {names} from the current tree")
    return page


def leads_to(name: str, root: str) -> bool:
    """Return whether `import name` would find a module under `root`, outside of libraries."""
    top = name.partition(".")[0]
    if top in sys.modules:
        return any(_is_under(path, root) for path in _paths_of(sys.modules[top]))
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    paths = [spec.origin] if spec.has_location else spec.submodule_search_locations
    return any(_is_under(path, root) for path in paths or () if path)


def _in_old_tree(entry: str, today: str, root: str) -> str:
    """Return the folder of the old tree for an `entry` of `sys.path` in the current tree."""
    real = os.path.realpath(entry)
    if not _is_under(real, today):
        return entry
    return os.path.normpath(os.path.join(root, os.path.relpath(real, os.path.realpath(today))))


def _modules_under(root: str) -> dict[str, types.ModuleType]:
    """Return the imported modules under `root`, keyed by name and without libraries.

    A package without a file is included if one of its folders is under `root`.
    """
    modules = list(sys.modules.items())
    return {n: m for n, m in modules if any(_is_under(path, root) for path in _paths_of(m))}


def _paths_of(module: types.ModuleType) -> list[str]:
    # Not `getattr`: `torch.ops` and lazy modules return something for every attribute name.
    known = getattr(module, "__dict__", {})
    if isinstance(known.get("__file__"), str):
        return [known["__file__"]]
    try:
        return [path for path in known.get("__path__") or () if isinstance(path, str)]
    except KeyError:  # a namespace package whose parent is no longer imported
        return []


def _is_under(path: str, root: str) -> bool:
    """Return whether a file or folder is under `root` and not in a library."""
    if f"{path}{os.sep}".startswith(libraries()):
        return False
    real = f"{os.path.realpath(path)}{os.sep}"
    return real.startswith(os.path.realpath(root) + os.sep) and not real.startswith(libraries())


DeclaredSide: TypeAlias = tuple[Side, Precision | None]
"""A side and the lower precision that it declares."""
MAX_CHECK_SIZES = 3
"""The maximum number of a page's check sizes that are checked before a case is timed."""


@dataclass(frozen=True)
class TaskContext:
    """A task's pair and sides. The page is imported when the pair is first needed.

    Attributes:
        past: the page at a commit, or None.
    """

    task: CaseTask
    past: PageSource | None = None

    @cached_property
    def pair(self) -> Pair:
        """The pair of the current page."""
        OPENED.watch(self.task.page, self.task.root)
        with settings_of(self.task.module, self.task.root):
            page = load_page(self.task.page, self.task.root, self.task.module)
        pair = pair_of(getattr(page, self.task.function, None))
        if pair is None:
            raise PageError(f"{self.task.page} has no test {self.task.function!r} with @compare")
        return pair

    @property
    def sides(self) -> tuple[DeclaredSide, DeclaredSide]:
        """The baseline and the variant."""
        variant = self.pair.variant(self.task.variant)
        baseline = self.pair.baseline, self.pair.baseline_precision
        return baseline, (variant.side, variant.precision)

    def side(self, role: str) -> DeclaredSide:
        """Return the side with this role."""
        return self.sides[ROLES.index(role)]

    @property
    def sizes(self) -> list[Size]:
        """The sizes at which the task checks the sides. The last one is the case's own size."""
        listed = [size for size in self.pair.check_sizes if is_plain(size)]
        if self.task.at == "check":
            return listed or [*self.pair.cpu_sizes, self.task.size][:1]
        return [*listed[:MAX_CHECK_SIZES], self.task.size]

    def sources(self) -> dict[str, str]:
        """Return the digest of each side's source, keyed by role."""
        return {role: digest(self.side(role)[0], self.task.root) for role in ROLES}

    def opened_files(self) -> tuple[list[str], list[str]]:
        """Return the files that the page opened in this process (see `OpenedFiles.of_page`)."""
        return OPENED.of_page(self.task.page, self.task.root)

    def require_interpreter(self) -> None:
        """Refuse Triton kernels on a CPU without Triton's interpreter.

        Worker processes turn the interpreter on. If sides run inside the pytest process, the
        interpreter must be on before pytest starts.
        """
        sides = [side for side, _ in self.sides]  # imports the page, which may import Triton
        interprets = self.task.device != "cpu" or interpreting()
        if not interprets and triton_kernels(sides, self.task.root):
            raise PageError(
                f"{self.task.variant} launches Triton kernels, which without a GPU run in Triton's"
                " interpreter; it must be chosen before pytest starts when sides run inside pytest"
                "\n    TRITON_INTERPRET=1 pytest --pdb ..."
            )

    @cached_property
    def old_pair_or_none(self) -> Pair | None:
        """The pair at the commit of `past`, or None if the old page has no pair of this name."""
        past = self.past
        assert past is not None
        page = load_old_page(past.page, past.root, past.module, self.task.root)
        return pair_of(getattr(page, self.task.function, None))

    def old_pair(self) -> Pair:
        """Return the pair at the commit of `past`."""
        if self.old_pair_or_none is None:
            raise PageError(f"{self.task.function} has no pair in the old page")
        return self.old_pair_or_none

    def old_side(self, role: str) -> Side:
        """Return the side with this role at the commit of `past`."""
        sides = self.both_sides(self.pair, self.old_pair())
        return {name: old for name, _, old in sides}[role]

    def both_sides(self, pair: Pair, old: Pair) -> Iterator[tuple[str, Side, Side]]:
        """Yield the role, the current side and the old side of each side that existed then."""
        yield "baseline", pair.baseline, old.baseline
        name = self.task.variant
        if name in [variant.name for variant in old.variants]:
            yield "optimized", pair.variant(name).side, old.variant(name).side


MAX_CPU_REFERENCES = 4
"""The largest number of references kept on a CPU."""
KEPT_SHARE, KEPT_SHARE_OF_RANK = 1 / 8, 1 / 64
"""The shares of a GPU's memory that a process and a rank may keep between tasks. A rank's share is
smaller, because several sets of ranks share a GPU."""


@dataclass
class Cache:
    """An engine's state between tasks. Variants at the same size share a reference.

    Attributes:
        references: the expected results, keyed by page, size and seed.
        checks: the results of checks, keyed by case and size.
        exhausted: True if the process uses memory that it cannot release.
    """

    watch: Stopwatch
    references: dict[str, Reference] = field(default_factory=dict)
    checks: dict[str, CheckResult] = field(default_factory=dict)
    exhausted: bool = False

    def reference(self, task: CaseTask, pair: Pair, size: Size) -> Reference:
        """Return the reference at `size`, which checks and timings share.

        The input values at the timed size are the same in every run, so that a new result can be
        compared with a stored one. The task's secret seed determines the values at all other sizes,
        and the unseen values at the timed size.
        """
        page = f"{task.page}{task.function}{task.device}"
        purpose = "time" if (task.at, size) == ("case", task.size) else f"check{task.seed}"
        exact = Rule(**task.rule).exact
        key = f"{page}{size_words(size)}{purpose}{exact}"
        if key not in self.references:
            self._make_room(page, task.device)
            seed, unseen = (seed_of(task, p) for p in (purpose, f"unseen{task.seed}"))
            with self.watch.phase("inputs"):
                pool = InputPool(pair, dict(size), task.device, seed, unseen)
                self.references[key] = Reference(pool, self.watch, exact)
        return self.references[key]

    def _make_room(self, page: str, device: str) -> None:
        """Delete the references of other pages. If memory is short, delete this page's too."""
        import torch

        if device.startswith("cuda"):
            scarce = free_bytes() < 0.5 * torch.cuda.mem_get_info()[1]
        else:
            scarce = len(self.references) >= MAX_CPU_REFERENCES
        for key in [k for k in self.references if scarce or not k.startswith(page)]:
            del self.references[key]
        release(device)

    def release_memory(self, device: str) -> None:
        """Release GPU memory. If too much remains in use, mark the process as exhausted."""
        import torch

        if not device.startswith("cuda"):
            return

        def holds_more_than(share: float, *, everything: bool = False) -> bool:
            release(device, everything=everything)
            limit = share * torch.cuda.mem_get_info()[1]
            return current_group().max(torch.cuda.memory_reserved() > limit) > 0

        if holds_more_than(KEPT_SHARE if current_group().world == 1 else KEPT_SHARE_OF_RANK):
            self.references.clear()
            self.exhausted = holds_more_than(KEPT_SHARE, everything=True)
        self.exhausted |= bool(cuda_graph.abandoned)


def seed_of(task: CaseTask, purpose: str) -> int:
    """Return the seed that the function of `task` uses for `purpose`."""
    return zlib.crc32(f"{task.function}{purpose}".encode())
