"""The worker process: answer tasks over a pipe, never inside pytest.

    python -m pytest_aisp.worker READ_FD WRITE_FD

It dies with its parent. Whatever a page prints goes to this process's own stdout and stderr, which
are files (`printed`), never into an answer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from msgspec.structs import replace

from ..page.sources import PACKAGE
from ..results import messages
from ..results.messages import ErrorKind, ProgressUpdate, Reply, StopTask, Task, failed

C_LINES = 1
"""Linux's _IOLBF: a stream of C's writes at the end of a line."""
MARKS = "a side cannot skip, its case can: Variant(side, marks=[pytest.mark.skipif(...)])"


def main(read_fd: int, write_fd: int) -> None:
    """Answer tasks until the pipe closes or a `stop` arrives."""
    die_with_parent()
    faulthandler.enable()  # a side that crashes shows its line
    print_at_once()
    with os.fdopen(read_fd, "rb") as tasks, os.fdopen(write_fd, "wb", buffering=0) as replies:
        keep_from_children(tasks, replies)
        server = Server(lambda text: replies.write(messages.encode(ProgressUpdate(text))))
        import torch  # noqa: F401 - slow: the time limit of the first request starts after it

        gc.freeze()  # torch's half a million objects are no garbage: a collection takes 0.1 s less

        server.tell(messages.READY)
        for line in tasks:
            task = messages.decode_task(line)
            if isinstance(task, StopTask):
                return
            replies.write(encoded(server.answer(task)))


def print_at_once() -> None:
    """Write each line when it is printed, C's and CUDA's too: a crash takes what waits with it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stdout, None, C_LINES, ctypes.c_size_t(0))


def keep_from_children(*pipes: IO[bytes]) -> None:
    """Close `pipes` in every child: one that outlives this process must not hold them open."""
    for pipe in pipes:
        os.set_inheritable(pipe.fileno(), False)
        os.register_at_fork(after_in_child=pipe.close)


def encoded(reply: Reply) -> bytes:
    """Return the line that says `reply`, or that it cannot be said."""
    try:
        return messages.encode(reply)
    except (TypeError, ValueError) as error:
        return messages.encode(Reply(error="side", message=f"an answer cannot be sent: {error}"))


class Server:
    """Answer tasks with an engine, errors included.

    Attributes:
        tell: is told what is being done now.
    """

    def __init__(self, tell: Callable[[str], Any]) -> None:
        from .engine import Engine

        self.tell, self._doing = tell, ""
        self.engine = Engine(self._progress)

    def _progress(self, text: str) -> None:
        self._doing = text
        self.tell(text)

    def answer(self, task: Task) -> Reply:
        """Return the reply to `task`; an exception becomes an error reply."""
        self._doing = task.kind
        try:
            reply = Reply(result=self.engine.answer(task))
        except _answerable() as error:
            reply = _error_reply(error, self._doing)
            if _has_lost_gpu(error):
                reply = replace(reply, error="fault")
        with suppress(Exception):  # a page may have put anything in its place
            sys.stdout.flush()
        return replace(reply, exhausted=self._exhausted)

    @property
    def _exhausted(self) -> bool:
        from ..timing import cuda_graph

        return self.engine.kept.exhausted or bool(cuda_graph.abandoned)


class InProcess:
    """The same engine inside this process, for debuggers."""

    def __init__(self) -> None:
        self._server = Server(lambda text: None)

    def ask(self, task: Task, seconds: float, progress: Callable[[str], None]) -> Reply:
        """Return the reply to `task`; no time limit holds here."""
        self._server.tell = progress
        return self._server.answer(replace(task, limit=seconds))

    def close(self) -> None:
        """Nothing to release."""


def _answerable() -> tuple[type[BaseException], ...]:
    """Return what a task may raise and end in a reply: what `pytest.skip` raises, too."""
    pytests = sys.modules.get("_pytest.outcomes")  # if a page has imported it
    return (Exception,) if pytests is None else (Exception, pytests.OutcomeException)


def _error_reply(error: BaseException, doing: str) -> Reply:
    from ..checking import controls, inputs, numerics
    from ..isolation import monkeypatches
    from ..kernels import assemble
    from ..page.pair import SideError
    from ..timing import cuda_timer, schedule
    from ..util import pytree
    from . import loader, metrics, process_timer

    kinds: tuple[tuple[ErrorKind, tuple[type[Exception], ...]], ...] = (
        ("wrong", (numerics.Wrong,)),
        (
            "page",
            (
                loader.PageError,
                assemble.AssemblyError,
                SideError,
                pytree.TreeError,
                controls.TooLoose,
                controls.CannotTell,
                inputs.NotCold,
                cuda_timer.Unblockable,
                metrics.Uncountable,
            ),
        ),
        ("disturbed", (schedule.Disturbed, monkeypatches.Traced)),
    )
    if not isinstance(error, Exception) and type(error).__name__ == "Skipped":
        return Reply(error="page", message=f"{_first_line(error)}, during: {doing}\n{MARKS}")
    if isinstance(error, process_timer.ProcessFailed):
        return replace(error.reply, message=str(error))
    for name, types in kinds:
        if isinstance(error, types):
            return Reply(error=name, message=str(error))
    trace = _page_lines(error)
    if _is_out_of_memory(error):
        return failed("memory", f"out of memory: {_first_line(error)},", doing, trace)
    return failed("side", f"{type(error).__name__}: {_first_line(error)},", doing, trace)


def _has_lost_gpu(error: BaseException | None) -> bool:
    """Return whether CUDA is of no more use here, or may be.

    After an illegal access every call fails. After a lesser error of CUDA's what torch keeps may be
    spoilt: an event that the allocator of pinned memory asks for again at every `.item()`.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    while error is not None:
        if isinstance(error, torch.AcceleratorError):
            return True
        error = error.__cause__
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()  # torch raises a plain RuntimeError on a CPU
    short = isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text
    return short or (error.__cause__ is not None and _is_out_of_memory(error.__cause__))


def _first_line(error: BaseException) -> str:
    """Return the first line of what `error` says, and of what caused it."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    cause = error.__cause__
    return said if cause is None else f"{said} ({type(cause).__name__}: {_first_line(cause)})"


def _page_lines(error: BaseException) -> str:
    """Return the traceback without our own lines, which are of no use to the page's author."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (PACKAGE, "<string>")
    kept = [f for f in frames if not f.filename.startswith(ours)]
    return "".join(traceback.format_list(kept or frames))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; leave Ctrl-C to the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
