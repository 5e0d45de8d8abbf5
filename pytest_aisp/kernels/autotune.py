"""Record the configurations that Triton's autotuner chose for the kernels that sides launch.

The autotuner measures, so it may choose differently in the next process. That is why its choices
are stored with a result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from triton.runtime.autotuner import Autotuner, Config

Choices: TypeAlias = Mapping[str, list[str]]
"""The configurations of each kernel as Triton prints them: ``BLOCK: 128, num_warps: 4``."""


@contextmanager
def record_choices(found: dict[str, set[str]]) -> Iterator[None]:
    """Add to `found`, by kernel, the configuration of every tuned launch inside the block.

    Recording costs each launch some tenths of a microsecond, so nothing is timed in the block.
    """
    module = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        yield
        return
    run = module.Autotuner.run
    used: dict[tuple[int, int], tuple[Autotuner, Config]] = {}

    def recording_run(self: Autotuner, *args: object, **kwargs: object) -> object:
        result = run(self, *args, **kwargs)
        if len(self.configs) > 1:
            used[id(self), id(self.best_config)] = self, self.best_config
        return result

    module.Autotuner.run = recording_run
    try:
        yield
    finally:
        module.Autotuner.run = run
        for tuned, config in used.values():
            found.setdefault(tuned.base_fn.__name__, set()).add(str(config))


def merge_choices(parts: Iterable[Mapping[str, Iterable[str]]]) -> dict[str, list[str]]:
    """Return the choices of several processes as one mapping, sorted."""
    found: dict[str, set[str]] = {}
    for part in parts:
        for kernel, configs in part.items():
            found.setdefault(kernel, set()).update(configs)
    return {kernel: sorted(found[kernel]) for kernel in sorted(found)}


def choice_notes(choices: Choices) -> list[str]:
    """Return a line for each tuned kernel."""
    return [f"tuned {kernel}: {' | '.join(configs)}" for kernel, configs in choices.items()]


def differing_choices(stored: Choices, now: Choices) -> list[str]:
    """Return a line for each kernel with a configuration that is not among its stored ones."""
    return [
        f"{kernel} is tuned differently than in the stored result: {' | '.join(configs)},"
        f" stored {' | '.join(stored[kernel])}"
        for kernel, configs in now.items()
        if kernel in stored and not set(configs) <= set(stored[kernel])
    ]
