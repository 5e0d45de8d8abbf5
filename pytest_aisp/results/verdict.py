"""The verdict of a case: gates, screen, and votes.

A gate compares ln(speedup) with one limit. If the first measurement is past the gate's screen (a
threshold), the case is a suspect and is measured again in up to five fresh processes. Each of these
measurements is a vote, and three red votes make the case red. `verdict.md` explains this and has
the error rates, which are tested on a simulated device (`pytest_aisp.timing.fake_device`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from .stats import rms

if TYPE_CHECKING:
    from .row import CaseRecord

VOTES = 3
ATTEMPTS = 5
SCREEN, VOTE = 2.2, 2.8
"""The loss above which a case is a suspect, and the loss above which a vote is red, in spreads."""
EXCESS = 1.5
"""A process's standard error replaces the recorded spread if the error is more than this many times
the spread.
"""
DETECTABLE = 4.6
"""The loss that screen and votes together detect in 99 % of trials, in spreads."""
DETECTABLE_CODE = 6.0
"""The loss of a changed side that is detected in 499 of 500 trials, in spreads."""
PLANTED = 0.01
"""The smallest slowdown that a run's canary plants."""
MOVED_SHARE, MOVED_LEAST = 0.05, 5
"""The environment has changed if more cases than this share, and more than this number, are
suspects in the same direction.
"""
RECORD_FLOOR = 0.02
RECORD_SPREADS = 10.0
SESSION_SHIFTS = 5.0
"""Number of session spreads to add to the detectable loss.

All votes come from one session, so the votes do not show how much sessions differ.
"""
UNKNOWN_SESSION = {"graph": 0.010, "queue": 0.020, "host": 0.10, "cpu": 0.05, "process": 0.05}
"""The spread between sessions on each clock, assumed until sessions are recorded (spread.md)."""

DEFAULT_SPREAD = {"graph": 0.0025, "queue": 0.005, "host": 0.030, "cpu": 0.030, "process": 0.030}
"""The spread of one process's value on each clock, assumed until the product has a spread."""
NEUTRAL_FLOOR = {"graph": 0.02, "queue": 0.03, "host": 0.05, "cpu": 0.10, "process": 0.10}
"""The smallest margin on each clock for `neutral` claims and for stored results."""

INVALID_RUN = 17
"""Exit code if the environment moved, the canary failed, or a case was disturbed."""

Outcome = Literal["clear", "red", "green", "open"]
RED = ("fail", "regressed", "wrong", "invalid")
DISTURBED = "disturbed"
"""The verdict of a case that the machine disturbed. This verdict says nothing about the code."""
NOT_COMPARED = "not compared with its version"
"""Part of every remark about a side that may have changed, but was not compared."""
NOT_KNOWN = "since it was recorded is not known"
"""Part of the remark about a case of which not all files are known."""
NOT_RECORDED = "the recording holds"
"""The start of the reason why a replay lacks samples that it needs for a verdict."""
LOOK = (*RED, DISTURBED, "inconclusive", "stale")
"""Verdicts of cases that somebody should look at."""
ORDER = (*RED, DISTURBED, "stale", "inconclusive", "improved", "new", "pass", "checked", "compiled")
"""All verdicts: first the red ones, then the others in `LOOK`, then the rest."""


class Reading(NamedTuple):
    """The result of one process: ln(speedup), and its standard error from its laps."""

    value: float
    error: float = 0.0


def effective_spread(spread: float, reading: Reading) -> float:
    """Return the spread to use for `reading`: the recorded spread, or the reading's larger error.

    Some sessions vary more than the recorded sessions (spread.md). The error replaces the spread
    only if the error is above `EXCESS` times the spread. With four laps, two of each order, 6 %
    of processes exceed that limit by chance. A higher limit would miss too many noisy processes.
    """
    return reading.error if reading.error > EXCESS * spread else spread


