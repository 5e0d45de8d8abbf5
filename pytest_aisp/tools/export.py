"""`aisp export`: a run's timed sides as a file of pytest-benchmark.

For runs that were measured where it is not installed; where it is, `--benchmark-json` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.answers import Answer, Unanswerable
from ..results import runs


def answer(folder: Path) -> Answer:
    """Return the JSON that `pytest-benchmark compare` reads.

    Raises:
        Unanswerable: for a folder that holds no run, or no timed side; without pytest-benchmark.
    """
    try:
        from pytest_benchmark.plugin import pytest_benchmark_generate_json
        from pytest_benchmark.utils import safe_dumps
    except ImportError:
        raise Unanswerable(
            "export needs pytest-benchmark, whose form it writes\n    pip install pytest-benchmark"
        ) from None
    from .benchmarks import sides

    try:
        rows = list(runs.load(folder).rows())
    except runs.RunError as error:
        raise Unanswerable(str(error)) from None
    found = [side for row in rows for side in sides(row)]
    if not found:
        raise Unanswerable(
            f"no side was timed in {folder}: {len(rows)} rows without times; legal is a run that"
            " measured\n    pytest --aisp-artifacts=out"
        )
    plain = pytest_benchmark_generate_json(None, found, True, *_origin(rows))
    return Answer(safe_dumps(plain, ensure_ascii=True, indent=1).splitlines())


def _origin(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machine and the commit, as far as the rows know them."""
    products = sorted({row["product"] for row in rows})
    facts: dict[str, Any] = next((row["environment"] for row in rows if row["environment"]), {})
    return {"node": ", ".join(products), **facts}, {"id": None}
