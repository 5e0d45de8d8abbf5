"""Where pytest-benchmark is installed: it is given each timed side, and its fixture our GPU timer.

There is no public way in; what is used of its insides stands here and in `tools.benchmarks`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest

from ..tools.pytest_benchmark import sides

MARKER = "aisp_timer"
WINDOW, WINDOWS = 1e-3, 10
OURS = pytest.StashKey[int]()


def pytest_aisp_result(config: Any, row: dict[str, Any]) -> None:
    """Hand over a case's sides; on the controller, so under xdist too."""
    session, said = config._benchmarksession, config.getoption
    if not (session.skip or (said("benchmark_disable") and not said("benchmark_enable"))):
        session.benchmarks += (made := sides(row))
        config.stash[OURS] = config.stash.get(OURS, 0) + len(made)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    """Leave out its table where it would say no more than ours, and nobody asked for it."""
    session: Any = config._benchmarksession  # type: ignore[attr-defined]
    asked = any(str(word).startswith("--benchmark") for word in config.invocation_params.args)
    session.quiet |= not asked and len(session.benchmarks) == config.stash.get(OURS, 0)


def lend_timer(fixture: Any) -> None:
    """Let our timer time what a marked test gives to pytest-benchmark's `benchmark`."""
    if fixture is not None:
        fixture._raw, fixture._raw_pedantic = partial(_timed, fixture), _refuse


def _timed(fixture: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = partial(function, *args, **kwargs)
    if fixture.enabled:
        from ..timing.microbench import warm, window_times

        stats = fixture._make_stats(iterations=1)
        stats.options = {"timer": "aisp", "min_rounds": fixture._min_rounds}
        warm(call)
        windows = max(WINDOWS, fixture._min_rounds)
        for seconds in window_times(call, window=WINDOW, windows=windows):
            stats.update(seconds)
    return call()


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        f"benchmark.pedantic under @pytest.mark.{MARKER}: our timer chooses rounds itself; legal is"
        f" benchmark(function)\nCall benchmark(function), or remove @pytest.mark.{MARKER}"
    )
