"""One case from its declaration to its verdict. No pytest here: glue calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..kernels import autotune
from ..page.pair import Case
from ..results import metric_limits, verdict
from ..results.messages import CheckTask, CompileTask, CountTask
from ..results.metric_limits import METRICS
from ..results.row import duration, graph_notes, launch_bound, launch_bound_note, memory_note
from ..timing import kernel_profile
from .canary import offer_to_canary
from .case_client import CaseClient, reading, remeasuring
from .context import Failed, RunContext
from .judge import Judge
from .placement import COMPILER, Kernels
from .sandbox_case import run_apart


class EndOfBody(Exception):
    """Nothing is timed here, so the test body has said all it can."""


class CaseRun(CaseClient):
    """One case: `check`, then `measure`; `row` is what became of it."""

    def __init__(
        self, run: RunContext, case: Case, where: Mapping[str, str], kernels: Kernels
    ) -> None:
        super().__init__(run, case, where, kernels)
        self.judge, self.kernels = Judge(self), kernels

    def check(self, rule: dict[str, Any]) -> None:
        """Prove both sides right under `rule`, or assemble kernels where that is all we can."""
        self.rule = rule
        if self.place.kind == "compile":
            found = self.ask(self.task(CompileTask, archs=self.place.archs))
            self.row.verdict = "compiled"
            self.row.checks.append(found)
            self.row.notes += found["words"]
            raise EndOfBody
        timed = self.place.kind == "time"
        if timed and self.run.settings.update is not None:
            self._start_others()
        at = "case" if timed else "check"
        found = self.ask(self.task(CheckTask, at=at, search=self.run.settings.check))
        self.row.checks.append(found)
        self.row.notes.append("checked at " + "; ".join(found["sizes"]))
        for size, checked in found["sizes"].items():
            if checked["controls"]:
                self.row.notes.append(f"controls at {size}: {'; '.join(checked['controls'])}")
        if self.run.settings.untrusted and not timed:
            run_apart(self, None)

    def measure(self) -> None:
        """Time the sides, screen, vote, judge. Where nothing is timed the case is `checked`.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        self._begin("assert_speedup", "timed")
        first = self.timed(0)
        self._fill(first)
        if self.run.settings.audit and any(self.kernels):
            self._assemble(first)
        if self.run.settings.in_process:
            return self.judge.abstain()
        offer_to_canary(self.run, self)
        self.judge.judge(first)
        for role in self.changed():
            self.judge.judge_against(role)
        if self.run.settings.untrusted:
            run_apart(self, first)
        if self.run.settings.update is not None:
            self._record()
        if self.run.settings.aa:
            self._repeat(first)

    def _start_others(self) -> None:
        """Start the processes that record after the first: they import torch while it checks."""
        if self.place.device == "cuda" and self.run.timer is None:
            for number in range(1, self.run.settings.processes):
                self.bench(number)

    def count(self, goal: metric_limits.Name, limit: float) -> None:
        """Judge what both sides take of `goal`. Where nothing is timed the case is `checked`.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        asked, row = METRICS[goal].asked, self.row
        self._begin(asked, "counted")
        row.sources = dict(row.checks[0]["sources"])
        if self.place.device == "cpu" and self.run.timer is None:
            return self._uncounted(goal, "counted on GPUs alone")
        if goal == "energy" and not self.run.settings.energy:
            return self._uncounted(goal, "counted with --aisp-energy, and when recording")
        if goal == "goodput" and not row.seconds:
            raise Failed(
                f"{asked}() before assert_speedup(): it is a share of the time that this takes\n"
                "Call pair.assert_speedup() first"
            )
        found = self.ask(self.task(CountTask, metric=goal, timer=self.run.timer))
        row.checks.append(found)
        if goal == "goodput":
            found = metric_limits.shares(found, row.pair_seconds())
        row.environment = row.environment or self.environment()
        self.judge.judge_count(goal, found, limit)
        if self.run.settings.update is not None:
            self._store()

    def _begin(self, asked: str, done: str) -> None:
        """Refuse what is not proved; end the body where nothing is `done`."""
        if self.rule is None:
            raise Failed(
                f"{asked}() before assert_equivalent(): nothing is {done} before it is proved"
                " right\nCall pair.assert_equivalent() first"
            )
        if self.place.kind != "time":
            self.row.verdict = self.row.verdict or "checked"
            raise EndOfBody

    def _uncounted(self, goal: str, why: str) -> None:
        self.row.notes.append(f"{goal}: {why}")
        self.row.verdict = self.row.verdict or "checked"

    def _repeat(self, first: Mapping[str, Any]) -> None:
        """Repeat an A/A trial in more processes, each a trial of its own, judged alike."""
        values = [float(first["value"])]
        recorded = self.judge.spread()
        verdicts = [self.row.verdict]
        for number in range(1, self.run.settings.processes):
            timed = self.timed(100 + number, self.bench(number))
            found = reading(timed)
            values.append(found.value)
            gates = verdict.same_gates(verdict.effective_spread(recorded, found))
            with remeasuring(self, self.vote) as vote:
                decision = verdict.decide(found, gates, vote)
            self.row.votes += [vote.value for vote in decision.votes]
            verdicts.append(verdict.verdict_of(decision, stored=True, same_environment=True))
        self.row.trials = [[v, w] for v, w in zip(values, verdicts, strict=True)]
        if len(values) > 1:
            self.judge.interval(values)
        worst = next((v for v in ("regressed", "improved", "inconclusive") if v in verdicts), None)
        self.row.verdict = worst or self.row.verdict
        if worst == "regressed":
            raise Failed("\n".join(["a side differs from a copy of itself", *self.commands()]))

    def _fill(self, timed: Mapping[str, Any]) -> None:
        row = self.row
        row.clock = str(timed["clock"])
        row.work, row.sources = dict(timed["work"]), dict(timed["sources"])
        row.spread = verdict.effective_spread(self.judge.spread(), reading(timed))
        row.environment = self.environment()
        names = self._names()
        row.seconds = {
            names[0]: median(timed["baseline"]),
            names[1]: median(timed["optimized"]),
        }
        self.judge.interval([timed["value"]])
        self.judge.limit(timed)
        self._other_clock(timed["details"])
        row.notes += graph_notes(names, timed["details"])
        self._memory(timed["details"])
        row.notes += kernel_profile.kernel_notes(timed.get("kernels", {}))
        row.notes += autotune.choice_notes(timed["details"].get("choices", {}))
        for name, seconds in timed.get("one_off", {}).items():
            if seconds:
                row.notes.append(self._break_even(name, seconds))

    def _assemble(self, timed: dict[str, Any]) -> None:
        """Note what each kernel uses on this arch; whether it may, ``--aisp-compile`` says."""
        if self.run.replay is not None or self.run.settings.in_process:
            return
        task = self.task(CompileTask, archs=(self.machine.arch,))
        reply = self.run.bench(COMPILER).ask(task, self.timeout, self.run.progress)
        if reply.error is None:
            timed["assembled"] = reply.result["assembled"]
            self.row.notes += reply.result["words"]
        else:
            first = (reply.message.splitlines() or [reply.error])[0]
            self.row.notes.append(f"what its kernels use is not known: {first}")

    def _names(self) -> tuple[str, str]:
        baseline = self.case.pair.baseline.__name__
        variant = self.case.variant_name
        return (f"{variant}, a copy", variant) if self.run.settings.aa else (baseline, variant)

    def _other_clock(self, details: Mapping[str, Any]) -> None:
        """Note the times on the clock that does not judge, and the goodput of host-bound sides."""
        for key in ("as_called", "gpu_only"):
            if key in details:
                times = " / ".join(duration(t) for t in details[key])
                self.row.notes.append(f"{key.replace('_', ' ')}: {times}")
        if "as_called" in details:
            self._launch_bound(details["as_called"])
        if "gpu_only" in details:
            busy = zip(details["gpu_only"], self.row.pair_seconds(), strict=True)
            shares = " / ".join(f"{min(1.0, gpu / wall):.0%}" for gpu, wall in busy)
            self.row.notes.append(f"goodput, GPU time over wall time: {shares}")

    def _launch_bound(self, as_called: Sequence[float]) -> None:
        """Say of which side it is no news that a graph makes it fast."""
        row = self.row
        row.launch_bound = launch_bound(row.clock, row.seconds, as_called)
        if row.launch_bound:
            row.remarks.append(launch_bound_note(row.launch_bound))

    def _memory(self, details: Mapping[str, Any]) -> None:
        """Note what a call of each side needs; never in silence where it is traded for speed."""
        if "peak_bytes" in details:
            said, traded = memory_note(details["peak_bytes"])
            (self.row.remarks if traded else self.row.notes).append(said)

    def _break_even(self, name: str, seconds: float) -> str:
        slow, fast = self.row.pair_seconds()
        gain = slow - fast
        calls = f"pays after {seconds / gain:.3g} calls" if gain > 0 else "never pays"
        return f"preparing {name} took {duration(seconds)}: {calls}"

    def _record(self) -> None:
        """Measure the case in every recording process and have it stored.

        Votes are processes too: without them a value that they did not confirm would stand alone.
        """
        run, row = self.run, self.row
        count = 1 if self.row.clock == "process" else run.settings.processes
        timed = list(row.timings)
        for number in range(len(timed), count):
            run.progress(f"record {number + 1}/{count}")
            timed.append(self.timed(100 + number, self.bench(number)))
        values = [float(t["value"]) for t in timed]
        self.judge.interval(values)
        self.judge.refuse_below_claim(values)
        names = list(row.seconds)
        for name, side in zip(names, ("baseline", "optimized"), strict=True):
            row.seconds[name] = median(median(t[side]) for t in timed)
        self._store(
            values=[values],
            clock=row.clock,
            baseline_us=row.seconds[names[0]] * 1e6,
            optimized_us=row.seconds[names[1]] * 1e6,
            share=row.share,
            limit=row.limit or None,
            choices=autotune.merge_choices(t["details"].get("choices", {}) for t in timed),
        )

    def _store(self, **times: Any) -> None:
        """Put what to store in the row: what was counted so far, and the `times` once there are."""
        row = self.row
        row.recorded |= {"sources": dict(row.sources), "goals": dict(row.goals), **times}
        row.recorded["replace"] = self.run.settings.update == "all"
