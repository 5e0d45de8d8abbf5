"""One side of one case, a few times, alone: the program that NVIDIA's profilers are put around.

    python -m pytest_aisp.worker.profile_target TASK.json

The file holds a `ProfileTask` whose `side` is a role. The calls are in an
NVTX range ``aisp-baseline`` or ``aisp-optimized``, between the start and the stop of CUDA's
profiler. The exit code is 1 where the side cannot be run; stderr says why.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from ..results import messages
from .server import Server


def main(path: str) -> int:
    """Run the task in the file `path`; return the exit code."""
    task = messages.decode_task(Path(path).read_bytes())
    reply = Server(lambda text: None).answer(task)
    if reply.error is not None:
        sys.stderr.write(f"{reply.trace}{reply.message}\n")
    return int(reply.error is not None)


if __name__ == "__main__":
    faulthandler.enable()  # a side that crashes shows its line
    sys.exit(main(sys.argv[1]))
