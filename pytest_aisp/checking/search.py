"""Search for the smallest size at which a check fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

from ..page.pair import Size
from ..util.process_group import current_group

EXAMPLES = 20
"""Number of sizes that a search tries."""


def smallest_failure(
    strategies: Mapping[str, object], check: Callable[[Size], object], seed: int
) -> Exception | None:
    """Return the failure of the smallest size that fails, or None if none of 20 fails.

    With several ranks, all ranks check the sizes that rank 0 draws, and failures are not shrunk.
    Shrinking chooses sizes by which ones failed, and a size may fail on only one of the ranks.

    Args:
        strategies: a value or a Hypothesis strategy for each size key.
        check: raises an error if a side is wrong at the given size.
    """
    if current_group().world > 1:
        sizes: list[Size] = []
        _search(strategies, sizes.append, seed)
        sizes.sort(key=lambda size: [(isinstance(v, str), v) for v in size.values()])
        return _first_failure(current_group().broadcast(sizes), check)
    failures: dict[str, Exception] = {}

    def fails(size: Size) -> bool:
        failure = _first_failure([size], check)
        if failure is not None:
            failures[repr(size)] = failure
        return failure is not None

    smallest = _search(strategies, fails, seed)
    return None if smallest is None else failures[repr(smallest)]


def _first_failure(sizes: Iterable[Size], check: Callable[[Size], object]) -> Exception | None:
    for size in sizes:
        try:
            check(size)
        except Exception as error:
            return error
    return None


def _search(
    strategies: Mapping[str, object], fails: Callable[[Size], object], seed: int
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
        return find(
            st.fixed_dictionaries(fixed),
            lambda size: bool(fails(size)),
            settings=rules,
            random=Random(seed),
        )
    except NoSuchExample:
        return None
