"""The timed sides of rows as pytest-benchmark knows them: all that depends on its `Metadata`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..results.row import Row


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
