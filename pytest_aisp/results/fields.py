"""The fields of a stored result: each converter returns what the file holds, or refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .goals import GOALS
from .verdict import DEFAULT_SPREAD


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
    if not table.keys() <= GOALS.keys():
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
    "goals": (_goals, f"by {' or '.join(GOALS)}, amounts of baseline and optimized, and noise"),
    "samples": (lambda v: _word(v, _HEX), "a hex hash"),
}
OPTIONAL = ("share", "limit", "samples")
TIMES = ("baseline_us", "optimized_us", "clock", "values")
"""What a result has all of, or nothing."""
