"""Search sizes given as Hypothesis strategies for the smallest one that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .messages import Task

EXAMPLES = 20


def smallest_failure(
    strategies: Mapping[str, Any], check: Callable[[Mapping[str, Any]], Any], task: Task
) -> Exception | None:
    """Return the failure of the smallest size that fails, or None when none of 20 does.

    Args:
        strategies: values and strategies by size key.
        check: raises for a size at which a side is wrong.
    """
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    failures: dict[str, Exception] = {}

    def fails(size: Mapping[str, Any]) -> bool:
        try:
            check(size)
        except Exception as error:
            failures[repr(size)] = error
            return True
        return False

    fixed = {
        k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in strategies.items()
    }
    rules = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=task.reproducible,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        size = find(st.fixed_dictionaries(fixed), fails, settings=rules)
    except NoSuchExample:
        return None
    return failures[repr(size)]
