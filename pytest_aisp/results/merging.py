"""What becomes of stored results when new ones come: nothing is dropped, sessions add up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .stored import Environments, Result, Results, Stored, base_of, differences


@dataclass(frozen=True)
class Change:
    """One line that a write added (`old` is None) or altered."""

    key: str
    old: Result | None
    new: Result


def merge(
    stored: Stored, new: Results, environments: Environments, *, replace: bool
) -> tuple[Stored, list[Change]]:
    """Return `stored` with `new` merged in, and what changed. No entry is ever dropped.

    Args:
        environments: the facts behind the environment keys of `new`.
        replace: True rewrites entries that exist. False leaves them alone, except that an entry
            with one session gains a second one, and one that lacks times or a goal gains those.
            A second session has another environment key. Whatever is gained has the same sources,
            clock and tuning choices, and no `differences`.
    """
    table = {**stored.environments, **Stored(stored.product, environments).environments}
    for name, facts in stored.environments.items():
        if table[name] != facts:
            raise ValueError(f"the environment {name!r} is stored as {facts}, not {table[name]}")
    several = base_of(stored.product) != stored.product
    results = dict(stored.results)
    for key, result in new.items():
        old = results.get(key)
        if old is None or replace:
            results[key] = result
        elif _is_alike(old, result, table, several):
            second = (len(old.values), len(result.values)) == (1, 1)
            second &= old.environments != result.environments
            gained = _with_session(old, result, table) if second else _completed(old, result)
            results[key] = gained
    changed = sorted(key for key in new if results[key] != stored.results.get(key))
    changes = [Change(key, stored.results.get(key), results[key]) for key in changed]
    return tidy(stored, table, results), changes


def _is_alike(old: Result, new: Result, table: Environments, several: bool) -> bool:
    """Return whether both are of the same code, and comparable as far as both go."""
    both_timed = bool(old.values and new.values)
    if both_timed and (old.clock, old.choices) != (new.clock, new.choices):
        return False
    facts = table[old.environments[-1]], table[new.environments[0]]
    clock = old.clock or new.clock or ""
    return old.sources == new.sources and not differences(*facts, clock, several=several)


def _completed(old: Result, new: Result) -> Result:
    """Return `old` with the times and goals that only `new` has."""
    return replace(old if old.values else new, goals={**new.goals, **old.goals})


def _with_session(old: Result, new: Result, table: Environments) -> Result:
    """Return both sessions, by date, whichever was stored first."""
    names = {result.environments[0]: result for result in (old, new)}
    first, last = sorted(names, key=lambda name: (str(table[name].get("date", "")), name))
    values = names[first].values + names[last].values
    return replace(names[last], values=values, environments=(first, last))


def tidy(stored: Stored, table: Environments, results: Results) -> Stored:
    """Return `results` in place of those `stored`, and of the `table` what they still need."""
    used = {name for result in results.values() for name in result.environments}
    return Stored(stored.product, {n: e for n, e in table.items() if n in used}, results)
