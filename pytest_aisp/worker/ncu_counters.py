"""The counters of Nsight Compute that explain a side: occupancy, issue slots, stalls."""

from __future__ import annotations

import csv
import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

OPTIONS = ("--csv", "--page=raw", "--print-units=base")
"""With these options, ``ncu --import`` prints rows of names, of units, and of each kernel."""
TIME = "gpu__time_duration.sum"
OCCUPANCY = ["sm__warps_active.avg.pct_of_peak_sustained_active"]
ISSUED = [
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct",
]
"""The names that versions of ncu use, the preferred one first."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SELECTED = "selected"
"""The "stall reason" that ncu gives a warp that issues an instruction, and so does not stall."""
MAX_BYTES = 10_000

Share = Annotated[float, Meta(ge=0)]


class Counters(Struct):
    """Means over the kernels of a side, weighted by their times.

    Attributes:
        kernels: the number of kernels that ncu profiled.
        occupancy: the share of an SM's warps that are active (achieved occupancy), or None.
        issue_slots: the share of cycles in which a scheduler issues an instruction, or None.
        stall: the most frequent reason why a warp waits, such as ``long scoreboard``, or "".
        stall_share: the share of a warp's cycles spent waiting for this reason.
    """

    kernels: Annotated[int, Meta(ge=1)]
    occupancy: Share | None = None
    issue_slots: Share | None = None
    stall: str = ""
    stall_share: Share = 0.0

    def words(self) -> str:
        """Return the counters as text. Counters that ncu did not measure are left out."""
        parts = [
            f"{name} {share:.0%}"
            for name, share in (
                ("achieved occupancy", self.occupancy),
                ("issue slots", self.issue_slots),
                (f"top stall {self.stall}", self.stall_share if self.stall else None),
            )
            if share is not None
        ]
        return ", ".join(parts)

    def write(self, folder: Path, role: str) -> str:
        """Write the counters of a side to `folder`, and return the name of the file.

        Raises:
            OSError: if the file cannot be written.
        """
        name = _file(role)
        (folder / name).write_bytes(msgspec.json.encode(self))
        return name

    @classmethod
    def read(cls, folder: Path, role: str) -> Counters | None:
        """Return the counters of a side in `folder`, or None if they are missing or malformed."""
        path = folder / _file(role)
        try:
            if path.stat().st_size > MAX_BYTES:
                return None
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None


def _file(role: str) -> str:
    return f"{role}.counters.json"


def import_report(
    ncu: str, report: Path, environment: Mapping[str, str], seconds: float
) -> Counters | None:
    """Return the counters in the report of `ncu`, or None if `ncu` cannot print them."""
    command = [ncu, "--import", str(report), *OPTIONS]
    try:
        printed = subprocess.run(
            command,
            env={**environment, "LC_ALL": "C"},  # a locale may write 6,5 for 6.5
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(printed.stdout)


def parse(text: str) -> Counters | None:
    """Return the counters in the output of ``ncu --import --csv --page=raw``.

    Returns: None if `text` has no kernel or no known counter.
    """
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.DictReader(lines[first:]) if row["ID"]]  # the units have no ID
    if not rows:
        return None
    stalls = {
        match[1].replace("_", " "): ratio
        for name in rows[0]
        if name and (match := STALL.fullmatch(name)) and (ratio := _mean(rows, [name])) is not None
    }
    reasons = {reason: ratio for reason, ratio in stalls.items() if reason != SELECTED}
    stall = max(reasons, key=reasons.__getitem__, default="")
    total = sum(stalls.values())
    found = Counters(len(rows), _share(rows, OCCUPANCY), _share(rows, ISSUED))
    if stall and total:
        found.stall, found.stall_share = stall, reasons[stall] / total
    return found if found.words() else None


def _share(rows: Iterable[Mapping[str, str]], names: Sequence[str]) -> float | None:
    """Return the mean of a counter in percent as a share, or None if ncu did not measure it."""
    percent = _mean(rows, names)
    return None if percent is None else percent / 100


def _mean(rows: Iterable[Mapping[str, str]], names: Sequence[str]) -> float | None:
    """Return the mean of the first of `names` that exists, weighted by the kernels' times."""
    for name in names:
        pairs = [(_number(row.get(TIME)), _number(row.get(name))) for row in rows]
        known = [
            (1.0 if time is None else time, value) for time, value in pairs if value is not None
        ]
        if (weight := sum(time for time, _ in known)) > 0:
            return sum(time * value for time, value in known) / weight
    return None


def _number(text: str | None) -> float | None:
    """Return a number such as ``1,234.5``, or None for ``n/a`` and other text."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
