"""The `pair` of a test body: what a page may ask of its case, and what it may read."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NoReturn

import pytest

from ..results import verdict
from ..results.metric_limits import Name
from ..worker.output_capture import say
from .case import CaseRun
from .run_context import Failed, Interrupted

LINES = 100
"""Lines of what each process printed that pytest gets to capture; with ``-s`` all are shown."""
MEMORY: Mapping[str, Name] = {
    "allocated": "memory",
    "reserved": "reserved",
    "fragmentation": "fragmentation",
}
"""The goal of each kind of memory that a page may name."""


class PairUnderTest:
    """A case in its test body. Judge it: a body that judges nothing fails.

    Attributes:
        variant, size: the case.
        judged: whether a verdict was asked for; refusal: the error of one that is red.
    """

    def __init__(self, case: CaseRun, session: pytest.Session) -> None:
        self._case, self._session = case, session
        self.judged = False
        self.refusal: AssertionError | None = None
        self.variant: str = case.case.variant_name
        self.size: Mapping[str, Any] = dict(case.case.size)

    def assert_equivalent(
        self, *, exact: bool = False, rtol: float | None = None, atol: float | None = None
    ) -> None:
        """Prove that baseline and variant compute what the reference says.

        Args:
            exact: equal bit for bit.
            rtol, atol: a tolerance of the page's own, instead of the derived bound; refused when a
                negative control passes it.

        Raises:
            AssertionError: naming the output, the worst coordinate, both values and the bound.
        """
        __tracebackhide__ = True
        self._red(lambda: self._case.check({"exact": exact, "rtol": rtol, "atol": atol}))

    def assert_speedup(self) -> None:
        """Time both sides and judge the claim and the stored result.

        Where nothing is timed this ends the body: the case is `checked`.

        Raises:
            AssertionError: naming the number, the limit it missed and where that came from.
        """
        __tracebackhide__ = True
        self.judged = True
        self._red(self._case.measure)

    def assert_memory(self, *, at_most: float, of: str = "allocated") -> None:
        """Judge the variant's peak memory on the GPU against the baseline's, and the stored result.

        Where nothing is timed this ends the body: the case is `checked`.

        Args:
            at_most: what a call of the variant may hold beyond its inputs, outputs and temporaries
                together, as a share of what a call of the baseline does. On several ranks, each
                side counts with the rank that needs most.
            of: ``allocated``; ``reserved``, what the allocator took from the GPU for it; or
                ``fragmentation``, how much more than it ever held.

        Raises:
            AssertionError: naming both amounts, the limit that was missed and where it came from.
            ValueError: for a share that is not above 0, or memory of another kind.
        """
        __tracebackhide__ = True
        if of not in MEMORY:
            raise ValueError(f"assert_memory(of={of!r}): legal are {', '.join(MEMORY)}")
        if not at_most > 0:
            raise ValueError(f"{at_most=} of the baseline's memory: it must be above 0")
        self._limit(MEMORY[of], at_most)

    def assert_energy(self, *, at_most: float) -> None:
        """Judge the joules of a call against the baseline's, and the stored result.

        Counted by the GPU's own counter over 5 s and more a window, four windows a case, so only
        with ``--aisp-energy`` and when recording. On several ranks, all GPUs together.

        Args:
            at_most: what a call of the variant may take, as a share of what one of the baseline
                does.

        Raises:
            AssertionError: naming both amounts, the limit that was missed and where it came from.
            ValueError: for a share that is not above 0.
        """
        __tracebackhide__ = True
        if not at_most > 0:
            raise ValueError(f"{at_most=} of the baseline's energy: it must be above 0")
        self._limit("energy", at_most)

    def assert_goodput(self, *, at_least: float) -> None:
        """Judge the share of the variant's wall time in which the GPU computes, and the stored one.

        Copies, fills, collectives and gaps are no use; kernels that run side by side count once.
        The wall time is that of `assert_speedup`, which comes first; the kernels' the profiler's.

        Args:
            at_least: of the variant's wall time, above 0 and at most 1.

        Raises:
            AssertionError: naming both shares, the limit that was missed and where it came from.
            ValueError: for what is no share.
        """
        __tracebackhide__ = True
        if not 0 < at_least <= 1:
            raise ValueError(f"{at_least=} of the wall time: it must be above 0 and at most 1")
        self._limit("goodput", at_least)

    def assert_launches(self, *, at_most: float) -> None:
        """Judge how many launches a call of the variant makes, and the stored result.

        Launches are kernels, copies and fills on the GPU, as the profiler sees them. Where nothing
        is timed this ends the body: the case is `checked`.

        Args:
            at_most: launches of a call of the variant.

        Raises:
            AssertionError: naming both numbers, the limit that was missed and where it came from.
            ValueError: for a limit that is not above 0.
        """
        __tracebackhide__ = True
        if not at_most > 0:
            raise ValueError(f"{at_most=} launches: it must be above 0")
        self._limit("launches", at_most)

    def _limit(self, metric: Name, limit: float) -> None:
        __tracebackhide__ = True
        self.judged = True
        self._red(lambda: self._case.measure_metric(metric, float(limit)))

    def _red(self, step: Callable[[], None]) -> None:
        __tracebackhide__ = True
        try:
            return step()
        except Failed as failure:
            message = str(failure)
        except Interrupted as over:
            self._stop(str(over))
        finally:
            self._say_again()
        self.refusal = AssertionError(message)
        raise self.refusal

    def _say_again(self) -> None:
        """Print here what the sides have printed in their processes; pytest does the rest."""
        captured = self._session.config.getoption("capture", "fd") != "no"
        for name, text in self._case.run.printed(LINES if captured else None).items():
            if text:
                self._case.run.progress("")
                say(getattr(sys, name), text)

    def _stop(self, why: str) -> NoReturn:
        __tracebackhide__ = True
        if hasattr(self._session.config, "workerinput"):
            self._session.shouldstop = why  # to xdist an exit would be a crash of this worker
            pytest.skip(why)
        pytest.exit(why, returncode=pytest.ExitCode.INTERRUPTED)

    @property
    def speedup(self) -> float:
        """How many times faster the variant was."""
        return math.exp(fmean(self._values("speedup")))

    @property
    def interval(self) -> tuple[float, float]:
        """The 99 % interval of `speedup`."""
        values, timing = self._values("interval"), self._case.timing
        assert timing is not None
        low, high = verdict.interval(fmean(values), timing.spread, len(values))
        return math.exp(low), math.exp(high)

    def _values(self, name: str) -> list[float]:
        if not self._case.values:
            raise AssertionError(f"pair.{name} before assert_speedup(): nothing was timed yet")
        return self._case.values
