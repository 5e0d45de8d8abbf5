"""What processes print: files that they write and we read between tasks.

A pipe would stop the side that fills it, or have somebody read it while windows are timed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal, NamedTuple, TextIO

from ..page.sources import PACKAGE

Name = Literal["stdout", "stderr"]
STREAMS: tuple[Name, Name] = ("stdout", "stderr")
MOST = 1 << 24
"""Bytes that are read at once; of what is beyond them, lines alone are counted."""
WIDEST = 1 << 10
"""Bytes that a line takes, on average, where no more than some lines are shown."""

# faulthandler's lines of no use to a page's author: a traceback has a comma before "in".
_OURS = re.compile(
    rf'  File "({re.escape(PACKAGE)}/|<frozen runpy>)'
    r'[^"]*", line \d+ in |Extension modules: '
)


class Chunk(NamedTuple):
    """What was printed: `skipped` lines that nobody has read, then `data`."""

    skipped: int = 0
    data: bytes = b""

    @property
    def text(self) -> str:
        """What it says, whatever it is."""
        return self.data.decode(errors="replace")

    def lines(self) -> list[str]:
        """Return the lines, of a crash's stack those of the page's."""
        return [line for line in self.text.splitlines() if not _OURS.match(line)]


class Stream:
    """A file that a process appends to, and what of it is new."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self.file = tempfile.TemporaryFile("a+b") if file is None else file  # noqa: SIM115 - close
        self._taken, self._rest = 0, Chunk()

    @classmethod
    def at(cls, path: str) -> Stream:
        """Return the stream that somebody else's file is."""
        return cls(open(path, "rb"))

    def new(self) -> Chunk:
        """Return what was printed since the last `take`."""
        return self._rest if self.file.closed else self._new()[0]

    def take(self) -> Chunk:
        """Return what was printed since the last time."""
        if self.file.closed:
            found, self._rest = self._rest, Chunk()
        else:
            found, self._taken = self._new()
        return found

    def _new(self) -> tuple[Chunk, int]:
        """Return what is new, and where it ends."""
        file = self.file.fileno()
        end = os.fstat(file).st_size
        at = self._taken if self._taken <= end else 0  # its writer may have emptied it
        skipped = 0
        while at < end - MOST and (read := os.pread(file, min(MOST, end - MOST - at), at)):
            skipped, at = skipped + read.count(b"\n"), at + len(read)
        return Chunk(skipped, os.pread(file, end - at, at)), end

    def close(self) -> None:
        """Let the file go; what is new in it can still be taken."""
        self._rest = self.new()
        self.file.close()


@dataclass(frozen=True)
class OutputCapture:
    """What one process prints.

    Attributes:
        who: which of several it is, or empty.
    """

    stdout: Stream
    stderr: Stream
    who: str = ""

    def last(self, lines: int) -> list[str]:
        """Return the last lines that are new, those of stderr behind those of stdout."""
        return [*self.stdout.new().lines(), *self.stderr.new().lines()][-lines:]

    def take(self, name: Name) -> Chunk:
        """Return what is new in one of both."""
        return (self.stdout if name == "stdout" else self.stderr).take()

    def close(self) -> None:
        """Let both files go."""
        self.stdout.close()
        self.stderr.close()


def shown(chunks: Sequence[Chunk], who: str, most: int | None) -> str:
    """Return what was printed as text, each line behind `who` printed it.

    Args:
        most: lines that are shown, the last ones; None for all, as they are.
    """
    skipped = sum(chunk.skipped for chunk in chunks)
    if most is None and not who:
        return _note(who, skipped, 0) + "".join(chunk.text for chunk in chunks)
    lines = [line for chunk in chunks for line in chunk.lines()]
    kept = lines if most is None else lines[max(0, len(lines) - most) :]
    before = f"{who}: " if who else ""
    text = "".join(f"{before}{line}\n" for line in kept)
    cut = 0 if most is None else max(0, len(text) - most * WIDEST)
    return _note(before, skipped + len(lines) - len(kept), cut) + text[cut:]


def _note(before: str, lines: int, characters: int) -> str:
    """Return the line that says how much is left out, or nothing."""
    parts = [f"{lines} lines"] * bool(lines) + [f"{characters} characters"] * bool(characters)
    return f"{before}({' and '.join(parts)} left out)\n" if parts else ""


def say(stream: TextIO, text: str) -> None:
    """Write `text` to `stream`, whatever characters that has."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def last_lines(output: IO[bytes], lines: int) -> str:
    """Return the last `lines` in a file that a process wrote, a crash's stack without ours."""
    return "\n".join(Stream(output).new().lines()[-lines:])
