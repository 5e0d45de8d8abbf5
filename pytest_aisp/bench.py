"""The bench process: answer tasks over a pipe, never inside pytest.

    python -m pytest_aisp.bench READ_FD WRITE_FD

It dies with its parent. Whatever a page prints goes to this process's own stdout, never into an
answer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from typing import BinaryIO

from . import messages
from .messages import Reply, Task


def main(read_fd: int, write_fd: int) -> None:
    """Answer tasks until the pipe closes or a `stop` arrives."""
    _die_with_parent()
    with os.fdopen(read_fd, "rb") as tasks, os.fdopen(write_fd, "wb", buffering=0) as replies:
        server = Server(replies)
        for line in tasks:
            task = messages.task_from(messages.decode(line))
            if task.kind == "stop":
                return
            replies.write(messages.encode(server.answer(task)))


class Server:
    """Answer tasks with an engine, errors included."""

    def __init__(self, replies: BinaryIO | None = None) -> None:
        from .engine import Engine

        self._replies = replies
        self.engine = Engine(self._progress)

    def _progress(self, text: str) -> None:
        if self._replies is not None:
            self._replies.write(messages.encode({"progress": text}))

    def answer(self, task: Task) -> Reply:
        """Return the reply to `task`; an exception becomes an error reply."""
        try:
            return Reply(result=getattr(self.engine, task.kind)(task))
        except Exception as error:
            return _error_reply(error, task)


def _error_reply(error: Exception, task: Task) -> Reply:
    from . import controls, cuda, engine, numerics, sides, timing, trees, workbench

    kinds: tuple[tuple[str, tuple[type[Exception], ...]], ...] = (
        ("wrong", (numerics.Wrong,)),
        (
            "page",
            (
                engine.PageError,
                sides.SideError,
                trees.TreeError,
                controls.TooLoose,
                controls.CannotTell,
                workbench.NotCold,
                cuda.Unblockable,
            ),
        ),
        ("disturbed", (timing.Disturbed,)),
    )
    for name, types in kinds:
        if isinstance(error, types):
            return Reply(error=name, message=str(error))
    trace = _own_lines(error, task.root)
    if "out of memory" in str(error).lower():
        return Reply(error="memory", message=f"out of memory: {_first_line(error)}", trace=trace)
    return Reply(error="side", message=f"{type(error).__name__}: {_first_line(error)}", trace=trace)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no message"


def _own_lines(error: Exception, root: str) -> str:
    """Return the traceback from the page's first line on: ours are of no use to its author."""
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(os.path.abspath(__file__))
    first = next((i for i, f in enumerate(frames) if not f.filename.startswith(own)), 0)
    return "".join(traceback.format_list(frames[first:]))


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
