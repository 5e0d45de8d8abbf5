"""Run CUDA C++ kernels on the CPU: ``pytest -p pytest_aisp_emulator --aisp-check``.

To use it without pytest::

    with emulated(seed=1):
        kernels.rows[grid, block](x, out, n)  # CPU tensors
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import TYPE_CHECKING

from .compiler import CannotEmulate, unsupported
from .emulator import Fault, emulated

if TYPE_CHECKING:
    import pytest

__all__ = ["CannotEmulate", "Fault", "emulated", "install", "unsupported"]

SEED = "PYTEST_AISP_EMULATOR_SEED"
"""The name of the environment variable whose value is the seed of the thread orders."""


_installed = contextlib.ExitStack()


def install() -> None:
    """From now on, emulate every kernel launch in this process."""
    _installed.enter_context(emulated(int(os.environ.get(SEED, "0"))))


def pytest_aisp_cuda_emulator(config: pytest.Config) -> str:
    """Return the name of the module that emulates CUDA C++ for pytest-aisp."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1 << 31)))
    return __name__


def pytest_report_header() -> str:
    """Return a line that says how to repeat the thread orders of this run."""
    return f"CUDA C++ runs emulated; repeat its thread orders with {SEED}={os.environ[SEED]}"
