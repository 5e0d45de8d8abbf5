"""Leases: runs on one machine take turns at its GPUs.

A lease is an advisory lock on a file in a folder that all of a user's runs share. It ends with the
process that holds it.
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
REMEDY = f"Point {LEASES} at a folder that can be written, the same for all who share the GPUs"


def lease_folder() -> Path:
    """Return the folder of this machine's leases, created if necessary.

    It does not follow TMPDIR, which jobs and containers set differently.
    """
    path = Path(os.environ.get(LEASES) or f"/tmp/pytest-aisp-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def lease(
    name: str, *, shared: bool = False, waiting: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Wait for the lease `name`, and hold it alone or with other `shared` holders.

    Args:
        waiting: called with a message before a wait.
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
    """Hold the leases of `gpus` by UUID and share the host's, as a case on several GPUs does.

    The order is the same everywhere, which prevents deadlocks.

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
    """Return whether `pid` is a worker process that leases in the same folder as this process.

    Then the two take turns, so it does not disturb a measurement here.
    """
    try:
        command, variables = (Path(f"/proc/{pid}/{f}").read_bytes() for f in ("cmdline", "environ"))
    except OSError:  # it has ended, or belongs to another user
        return False
    if b"pytest_aisp.worker" not in command and b"pytest_aisp.distributed.rank" not in command:
        return False
    ours, prefix = os.fsencode(os.environ.get(LEASES, "")), os.fsencode(f"{LEASES}=")
    theirs = [v.removeprefix(prefix) for v in variables.split(b"\0") if v.startswith(prefix)]
    return ours in (theirs or [b""])
