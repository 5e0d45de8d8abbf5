"""A bench process under NVIDIA's compute-sanitizer, which sees what a kernel may not do.

A read beyond a tensor whose neighbour happens to hold something harmless gives the right result;
here it is an error of the page.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..results.messages import Reply, Task
from .client import BenchProcess

TOOL = "compute-sanitizer"
ABSENT = f"{TOOL} is not on PATH; it comes with the CUDA toolkit, in bin/"
SLOWER = 20.0
"""By how much time limits are longer under it."""
SHOWN = 12
"""Lines of its report that a failure shows."""

_NO_FINDING = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY: 0 |^=+\s*$|Target application|LEAK SUM")
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, so that reading beyond it is reading beyond memory."""


def installed() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    return shutil.which(TOOL)


class Sanitized(BenchProcess):
    """A bench process whose kernels `check`, a tool of compute-sanitizer, watches."""

    def __init__(self, check: str, environment: Mapping[str, str | None] | None = None) -> None:
        handle, self._log = tempfile.mkstemp(prefix="aisp-sanitizer-", suffix=".log")
        os.close(handle)
        self._check, self._read = check, 0
        # What a library does wrong while it initializes is none of a page's business.
        watch = ("--tool", check, "--log-file", self._log, "--report-api-errors", "no")
        tool = installed() or TOOL
        super().__init__({**(environment or {}), **ENVIRONMENT}, [tool, *watch])

    def ask(self, task: Task, seconds: float, progress: Callable[[str], None]) -> Reply:
        """Return the reply to `task`, or what was found while it was answered."""
        reply = super().ask(task, SLOWER * seconds, progress)
        found = self._findings()
        if not found:
            return reply
        self.kill()  # after an access beyond memory nothing works any more
        first = f"{self._check} finds fault with a kernel:"
        words = [first, *found[:SHOWN], *["..."] * (len(found) > SHOWN)]
        return replace(reply, error="page", message="\n".join(words), trace="")

    def _findings(self) -> list[str]:
        """Return the report's new lines, without its frame."""
        with open(self._log, errors="replace") as log:
            log.seek(self._read)
            lines = log.read().splitlines()
            self._read = log.tell()
        return [line.removeprefix("=========").strip() for line in lines if _is_finding(line)]

    def close(self) -> None:
        super().close()
        os.unlink(self._log)


def _is_finding(line: str) -> bool:
    return bool(line.strip()) and not _NO_FINDING.search(line)
