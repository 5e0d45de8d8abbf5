"""What is stored: a result of each case, and the environments in which they were recorded."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

from .metric_limits import METRICS
from .stats import rms, session_spread, trimmed_spread
from .verdict import DEFAULT_SPREAD, UNKNOWN_SESSION

Environment: TypeAlias = Mapping[str, Any]
Environments: TypeAlias = Mapping[str, Environment]
Results: TypeAlias = "Mapping[str, Result]"
VERSIONS = ("driver", "cuda", "torch", "triton")
"""The facts of an environment that are always known, and compared."""
COMPARED = ("cudnn", "cublas", "power_limit_w", "mig")
"""Facts that are compared where both environments know them: they choose and pace GPU kernels."""
COMPARED_BY_HOST = ("cpu", "governor")
"""Facts that are compared as well where the host's speed enters: on `HOST_CLOCKS`."""
HOST_CLOCKS = ("host", "cpu", "process")
COMPARED_BY_RANKS = ("nccl", "links")
"""Facts that are compared as well where GPUs work together."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is stored of one case, rounded when built to what the file holds.

    Attributes:
        baseline_us, optimized_us: microseconds per call, to four digits; None, as `clock`, where
            the page asks for goals and for no time.
        share: share of the machine's `limit` that the optimized side reaches, as in 0.92.
        limit: name of that limit, as in ``copy``.
        clock: ``graph``, ``queue``, ``host``, ``cpu``, ``process``.
        values: ln(speedup) by session, by process, to 0.00001; empty where nothing was timed.
        environments: for each session, its key in the file's table of environments.
        sources: hex hashes of the sides' sources, ``baseline`` and ``optimized``.
        choices: tuning choices of the sides; JSON types.
        goals: by name, as in ``memory``, what a call of ``baseline`` and of ``optimized`` takes;
            empty where the page asks for nothing but time.
        samples: hex hash of the file with the samples.

    With several sessions, whatever is not by session is the latest one's. What was not timed has
    one session.

    Raises:
        ValueError: for a field that the file could not hold.
    """

    baseline_us: float | None = None
    optimized_us: float | None = None
    share: float | None = None
    limit: str | None = None
    clock: str | None = None
    values: tuple[tuple[float, ...], ...] = ()
    environments: tuple[str, ...]
    sources: Mapping[str, str]
    choices: Mapping[str, Any] = field(default_factory=dict)
    goals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    samples: str | None = None

    def __post_init__(self) -> None:
        untimed = all(getattr(self, name) in (None, ()) for name in TIMES)
        for name, form in FORMS.items():
            value = getattr(self, name)
            absent = value is None and name in OPTIONAL
            if not absent and not (untimed and name in TIMES):
                object.__setattr__(self, name, converted(name, value, *form))
        if untimed and not self.goals:
            raise ValueError(f"goals={self.goals} must not be empty where nothing was timed")
        if untimed and (self.share, self.limit) != (None, None):
            raise ValueError(f"share={self.share} of {self.limit} must be None without a time")
        names = self.environments
        if not len(set(names)) == len(names) == max(1, len(self.values)):
            raise ValueError(f"environments={names} must be one per session, all other")

    @property
    def value(self) -> float | None:
        """ln(speedup): the mean over sessions of the mean over processes."""
        return fmean(fmean(session) for session in self.values) if self.values else None

    @property
    def speedup(self) -> float | None:
        return None if self.value is None else math.exp(self.value)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per call of ``baseline`` and ``optimized``, or nothing."""
        times = {"baseline": self.baseline_us, "optimized": self.optimized_us}
        return {side: time * 1e-6 for side, time in times.items() if time is not None}

    @property
    def sessions(self) -> int:
        return len(self.environments)

    @property
    def processes(self) -> int:
        """How many processes were measured, all sessions together."""
        return sum(map(len, self.values))

    @property
    def own_spread(self) -> float | None:
        """Spread of a process's value, each session about its own centre; None below 3."""
        spreads = [trimmed_spread(session) for session in self.values if len(session) >= 3]
        return rms(spreads) if spreads else None


@dataclass(frozen=True)
class Stored:
    """What one file holds: a product's results for one chapter, by page, function and case id."""

    product: str
    environments: Environments = field(default_factory=dict)
    results: Results = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = self.environments.items()
        table = {k: converted(f"environments[{k!r}]", e, *TABLE) for k, e in facts}
        object.__setattr__(self, "environments", table)
        for key, result in self.results.items():
            for name in set(result.environments) - set(table):
                raise ValueError(f"results[{key!r}]: its environment {name!r} is not in the table")


def environment_key(environment: Environment) -> str:
    """Return a short key that follows from the facts: the first 8 digits of their hash."""
    return hashlib.sha256(json.dumps(plain_table(environment)).encode()).hexdigest()[:8]


