"""One case, from its page to its row, top to bottom.

The stages are called by the test body: `check` by ``pair.assert_equivalent()``, `measure` by
``pair.assert_speedup()``, `measure_metric` by ``pair.assert_memory()`` and its kin. A stage asks
worker processes through `CaseClient`, and leaves typed results and findings. The verdict is a
function of all findings (`results.verdict.case_verdict`); `case_row.build_row` makes the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from ..kernels import autotune
from ..page.pair import Case
from ..results import metric_limits, verdict
from ..results.messages import CheckTask, CompileTask, CountTask
from ..results.verdict import Finding
from .canary import offer_to_canary
from .case_client import CaseClient, key_of
from .judge import (
    Judgement,
    MetricJudgement,
    judge_aa_repeat,
    judge_changed_side,
    judge_metric,
    judge_recorded_claim,
    judge_speedup,
)
from .measurement import Timing, read_timing
from .placement import COMPILER, Kernels, placement_of
from .run_context import Failed, RunContext
from .sandbox_case import run_sandboxed
from .stored_result import StoredResult
from .terminal import accept_commands


class EndOfBody(Exception):
    """Nothing is timed here, so the test body has nothing left to do."""


class CaseRun:
    """One case in one run.

    Attributes:
        placement: where the case can be shown: timed, checked, compiled or skipped.
        client: its worker processes, and what they answered.
        stored: its stored result, and those of its chapter.
        timing, judgement, metrics: what the stages returned; None or empty before them.
        findings: the verdict that each stage alone would give, with its reasons.
    """

    def __init__(
        self, run: RunContext, case: Case, where: Mapping[str, str], kernels: Kernels
    ) -> None:
        self.run, self.case, self.where, self.kernels = run, case, where, kernels
        self.placement = placement_of(run, case, kernels)
        self.client = CaseClient(run, case, where, self.placement)
        self.stored = StoredResult(run, self.client.path, key_of(case, where), case)
        timed = self.placement.kind == "time" and not run.settings.aa
        target = case.variant, self.client.machine.arch, case.gpus
        self.claim = case.pair.claim(*target) if timed else None
        self.claim_origin = case.pair.origin(*target) if self.claim is not None else ""
        self.checks: list[dict[str, Any]] = []
        self.timing: Timing | None = None
        self.judgement: Judgement | None = None
        self.metrics: dict[str, MetricJudgement] = {}
        self.findings: list[Finding] = []
        self.notes, self.remarks = self.client.notes, self.client.remarks
        self.values: list[float] = []
        self.trials: list[list[Any]] = []
        self.profile: dict[str, Any] = {}
        self.recorded: dict[str, Any] = {}
        self.wall = 0.0

    def check(self, rule: dict[str, Any]) -> None:
        """Prove both sides right under `rule`, or compile their kernels where nothing can run."""
        with self._stage():
            self.client.rule = rule
            if self.placement.kind == "compile":
                found = self.client.ask(self.client.task(CompileTask, archs=self.placement.archs))
                self.checks.append(found)
                self.notes += found["words"]
                self.findings.append(Finding("compiled"))
                raise EndOfBody
            times = self.placement.kind == "time"
            if times and self.run.settings.update is not None:
                self.client.start_recording_processes()
            at = "case" if times else "check"
            task = self.client.task(CheckTask, at=at, search=self.run.settings.check)
            found = self.client.ask(task)
            self.checks.append(found)
            self.notes.append("checked at " + "; ".join(found["sizes"]))
            for size, checked in found["sizes"].items():
                if checked["controls"]:
                    self.notes.append(f"controls at {size}: {'; '.join(checked['controls'])}")
            if self.run.settings.untrusted and not times:
                run_sandboxed(self.client, None)

    def measure(self) -> None:
        """Time both sides, judge the speedup, and record it where the run records.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        settings = self.run.settings
        with self._stage():
            self._require_check("assert_speedup", "timed")
            first = self.client.time(0)
            self.timing = timing = read_timing(self.client, self.stored, first)
            self.values = [timing.reading.value]
            timing.refuse_impossible()
            if settings.audit and any(self.kernels):
                self._compile_too(first)
            if settings.in_process:
                self.findings.append(_no_verdict_in_process(settings.in_process))
                return self._stop_if_red()
            offer_to_canary(self)
            self.judgement = judged = judge_speedup(
                self.client, self.stored, timing, self.claim, self.claim_origin
            )
            self.values = judged.votes or self.values
            self.findings += judged.findings
            self._stop_if_red(accept=True)
            for role in self.client.changed_sides():
                self.findings += judge_changed_side(self.client, self.stored, timing, role)
                self._stop_if_red()
            if settings.untrusted:
                run_sandboxed(self.client, timing)
            if settings.update is not None:
                self._record(timing)
            if settings.aa:
                self._repeat_aa(timing)

    def measure_metric(self, metric: metric_limits.Name, limit: float) -> None:
        """Judge what a call of each side takes of `metric`.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        asked = metric_limits.METRICS[metric].asked
        with self._stage():
            self._require_check(asked, "measured")
            why = self._not_measurable(metric)
            if why:
                self.notes.append(f"{metric}: {why}")
                self.findings.append(Finding("checked"))
                return
            if metric == "goodput" and self.timing is None:
                raise Failed(
                    f"{asked}() before assert_speedup(): goodput is a share of the call's time\n"
                    "Call pair.assert_speedup() first"
                )
            found = self.client.ask(
                self.client.task(CountTask, metric=metric, timer=self.run.timer)
            )
            self.checks.append(found)
            if metric == "goodput" and self.timing is not None:
                found = metric_limits.shares(found, self.timing.pair_seconds)
            environment = self.environment()
            judged = judge_metric(
                self.stored, metric, found, limit, environment, self.sources(), self.judgement
            )
            self.metrics[metric] = judged
            self.findings += judged.findings
            self._stop_if_red(accept=True)
            if self.run.settings.update is not None:
                self._store()

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Turn the failure of a stage into a finding."""
        try:
            yield
        except Failed as failure:
            if failure.finding is not None:
                self.findings.append(failure.finding)
            raise

    @property
    def verdict(self) -> str:
        """The verdict of everything found so far; empty before any finding."""
        settings = self.run.settings
        strict = settings.strict_environment and settings.update is None
        return verdict.case_verdict(self.findings, strict_environment=strict)

    def _stop_if_red(self, *, accept: bool = False) -> None:
        """Raise `Failed` where the findings so far fail the run, here or by the ini file.

        Args:
            accept: whether storing today's result is a way out.
        """
        settings, word = self.run.settings, self.verdict
        red = word in verdict.RED
        red |= word == "new" and settings.missing == "fail" and settings.update is None
        red |= word == "inconclusive" and settings.inconclusive == "fail"
        if not red:
            return
        lines = [*self.reasons(), *self.client.commands()]
        stored = not settings.aa and self.stored.result is not None
        if accept and word != "fail" and (stored or word == "new"):
            lines += accept_commands(self.where["typed"], stored=stored)
        raise Failed("\n".join(lines), verdict=None)

    def reasons(self) -> list[str]:
        """Return the reasons of all findings."""
        return [reason for finding in self.findings for reason in finding.reasons]

    def _require_check(self, asked: str, done: str) -> None:
        """Refuse a pair that is not checked; end the body where nothing is timed."""
        if self.client.rule is None:
            raise Failed(
                f"{asked}() before assert_equivalent(): nothing is {done} before it is proved"
                " right\nCall pair.assert_equivalent() first"
            )
        if self.placement.kind != "time":
            self.findings.append(Finding("checked"))
            raise EndOfBody

    def _not_measurable(self, metric: str) -> str:
        """Return why `metric` is not measured here, or an empty text."""
        if self.placement.device == "cpu" and self.run.timer is None:
            return "measured on GPUs only"
        if metric == "energy" and not self.run.settings.energy:
            return "measured with --aisp-energy, and when recording"
        return ""

    def environment(self) -> dict[str, Any]:
        """Return the facts that a stored result depends on besides its sources."""
        return self.timing.environment if self.timing is not None else self.client.environment()

    def sources(self) -> dict[str, str]:
        """Return the digests of both sides."""
        if self.timing is not None:
            return self.timing.sources
        return dict(self.checks[0]["sources"]) if self.checks else {}

    def _compile_too(self, first: dict[str, Any]) -> None:
        """Note what each kernel uses on this arch."""
        if self.run.replay is not None or self.run.settings.in_process:
            return  # there is no process to ask
        task = self.client.task(CompileTask, archs=(self.client.machine.arch,))
        reply = self.run.worker(COMPILER).ask(task, self.client.timeout, self.run.progress)
        if reply.error is None:
            first["assembled"] = reply.result["assembled"]
            self.notes += reply.result["words"]
        else:
            why = (reply.message.splitlines() or [reply.error])[0]
            self.notes.append(f"the resources of its kernels are unknown: {why}")

    def _record(self, timing: Timing) -> None:
        """Measure the case in every recording process, and hand its result to the recorder.

        Votes count as recording processes: a first value that they refuted must not stand alone.
        """
        count = 1 if timing.clock == "process" else self.run.settings.processes
        answers = list(self.client.timings)
        for number in range(len(answers), count):
            self.run.progress(f"record {number + 1}/{count}")
            answers.append(self.client.time(100 + number, self.client.worker(number)))
        self.values = [float(answer["value"]) for answer in answers]
        judge_recorded_claim(self.claim, self.claim_origin, self.values, self.verdict)
        seconds = [
            median(median(answer[side]) for answer in answers) for side in ("baseline", "optimized")
        ]
        self.timing = timing.with_seconds(seconds)
        self._store(
            values=[self.values],
            clock=timing.clock,
            baseline_us=seconds[0] * 1e6,
            optimized_us=seconds[1] * 1e6,
            share=timing.share,
            limit=timing.limit or None,
            choices=autotune.merge_choices(a["details"].get("choices", {}) for a in answers),
        )

    def _store(self, **times: Any) -> None:
        """Put what is to be stored in the row: metrics so far, and `times` once there are any."""
        metrics = {name: dict(judged.found) for name, judged in self.metrics.items()}
        self.recorded |= {"sources": self.sources(), "goals": metrics, **times}
        self.recorded["replace"] = self.run.settings.update == "all"

    def _repeat_aa(self, timing: Timing) -> None:
        """Repeat an A/A trial in more processes; each is a trial of its own."""
        spread = self.stored.spread(timing.clock)
        trials = [(timing.reading.value, self.verdict)]
        for number in range(1, self.run.settings.processes):
            value, word, votes = judge_aa_repeat(self.client, spread, number)
            trials.append((value, word))
            self.findings.append(Finding(word))
            if self.judgement is not None:
                self.judgement.votes += votes
        self.trials = [list(trial) for trial in trials]
        self.values = [value for value, _ in trials] if len(trials) > 1 else self.values
        if self.verdict == "regressed":
            message = "a side differs from a copy of itself"
            raise Failed("\n".join([message, *self.client.commands()]), verdict=None)


def _no_verdict_in_process(option: str) -> Finding:
    """Return the finding for a case timed inside pytest, where no vote is a fresh process."""
    reason = f"timed inside pytest ({option}), not in a process of its own: no verdict"
    return Finding("inconclusive", (reason,))
