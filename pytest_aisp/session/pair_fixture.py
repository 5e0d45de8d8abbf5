"""The fixture `pair` with its assertions, and the code that runs a test body."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import NoReturn

import pytest

from ..page.pair import MARK, Case, Size
from ..results import stats
from ..results.metric_limits import Name
from ..worker.output_capture import write_text
from .case import CaseRun
from .collect import CaseLocation, refuse
from .options import LOCK_ERROR, RUN
from .run_context import EndOfBody, Failed, Interrupted, MachineDisturbed

PAIR: pytest.StashKey[PairUnderTest] = pytest.StashKey()
LINES = 100
"""The maximum number of output lines per process that pytest captures. ``-s`` shows all lines."""
MEMORY: Mapping[str, Name] = {
    "allocated": "memory",
    "reserved": "reserved",
    "fragmentation": "fragmentation",
}
"""The metric for each kind of memory that a page can pass to `assert_memory`."""


class PairUnderTest:
    """The value of the fixture `pair`, whose assertions judge a case.

    A test body has to call an assertion that requests a verdict. On a machine that does not time
    the case, the first such assertion ends the body, and the verdict is `checked`. A red verdict
    raises an AssertionError. Its message has the measured value, the missed limit, and the place
    where the limit is written.

    Attributes:
        variant, size: the case.
        judged: True once the body has requested a verdict.
        failure: the error of a red verdict. Each later assertion raises it again.
        case_run: the run of the case.
        reported: True once the row is written. Later assertions fail.
    """

    def __init__(self, case_run: CaseRun, session: pytest.Session) -> None:
        self.case_run, self._session = case_run, session
        self.judged = self.reported = False
        self.failure: AssertionError | None = None
        self.variant: str = case_run.case.variant_name
        self.size: Size = dict(case_run.case.size)

    def assert_equivalent(
        self, *, exact: bool = False, rtol: float | None = None, atol: float | None = None
    ) -> None:
        """Check that baseline and variant compute the same results as the reference.

        Args:
            exact: require equality bit for bit.
            rtol, atol: a tolerance that replaces the derived bound. The check fails if this
                tolerance accepts a negative control.

        Raises:
            AssertionError: if an output differs. The message names the output, the coordinate with
                the largest error, both values and the bound.
        """
        __tracebackhide__ = True
        rule = {"exact": exact, "rtol": rtol, "atol": atol}
        self._run_stage(lambda: self.case_run.check(rule))

    def assert_speedup(self) -> None:
        """Time both sides, and compare the speedup with the claim and the stored result."""
        __tracebackhide__ = True
        self.judged = True
        self._run_stage(self.case_run.measure)

    def assert_memory(self, *, at_most: float, of: str = "allocated") -> None:
        """Compare the variant's peak GPU memory with the baseline's and with the stored result.

        Args:
            at_most: the most memory that a call of the variant may need, as a share of the
                baseline's. Outputs and temporaries are included, but inputs are not. With several
                ranks, each side's amount is the maximum over its ranks.
            of: the kind of memory: ``allocated``; ``reserved``, which the allocator took from the
                GPU; or ``fragmentation``, the part of the reserved memory that was never used.

        Raises:
            ValueError: if the share is not above 0, or the kind of memory is unknown.
        """
        __tracebackhide__ = True
        if of not in MEMORY:
            raise ValueError(f"assert_memory(of={of!r}): choose one of {', '.join(MEMORY)}")
        if not at_most > 0:
            raise ValueError(f"{at_most=} of the baseline's memory: it must be above 0")
        self._judge_metric(MEMORY[of], at_most)

    def assert_energy(self, *, at_most: float) -> None:
        """Compare the variant's energy per call with the baseline's and with the stored result.

        The GPU's energy counter needs four windows of at least 5 s per case. So energy is measured
        only with ``--aisp-energy`` and when results are recorded. With several ranks, the energies
        of all GPUs are added.

        Args:
            at_most: the most energy that a call of the variant may use, as a share of the
                baseline's.

        Raises:
            ValueError: if the share is not above 0.
        """
        __tracebackhide__ = True
        if not at_most > 0:
            raise ValueError(f"{at_most=} of the baseline's energy: it must be above 0")
        self._judge_metric("energy", at_most)

    def assert_goodput(self, *, at_least: float) -> None:
        """Compare the variant's goodput with `at_least` and with the stored result.

        Goodput is the share of the wall time during which the GPU computes. Copies, fills,
        collectives and gaps do not count. If several kernels overlap, their time counts only once.
        Call `assert_speedup` first, because it measures the wall time. The profiler measures the
        kernels' time.

        Args:
            at_least: the minimum goodput, as a share of the variant's wall time.

        Raises:
            ValueError: if the share is not above 0, or is above 1.
        """
        __tracebackhide__ = True
        if not 0 < at_least <= 1:
            raise ValueError(f"{at_least=} of the wall time: it must be above 0 and at most 1")
        self._judge_metric("goodput", at_least)

    def assert_launches(self, *, at_most: float) -> None:
        """Compare the variant's launches per call with `at_most` and with the stored result.

        Args:
            at_most: the largest number of kernels, copies and fills per call. The profiler counts
                them.

        Raises:
            ValueError: if the limit is not above 0.
        """
        __tracebackhide__ = True
        if not at_most > 0:
            raise ValueError(f"{at_most=} launches: it must be above 0")
        self._judge_metric("launches", at_most)

    def _judge_metric(self, metric: Name, limit: float) -> None:
        __tracebackhide__ = True
        self.judged = True
        self._run_stage(lambda: self.case_run.measure_metric(metric, float(limit)))

    def _run_stage(self, stage: Callable[[], None]) -> None:
        """Run a stage of the case, and turn its failure into an AssertionError."""
        __tracebackhide__ = True
        if self.reported:
            raise AssertionError(
                "the test is over and its verdict is reported: nothing more is judged\n"
                "Call the assertions of `pair` in the test body"
            )
        if self.failure is not None:  # nothing is measured after a red verdict
            raise self.failure.with_traceback(None)
        try:
            return stage()
        except MachineDisturbed as disturbed:
            pytest.skip(f"disturbed: {disturbed}")
        except Failed as failure:
            message = self._with_cause(failure)
        except Interrupted as over:
            self._stop(str(over))
        finally:
            self._print_captured()
        self.failure = AssertionError(message)
        raise self.failure

    def _with_cause(self, failure: Failed) -> str:
        """Return the message of a failure with the cause before the commands."""
        message, cause = str(failure), self.case_run.cause
        if failure.finding is None or not cause:  # then the message names the cause, if any
            return message
        text, reproduce, commands = message.partition("\nreproduce:")
        return f"{text}\ncause: {cause}{reproduce}{commands}"

    def _print_captured(self) -> None:
        """Print the output of the worker processes in this process, where pytest captures it."""
        run = self.case_run.run
        captured = self._session.config.getoption("capture", "fd") != "no"
        for name, text in run.shared.take_output(LINES if captured else None).items():
            if text:
                run.progress("")
                write_text(getattr(sys, name), text)

    def stop_after_report(self, why: str) -> None:
        """End the run after this test has been reported."""
        self._session.shouldstop = why

    def _stop(self, why: str) -> NoReturn:
        __tracebackhide__ = True
        if hasattr(self._session.config, "workerinput"):
            self.stop_after_report(why)  # xdist would treat an exit as a crash of this worker
            pytest.skip(why)
        pytest.exit(why, returncode=pytest.ExitCode.INTERRUPTED)

    @property
    def speedup(self) -> float:
        """The speedup of the variant as a factor."""
        return math.exp(fmean(self._values("speedup")))

    @property
    def interval(self) -> tuple[float, float]:
        """The 99 % interval of `speedup`."""
        values, timing = self._values("interval"), self.case_run.timing
        assert timing is not None
        low, high = stats.interval(fmean(values), timing.spread, len(values))
        return math.exp(low), math.exp(high)

    def _values(self, name: str) -> list[float]:
        if not self.case_run.values:
            raise AssertionError(f"pair.{name} before assert_speedup(): nothing was timed yet")
        return self.case_run.values


def pair_under_test(request: pytest.FixtureRequest) -> PairUnderTest:
    """Return the value of the `pair` fixture for a test body."""
    item, config = request.node, request.config
    case = getattr(request, "param", None)
    if not isinstance(case, Case):
        if item.get_closest_marker(MARK) is None:
            refuse(item, "the fixture `pair` needs @compare on the test")
        refuse(
            item,
            "when= leaves no case: it returned False for every variant at every size\n"
            "Add a size at which a variant exists. If the page cannot run here, skip it:\n"
            "    @pytest.mark.skipif(...)",
        )
    if (why := item.stash.get(LOCK_ERROR, None)) is not None:
        refuse(item, why)
    if PAIR in item.stash:
        refuse(
            item,
            "this case was already judged in this run: a rerun must not turn red into green\n"
            "Exclude cases from whatever reruns tests",
        )
    if RUN not in config.stash:  # a page outside aisp_pages, in a session without our options
        from .startup import configure

        configure(config)
        if live := config.pluginmanager.get_plugin("aisp-live"):
            live.pytest_sessionstart()  # the session has started, and so has the test
            live.pytest_runtest_logstart(item.nodeid)
    run = config.stash[RUN]
    if run.settings.cold_start:
        run.end_workers()
    case_run = CaseRun(run, case, CaseLocation.of(item))
    if case_run.placement.kind == "skip":
        pytest.skip(case_run.placement.need)
    if (marker := item.get_closest_marker("aisp_timeout")) is not None:
        case_run.client.timeout = float(marker.args[0]) * run.settings.timeout_multiplier
    if reruns := config.getoption("reruns", None):
        case_run.notes.append(f"--reruns={reruns} does not rerun cases: the first verdict stands")
    item.stash[PAIR] = pair = PairUnderTest(case_run, request.session)
    run.shared.take_output(0)  # drop late output of an earlier case's threads
    return pair


@contextlib.contextmanager
def run_body(item: pytest.Function) -> Iterator[None]:
    """Run a test body, which must request a verdict. It ends early if nothing is timed."""
    __tracebackhide__ = True
    start, pair = time.monotonic(), item.stash.get(PAIR, None)
    if pair is None:  # a user's fixture with the same name
        if item.get_closest_marker(MARK) is not None:
            refuse(
                item,
                "another fixture `pair` hides the plugin's: nothing would be checked or timed\n"
                "Give that fixture another name",
            )
        yield
        return
    try:
        with contextlib.suppress(EndOfBody):
            yield
            _require_judgement(item, pair)
    except pytest.exit.Exception as stop:
        if pair.failure is None:
            raise
        pair.stop_after_report(str(stop))
        raise pair.failure from None
    finally:
        pair.case_run.run.progress("")
        pair.case_run.wall = time.monotonic() - start


def _require_judgement(item: pytest.Function, pair: PairUnderTest) -> None:
    """Fail a test body that requested no verdict, or that claims a speedup without judging it."""
    case_run = pair.case_run
    if not pair.judged:
        refuse(item, "this page never judged its pair\nEnd the body with pair.assert_speedup()")
    if case_run.timing is None and case_run.claim is not None:  # judged by metrics alone
        if case_run.claim not in (1.0, "yardstick"):
            refuse(
                item,
                f"this page never judged what it claims, {case_run.claim} by"
                f" {case_run.claim_origin}\nCall pair.assert_speedup(), or claim nothing",
            )
        case_run.claim = None
