"""Captured output: processes print into files, which are read between tasks.

Pipes would be worse: a full pipe stops the side that prints, and a process that empties the pipe
disturbs timed windows.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal, NamedTuple, TextIO

from ..page.sources import PACKAGE

StreamName = Literal["stdout", "stderr"]
STREAMS: tuple[StreamName, StreamName] = ("stdout", "stderr")
MAX_BYTES = 1 << 24
"""The largest number of bytes to read at once. Earlier lines are only counted."""
MAX_LINE_LENGTH = 1 << 10
"""The maximum average number of characters per line, if the number of lines is limited."""

# The lines of faulthandler's stack that a page's author does not need. An ordinary traceback does
# not match, because it has a comma before "in".
_OUR_FRAMES = re.compile(
    rf'  File "({re.escape(PACKAGE)}/|<frozen runpy>)'
    r'[^"]*", line \d+ in |Extension modules: '
)


class Chunk(NamedTuple):
    """A piece of output: the number of skipped lines, and the data after these lines."""

    skipped: int = 0
    data: bytes = b""

    @property
    def text(self) -> str:
        """The data as text."""
        return self.data.decode(errors="replace")

    def lines(self) -> list[str]:
        """Return the lines. This package's own lines in the stack of a crash are removed."""
        return [line for line in self.text.splitlines() if not _OUR_FRAMES.match(line)]


class Stream:
    """A file that a process appends to. Each read starts at the end of the last `take`."""

    def __init__(self, path: str | None = None) -> None:
        self.file: IO[bytes] = open(path, "rb") if path else tempfile.TemporaryFile("a+b")  # noqa: SIM115 - close
        self._position = 0
        self._unread = Chunk()  # the rest of a closed file

    def peek(self) -> Chunk:
        """Return the output since the last `take`."""
        return self._read()[0]

    def take(self) -> Chunk:
        """Return the output since the last `take`, and mark this output as read."""
        chunk, self._position = self._read()
        self._unread = Chunk()
        return chunk

    def _read(self) -> tuple[Chunk, int]:
        """Return the new output and the file position of its end."""
        if self.file.closed:
            return self._unread, self._position
        fd = self.file.fileno()
        end = os.fstat(fd).st_size
        start = self._position if self._position <= end else 0  # a page may truncate the file
        skipped = 0
        while start < end - MAX_BYTES:
            data = os.pread(fd, min(MAX_BYTES, end - MAX_BYTES - start), start)
            skipped, start = skipped + data.count(b"\n"), start + len(data)
        return Chunk(skipped, os.pread(fd, end - start, start)), end

    def close(self) -> None:
        """Close the file. The unread part is kept for the next `take`."""
        self._unread = self.peek()
        self.file.close()


@dataclass(frozen=True)
class OutputCapture:
    """The output of one process.

    Attributes:
        label: the name of the process if there are several, else an empty string.
    """

    stdout: Stream
    stderr: Stream
    label: str = ""

    def last(self, lines: int) -> list[str]:
        """Return the last new lines of stdout, followed by the last new lines of stderr."""
        return [*self.stdout.peek().lines(), *self.stderr.peek().lines()][-lines:]

    def take(self, name: StreamName) -> Chunk:
        """Return the new output of one stream."""
        return (self.stdout if name == "stdout" else self.stderr).take()

    def close(self) -> None:
        """Close both files."""
        self.stdout.close()
        self.stderr.close()


def format_output(chunks: Sequence[Chunk], label: str, max_lines: int | None) -> str:
    """Return the output as text. Each line starts with the process's `label`.

    Args:
        max_lines: the number of lines to keep from the end, or None for all lines.
    """
    skipped = sum(chunk.skipped for chunk in chunks)
    prefix = f"{label}: " if label else ""
    if max_lines is None and not label:
        return _left_out(prefix, skipped, 0) + "".join(chunk.text for chunk in chunks)
    lines = [line for chunk in chunks for line in chunk.lines()]
    shown = lines if max_lines is None else lines[max(0, len(lines) - max_lines) :]
    text = "".join(f"{prefix}{line}\n" for line in shown)
    cut = 0 if max_lines is None else max(0, len(text) - max_lines * MAX_LINE_LENGTH)
    return _left_out(prefix, skipped + len(lines) - len(shown), cut) + text[cut:]


def _left_out(prefix: str, lines: int, characters: int) -> str:
    """Return a line with the amount of output that is left out, or an empty string."""
    parts = [f"{lines} lines"] * bool(lines) + [f"{characters} characters"] * bool(characters)
    return f"{prefix}({' and '.join(parts)} left out)\n" if parts else ""


def write_text(stream: TextIO, text: str) -> None:
    """Write `text` to `stream`. Characters that the encoding lacks become question marks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
