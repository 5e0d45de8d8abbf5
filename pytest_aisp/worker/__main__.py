"""The worker process as a program.

    python -m pytest_aisp.worker READ_FD WRITE_FD     answer tasks over a pipe (see `server`)
    python -m pytest_aisp.worker TASK.json            run one task of a file

NVIDIA's profilers run the second form. The file holds a `ProfileTask` whose `side` is a role. A few
calls run in an NVTX range ``aisp-baseline`` or ``aisp-optimized``, between the start and the stop
of CUDA's profiler. The exit code is 1 if the side cannot be run; stderr says why.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from ..results import messages
from .server import Server, main


def run_file(path: str) -> int:
    """Run the task in the file `path`; return the exit code."""
    faulthandler.enable()  # a crash shows the line of the side
    task = messages.decode_task(Path(path).read_bytes())
    reply = Server(lambda text: None).answer(task)
    if reply.error is not None:
        sys.stderr.write(f"{reply.trace}{reply.message}\n")
    return int(reply.error is not None)


if len(sys.argv) == 2:
    sys.exit(run_file(sys.argv[1]))
main(int(sys.argv[1]), int(sys.argv[2]))
