"""Search sizes given as Hypothesis strategies for the smallest one that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from ..results.messages import CaseTask
from ..util.process_group import current_group

EXAMPLES = 20

Size = Mapping[str, Any]


def smallest_failure(
    strategies: Mapping[str, Any], check: Callable[[Size], Any], task: CaseTask
) -> Exception | None:
    """Return the failure of the smallest size that fails, or None when none of 20 does.

    On several ranks the sizes are those that the first one draws, and none is looked for below the
    smallest of them that fails: what is drawn next would depend on what failed, and a size may fail
    on one rank alone.

    Args:
        strategies: values and strategies by size key.
        check: raises for a size at which a side is wrong.
    """
    if current_group().world > 1:
        return _first_failure(current_group().broadcast(_drawn(strategies, task)), check)
    failures: dict[str, Exception] = {}

    def fails(size: Size) -> bool:
        failure = _first_failure([size], check)
        if failure is not None:
            failures[repr(size)] = failure
        return failure is not None

    size = _found(strategies, fails, task)
    return None if size is None else failures[repr(size)]


def _first_failure(sizes: Iterable[Size], check: Callable[[Size], Any]) -> Exception | None:
    for size in sizes:
        try:
            check(size)
        except Exception as error:
            return error
    return None


def _drawn(strategies: Mapping[str, Any], task: CaseTask) -> list[Size]:
    """Return sizes that the search would try, the smallest first."""
    drawn: list[Size] = []

    def keep(size: Size) -> bool:
        drawn.append(dict(size))
        return False

    _found(strategies, keep, task)
    return sorted(drawn, key=lambda size: tuple(map(_rank_of, size.values())))


def _rank_of(value: Any) -> tuple[bool, Any]:
    """Return by what `value` is ordered: numbers by their value, words after them."""
    return isinstance(value, str), value


def _found(
    strategies: Mapping[str, Any], fails: Callable[[Size], bool], task: CaseTask
) -> Size | None:
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    fixed = {
        k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in strategies.items()
    }
    rules = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        drawn = Random(task.seed)
        return find(st.fixed_dictionaries(fixed), fails, settings=rules, random=drawn)
    except NoSuchExample:
        return None
