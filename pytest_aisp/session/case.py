"""Run one case, from its page to its row.

The test body calls the stages: ``pair.assert_equivalent()`` calls `check`,
``pair.assert_speedup()`` calls `measure`, and ``pair.assert_memory()`` and similar assertions call
`measure_metric`. A stage sends tasks to worker processes through `CaseClient`, and stores typed
results and findings. `results.verdict.case_verdict` computes the verdict from all findings, and
`measurement.build_row` makes the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ..page.pair import Case
from ..results import metric_limits, verdict
from ..results.messages import CheckTask, CompileTask, Json
from ..results.row import Profile, Recording
from ..results.task_results import Amounts, CheckResult, CompileResult
from ..results.verdict import Cause, Finding
from .canary import offer_to_canary
from .case_client import CaseClient
from .cause import SAME_CODE
from .code_gate import sides_to_time
from .collect import CaseLocation
from .counting import MetricJudgement, count_and_judge, replays
from .judge_case import Judgement, judge_changed_side, judge_speedup
from .measurement import Timing, read_timing
from .placement import kernels_of, placement_of
from .recording import add_sources_and_metrics, record, repeat_aa
from .run_context import EndOfBody, Failed, MachineDisturbed, RunContext
from .sandbox_and_profile import run_sandboxed
from .stored_result import StoredResult
from .terminal import accept_commands
from .two_environments import judge_environments


class CaseRun:
    """One case in one run.

    Attributes:
        placement: whether the case is timed, checked, compiled or skipped on this machine.
        client: the client of the case's worker processes, with their replies.
        stored: the stored result of the case, and the other stored results of its chapter.
        timing, judgement, metrics: the results of the stages; None or empty before each stage.
        findings: for each stage, the verdict of this stage alone, and its reasons.
        values: ln(speedup) from each process; the speedup is computed from these values.
        recorded: the result to store, if the run records.
        wall: seconds that the test body took.
    """

    def __init__(self, run: RunContext, case: Case, location: CaseLocation) -> None:
        self.run, self.case, self.location = run, case, location
        self.kernels = kernels_of(run, case)
        self.placement = placement_of(run, case, self.kernels)
        self.client = CaseClient(run, case, location, self.placement)
        self.stored = StoredResult(run, self.client.path, location.key(case), case)
        timed = self.placement.kind == "time" and not run.settings.aa
        arch = self.client.machine.arch
        self.claim = case.claim(arch) if timed else None
        self.claim_origin = case.claim_origin(arch) if self.claim is not None else ""
        self.checks: list[CheckResult | CompileResult | Amounts] = []
        self._checked_sources: dict[str, str] = {}
        self.timing: Timing | None = None
        self.judgement: Judgement | None = None
        self.metrics: dict[str, MetricJudgement] = {}
        self.findings: list[Finding] = []
        self.notes, self.remarks = self.client.notes, self.client.remarks
        self.values: list[float] = []
        self.trials: list[tuple[float, str]] = []
        self.profile = Profile()
        self.recorded = Recording()
        self.wall = 0.0

    def check(self, rule: Mapping[str, float | None]) -> None:
        """Check both sides under `rule`, or compile their kernels if nothing can run here."""
        with self._stage():
            self.client.rule = rule
            if self.placement.kind == "compile":
                assemble = self.client.task(CompileTask, archs=self.placement.archs)
                compiled = self.client.ask(assemble, CompileResult)
                self.checks.append(compiled)
                self._checked_sources = compiled.sources
                self.notes += compiled.words
                self.findings.append(Finding("compiled"))
                raise EndOfBody
            times = self.placement.kind == "time"
            if times and self.run.settings.update is not None:
                self.client.start_recording_processes()
            at = "case" if times else "check"
            task = self.client.task(CheckTask, at=at, search=self.run.settings.check)
            result = self.client.ask(task, CheckResult)
            self.checks.append(result)
            self._checked_sources = result.sources
            self.stored.opened, self.stored.lent = result.opened, result.lent
            self.notes.append("checked at " + "; ".join(result.sizes))
            for size, checked in result.sizes.items():
                if checked.controls:
                    self.notes.append(f"controls at {size}: {'; '.join(checked.controls)}")
                self.notes += [f"at {size}: {remark}" for remark in checked.remarks]
            if result.sizes:  # the last size is the case's own
                self.remarks += list(result.sizes.values())[-1].inputs
            if self.run.settings.untrusted and not times:
                run_sandboxed(self.client, None)

    def measure(self) -> None:
        """Time both sides, judge the speedup, and record it if the run records.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        with self._stage():
            self._require_check("assert_speedup", "timed")
            self._measure_when_quiet()

    def _measure(self) -> None:
        settings = self.run.settings
        result = self.client.time(0)
        self.timing = timing = read_timing(self.client, self.stored, result)
        self.values = [timing.reading.value]
        timing.refuse_impossible()
        if settings.audit and any(self.kernels):
            self.client.note_kernel_resources(result)
        if settings.in_process:  # there can be no votes, because they need fresh processes
            option = settings.in_process
            reason = f"timed inside pytest ({option}), not in a separate process: no verdict"
            self.findings.append(Finding("inconclusive", (reason,)))
            return self._stop_if_red()
        offer_to_canary(self)
        self.judgement = judge_speedup(self.client, self.stored, timing, self.claim)
        self.values = self.judgement.votes or self.values
        self.findings += self.judgement.findings
        for role in sides_to_time(self.client, self.stored, timing) if self.case.judged else ():
            self.findings += judge_changed_side(self.client, self.stored, timing, role)
        self.findings += [verdict.CODE_IS_AS_FAST] * bool(self.client.unchanged)
        if self.case.judged:
            self.findings += judge_environments(self.client, self.stored)
        self._stop_if_red(accept=True)
        if settings.untrusted:
            run_sandboxed(self.client, timing)
        if settings.update is not None:
            record(self, timing)
        if settings.aa:
            repeat_aa(self, timing)

    def _measure_when_quiet(self) -> None:
        """Measure. If other work disturbs this, wait and repeat it for a limited time."""
        client, canary = self.client, self.run.canary_case
        lists: tuple[list[Json], ...] = (self.findings, self.notes, self.remarks, self.trials)
        lists += client.timings, client.against, client.missing_votes, client.neighbors
        lists += (client.unchanged,)
        lengths = [len(each) for each in lists]

        def forget() -> None:
            for each, length in zip(lists, lengths, strict=True):
                del each[length:]
            self.run.canary_case, self.recorded = canary, Recording()
            self.timing = self.judgement = None
            self.values = []

        self.run.when_quiet(self._measure_beside_neighbors, forget)

    def _measure_beside_neighbors(self) -> None:
        """Measure, and drop the verdict if another process on the GPU may have caused it.

        Raises:
            MachineDisturbed: if another process used the GPU, and the case is red or recorded.
        """
        failure: Failed | None = None
        try:
            self._measure()
        except Failed as error:
            if error.finding is not None and error.finding.verdict != "invalid":
                raise  # another process on the GPU cannot cause an error
            failure = error
        word = "invalid" if failure is not None and failure.finding is not None else self.verdict
        named = self.client.neighbor()
        if named and (word not in ("pass", "new") or self.run.settings.update is not None):
            raise MachineDisturbed(named)
        if failure is not None:
            raise failure
        if named:
            self.remarks.append(f"{named}: the speedup may be wrong")

    def measure_metric(self, metric: metric_limits.Name, limit: float) -> None:
        """Measure `metric` per call of each side, and compare it with its limits.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        method = metric_limits.METRICS[metric].assertion
        with self._stage():
            self._require_check(method, "measured")
            why = self._not_measurable(metric)
            if why:
                self.notes.append(f"{metric}: {why}")
                self.findings.append(Finding("checked"))
                return
            if metric == "goodput" and self.timing is None:
                raise Failed(
                    f"{method}() before assert_speedup(): goodput is a share of the call's time\n"
                    "Call pair.assert_speedup() first"
                )
            self.metrics[metric] = judged = count_and_judge(self, metric, limit)
            self.findings += judged.findings
            self._stop_if_red(accept=True)
            if self.run.settings.update is not None:
                add_sources_and_metrics(self)

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Add a finding to the case if the `with` block raises a failure."""
        try:
            yield
        except Failed as failure:
            if failure.finding is not None:
                self.findings.append(self._with_cause(failure.finding))
            raise

    def _with_cause(self, finding: Finding) -> Finding:
        """Return the finding of an error. Code that is as recorded is not the cause of an error."""
        with suppress(Failed):  # the stored result may be the error
            mine = self.stored.result
            known = finding.cause or finding.verdict != "fail" or not self.stored.has_recorded_code
            if mine is None or known or self.run.replay is not None:
                return finding
            environment, sources = self.environment(), mine.sources
            found = self.stored.differences(mine, environment, sources, mine.clock or "")
            reasons = (*finding.reasons, *found.environment, SAME_CODE)
            return Finding(finding.verdict, reasons, self.stored.cause(found))
        return finding

    @property
    def verdict(self) -> str:
        """The verdict that follows from the current findings, or empty if there are none."""
        settings = self.run.settings
        strict = settings.strict_environment and settings.update is None
        return verdict.case_verdict(self.findings, strict_environment=strict)

    @property
    def cause(self) -> Cause:
        """The cause of the verdict, if the run has evidence of it."""
        return verdict.case_cause(self.findings, self.verdict)

    def _stop_if_red(self, *, accept: bool = False) -> None:
        """Raise `Failed` if the current verdict is red, or if the ini file makes it fail the run.

        Args:
            accept: True to print the command that stores today's result.
        """
        settings, word = self.run.settings, self.verdict
        red = word in verdict.RED
        red |= word == "new" and settings.missing == "fail" and settings.update is None
        red |= word == "inconclusive" and settings.inconclusive == "fail"
        if not red:
            return
        cause = [f"cause: {self.cause}"] * bool(self.cause)
        lines = [*self.reasons(), *cause, *self.client.commands()]
        stored = not settings.aa and self.stored.result is not None
        if accept and word != "fail" and (stored or word == "new"):
            lines += accept_commands(self.location.typed, stored=stored)
        raise Failed("\n".join(lines), verdict=None)

    def reasons(self) -> list[str]:
        """Return the reasons that the findings give."""
        return [reason for finding in self.findings for reason in finding.reasons]

    def _require_check(self, method: str, done: str) -> None:
        """Raise `Failed` if the pair was not checked. End the body if nothing is timed here."""
        if self.client.rule is None:
            raise Failed(
                f"{method}() before assert_equivalent(): nothing is {done} before it is proved"
                " right\nCall pair.assert_equivalent() first"
            )
        if self.placement.kind != "time":
            self.findings.append(Finding("checked"))
            raise EndOfBody

    def _not_measurable(self, metric: str) -> str:
        """Return the reason why `metric` is not measured here; empty if it is measured."""
        if self.placement.device == "cpu" and self.run.timer is None:
            return "measured on GPUs only"
        if metric == "energy" and not (self.run.settings.energy or replays(self.run, metric)):
            return "measured with --aisp-energy, and when recording"
        return ""

    def environment(self) -> dict[str, Json]:
        """Return the facts that a stored result depends on."""
        return self.timing.environment if self.timing is not None else self.client.environment()

    def sources(self) -> dict[str, str]:
        """Return the hashes of both sides' sources."""
        if self.timing is not None:
            return self.timing.sources
        return dict(self._checked_sources)
