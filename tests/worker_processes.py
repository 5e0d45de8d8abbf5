"""Worker processes as another process sees them, and waiting for what other processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from zygote import WORKER


def alive_workers(folder: Path) -> list[int]:
    """Return the worker processes that were started in `folder` and are alive."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_worker(entry, folder)]


def _is_worker(entry: Path, folder: Path) -> bool:
    try:
        command = (entry / "cmdline").read_bytes() + (entry / "comm").read_bytes()
        names = (b"pytest_aisp.worker", b"pytest_aisp.distributed.rank", WORKER.encode())
        return any(name in command for name in names) and os.readlink(entry / "cwd") == str(folder)
    except OSError:  # it has ended meanwhile
        return False


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; two minutes are for a machine that is busy."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
