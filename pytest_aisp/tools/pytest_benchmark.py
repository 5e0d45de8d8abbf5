"""The timed sides of rows as pytest-benchmark knows them: all that depends on its `Metadata`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..results import run_reader
from ..results.row import Row
from ..util.cli_result import CliError, CliResult


def sides(row: Mapping[str, Any]) -> list[Any]:
    """Return both timed sides of a row, a group with the case's name; nothing where none was.

    A round is a window of a process, votes and all; its value is the seconds of a call in it.
    """
    from pytest_benchmark.stats import Metadata

    found, said, case = [], dict(Row.of(row).properties()), row["nodeid"]
    for name, role in zip(row["seconds"], ("baseline", "optimized"), strict=False):
        known = {"name": f"{case.rpartition('::')[2]} {name}", "fullname": f"{case} {name}"}
        known |= {"group": case, "param": f"{row['variant']} {name}"}
        params = {**row["size"], "variant": row["variant"], "side": role}
        unused = {"cprofile_stats": None, "has_error": False}
        fixture = SimpleNamespace(**known, params=params, extra_info=said, **unused)
        side = Metadata(fixture, iterations=1, options={"timer": f"aisp, {row['clock']} clock"})
        for seconds in (s for timing in row["timings"] for s in timing[role]):
            side.update(seconds)
        found.append(side)
    return found


def export_result(folder: Path) -> CliResult:
    """Return the JSON that `pytest-benchmark compare` reads.

    Raises:
        Unanswerable: for a folder that holds no run, or no timed side; without pytest-benchmark.
    """
    try:
        from pytest_benchmark.plugin import pytest_benchmark_generate_json
        from pytest_benchmark.utils import safe_dumps
    except ImportError:
        raise CliError(
            "export needs pytest-benchmark, whose form it writes\n    pip install pytest-benchmark"
        ) from None

    try:
        rows = list(run_reader.load(folder).rows())
    except run_reader.RunError as error:
        raise CliError(str(error)) from None
    found = [side for row in rows for side in sides(row)]
    if not found:
        raise CliError(
            f"no side was timed in {folder}: {len(rows)} rows without times; legal is a run that"
            " measured\n    pytest --aisp-artifacts=out"
        )
    plain = pytest_benchmark_generate_json(None, found, True, *_origin(rows))
    return CliResult(safe_dumps(plain, ensure_ascii=True, indent=1).splitlines())


def _origin(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machine and the commit, as far as the rows know them."""
    products = sorted({row["product"] for row in rows})
    facts: dict[str, Any] = next((row["environment"] for row in rows if row["environment"]), {})
    return {"node": ", ".join(products), **facts}, {"id": None}
