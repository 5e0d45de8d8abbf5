"""Give the C library's malloc the same parameters at the start of every window.

A side may change them with `mallopt`, after which each large allocation of the other side maps new
pages. No function returns the parameters, so nothing can compare them: each window sets them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from .protections import enabled

PARAMETERS = {
    -1: 64 << 20,  # M_TRIM_THRESHOLD
    -2: 128 << 10,  # M_TOP_PAD
    -3: 32 << 20,  # M_MMAP_THRESHOLD
    -4: 65536,  # M_MMAP_MAX
    -6: 0,  # M_PERTURB
}
"""The values by the number of the parameter: those that glibc itself reaches in a process that has
freed a block of 32 MiB or more.
"""


def reset_malloc() -> None:
    """Set malloc's parameters, unless the user has set some of them for the whole process."""
    if MALLOPT is not None and enabled("malloc"):
        for number, value in PARAMETERS.items():
            MALLOPT(number, value)


def find_mallopt() -> Callable[[int, int], int] | None:
    """Return the C library's `mallopt`, or None if there is none or the user has set parameters."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)


MALLOPT = find_mallopt()
"""Found when this module is imported, so that a page cannot pretend to be the user."""
