"""The program of a worker process: answer tasks over a pipe.

    python -m pytest_aisp.worker READ_FD WRITE_FD

The process dies with its parent. A page's output never goes into a reply, but to this process's own
stdout and stderr, which are files (see `output_capture`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from msgspec.structs import replace

from ..page.sources import PACKAGE
from ..results import encoding, messages
from ..results.messages import ErrorKind, ProgressUpdate, Reply, StopTask, Task, failed

LINE_BUFFERED = 1
"""Linux's _IOLBF, with which the C library writes a stream out at the end of each line."""
MESSAGE_LINES = 30
"""The largest number of lines of an error's message, after its first line."""
PR_SET_PDEATHSIG = 1
SKIP_HINT = "a side cannot skip, but its case can: Variant(side, marks=[pytest.mark.skipif(...)])"


def main(read_fd: int, write_fd: int) -> None:
    """Answer tasks until the pipe closes or a `stop` arrives."""
    die_with_parent()
    faulthandler.enable()  # a crash prints the side's line
    print_at_once()
    with os.fdopen(read_fd, "rb") as tasks, os.fdopen(write_fd, "wb", buffering=0) as replies:
        _close_in_children(tasks, replies)
        server = Server(lambda text: replies.write(encoding.encode(ProgressUpdate(text))))
        importlib.import_module("torch")  # slow, so done before the first task's time limit

        gc.freeze()  # collections skip torch's half a million objects and take 0.1 s less

        from .input_process import fork_early

        server.progress(messages.READY)
        for number, line in enumerate(tasks):
            task = encoding.decode_task(line)
            if number == 0:  # no page has been imported
                fork_early(task)
            if isinstance(task, StopTask):
                return
            replies.write(encode_reply(server.answer(task)))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends. Leave Ctrl-C to the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def print_at_once() -> None:
    """Write out each line when it is printed, even by C or CUDA, so that a crash loses no line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stdout, None, LINE_BUFFERED, ctypes.c_size_t(0))


def _close_in_children(*pipes: IO[bytes]) -> None:
    """Close `pipes` in every child process, so that no surviving child keeps them open."""
    for pipe in pipes:
        os.set_inheritable(pipe.fileno(), False)
        os.register_at_fork(after_in_child=pipe.close)


def encode_reply(reply: Reply) -> bytes:
    """Return the line for `reply`, or for an error reply if `reply` cannot be encoded."""
    try:
        return encoding.encode(reply)
    except (TypeError, ValueError) as error:
        return encoding.encode(Reply(error="side", message=f"an answer cannot be sent: {error}"))


class Server:
    """Answer tasks with an engine, and turn exceptions into error replies.

    Attributes:
        progress: a function that is called with a description of the current step.
    """

    def __init__(self, progress: Callable[[str], object]) -> None:
        from .engine import Engine

        self.progress, self._doing = progress, ""
        self.engine = Engine(self._note_progress)

    def _note_progress(self, text: str) -> None:
        self._doing = text
        self.progress(text)

    def answer(self, task: Task) -> Reply:
        """Return the reply to `task`."""
        from ..timing import cuda_graph

        self._doing = task.kind
        try:
            reply = Reply(result=self.engine.answer(task))
        except _reported_exceptions() as error:
            reply = replace(_error_reply(error, self._doing), code=getattr(error, "code", ""))
            if _may_have_lost_gpu(error):
                reply = replace(reply, error="fault")
        with suppress(Exception):  # a page may have replaced stdout
            sys.stdout.flush()
        exhausted = self.engine.cache.exhausted or bool(cuda_graph.abandoned)
        return replace(reply, exhausted=exhausted and not self.engine.holder.busy)


class InProcess:
    """A worker that runs the engine in the pytest process, so that a debugger can be used."""

    def __init__(self) -> None:
        self._server = Server(lambda text: None)

    def ask(self, task: Task, seconds: float, progress: Callable[[str], None]) -> Reply:
        """Return the reply to `task`, without a time limit."""
        from ..isolation import monkeypatches

        self._server.progress = progress
        reply = self._server.answer(replace(task, limit=seconds))
        monkeypatches.put_back()  # the next case has the same process
        return reply

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _reported_exceptions() -> tuple[type[BaseException], ...]:
    """Return the exceptions that become replies, including `pytest.skip.Exception` if loaded."""
    outcomes = sys.modules.get("_pytest.outcomes")
    return (Exception,) if outcomes is None else (Exception, outcomes.OutcomeException)


def _error_reply(error: BaseException, doing: str) -> Reply:
    from ..checking.numerics import Wrong
    from ..isolation.interference import Disturbed
    from ..isolation.monkeypatches import Traced
    from ..page.pair import PageError
    from .process_timer import ProcessFailed

    if not isinstance(error, Exception) and type(error).__name__ == "Skipped":
        return Reply(error="page", message=f"{_first_line(error)}, during: {doing}\n{SKIP_HINT}")
    if isinstance(error, ProcessFailed):
        return replace(error.reply, message=str(error))
    kinds: dict[ErrorKind, tuple[type[Exception], ...]] = {
        "wrong": (Wrong,),
        "page": (PageError,),
        "disturbed": (Disturbed,),
        "traced": (Traced,),
    }
    for kind, types in kinds.items():
        if isinstance(error, types):
            return Reply(error=kind, message=str(error))
    trace = _page_lines(error) + _further_lines(error)
    if _is_out_of_memory(error):
        return failed("memory", f"out of memory: {_first_line(error)},", doing, trace)
    return failed("side", f"{type(error).__name__}: {_first_line(error)},", doing, trace)


def _may_have_lost_gpu(error: BaseException | None) -> bool:
    """Return whether CUDA may be unusable in this process.

    After an illegal access, all CUDA calls fail. After other CUDA errors, torch's own state may be
    broken. For example, the allocator of pinned memory may query a broken event at every `.item()`.
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
    text = str(error).lower()  # on a CPU, torch raises a plain RuntimeError
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        return True
    return error.__cause__ is not None and _is_out_of_memory(error.__cause__)


def _first_line(error: BaseException) -> str:
    """Return the first line of the error's message, and the first line of its cause's message."""
    lines = str(error).strip().splitlines() or ["no message"]
    cause, first = error.__cause__, lines[0].removesuffix(":")
    if cause is None:
        return first
    return f"{first} ({type(cause).__name__}: {_first_line(cause)})"


def _further_lines(error: BaseException) -> str:
    """Return the rest of a message whose first line ends with a colon, such as a compiler's."""
    first, *rest = str(error).strip().splitlines() or [""]
    return "".join(f"{line}\n" for line in rest[:MESSAGE_LINES]) if first.endswith(":") else ""


def _page_lines(error: BaseException) -> str:
    """Return the traceback without the lines of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    page_frames = [f for f in frames if not f.filename.startswith((PACKAGE, "<string>"))]
    return "".join(traceback.format_list(page_frames or frames))