@dataclass(frozen=True)
class Gate:
    """One limit for ln(speedup). `sign` is -1 for the gate that looks for gains.

    Attributes:
        name: ``claim``, ``neutral``, ``record``, ``improvement``, ``code``, ``same-slower``,
            ``same-faster``.
        limit: the ln(speedup) with which the case is compared.
        screen: a case with a deficit above `screen` is a suspect.
        red, green: a vote is red if its deficit is above `red`, and green if it is at most `green`.
        spread: the spread of one process, if `red` is derived from the spread. If the processes of
            this case have larger errors, a red vote needs a larger deficit.
    """

    name: str
    limit: float
    screen: float
    red: float
    green: float
    sign: int = 1
    spread: float = math.inf

    def deficit(self, value: float) -> float:
        """Return limit minus `value`, or `value` minus limit for the gate that looks for gains."""
        return self.sign * (self.limit - value)

    def decide(self, first: Reading, votes: Sequence[Reading]) -> Outcome:
        """Return the current outcome: `open` until there are three red or three green votes."""
        if self.deficit(first.value) <= self.screen:
            return "clear"
        together = Reading(0.0, rms(reading.error for reading in [first, *votes]))
        if sum(self._is_red(vote, together) for vote in votes) >= VOTES:
            return "red"
        if sum(self.deficit(vote.value) <= self.green for vote in votes) >= VOTES:
            return "green"
        return "open"

    def _is_red(self, vote: Reading, together: Reading) -> bool:
        """Return whether `vote` is red by its own error and also by the error of all processes."""
        wide = max(effective_spread(self.spread, vote), effective_spread(self.spread, together))
        excess = 0.0 if math.isinf(self.spread) else VOTE * (wide - self.spread)
        return self.deficit(vote.value) > self.red + excess


def claim_gate(speedup: float, spread: float) -> Gate:
    """Return the gate of ``at_least=speedup``: red 2.8 spreads below, clear 2.2 spreads above."""
    screen, vote = -SCREEN * spread, VOTE * spread
    return Gate("claim", math.log(speedup), screen, vote, 0.0, spread=spread)


def neutral_gate(margin: float) -> Gate:
    """Return the gate of ``at_least="neutral"``: red only if the loss exceeds `margin`."""
    return Gate("neutral", 0.0, 0.8 * margin, margin, margin)


def record_gates(stored: float, margin: float) -> tuple[Gate, Gate]:
    """Return the gates against a stored ln(speedup): one for losses, one for gains."""
    return (
        Gate("record", stored, 0.8 * margin, margin, margin),
        Gate("improvement", stored, 0.8 * margin, margin, margin, sign=-1),
    )


def code_gate(spread: float, first: Reading) -> Gate:
    """Return the gate of a changed side against its old version: only a loss is red.

    Args:
        spread: the recorded spread of one process.
        first: the result of the first process. If its error replaces the spread, the threshold for
            a suspect rises less than the threshold for a red vote, because a needless suspect costs
            only votes.
    """
    screen, vote = SCREEN * max(spread, effective_spread(spread, first) / EXCESS), VOTE * spread
    return Gate("code", 0.0, screen, vote, vote, spread=spread)


def planted_share(spread: float) -> float:
    """Return the slowdown that a run's canary plants: 1 %, or more if the code gate needs more."""
    return max(PLANTED, math.expm1(DETECTABLE_CODE * spread))


def sees(reading: Reading, spread: float) -> bool:
    """Return whether a slowed-down side with this `reading` becomes a suspect of the code gate."""
    return code_gate(spread, reading).decide(reading, []) != "clear"


def same_gates(spread: float) -> tuple[Gate, Gate]:
    """Return the gates for comparing a side with itself in one process, as in an A/A trial."""
    screen, vote = SCREEN * spread, VOTE * spread
    return (
        Gate("same-slower", 0.0, screen, vote, vote, spread=spread),
        Gate("same-faster", 0.0, screen, vote, vote, sign=-1, spread=spread),
    )


def record_margin(spread: float, session: float, clock: str) -> float:
    """Return the margin against a stored result: 10 combined spreads, or a larger floor."""
    both = math.hypot(spread, session)
    return max(RECORD_FLOOR, NEUTRAL_FLOOR[clock], RECORD_SPREADS * both)


@dataclass(frozen=True)
class Decision:
    """The outcome of each gate, and the votes."""

    outcomes: dict[str, Outcome]
    votes: tuple[Reading, ...]

    @property
    def suspect(self) -> bool:
        return any(outcome != "clear" for outcome in self.outcomes.values())


