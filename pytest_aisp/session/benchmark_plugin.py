"""The adapter to pytest-benchmark. It adds the timed sides to pytest-benchmark's results, and makes
the fixture `benchmark` use this plugin's timer.

pytest-benchmark has no public interface for these tasks, so this module uses its internals. No
other module does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import pytest

from ..results.row import Row
from ..util.cli_result import CliError, CliResult

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture
    from pytest_benchmark.session import BenchmarkSession
    from pytest_benchmark.stats import Metadata

P = ParamSpec("P")
T = TypeVar("T")
MARKER = "aisp_timer"
WINDOW, WINDOWS = 1e-3, 10
OURS = pytest.StashKey[int]()
"""The stash key of a count: how many of pytest-benchmark's results are sides of cases."""


def _session(config: pytest.Config) -> BenchmarkSession:
    session: BenchmarkSession = config._benchmarksession  # type: ignore[attr-defined]
    return session


def pytest_aisp_result(config: pytest.Config, row: Mapping[str, object]) -> None:
    """Add a case's sides to pytest-benchmark's results. With xdist, the controller does it."""
    session, option = _session(config), config.getoption
    if not (session.skip or (option("benchmark_disable") and not option("benchmark_enable"))):
        benchmarks = sides(Row.of(row))
        session.benchmarks += benchmarks
        config.stash[OURS] = config.stash.get(OURS, 0) + len(benchmarks)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    """Hide pytest-benchmark's table if it has only this plugin's cases and was not requested."""
    session = _session(config)
    requested = any(str(word).startswith("--benchmark") for word in config.invocation_params.args)
    session.quiet |= not requested and len(session.benchmarks) == config.stash.get(OURS, 0)


def lend_timer(fixture: Any) -> None:
    """Make the `benchmark` fixture of a marked test use this plugin's timer."""
    if fixture is not None:
        fixture._raw, fixture._raw_pedantic = partial(_timed, fixture), _refuse


def _timed(
    fixture: BenchmarkFixture, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    call = partial(function, *args, **kwargs)
    if fixture.enabled:
        from ..timing.cuda_graph import window_times
        from ..timing.schedule import warm

        stats = fixture._make_stats(iterations=1)
        stats.options = {"timer": "aisp", "min_rounds": fixture._min_rounds}
        warm(call)
        windows = max(WINDOWS, fixture._min_rounds)
        for seconds in window_times(call, window=WINDOW, windows=windows):
            stats.update(seconds)
    return call()


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise TypeError(
        f"benchmark.pedantic under @pytest.mark.{MARKER}: our timer chooses rounds itself\n"
        f"Call benchmark(function), or remove @pytest.mark.{MARKER}"
    )


def sides(row: Row) -> list[Metadata]:
    """Return a row's two timed sides as a group of benchmarks; empty if nothing was timed.

    Each timing window of each process, including votes, is one round. The value of a round is the
    seconds per call in its window.
    """
    from pytest_benchmark.stats import Metadata

    benchmarks = []
    for name, role in zip(row.seconds, ("baseline", "optimized"), strict=False):
        fixture = SimpleNamespace(
            name=f"{row.nodeid.rpartition('::')[2]} {name}",
            fullname=f"{row.nodeid} {name}",
            group=row.nodeid,
            param=f"{row.variant} {name}",
            params={**row.size, "variant": row.variant, "side": role},
            extra_info=dict(row.properties()),
            cprofile_stats=None,
            has_error=False,
        )
        side = Metadata(fixture, iterations=1, options={"timer": f"aisp, {row.clock} clock"})
        for seconds in (s for timing in row.timings for s in timing[role]):
            side.update(seconds)
        benchmarks.append(side)
    return benchmarks


def export_result(folder: Path) -> CliResult:
    """Return the run in `folder` as the JSON that `pytest-benchmark compare` reads.

    Raises:
        CliError: if pytest-benchmark is missing, or `folder` has no run or no timed side.
    """
    from ..results import run_reader

    try:
        from pytest_benchmark.plugin import pytest_benchmark_generate_json
        from pytest_benchmark.utils import safe_dumps
    except ImportError:
        raise CliError(
            "export writes a file of pytest-benchmark, which is not installed\n"
            "    pip install pytest-benchmark"
        ) from None
    try:
        rows = list(run_reader.load(folder).rows())
    except run_reader.RunError as error:
        raise CliError(str(error)) from None
    benchmarks = [side for row in rows for side in sides(row)]
    if not benchmarks:
        raise CliError(
            f"no side was timed in {folder}: its {len(rows)} rows have no times\n"
            "Export a run that measured:\n    pytest --aisp-artifacts=out"
        )
    machine = {"node": ", ".join(sorted({row.product for row in rows})), **_environment(rows)}
    commit = {"id": None}
    plain = pytest_benchmark_generate_json(None, benchmarks, True, machine, commit)
    return CliResult(safe_dumps(plain, ensure_ascii=True, indent=1).splitlines())


def _environment(rows: Sequence[Row]) -> dict[str, object]:
    return next((row.environment for row in rows if row.environment), {})
