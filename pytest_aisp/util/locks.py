"""Leases: who may use a GPU, and who may time on the host's clock, across processes of a machine.

Advisory locks on files in a folder of the user's; a lease dies with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .cli_result import CliError
from .device import LEASES

REMEDY = f"Point {LEASES} at a folder that can be written, the same for all who share the GPUs"


def folder() -> Path:
    """Return the folder of this machine's leases, made if need be.

    It does not follow TMPDIR, which jobs and containers set apart from each other.
    """
    named = os.environ.get(LEASES)
    path = Path(named) if named else Path(f"/tmp/pytest-aisp-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def lease(
    name: str, *, shared: bool = False, waiting: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Hold the lease `name`, alone or together with other `shared` holders; wait for it.

    Args:
        waiting: is told in words that the lease is not free, before waiting for it.
    """
    with open(folder() / f"{name}.lock", "w") as file:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"wait for {name}, which another run holds")
            fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def together(gpus: Iterable[str], waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the leases of `gpus` by UUID, the host's shared: as a case on several GPUs does.

    They are taken in one order everywhere, so that nobody waits in a ring.

    Raises:
        Unanswerable: where the folder of leases cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lease("host", shared=True, waiting=waiting))
            for gpu in sorted(gpus):
                held.enter_context(lease(gpu, waiting=waiting))
        except OSError as error:
            raise CliError(f"the machine cannot be leased: {error}\n{REMEDY}") from None
        yield
