"""Leases: who may use a GPU, and who may time on the host's clock, across processes of a machine.

Advisory locks on files in a folder of the user's; a lease dies with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def folder() -> Path:
    """Return the folder of this machine's leases, made if need be."""
    path = Path(tempfile.gettempdir()) / f"pytest-aisp-{os.getuid()}"
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
