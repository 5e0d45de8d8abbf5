"""Merge new results into stored results. No entry is dropped, and an entry can gain sessions."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec.structs import asdict

from .metric_limits import with_session
from .models import Environments, Result, Results, Stored, base_of, differences
from .row import Recording

HOURS_APART = 6
"""Runs that start fewer hours apart than this are one session, because temperature changes slowly.
"""
MOST_SESSIONS = 5
"""A sixth session would narrow the margin by at most 6 % (spread.md)."""


NO_TEXTS: Mapping[str, Mapping[str, str]] = {}


@dataclass(frozen=True)
class Change:
    """A line that was changed in the file of results. If `old` is None, the line was added."""

    key: str
    old: Result | None
    new: Result

    @property
    def only_digests(self) -> bool:
        """True if only the digests of sources or the list of files changed."""
        names = {"sources": self.new.sources, "files": self.new.files}
        return self.old is not None and self.new == msgspec.structs.replace(self.old, **names)


def merge(
    stored: Stored,
    new: Results,
    environments: Environments,
    *,
    replace: bool,
    texts: Mapping[str, Mapping[str, str]] = NO_TEXTS,
) -> tuple[Stored, list[Change]]:
    """Return `stored` with `new` merged into it, and the changed entries. No entry is dropped.

    Args:
        environments: the facts of each environment that `new` names.
        replace: if True, a new result replaces an existing entry. If False, an entry stays, and can
            only gain times, goals, or one more session (up to `MOST_SESSIONS`). A new session must
            be at least `HOURS_APART` hours from each stored session, or on another board. Additions
            must have the same sources, machine code, clock and tuning choices as the entry, and
            `differences` must find no difference between the two environments.
        texts: today's digests of the sides' source texts, by key. An entry with one of these
            digests gets the digest of the syntax tree instead.
    """
    table = _table(stored, environments)
    for name, facts in stored.environments.items():
        if table[name] != facts:
            raise ValueError(f"the environment {name!r} is stored as {facts}, not {table[name]}")
    several = _several(stored)
    results = dict(stored.results)
    for key, result in new.items():
        old = results.get(key)
        if old is None or replace:
            results[key] = result
            continue
        old = old.with_syntax(result.sources, texts.get(key, {}))
        if old.sources == result.sources and not old.files:
            old = msgspec.structs.replace(old, files=result.files)
        results[key] = old
        if not _unlike(old, result, table, several):
            more = old.sessions < MOST_SESSIONS and _could_be_session(old, result)
            more = more and _is_apart(old, result, table)
            results[key] = (_with_session if more else _completed)(old, result, table)
    changed = sorted(key for key in new if results[key] != stored.results.get(key))
    changes = [Change(key, stored.results.get(key), results[key]) for key in changed]
    return tidy(stored, table, results), changes


def why_kept(stored: Stored, key: str, new: Result, environments: Environments) -> str:
    """Return the reason why ``merge(..., replace=False)`` did not add `new` to `stored`.

    The text is empty if `new` was added or could only add times or goals.
    """
    old = stored.results.get(key)
    if old is None or set(new.environments) <= set(old.environments):
        return ""
    table = _table(stored, environments)
    if names := _unlike(old, new, table, _several(stored)):
        return f"it differs from the stored result in {', '.join(names)}"
    if not _could_be_session(old, new):
        return ""
    if not _is_apart(old, new, table):
        near = f"a stored session is less than {HOURS_APART} hours away"
        return f"{near} and not known to be on another board, so this is not another session"
    return f"it has {old.sessions} sessions, and more are not kept"


def _table(stored: Stored, environments: Environments) -> Environments:
    return {**stored.environments, **Stored(stored.product, environments).environments}


def _several(stored: Stored) -> bool:
    return base_of(stored.product) != stored.product


def _unlike(old: Result, new: Result, table: Environments, several: bool) -> list[str]:
    """Return the names of the differences that make `old` and `new` incomparable."""
    sides = sorted(old.sources.keys() | new.sources.keys())
    names = [f"{side} source" for side in sides if old.sources.get(side) != new.sources.get(side)]
    if old.values and new.values:
        names += ["clock"] if old.clock != new.clock else []
        names += ["tuning choices"] if old.choices != new.choices else []
    both = old.machine_code.keys() & new.machine_code.keys()  # older results have none
    other = any(old.machine_code[side] != new.machine_code[side] for side in both)
    names += ["machine code"] * (other and not names)
    facts = table[old.environments[-1]], table[new.environments[0]]
    return names + differences(*facts, old.clock or new.clock or "", several=several)


def _could_be_session(old: Result, new: Result) -> bool:
    """Return whether `new` is a single new session with the same kind of measurements as `old`."""
    timed = bool(old.values), bool(new.values)
    alike = all(timed) or (not any(timed) and old.goals.keys() == new.goals.keys())
    return alike and new.sessions == 1 and new.environments[0] not in old.environments


def _is_apart(old: Result, new: Result, table: Environments) -> bool:
    """Return whether `new` is hours apart from each session of `old`, or on another board."""
    return all(_are_apart(name, new.environments[0], table) for name in old.environments)


def _are_apart(one: str, other: str, table: Environments) -> bool:
    """Return whether two sessions are at least `HOURS_APART` hours apart, or on different boards.

    Only sessions since 2026-11-26 name their board. If a session's key has no time of day, the
    dates are compared.
    """
    boards = table[one].get("board"), table[other].get("board")
    if None not in boards and boards[0] != boards[1]:
        return True
    first, second = _start(one), _start(other)
    if first is not None and second is not None:
        return abs(second - first) >= datetime.timedelta(hours=HOURS_APART)
    days = table[one].get("date"), table[other].get("date")
    return None in days or days[0] != days[1]


def _start(name: str) -> datetime.datetime | None:
    """Return the start time in the key `name` of a session, or None if the key has no time."""
    for form in ("%Y-%m-%dT%H%M%S.%fZ", "%Y-%m-%dT%H%M%SZ"):
        with suppress(ValueError):
            return datetime.datetime.strptime(name, form)
    return None


def _completed(old: Result, new: Result, table: Environments) -> Result:
    """Return `old` with the times and goals that it lacks, taken from `new`."""
    gained = msgspec.structs.replace(old if old.values else new, goals={**new.goals, **old.goals})
    return gained if gained == old else msgspec.structs.replace(gained, samples=new.samples)


def recorded_result(recorded: Recording, environment: str, samples: str | None) -> Result:
    """Return the result to store for a row's values, which are `recorded`.

    Args:
        environment: the key of the run's environment.
        samples: the hash of the row's samples, or None if the run keeps no samples.
    """
    others = ("text_sources", "replace")
    fields = {name: value for name, value in asdict(recorded).items() if name not in others}
    return Result.of({**fields, "environments": [environment], "samples": samples})


def _with_session(old: Result, new: Result, table: Environments) -> Result:
    """Return `old` with the session of `new` added. The sessions are ordered by date.

    The speedup is the geometric mean over sessions. The times and the share are geometric means
    too, so the ratio of the times is the speedup.
    """
    names, values = old.environments + new.environments, old.values + new.values
    order = sorted(
        range(len(names)), key=lambda i: (str(table[names[i]].get("date", "")), names[i])
    )
    latest = new if order[-1] == old.sessions else old
    both = {
        n: with_session(old.goals[n], old.sessions, a)
        for n, a in new.goals.items()
        if n in old.goals
    }
    return msgspec.structs.replace(
        latest,
        goals={**old.goals, **new.goals, **both},
        values=tuple(values[i] for i in order if values),
        environments=tuple(names[i] for i in order),
        baseline_us=_mean(old, old.baseline_us, new.baseline_us),
        optimized_us=_mean(old, old.optimized_us, new.optimized_us),
        share=_mean(old, old.share, new.share) if old.limit == new.limit else latest.share,
    )


def _mean(old: Result, one: float | None, other: float | None) -> float | None:
    """Return the geometric mean over all sessions. `one` is the mean over the sessions of `old`.

    `other` is the value of the new session. The result is None if `one` or `other` is None.
    """
    if one is None or other is None:
        return None
    return float((one**old.sessions * other) ** (1 / (old.sessions + 1)))


def tidy(stored: Stored, table: Environments, results: Results) -> Stored:
    """Return `stored` with these `results`, and with the environments of `table` that they use."""
    used = {name for result in results.values() for name in result.environments}
    return Stored(stored.product, {n: e for n, e in table.items() if n in used}, results)
