"""The contents of a file of stored results: one result per case, and the environments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from .messages import Json
from .metric_limits import check_goals
from .stats import case_session_spread, rms, session_spread, trimmed_spread
from .verdict import UNKNOWN_SESSION

Environment: TypeAlias = Mapping[str, Json]
Environments: TypeAlias = Mapping[str, Environment]
VERSIONS = ("driver", "cuda", "torch", "triton")
"""Facts that every environment has. They are always compared."""
COMPARED = ("cudnn", "cublas", "power_limit_w", "mig")
"""Facts that affect GPU kernels. They are compared if both environments have them."""
COMPARED_BY_HOST = ("cpu", "governor")
"""Additional facts compared on `HOST_CLOCKS`, because the host's speed affects these clocks."""
HOST_CLOCKS = ("host", "cpu", "process")
SIMULATED = "simulated-"
"""The prefix of a product name for results of a simulated timer. No real product has this prefix.
"""
COMPARED_BY_RANKS = ("nccl", "links")
"""Additional facts compared for cases on several GPUs."""


Role = Literal["baseline", "optimized"]
Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]+\Z")]
SYNTAX = "syntax:"
"""The prefix of a digest of a syntax tree. A stored digest without this prefix is an older digest
of source text (`page.sources`).
"""
Digest = Annotated[str, Meta(pattern=rf"\A({SYNTAX})?[0-9a-f]+\Z")]
Blob = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
Name = Annotated[str, Meta(pattern=r"\A.+\Z")]
Microseconds = Annotated[float, Meta(ge=1e-6, le=1e15)]
Ratio = Annotated[float, Meta(ge=0, le=1e22)]
LogRatios = Annotated[tuple[Annotated[float, Meta(ge=-50, le=50)], ...], Meta(min_length=1)]
Amount = Annotated[int, Meta(ge=0, lt=10**18)] | Annotated[float, Meta(ge=0, lt=1e18)]
ROLES: tuple[Role, ...] = get_args(Role)
TIMES = ("baseline_us", "optimized_us", "clock", "values")
"""The fields that a timed result has. A result without timing has none of them."""


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The stored result of one case. Its numbers are rounded to the digits in the file.

    If there are several sessions, times and the share are geometric means over the sessions. Other
    fields with a single value are from the latest session.

    Attributes:
        baseline_us, optimized_us: microseconds per call, to four digits.
        share: share of the machine's `limit` that the optimized side reaches, such as 0.92.
        limit: name of that limit, such as ``copy``.
        clock: ``graph``, ``queue``, ``host``, ``cpu`` or ``process``.
        values: for each session, ln(speedup) of each process, rounded to 0.00001.
        environments: for each session, its key in the file's table of environments.
        sources: digests of the sources of both sides.
        files: the git blob of the page and of each file that the sides use, by path.
        machine_code: for each role, a digest of the machine code of the kernels that the side
            launches.
        choices: tuning choices of the sides.
        goals: for each metric, the `metric_limits.Amounts` of all sessions together.
        samples: SHA-256 of the file of samples of the run that last wrote this result. It is None
            if that run kept no artifacts.

    Raises:
        ValueError: if fields contradict each other. Only `of` also checks the type of each field.
    """

    baseline_us: Microseconds | None = None
    optimized_us: Microseconds | None = None
    share: Ratio | None = None
    limit: Name | None = None
    clock: Literal["graph", "queue", "host", "cpu", "process"] | None = None
    values: tuple[LogRatios, ...] = ()
    environments: tuple[Name, ...]
    sources: Mapping[str, Digest]
    files: Mapping[Name, Blob] = {}
    machine_code: Mapping[Role, Hash] = {}
    choices: Mapping[str, Json] = {}
    goals: Mapping[str, Mapping[str, Amount]] = {}
    samples: Hash | None = None

    @classmethod
    def of(cls, plain: Mapping[str, Json]) -> Result:
        """Convert plain JSON types to a result. Raise ValueError if they are not a valid result."""
        return msgspec.convert(plain, cls)

    def __post_init__(self) -> None:
        rounded = {
            "baseline_us": _rounded(self.baseline_us, ".4g"),
            "optimized_us": _rounded(self.optimized_us, ".4g"),
            "share": _rounded(self.share, ".4g"),
            "values": tuple(tuple(_rounded(v, ".5f") for v in values) for values in self.values),
            "environments": tuple(self.environments),
            "sources": dict(sorted(self.sources.items())),
            "files": dict(sorted(self.files.items())),
            "machine_code": dict(sorted(self.machine_code.items())),
            "choices": _sorted_table("choices", self.choices),
            "goals": _sorted_table("goals", self.goals),
        }
        for name, value in rounded.items():
            force_setattr(self, name, value)
        self._check()

    def _check(self) -> None:
        missing = [name for name in TIMES if getattr(self, name) in (None, ())]
        if 0 < len(missing) < len(TIMES):
            raise ValueError(f"{missing[0]} is missing; a timed result has {', '.join(TIMES)}")
        if missing and not self.goals:
            raise ValueError("goals must not be empty if nothing was timed")
        if missing and (self.share, self.limit) != (None, None):
            raise ValueError(f"share={self.share} of {self.limit} must be None without a time")
        if self.sources.keys() != set(ROLES):
            raise ValueError(f"sources={self.sources} must be of baseline and optimized")
        check_goals(self.goals)
        names = self.environments
        if not len(set(names)) == len(names) == (len(self.values) or max(1, len(names))):
            raise ValueError(f"environments={names} must be one per session, all different")

    @property
    def value(self) -> float | None:
        """The mean of the sessions' values. A session's value is the mean of its processes."""
        return fmean(fmean(session) for session in self.values) if self.values else None

    @property
    def speedup(self) -> float | None:
        return None if self.value is None else math.exp(self.value)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per call of ``baseline`` and ``optimized``; empty for an untimed result."""
        times = {"baseline": self.baseline_us, "optimized": self.optimized_us}
        return {side: time * 1e-6 for side, time in times.items() if time is not None}

    @property
    def sessions(self) -> int:
        return len(self.environments)

    @property
    def processes(self) -> int:
        """The total number of measured processes over all sessions."""
        return sum(map(len, self.values))

    @property
    def own_spread(self) -> float | None:
        """Standard deviation in sessions with 3 or more processes. None if it is not known.

        If no session has 3 processes, two or more sessions with 2 processes are used.
        """
        spreads = [trimmed_spread(session) for session in self.values if len(session) >= 3]
        pairs = [abs(a - b) / math.sqrt(2) for a, b in (v for v in self.values if len(v) == 2)]
        if not spreads and len(pairs) >= 2:
            spreads = pairs
        return rms(spreads) if spreads else None

    @property
    def has_text_digests(self) -> bool:
        return not all(digest.startswith(SYNTAX) for digest in self.sources.values())

    def with_syntax(self, syntax: Mapping[str, str], text: Mapping[str, str]) -> Result:
        """Return the result with syntax digests instead of text digests for the unchanged sides.

        Args:
            syntax, text: today's digests of both sides, of the syntax trees and of the texts.
        """
        then = self.sources
        met = {role: digest for role, digest in syntax.items() if then[role] == text.get(role)}
        return replace(self, sources={**then, **met}) if met else self


