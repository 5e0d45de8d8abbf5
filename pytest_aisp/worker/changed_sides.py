"""Which sides of a case differ from their version in an old tree."""

from __future__ import annotations

from pathlib import Path

from ..page import normalize
from ..page.imports import contents, import_folders
from ..page.pair import Pair, Side
from ..page.sources import digest, imported_late, reached_names
from ..results.task_results import ChangedResult
from .loader import MixedTreesError, TaskContext, leads_to


def changed_sides(context: TaskContext) -> ChangedResult:
    """Return which sides have changed, or why the old page cannot be compared.

    A side has changed if its digest differs. Both sides count as changed if anything else differs
    that they may use: another file, or code of the page that is neither a test, nor another side,
    nor makes inputs or references.

    An old page cannot be compared if it needs files of the current tree, or if an old side would
    import such files when it is called.
    """
    past, task = context.past, context.task
    assert past is not None
    pair, result = context.pair, ChangedResult()  # the page first: the old import hides modules
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
    names_now = _names(pair, [now for _, now, _ in both], task.root)
    names_then = _names(old, [then for _, _, then in both], past.root)
    elsewhere = _differs_elsewhere(context, names_now, names_then)
    for role, now, then in both:
        late = [n for n in imported_late(then, past.root) if leads_to(n, task.root)]
        if late:
            result.why = f"{then.__name__} imports {', '.join(late)} when it is called"
            continue
        before = digest(then, past.root, constants=True)
        differs = digest(now, task.root, constants=True) != before
        setattr(result, role, differs or elsewhere)
    return result


def _differs_elsewhere(context: TaskContext, now: set[str], then: set[str]) -> bool:
    """Return whether code or data differ that the digests of the sides may not contain.

    Args:
        now, then: the functions to leave out of today's page and of the old page.
    """
    task, past = context.task, context.past
    assert past is not None
    folders = import_folders(task.root)
    rests, others = [], []
    for place, names in ((task, now), (past, then)):
        page = Path(place.page)
        rests.append(normalize.rest(page.read_text(encoding="utf-8"), names))
        others.append(contents(page, place.root, folders))
    return rests[0] != rests[1] or others[0] != others[1]


def _names(pair: Pair, sides: list[Side], root: str) -> set[str]:
    """Return the functions of a page whose changes the digests contain, or that do not matter.

    The digests of `sides` contain what they reach by name. Other sides, and functions that make
    inputs, references and costs, are no part of `sides`.
    """
    functions = [pair.baseline, *(variant.side for variant in pair.variants), pair.inputs]
    functions += [pair.reference, pair.work, *pair.costs.values()]
    return {getattr(f, "__name__", "") for f in functions} | reached_names(sides, root)