def decide(
    first: Reading, gates: Sequence[Gate], remeasure: Callable[[], Reading | None]
) -> Decision:
    """Screen `first`, then vote with `remeasure` until every gate is decided.

    Args:
        first: the result of the first process.
        remeasure: a function that measures in one more fresh process, or returns None if no budget
            is left.
    """
    votes: list[Reading] = []
    while len(votes) < ATTEMPTS and any(g.decide(first, votes) == "open" for g in gates):
        vote = remeasure()
        if vote is None:
            break
        votes.append(vote)
    return Decision({g.name: g.decide(first, votes) for g in gates}, tuple(votes))


def verdict_of(decision: Decision, *, stored: bool, same_environment: bool) -> str:
    """Return the verdict. A loss against a result from another environment makes it `stale`."""
    outcomes = decision.outcomes
    if "red" in (outcomes.get("claim"), outcomes.get("neutral")):
        return "fail"
    if "red" in (outcomes.get("record"), outcomes.get("same-slower")):
        return "regressed" if same_environment else "stale"
    if "open" in outcomes.values():
        return "inconclusive"
    if "red" in (outcomes.get("improvement"), outcomes.get("same-faster")):
        return "improved"
    return "pass" if stored else "new"


Cause = Literal["", "code", "environment", "machine", "tuner", "noise"]
"""The cause of a red, stale or inconclusive verdict, if the run has evidence of a cause."""


class Finding(NamedTuple):
    """The result of one stage of a case: the verdict of this stage alone, reasons, and cause.

    Attributes:
        missed_limit: True for a `fail` because of a missed claim or a missed limit of a metric.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    cause: Cause = ""
    missed_limit: bool = False


CODE_IS_AS_FAST = Finding("pass")
"""The finding of a changed side that is as fast as its old version."""


def case_cause(findings: Sequence[Finding], word: str) -> Cause:
    """Return the cause of the findings that led to the verdict `word`.

    If nothing else explains a red or stale verdict, the cause is the code. But if the changed code
    is as fast as the old code, the cause of a loss is the machine.
    """
    words = {"regressed": ("stale", word), "fail": ("regressed", word)}.get(word, (word,))
    decisive = [finding for finding in findings if finding.verdict in words]
    causes = [finding.cause for finding in decisive if finding.cause]
    compared: tuple[Cause, ...] = (
        "code",
        "environment",
    )  # a direct comparison is the best evidence
    if found := [cause for cause in compared if cause in causes]:
        return found[0]
    if causes or word not in (*RED, "stale"):
        return causes[0] if causes else ""
    return "machine" if any(finding is CODE_IS_AS_FAST for finding in findings) else "code"


def case_verdict(findings: Iterable[Finding], *, strict_environment: bool = False) -> str:
    """Return the verdict of a case: the worst of its findings, or empty without findings.

    Args:
        strict_environment: True to treat a loss in another environment as a regression.
    """
    words = [finding.verdict for finding in findings]
    if strict_environment:
        words = ["regressed" if word == "stale" else word for word in words]
    return min(words, key=ORDER.index, default="")


def detectable(gates: Sequence[Gate], spread: float, session: float) -> float:
    """Return the smallest loss of ln(speedup) that is detected in 99 % of trials.

    If there is a stored result, the loss is relative to it, and includes the spread between
    sessions. Without a stored result, the loss is relative to the claim. If the loss is 1.8 spreads
    larger than `Gate.red`, at least three of five votes are red in 99 % of trials.
    """
    record = next((g for g in gates if g.name == "record"), None)
    if record is None:
        return max(g.red for g in gates if g.sign > 0) + (DETECTABLE - VOTE) * spread
    return record.red + (DETECTABLE - VOTE) * spread + SESSION_SHIFTS * session


def environment_moved(rows: Iterable[CaseRecord]) -> bool:
    """Return whether too many of the timed cases are suspects in the same direction."""
    suspects = [row.suspect for row in rows if row.value is not None]
    limit = max(MOVED_LEAST, MOVED_SHARE * len(suspects))
    return any(suspects.count(direction) > limit for direction in (1, -1))
