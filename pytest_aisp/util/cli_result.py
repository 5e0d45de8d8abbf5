"""What a command of `aisp` answers, lines and an exit code, and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class CliResult:
    """The lines to print, and the exit code."""

    lines: Sequence[str]
    code: int = 0


class CliError(Exception):
    """A command cannot answer here; the message says why and what to do.

    Attributes:
        code: the exit code: 2, but for a command that says otherwise.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def parse_bytes(text: str) -> int:
    """Return the bytes of ``4KiB``, ``512MiB``, ``1GiB`` or ``4096``.

    Raises:
        ValueError: for anything else, or nothing at all.
    """
    found = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{text!r} is no size; write it like 4KiB, 512MiB or 1GiB")
    return int(found[1]) * UNITS[found[2] or "B"]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of ``4KiB:512MiB`` (each twice the last) or ``4KiB,1MiB``, ascending.

    Raises:
        ValueError: for a size that is none, or a range that ends before it begins.
    """
    if ":" not in text:
        return tuple(sorted({parse_bytes(part) for part in text.split(",")}))
    low, high = map(parse_bytes, text.split(":", 1))
    if low > high:
        raise ValueError(f"{text!r} ends before it begins; write the smaller size first")
    sizes = [low]
    while sizes[-1] * 2 <= high:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def part_of(text: str, done: int, of: int) -> str:
    """Return `text` with how much is done: ``all_reduce of 4 KiB (3 of 18 done)``."""
    return f"{text} ({done} of {of} done)"


def parted(text: str) -> tuple[str, int, int | None]:
    """Return what `part_of` was told: the text, what is done, and of how many; None: unknown."""
    found = re.fullmatch(r"(.*) \((\d+) of (\d+) done\)", text)
    return (text, 0, None) if found is None else (found[1], int(found[2]), int(found[3]))


def size_text(nbytes: int) -> str:
    """Return ``4 KiB``: bytes in the largest unit that leaves a number of 1 or more."""
    unit, scale = next(u for u in reversed(UNITS.items()) if nbytes >= u[1] or u[1] == 1)
    return f"{nbytes / scale:.4g} {unit}"


def rate_text(rate: float) -> str:
    """Return ``387.4 GB/s``."""
    return f"{rate / 1e9:.4g} GB/s"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return `rows`, the heads first, as lines whose columns stand below each other."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
