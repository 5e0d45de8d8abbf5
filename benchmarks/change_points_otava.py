"""False and missed change points of apache-otava in the histories of `change_points.py`.

    pip install apache-otava
    python benchmarks/change_points_otava.py    1,000 of the 10,000 series per row

The left columns have apache-otava's default settings. For the right columns, `--min-magnitude` is
0.01, because our search also ignores changes below 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from change_points import FALSE, FLOOR, LOOKED, PLANTED, rates
from otava.analysis import compute_change_points
from otava.series import AnalysisOptions

COUNT = 1000


def default(values: Sequence[float], errors: Sequence[float], floor: float = 0.0) -> list[int]:
    """Return the positions that apache-otava finds. It does not use the errors."""
    options = AnalysisOptions()
    changes, _ = compute_change_points(
        list(map(math.exp, values)),
        window_len=options.window_len,
        max_pvalue=options.max_pvalue,
        min_magnitude=floor,
    )
    return [change.index for change in changes]


def with_floor(values: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Return the positions that apache-otava finds, without changes below 1 %."""
    return default(values, errors, FLOOR)


def main() -> None:
    methods = default, with_floor
    for models, head, count in (
        (FALSE, "noise", COUNT),
        (LOOKED, "looked at after every run", COUNT // 10),
        (PLANTED, "planted change", COUNT),
    ):
        rates(models, count, (head, "series", "default", "", "floor of 1 %", ""), methods)


if __name__ == "__main__":
    main()
