"""Find worker processes, and wait for other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from zygote import SERVER_NAME, WORKER_NAME

PROGRAMS = (b"pytest_aisp.worker", b"pytest_aisp.distributed.rank", WORKER_NAME.encode())

ANY_LOAD = str(Path(__file__).parent / "any_load")
"""A folder for `sys.path`, with which worker processes measure on a busy machine."""


def alive_workers(folder: Path) -> list[int]:
    """Return the worker processes that were started in `folder` and are alive."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_worker(entry, folder)]


def _is_worker(entry: Path, folder: Path) -> bool:
    try:
        command, name = (entry / "cmdline").read_bytes(), (entry / "comm").read_bytes()
        if name.strip() == SERVER_NAME.encode():
            return False
        command += name
        return any(p in command for p in PROGRAMS) and os.readlink(entry / "cwd") == str(folder)
    except OSError:  # it has ended meanwhile
        return False


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, for two minutes at most: the machine may be busy."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