def joined(product: str, count: int) -> str:
    """Return the product of `count` GPUs of `product`: ``nvidia-h200-x2``."""
    return product if count == 1 else f"{product}-x{count}"


def base_of(product: str) -> str:
    """Return the product of one GPU: ``nvidia-h200`` for ``nvidia-h200-x2``."""
    return re.sub(r"-x\d+$", "", product)


def differences(
    one: Environment, other: Environment, clock: str, *, several: bool = False
) -> list[str]:
    """Return the facts for which times on `clock` in two environments are not comparable.

    A fact that one of them does not know is no difference: older files lack some. Any other fact,
    as the NUMA node, is only recorded.

    Args:
        several: whether several GPUs worked together; then `COMPARED_BY_RANKS` count too.
    """
    names = COMPARED + (COMPARED_BY_HOST if clock in HOST_CLOCKS else ())
    names += COMPARED_BY_RANKS if several else ()
    known = [name for name in names if None not in (one.get(name), other.get(name))]
    return [name for name in (*VERSIONS, *known) if one.get(name) != other.get(name)]


def pooled(results: Iterable[Result], clock: str) -> list[float]:
    """Return the own spreads of the results measured on `clock`."""
    spreads = (result.own_spread for result in results if result.clock == clock)
    return [spread for spread in spreads if spread is not None]


def session_sd(results: Iterable[Result], clock: str) -> float:
    """Return the session-to-session sd on `clock`: what is assumed, until results show better."""
    cases = [result.values for result in results if result.clock == clock]
    return session_spread(cases, UNKNOWN_SESSION[clock])


def converted(name: str, value: Any, convert: Callable[[Any], Any], legal: str) -> Any:
    """Return what `convert` makes of the field `name`; a ValueError says what is legal."""
    try:
        return convert(value)
    except (AttributeError, TypeError, ValueError, LookupError):
        raise ValueError(f"{name}={value!r} must be {legal}") from None


def _rounded(value: Any, form: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not low <= value <= high:
        raise ValueError
    return float(format(value, form)) + 0.0  # no -0.0: equal results must give the same text


def _some(value: Any, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    return tuple(map(convert, value))


def _word(value: Any, pattern: str = ".+") -> str:
    if not re.fullmatch(pattern, value):
        raise ValueError
    return str(value)


def _hashes(value: Any) -> dict[str, str]:
    if set(value) != {"baseline", "optimized"}:
        raise ValueError
    return {side: _word(value[side], _HEX) for side in ("baseline", "optimized")}


def plain_table(value: Any) -> dict[str, Any]:
    """Return a sorted copy of a table as reading it back will give it."""
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(json.loads(json.dumps(dict(value), sort_keys=True, allow_nan=False)))


def _goals(value: Any) -> dict[str, Any]:
    """Return a sorted copy of what both sides take of each goal."""
    table = plain_table(value)
    if not table.keys() <= METRICS.keys():
        raise ValueError
    for both in table.values():
        named = both.keys() - {"noise"} == {"baseline", "optimized"}
        if not named or not all(map(_amount, both.values())):
            raise ValueError
    return table


def _amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18


def _sessions(value: Any) -> tuple[Any, ...]:
    return _some(value, lambda session: _some(session, lambda v: _rounded(v, ".5f", -50, 50)))


Form: TypeAlias = tuple[Callable[[Any], Any], str]
_HEX = "[0-9a-f]+"
_TIME: Form = (lambda v: _rounded(v, ".4g", 1e-6, 1e15), "a number from 1e-6 to 1e15")
RATIO: Form = (lambda v: _rounded(v, ".4g", 0, 1e22), "a number from 0 to 1e22")
TABLE: Form = (plain_table, "a table of finite JSON values")
FORMS: dict[str, Form] = {
    "baseline_us": _TIME,
    "optimized_us": _TIME,
    "share": RATIO,
    "limit": (_word, "a name"),
    "clock": (lambda v: _word(v, "|".join(DEFAULT_SPREAD)), f"one of {', '.join(DEFAULT_SPREAD)}"),
    "values": (_sessions, "a list of sessions, each a list of numbers from -50 to 50"),
    "environments": (lambda v: _some(v, _word), "a list of names"),
    "sources": (_hashes, "two hex hashes, of baseline and optimized"),
    "choices": TABLE,
    "goals": (_goals, f"by {' or '.join(METRICS)}, amounts of baseline and optimized, and noise"),
    "samples": (lambda v: _word(v, _HEX), "a hex hash"),
}
OPTIONAL = ("share", "limit", "samples")
TIMES = ("baseline_us", "optimized_us", "clock", "values")
"""What a result has all of, or nothing."""
