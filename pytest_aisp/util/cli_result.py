"""The result of an `aisp` command, and functions to parse and print sizes, rates and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class CliResult:
    """The result of a command: the lines to print, and the exit code."""

    lines: Sequence[str]
    code: int = 0


class CliError(Exception):
    """A command cannot run here. The message contains the reason and a remedy."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size such as ``4KiB``, ``512MiB``, ``1GiB`` or ``4096``.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write it like 4KiB, 512MiB or 1GiB")
    return int(match[1]) * UNITS[match[2] or "B"]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a list ``4KiB,1MiB`` or a range ``4KiB:512MiB``, in ascending order.

    In a range, each size is twice the previous one.

    Raises:
        ValueError: a part is not a size, or a range ends before it begins.
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


def with_progress(text: str, done: int, total: int) -> str:
    """Return `text` and the progress: ``all_reduce of 4 KiB (3 of 18 done)``."""
    return f"{text} ({done} of {total} done)"


def split_progress(text: str) -> tuple[str, int, int | None]:
    """Return the arguments of the `with_progress` call. For any other text, the total is None."""
    match = re.fullmatch(r"(.*) \((\d+) of (\d+) done\)", text)
    return (text, 0, None) if match is None else (match[1], int(match[2]), int(match[3]))


def size_text(nbytes: int) -> str:
    """Return `nbytes` in the largest unit that gives at least 1, such as ``4 KiB``."""
    unit, scale = next(u for u in reversed(UNITS.items()) if nbytes >= u[1] or u[1] == 1)
    return f"{nbytes / scale:.4g} {unit}"


def rate_text(rate: float) -> str:
    """Return `rate` as text with its unit: ``387.4 GB/s``."""
    return f"{rate / 1e9:.4g} GB/s"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return `rows` as lines with aligned columns. The first row has the headings."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
