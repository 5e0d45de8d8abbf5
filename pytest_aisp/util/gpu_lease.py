"""Leases, with which runs on the same machine take turns using the GPUs.

A lease is an advisory lock on a file in a folder that all runs of a user share. A lease ends when
the process that holds it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .cli_result import CliError

LEASES = "AISP_LEASES"
"""The variable that names the folder of leases."""
REMEDY = f"Point {LEASES} at a writable folder, the same for all users of the GPUs"


def lease_folder() -> Path:
    """Return the folder of this machine's leases, created if necessary.

    The folder does not depend on TMPDIR, because jobs and containers set TMPDIR differently.
    """
    path = Path(os.environ.get(LEASES) or f"/tmp/pytest-aisp-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def lease(
    name: str, *, shared: bool = False, waiting: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Wait for the lease `name`, and hold it inside the block.

    Args:
        shared: True to hold the lease at the same time as other processes that also pass True.
        waiting: a function that is called with a message if this process has to wait.
    """
    with open(lease_folder() / f"{name}.lock", "w") as file:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"wait for {name}, which another run holds")
            fcntl.flock(file, mode)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have the file open


@contextlib.contextmanager
def lease_gpus(gpus: Iterable[str], waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the leases of the GPUs with these UUIDs inside the block, and share the host's lease.

    All runs take the leases in the same order, which prevents deadlocks.

    Raises:
        CliError: the folder of leases cannot be written.
    """
    with contextlib.ExitStack() as leases:
        try:
            leases.enter_context(lease("host", shared=True, waiting=waiting))
            for gpu in sorted(gpus):
                leases.enter_context(lease(gpu, waiting=waiting))
        except OSError as error:
            raise CliError(f"the machine cannot be leased: {error}\n{REMEDY}") from None
        yield


def is_worker(pid: int) -> bool:
    """Return whether `pid` is a worker process that uses the same folder of leases.

    Worker processes with the same folder take turns, so they do not disturb measurements.
    """
    try:
        command, variables = (Path(f"/proc/{pid}/{f}").read_bytes() for f in ("cmdline", "environ"))
    except OSError:  # the process has ended, or belongs to another user
        return False
    if b"pytest_aisp.worker" not in command and b"pytest_aisp.distributed.rank" not in command:
        return False
    ours, prefix = os.fsencode(os.environ.get(LEASES, "")), os.fsencode(f"{LEASES}=")
    theirs = [v.removeprefix(prefix) for v in variables.split(b"\0") if v.startswith(prefix)]
    return ours in (theirs or [b""])