Results: TypeAlias = Mapping[str, Result]


class Stored(Struct, frozen=True):
    """The content of one file: the results of one product for one chapter, by key."""

    product: str
    environments: Environments = {}
    results: Results = {}

    def __post_init__(self) -> None:
        facts = self.environments.items()
        table = {name: _sorted_table(f"environments[{name!r}]", fact) for name, fact in facts}
        force_setattr(self, "environments", table)
        for key, result in self.results.items():
            for name in set(result.environments) - set(table):
                raise ValueError(f"results[{key!r}]: its environment {name!r} is not in the table")
        for name, fact in table.items():
            if fact.get("timer") and not self.product.startswith(SIMULATED):
                timer = f"the timer {fact['timer']}, not the plugin's own"
                raise ValueError(f"environments[{name!r}] is of {timer}, on {self.product}")


def joined(product: str, count: int, nodes: int = 1) -> str:
    """Return the product name of `count` GPUs of `product`, such as ``nvidia-h200-x2``.

    Args:
        nodes: the number of machines that these GPUs are in, in equal shares. 16 GPUs in two
            machines are ``nvidia-h200-2x8``, because the links between machines are slower.
    """
    if count == 1:
        return product
    return f"{product}-x{count}" if nodes == 1 else f"{product}-{nodes}x{count // nodes}"


def base_of(product: str) -> str:
    """Return the product name of a single GPU: ``nvidia-h200`` for ``nvidia-h200-x2``."""
    return re.sub(r"-\d*x\d+$", "", product)


def differences(
    one: Environment, other: Environment, clock: str, *, several: bool = False
) -> list[str]:
    """Return the names of the facts whose differences make times on `clock` incomparable.

    A fact that is missing from one environment does not count as a difference, because older files
    lack some facts. Some facts, such as the NUMA node, are recorded but never compared.

    Args:
        several: True if several GPUs worked together. Then `COMPARED_BY_RANKS` are compared too.
    """
    names = COMPARED + (COMPARED_BY_HOST if clock in HOST_CLOCKS else ())
    names += COMPARED_BY_RANKS if several else ()
    known = [name for name in names if None not in (one.get(name), other.get(name))]
    return [name for name in (*VERSIONS, *known) if one.get(name) != other.get(name)]


def pooled(results: Iterable[Result], clock: str) -> list[float]:
    """Return the `Result.own_spread` of each result that was measured on `clock`."""
    spreads = (result.own_spread for result in results if result.clock == clock)
    return [spread for spread in spreads if spread is not None]


def session_sd(results: Iterable[Result], clock: str, mine: Result | None = None) -> float:
    """Return the standard deviation between sessions of ln(speedup); without data, an assumed one.

    Args:
        results: all results of the file. Those that were measured on `clock` are used.
        mine: a case's result. If it is given, the standard deviation of this case is returned.
    """
    cases = [result.values for result in results if result.clock == clock]
    pool = session_spread(cases, UNKNOWN_SESSION[clock])
    known = mine is not None and mine.clock == clock
    return case_session_spread(mine.values, pool) if known and mine is not None else pool


def _rounded(value: float | None, form: str) -> float | None:
    if value is None:
        return None
    return float(format(value, form)) + 0.0  # turns -0.0 into 0.0


def _sorted_table(name: str, table: Mapping[str, Json]) -> dict[str, Json]:
    """Return a sorted copy of `table`, with the types that it has when it is read from the file.

    Raises:
        ValueError: if a value is infinite, or has no JSON type.
    """
    try:
        text = json.dumps(dict(table), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={table!r} must be finite JSON values: {error}") from None
    return dict(json.loads(text))
