"""Find the sides of a case that differ from an old version, in source or machine code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import FunctionType

from ..kernels.machine_code import difference, launched_code, sass_diff
from ..page import normalize
from ..page.imports import NO_KERNELS, contents, import_folders, imported_late, used_files
from ..page.pair import ROLES, Pair, Side
from ..page.sources import digest, kernel_files, kernel_sources, reached_names, triton_kernels
from ..results.messages import ChangedTask
from ..results.task_results import ChangedResult
from .loader import MixedTreesError, TaskContext, leads_to

COMPILE = "torch.compile"


def changed_sides(context: TaskContext) -> ChangedResult:
    """Return the changed sides, or the reason why the old page cannot be compared.

    A side has changed if its source has another digest. If other code that the sides may use
    differs (another file, or code in the page), both sides count as changed. Tests, other sides,
    and functions that make inputs or references do not count.

    An old page cannot be compared if the page needs files of the current tree, or if a call of an
    old side would import such files.

    Without an old tree, only return digests of the machine code that the sides launch.
    """
    past, task = context.past, context.task
    if isinstance(task, ChangedTask) and task.sass:
        sides = context.side(task.sass)[0], context.old_side(task.sass)
        launched = (launched_code(context.pair, side, task.size, task.arch) for side in sides)
        return ChangedResult(sass=sass_diff(*launched))
    if past is None:
        return _machine_code(context)
    pair, result = (
        context.pair,
        ChangedResult(),
    )  # the page first: the old import hides modules
    try:
        old = context.old_pair_or_none
    except MixedTreesError as error:
        return ChangedResult(why=str(error))
    except Exception as error:
        why = f"the old page cannot be imported: {type(error).__name__}: {error}"
        return ChangedResult(why=why)
    if old is None:
        return result
    both = list(context.both_sides(pair, old))
    rest = _Rest(context, [now for _, now, _ in both], [then for _, _, then in both])
    elsewhere = rest.differs()
    only_kernels = not elsewhere or not rest.differs(_sides_of(pair), _sides_of(old))
    for role, now, then in both:
        late = [n for n in imported_late(then, past.root) if leads_to(n, task.root)]
        if late:
            result.why = f"{then.__name__} imports {', '.join(late)} when it is called"
            continue
        differs = _digests_differ(context, now, then)
        setattr(result, role, differs or elsewhere)
        if not (differs or elsewhere) or not only_kernels:
            continue
        if differs and _digests_differ(context, now, then, kernels=False):
            continue
        result.kernels_alone.append(role)
        if isinstance(task, ChangedTask) and task.arch:
            result.why_timed[role] = _why_timed(context, rest, now, then, differs=differs)
    return result


def _machine_code(context: TaskContext) -> ChangedResult:
    """Return a digest of the machine code that each side launches, for sides with known kernels."""
    result, task = ChangedResult(), context.task
    assert isinstance(task, ChangedTask)
    for role in ROLES:
        side, _ = context.side(role)
        found = launched_code(context.pair, side, task.size, task.arch)
        if not found.error and found.code:
            result.machine_code[role] = found.digest()
    return result


def _why_timed(context: TaskContext, rest: _Rest, now: Side, then: Side, *, differs: bool) -> str:
    """Return the reason to time a side whose versions differ only in kernel sources.

    The text is empty if both versions launch the same code with the same arguments.

    Args:
        differs: whether a kernel that the side names differs. If not, the side's library calls are
            unchanged, because the calling code is unchanged.
    """
    task, past = context.task, context.past
    assert past is not None
    assert isinstance(task, ChangedTask)
    new, old = (
        launched_code(context.pair, side, task.size, task.arch, kernel_files([side], root))
        for side, root in ((now, task.root), (then, past.root))
    )
    for launched in (new, old):
        if launched.error:
            return launched.error
        if differs and launched.operators:
            return f"it calls {launched.operators[0][0]}, whose kernels are not seen"
    if _others(now, task.root, new.launched) != _others(then, past.root, old.launched):
        return "a kernel that it did not launch differs"
    triton = any(isinstance(kernel, FunctionType) for kernel in new.launched)
    named = set(kernel_files([now], task.root))
    if new.queries and (triton or not new.launched <= named or rest.differs([now], [then])):
        return f"its launches may depend on torch.cuda.{min(new.queries)}"
    if triton and rest.mentions(COMPILE):
        return f"its kernels may be launched by {COMPILE}"
    return difference(new, old)


def _others(side: Side, root: str, launched: Collection[object]) -> list[str]:
    """Return the digests of the Triton kernels that a side refers to, but did not launch."""
    kernels = (kernel for kernel in triton_kernels([side], root) if kernel not in launched)
    return [digest(kernel, root, constants=True) for kernel in kernels]


def _digests_differ(context: TaskContext, now: Side, then: Side, *, kernels: bool = True) -> bool:
    assert context.past is not None
    one, other = (
        digest(side, root, constants=True, kernels=kernels)
        for side, root in ((now, context.task.root), (then, context.past.root))
    )
    return one != other


class _Rest:
    """The code and data in both trees that are not part of the sides' digests.

    Args:
        now, then: the sides of the case in today's page and in the old page.
    """

    def __init__(self, context: TaskContext, now: list[Side], then: list[Side]) -> None:
        assert context.past is not None
        task, past = context.task, context.past
        self.trees = [(Path(task.page), task.root), (Path(past.page), past.root)]
        self.folders = import_folders(task.root)
        self.opened = task.opened if isinstance(task, ChangedTask) else ()
        names_now = _names(context.pair, now, task.root)
        self._names = [names_now, _names(context.old_pair(), then, past.root)]

    def differs(self, *without: Iterable[Side]) -> bool:
        """Return whether the trees differ.

        Args:
            without: sides of today's page and of the old page whose kernels are left out.
        """
        found = []
        for number, (page, root) in enumerate(self.trees):
            kernels = kernel_sources(without[number], root) if without else NO_KERNELS
            names = self._names[number] | _functions(kernels, page, root)
            text = normalize.rest(page.read_text(encoding="utf-8"), names)
            found.append((text, contents(page, root, self.folders, kernels, self.opened)))
        return found[0] != found[1]

    def mentions(self, word: str) -> bool:
        """Return whether a module of either tree has `word` in its text."""
        return any(
            word in file.read_text(encoding="utf-8", errors="replace")
            for page, root in self.trees
            for file in used_files(page, root, self.folders).values()
            if file.suffix == ".py"
        )


def _functions(kernels: Mapping[str, Collection[str]], page: Path, root: str) -> set[str]:
    """Return the names of the Triton functions in `page`."""
    resolved, under = page.resolve(), Path(root).resolve()
    name = str(resolved.relative_to(under)) if resolved.is_relative_to(under) else ""
    return set(kernels.get(name, ()))


def _sides_of(pair: Pair) -> list[Side]:
    return [pair.baseline, *(variant.side for variant in pair.variants)]


def _names(pair: Pair, sides: list[Side], root: str) -> set[str]:
    """Return the names of a page's functions whose text `_Rest` does not compare.

    Some of them are in the digests of `sides`, which are compared elsewhere. The others are other
    sides, and functions that make inputs, references and costs. Nothing compares these.
    """
    functions = [pair.baseline, *(variant.side for variant in pair.variants), pair.inputs]
    functions += [pair.reference, pair.work, *pair.costs.values()]
    return {getattr(f, "__name__", "") for f in functions} | reached_names(sides, root)
