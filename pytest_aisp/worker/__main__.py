"""The worker process as a program.

    python -m pytest_aisp.worker READ_FD WRITE_FD     answer tasks over a pipe (see `server`)
    python -m pytest_aisp.worker TASK.json            run the task in a file

NVIDIA's profilers run the second form. The file holds a `ProfileTask` whose `side` is a role. The
program starts CUDA's profiler, calls the side a few times in an NVTX range named ``aisp-baseline``
or ``aisp-optimized``, and stops the profiler. The exit code is 1 if the side cannot be run, and
stderr contains the reason.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from ..results import encoding
from .server import Server, main


def run_file(path: str) -> int:
    """Run the task in the file `path` and return the exit code."""
    faulthandler.enable()  # a crash prints the side's line
    task = encoding.decode_task(Path(path).read_bytes())
    reply = Server(lambda text: None).answer(task)
    if reply.error is not None:
        sys.stderr.write(f"{reply.trace}{reply.message}\n")
    return int(reply.error is not None)


if len(sys.argv) == 2:
    sys.exit(run_file(sys.argv[1]))
main(int(sys.argv[1]), int(sys.argv[2]))
