"""Hold a case's numbers against its gates: spread, limits, screen, vote, verdict, words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ..kernels import autotune
from ..page.pair import Work
from ..results import stats, verdict
from ..results.export import path_below
from ..results.metric_limits import METRICS
from ..results.models import Result, differences, pooled, session_sd
from ..results.row import bare, duration, ratio
from ..timing import peaks as peaks_module
from .case_client import CaseClient, reading, remeasuring
from .context import Failed
from .terminal import accept_commands


class Judge:
    """The judge of one case."""

    def __init__(self, client: CaseClient) -> None:
        self.client, self.run, self.case, self.row = client, client.run, client.case, client.row
        self.unlike: list[str] = []

    def judge(self, first: Mapping[str, Any]) -> None:
        """Screen and vote on what the first process measured, and give the row its verdict."""
        row, settings = self.row, self.run.settings
        gates, same_environment, has_record = self._gates(first)
        session = row.session = self._session()
        if gates:  # a yardstick without a stored result is held against nothing
            row.detectable = verdict.detectable(gates, row.spread or 0.0, session)
        with remeasuring(self.client, self.client.vote) as vote:
            decision = verdict.decide(reading(first), gates, vote)
        row.votes = [vote.value for vote in decision.votes]
        if row.votes:
            # The first value was singled out for being extreme; the votes were not.
            self.interval(row.votes)
            row.notes.append(
                f"measured {1 + len(row.votes)} times; the first gave {ratio(first['value'])}"
            )
        row.suspect = self._direction(gates, reading(first)) if decision.suspect else 0
        found = verdict.verdict_of(
            decision, stored=has_record or settings.aa, same_environment=same_environment
        )
        row.verdict = verdict.worst_of(row.verdict, found)
        self._explain(gates, decision, first)
        if row.verdict == "stale" and settings.strict_environment and settings.update is None:
            row.verdict = "regressed"
        self._end()

    def _end(self) -> None:
        """Fail where the verdict so far is red, here or by the ini file."""
        row, settings = self.row, self.run.settings
        red = row.verdict in verdict.RED
        red |= row.verdict == "new" and settings.missing == "fail" and settings.update is None
        red |= row.verdict == "inconclusive" and settings.inconclusive == "fail"
        if red:
            raise Failed("\n".join([*row.reasons, *self.client.commands(), *self._accept()]))

    def abstain(self) -> None:
        """Give no verdict on what was timed inside pytest, where no vote is a fresh process."""
        row, settings = self.row, self.run.settings
        row.verdict = "inconclusive"
        row.reasons.append(
            f"timed inside pytest ({settings.in_process}), not in a process of its own: nothing is"
            " decided on that"
        )
        if settings.inconclusive == "fail":
            raise Failed("\n".join([*row.reasons, *self.client.commands()]))

    def judge_against(self, role: str) -> None:
        """Judge a changed side against itself as it was: red for a loss that the vote confirms.

        Raises:
            Failed: for a loss; the message names the commits.
        """
        client, row, past = self.client, self.row, self.run.past
        name = self.case.pair.baseline.__name__ if role == "baseline" else row.variant
        before, reasons = row.verdict, list(row.reasons)
        try:
            first = client.timed_against(role, 0)
        except Failed:
            why = row.reasons[-1]
            row.verdict, row.reasons = before, reasons
            row.remarks.append(f"{name} is not compared with itself as it was: {why}")
            return
        gate = verdict.code_gate(self.spread(), first)
        with remeasuring(client, lambda *process: client.timed_against(role, *process)) as vote:
            decision = verdict.decide(first, [gate], vote)
        votes = [vote.value for vote in decision.votes]
        value = fmean(votes) if votes else first.value
        range_ = past.label if past is not None else ""
        smallest = 1 - math.exp(-verdict.DETECTABLE_CODE * gate.spread)
        row.notes.append(
            f"{name} against itself at {range_}: {ratio(value)}; detects {smallest:.1%}"
        )
        if decision.outcomes["code"] == "red":
            row.verdict = "regressed"
            row.reasons.append(
                f"{name} is {ratio(value)} of itself as it was, {range_}: margin {gate.red:.2%};"
                f" votes of fresh processes: {', '.join(map(bare, votes))} -> red"
            )
            raise Failed("\n".join([*row.reasons, *client.commands()]))
        if decision.outcomes["code"] == "open":
            row.verdict = "inconclusive"

    def judge_count(self, name: str, found: Mapping[str, float], limit: float) -> None:
        """Hold what both sides take of a goal against the page's limit and the stored result.

        Raises:
            Failed: for too much of it, or of goodput too little.
        """
        row, settings, goal = self.row, self.run.settings, METRICS[name]
        said = f"{name}: {goal.said(found, limit)}"
        row.goals[name], row.limits[name] = dict(found), limit
        row.remarks = [r for r in row.remarks if not r.startswith(f"{name}:")]
        if settings.aa:
            return
        row.remarks.append(said)
        mine = self._mine()
        before = mine.goals.get(name) if mine is not None else None
        row.held |= {} if before is None else {name: before["optimized"]}
        word = "new" if before is None else "pass"
        if goal.missed(found, limit):
            word = "fail"
            row.reasons.append(f"{said} ({goal.asked} on the page) -> red")
        elif mine and before and settings.update != "all" and goal.worse(before, found):
            unlike = self.unlike or self._unlike(mine)
            word = "stale" if unlike and not settings.strict_environment else "regressed"
            now, then = goal.unit(found["optimized"]), goal.unit(before["optimized"])
            row.reasons.append(
                f"{name}: {now} against {then} (stored in {self._relative()}) -> red"
            )
            row.reasons += unlike
        row.verdict = verdict.worst_of(row.verdict, word)
        self._end()

    def _mine(self) -> Result | None:
        """Return the case's stored result."""
        return self.run.stored(self.client.path).results.get(self.row.key)

    @staticmethod
    def _direction(gates: list[verdict.Gate], first: verdict.Reading) -> int:
        losing = [g.sign for g in gates if g.name != "claim" and g.decide(first, []) != "clear"]
        return losing[0] if losing else 0

    def _gates(self, timed: Mapping[str, Any]) -> tuple[list[verdict.Gate], bool, bool]:
        """Return the gates, whether the record's environment is this one, whether there is one."""
        row = self.row
        spread = row.spread or 0.0
        if self.run.settings.aa:
            return list(verdict.same_gates(spread)), True, True
        gates: list[verdict.Gate] = []
        if row.claim == "neutral":
            margin = max(verdict.NEUTRAL_FLOOR[row.clock], verdict.DETECTABLE * spread)
            gates.append(verdict.neutral_gate(margin))
        elif row.claim != "yardstick":
            gates.append(verdict.claim_gate(float(row.claim or 1.0), spread))
        mine = self._mine()
        if mine is None or mine.value is None:
            return gates, True, False
        if mine.clock != row.clock:
            if self.run.settings.update != "all":
                row.verdict = verdict.worst_of(row.verdict, "stale")
                row.reasons.append(self._other_clock(mine, timed["details"]))
            return gates, True, True
        row.stored, row.origins["stored"] = mine.value, self._relative()
        if self.run.settings.update == "all":  # it is to be replaced: only the claim counts
            return gates, True, True
        margin = verdict.record_margin(spread, self._session(), row.clock)
        gates += verdict.record_gates(mine.value, margin)
        self.unlike = self._unlike(mine)
        same_environment = not self.unlike
        self.unlike += autotune.differing_choices(mine.choices, timed["details"].get("choices", {}))
        return gates, same_environment, True

    def _other_clock(self, mine: Result, details: Mapping[str, Any]) -> str:
        """Say that nothing was held against `mine`, and why a side is on a clock of its own."""
        why = next((f": {details[k]}" for k in ("no graph", "no queue") if k in details), "")
        return (
            f"timed on the {self.row.clock} clock{why}; the result stored in {self._relative()} is"
            f" of the {mine.clock} clock: not compared"
        )

    def _session(self) -> float:
        """Return this product's session-to-session spread on this clock."""
        return session_sd(self.run.stored(self.client.path).results.values(), self.row.clock)

    def _unlike(self, mine: Result) -> list[str]:
        """Return for which reasons a loss against `mine` need not be the code's."""
        stored, row = self.run.stored(self.client.path), self.row
        then, now = stored.environments.get(mine.environments[-1], {}), row.environment
        names = differences(then, now, row.clock, several=self.case.gpus > 1)
        unlike = [f"{n} was {then.get(n)} when stored, and is {now.get(n)}" for n in names]
        if mine.sources.get("baseline") != row.sources["baseline"]:
            unlike.append("the baseline is not the one that was stored")
        return unlike

    def limit(self, timed: Mapping[str, Any]) -> None:
        """Put the share of the machine's limit in the row.

        Raises:
            Failed: for a side that is faster than the machine can be.
        """
        peaks = self.run.peaks(self.client.machine.product)
        if self.case.gpus > 1:
            several = self.run.link_peaks(self.client.machine.with_count(self.case.gpus))
            peaks = peaks_module.joined(peaks, several)
        if peaks is None or self.run.settings.aa:
            return
        limit = peaks_module.limit_of(Work(**timed["work"]), self.row.bound, peaks)
        if limit is None:
            return
        seconds = min(self.row.pair_seconds())
        self.row.share = peaks_module.share(limit, self.row.pair_seconds()[1])
        self.row.limit = limit.name
        linked = self.case.gpus if limit.name in peaks_module.LINKS else 1
        product = self.client.machine.with_count(linked)
        path = peaks_module.path_of(self.run.settings.baselines, product)
        self.row.origins["limit"] = self._relative(path)
        cold = self.case.pair.l2 == "cold" and self.row.clock == "graph"
        if cold and peaks_module.implausible(limit, seconds):
            self.row.verdict = "invalid"
            raise Failed(
                f"{duration(seconds)} is less than the {duration(limit.seconds)} that this"
                f" machine's measured {limit.name} rate allows for the declared work:\n"
                "the work is overstated, or a side does less of it"
            )

    def spread(self) -> float:
        """Return the spread of one process's value: recorded, pooled, or this clock's default."""
        clock = self.row.clock
        results = list(self.run.stored(self.client.path).results.values())
        others = pooled(results, clock)
        mine = self._mine()
        own = mine.own_spread if mine is not None and mine.clock == clock else None
        if own is not None and mine is not None:
            return stats.pooled_spread(own, mine.processes, others)
        return stats.rms(others) if len(others) >= 3 else verdict.DEFAULT_SPREAD[clock]

    def interval(self, values: list[float]) -> None:
        """Put the mean of `values` and its 99 % interval in the row."""
        row = self.row
        row.value = fmean(values)
        spread = row.spread or 0.0
        row.low, row.high = verdict.interval(row.value, spread, len(values))

    def refuse_below_claim(self, values: list[float]) -> None:
        """Fail what the votes left open where all recorded processes together are below the claim.

        Raises:
            Failed: nothing is stored then.
        """
        row = self.row
        if row.verdict != "inconclusive" or not isinstance(row.claim, (int, float)):
            return
        value, claim = fmean(values), math.log(row.claim)
        if value < claim:
            row.verdict = "fail"
            row.reasons.append(
                f"{ratio(value)} in {len(values)} processes is below {bare(claim)}"
                f" ({row.origins['claim']}): not stored"
            )
            raise Failed("\n".join([*row.reasons, *self.client.commands()]))

    def _explain(
        self, gates: list[verdict.Gate], decision: verdict.Decision, first: Mapping[str, Any]
    ) -> None:
        """Say for each missed gate which number missed which limit, and where that came from."""
        origin = {
            "claim": "at_least on the page",
            "neutral": "at_least='neutral' on the page",
            "record": f"stored in {self._relative()}",
            "improvement": f"stored in {self._relative()}",
            "same-slower": "the same side, built again",
            "same-faster": "the same side, built again",
        }
        for gate in gates:
            outcome = decision.outcomes[gate.name]
            if outcome in ("clear", "green"):
                continue
            votes = ", ".join(bare(v.value) for v in decision.votes)
            self.row.reasons.append(
                f"{ratio(first['value'])} against {ratio(gate.limit)} ({origin[gate.name]}),"
                f" margin {gate.red:.1%}; votes of fresh processes: {votes or 'none'}"
                f" -> {outcome}"
            )
            if gate.name in ("record", "improvement"):
                self.row.reasons += self.unlike

    def _relative(self, path: Path | None = None) -> str:
        """Return `path`, or that of the stored result, as people write it: below the root."""
        return path_below(str(path or self.client.path), str(self.run.settings.root))

    def _accept(self) -> list[str]:
        """Return how to accept a result; a claim is the page's, and accepted nowhere else."""
        stored = not self.run.settings.aa and self._mine() is not None
        if self.row.verdict == "fail" or (not stored and self.row.verdict != "new"):
            return []
        return accept_commands(self.client.where["typed"], stored=stored)
