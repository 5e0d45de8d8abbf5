"""The verdict on a candidate, and its reason codes."""

from __future__ import annotations

import math
from statistics import median

from msgspec import Struct

from ..page.pair import ROLES
from ..results import stats
from ..results.messages import TIMEOUT_HINT, Reply
from ..results.task_results import TimeResult
from ..results.verdict import DEFAULT_SPREAD, Reading, effective_spread

REASONS = {
    "accepted": "the outputs are right, and nothing contradicts the time",
    "wrong_values": "an output differs from the reference",
    "wrong_structure": "a name, a parameter or an output is missing, or has another form",
    "protection": "a protection refused it: it is not allowed, whatever it returns",
    "import_error": "its file cannot be imported",
    "missing_package": "its file imports a package that is not installed",
    "raised": "it raised an exception",
    "timeout": "it made no progress within the time limit",
    "died": "its process ended",
    "out_of_memory": "it needs more memory than the limit",
    "problem_error": "the problem itself cannot be judged",
    "disturbed": "something else used the machine, so there is no verdict",
}
"""The reason codes of a verdict."""
NO_VERDICT = ("problem_error", "disturbed")
"""Reasons that say nothing about the candidate."""
BY_ERROR = {
    "wrong": "wrong_values",
    "page": "protection",
    "side": "raised",
    "fault": "raised",
    "memory": "out_of_memory",
    "died": "died",
    "timeout": "timeout",
}
"""The reason code for each kind of error. An exception may have its own code."""


class Verdict(Struct, kw_only=True):
    """The verdict on a candidate.

    Attributes:
        candidate: the candidate's file.
        accepted: whether the candidate's outputs are right and its time is credible.
        reason: one of `REASONS`.
        message: the reason in words.
        trace: the lines of the candidate that raised an exception.
        speedup, low, high: the speedup and its 99 % interval, or None if nothing was timed.
        clock: the name of the clock that the speedup was measured with.
        seconds: seconds per call of ``baseline`` and ``candidate``.
        memory: bytes by name. On a GPU, ``baseline`` and ``candidate`` are the bytes that one call
            needs in addition to the inputs. ``process`` is the peak host memory of the candidate's
            process.
        spent: seconds that the whole judgement took.
    """

    candidate: str = ""
    accepted: bool = False
    reason: str
    message: str = ""
    trace: str = ""
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    clock: str = ""
    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    spent: float = 0.0


class Refused(Exception):
    """A candidate is not accepted, for one of `REASONS`."""

    def __init__(self, reason: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.reason, self.trace = reason, trace


def refused_by(reply: Reply, reason: str) -> Refused:
    message = reply.message.replace(TIMEOUT_HINT, "allow more time with --timeout=SECONDS")
    return Refused(reason, message, reply.trace)


def set_speedup(verdict: Verdict, timing: TimeResult) -> None:
    reading = Reading(timing.value, timing.error)
    spread = effective_spread(DEFAULT_SPREAD[timing.clock], reading)
    low, high = stats.interval(timing.value, spread)
    verdict.speedup, verdict.low, verdict.high = map(math.exp, (timing.value, low, high))
    verdict.clock = timing.clock
    medians = median(timing.baseline), median(timing.optimized)
    verdict.seconds = dict(zip(("baseline", "candidate"), medians, strict=True))
    peaks = timing.details.get("peak_bytes", {})
    names = dict(zip(ROLES, ("baseline", "candidate"), strict=True))
    verdict.memory.update({names[role]: count for role, count in peaks.items()})
