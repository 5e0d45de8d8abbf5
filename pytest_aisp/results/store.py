"""Stored results: `baselines/<product>/<chapter>.json` read, merged and written.

One result and one environment per line, sorted, so that a review shows what changed. Each line ends
with a seal over all that it says; it keeps out edits, not forgers. A file is replaced as a whole or
not at all, and one that cannot be read is never written over.

Writers take turns by `flock` on `.<chapter>.json.lock`, a hidden file beside the results: there,
because a lock in /tmp would not hold off another node on a shared disk. Whoever holds it removes
it, so that git never sees one; what a killed process leaves behind is empty and blocks nobody.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any, TypeAlias

from .goals import GOALS
from .stats import rms, session_spread, trimmed_spread
from .verdict import DEFAULT_SPREAD

Environment: TypeAlias = Mapping[str, Any]
Environments: TypeAlias = Mapping[str, Environment]
Results: TypeAlias = "Mapping[str, Result]"

SCHEMAS = (1, 2)
"""Of a file in which every case was timed, as all were once, and of one with others in it."""
VERSIONS = ("driver", "cuda", "torch", "triton")
"""The facts of an environment that are always known, and compared."""
COMPARED = ("cudnn", "cublas", "power_limit_w", "mig")
"""Facts that are compared where both environments know them: they choose and pace GPU kernels."""
COMPARED_BY_HOST = ("cpu", "governor")
"""Facts that are compared as well where the host's speed enters: on `HOST_CLOCKS`."""
HOST_CLOCKS = ("host", "cpu", "process")


class StoreError(Exception):
    """A file of stored results that cannot be read or written. The last line is the way out."""


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
        untimed = all(getattr(self, name) in (None, ()) for name in _TIMES)
        for name, form in _FORMS.items():
            value = getattr(self, name)
            absent = value is None and name in _OPTIONAL
            if not absent and not (untimed and name in _TIMES):
                object.__setattr__(self, name, _converted(name, value, *form))
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
        table = {k: _converted(f"environments[{k!r}]", e, *_TABLE) for k, e in facts}
        object.__setattr__(self, "environments", table)
        for key, result in self.results.items():
            for name in set(result.environments) - set(table):
                raise ValueError(f"results[{key!r}]: its environment {name!r} is not in the table")


@dataclass(frozen=True)
class Change:
    """One line that a write added (`old` is None) or altered."""

    key: str
    old: Result | None
    new: Result


def load(path: Path) -> Stored:
    """Return what `path` holds; nothing where there is no file.

    Raises:
        StoreError: when the file cannot be read or is not what `write` could have written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Stored(path.absolute().parent.name)
    except OSError as error:
        raise _error(path, f"cannot be read: {error}", "ls -ld {path}") from error
    except ValueError as error:
        fault = f"was not written by pytest-aisp: {error}; restore the committed file:"
        raise _error(path, fault, _RESTORE) from error
    return parse(path, text)


def parse(path: Path, text: str) -> Stored:
    """Return what the file at `path` holds, or held once, of which `text` is the content.

    Raises:
        StoreError: when that is not what `write` could have written.
    """
    product = path.absolute().parent.name
    try:
        data = json.loads(text, object_pairs_hook=_unique)
        _check_schema(path, data)
        stored = _stored(data)
    except json.JSONDecodeError as error:
        raise _not_json(path, text, error) from error
    except (ValueError, RecursionError) as error:
        fault = f"was not written by pytest-aisp: {error}; restore the committed file:"
        raise _error(path, fault, _RESTORE) from error
    if stored.product != product:
        raise _misplaced(path, stored.product)
    return stored


def dump(stored: Stored) -> str:
    """Return the text of the file that holds `stored`: the same text for the same content."""
    schema = SCHEMAS[0] if all(r.values for r in stored.results.values()) else SCHEMAS[1]
    lines = ["{", f'"schema": {schema},', f'"product": {json.dumps(stored.product)},']
    lines += ['"environments": {', *_lines(stored.environments), "},"]
    lines += ['"results": {', *_lines({k: _sealed(k, r) for k, r in stored.results.items()}), "}"]
    return "\n".join([*lines, "}", ""])


def write(
    path: Path, product: str, new: Results, environments: Environments, *, replace: bool
) -> list[Change]:
    """Merge `new` into the file as `merge` does and return the changed lines, sorted by key.

    Atomic, and alone among the writers of this file, which is not touched when nothing changes.

    Raises:
        StoreError: when the file cannot be read or written; it is then as it was.
        ValueError: when a result's environment is unknown, or its key means two things.
    """
    if path.absolute().parent.name != product:
        raise _misplaced(path, product)
    with _writing(path) as target:
        stored, changes = merge(load(path), new, environments, replace=replace)
        if changes:
            _replace_file(target, dump(stored))
    return changes


def prune(path: Path, gone: Collection[str]) -> list[str]:
    """Remove the entries with the keys `gone` and return those that were there, sorted.

    What is recorded after `gone` was found out stays: nothing else is removed.

    Raises:
        StoreError: when the file cannot be read or written; it is then as it was.
    """
    if not path.exists():
        return []
    with _writing(path) as target:
        stored = load(path)
        kept = {key: result for key, result in stored.results.items() if key not in gone}
        if removed := sorted(set(stored.results) - set(kept)):
            _replace_file(target, dump(_tidy(stored, stored.environments, kept)))
    return removed


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
    results = dict(stored.results)
    for key, result in new.items():
        old = results.get(key)
        if old is None or replace:
            results[key] = result
        elif _is_alike(old, result, table):
            second = (len(old.values), len(result.values)) == (1, 1)
            second &= old.environments != result.environments
            gained = _with_session(old, result, table) if second else _completed(old, result)
            results[key] = gained
    changed = sorted(key for key in new if results[key] != stored.results.get(key))
    changes = [Change(key, stored.results.get(key), results[key]) for key in changed]
    return _tidy(stored, table, results), changes


def environment_key(environment: Environment) -> str:
    """Return a short key that follows from the facts: the first 8 digits of their hash."""
    return hashlib.sha256(json.dumps(_plain(environment)).encode()).hexdigest()[:8]


def differences(
    one: Environment, other: Environment, clock: str, *, several: bool = False
) -> list[str]:
    """Return the facts for which times on `clock` in two environments are not comparable.

    A fact that one of them does not know is no difference: older files lack some. Any other fact,
    as the NUMA node, is only recorded.

    Args:
        several: whether several GPUs worked together; then NCCL counts too.
    """
    names = COMPARED + (COMPARED_BY_HOST if clock in HOST_CLOCKS else ())
    names += ("nccl",) if several else ()
    known = [name for name in names if None not in (one.get(name), other.get(name))]
    return [name for name in (*VERSIONS, *known) if one.get(name) != other.get(name)]


def pooled(results: Iterable[Result], clock: str) -> list[float]:
    """Return the own spreads of the results measured on `clock`."""
    spreads = (result.own_spread for result in results if result.clock == clock)
    return [spread for spread in spreads if spread is not None]


def session_sd(results: Iterable[Result], clock: str) -> float | None:
    """Return the session-to-session sd on `clock`, or None until a result has two sessions."""
    return session_spread([result.values for result in results if result.clock == clock])


def _is_alike(old: Result, new: Result, table: Environments) -> bool:
    """Return whether both are of the same code, and comparable as far as both go."""
    both_timed = bool(old.values and new.values)
    if both_timed and (old.clock, old.choices) != (new.clock, new.choices):
        return False
    facts = table[old.environments[-1]], table[new.environments[0]]
    clock = old.clock or new.clock or ""
    return old.sources == new.sources and not differences(*facts, clock)


def _completed(old: Result, new: Result) -> Result:
    """Return `old` with the times and goals that only `new` has."""
    return replace(old if old.values else new, goals={**new.goals, **old.goals})


def _with_session(old: Result, new: Result, table: Environments) -> Result:
    """Return both sessions, by date, whichever was stored first."""
    names = {result.environments[0]: result for result in (old, new)}
    first, last = sorted(names, key=lambda name: (str(table[name].get("date", "")), name))
    values = names[first].values + names[last].values
    return replace(names[last], values=values, environments=(first, last))


def _tidy(stored: Stored, table: Environments, results: Results) -> Stored:
    used = {name for result in results.values() for name in result.environments}
    return Stored(stored.product, {n: e for n, e in table.items() if n in used}, results)


# Fields: each converter returns what the file holds, or raises for what it cannot hold.


def _converted(name: str, value: Any, convert: Callable[[Any], Any], legal: str) -> Any:
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


def _plain(value: Any) -> dict[str, Any]:
    """Return a sorted copy of a table as reading it back will give it."""
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(json.loads(json.dumps(dict(value), sort_keys=True, allow_nan=False)))


def _goals(value: Any) -> dict[str, Any]:
    """Return a sorted copy of what both sides take of each goal."""
    table = _plain(value)
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


_Form: TypeAlias = tuple[Callable[[Any], Any], str]
_HEX = "[0-9a-f]+"
_TIME: _Form = (lambda v: _rounded(v, ".4g", 1e-6, 1e15), "a number from 1e-6 to 1e15")
_RATIO: _Form = (lambda v: _rounded(v, ".4g", 0, 1e22), "a number from 0 to 1e22")
_TABLE: _Form = (_plain, "a table of finite JSON values")
_FORMS: dict[str, _Form] = {
    "baseline_us": _TIME,
    "optimized_us": _TIME,
    "share": _RATIO,
    "limit": (_word, "a name"),
    "clock": (lambda v: _word(v, "|".join(DEFAULT_SPREAD)), f"one of {', '.join(DEFAULT_SPREAD)}"),
    "values": (_sessions, "a list of sessions, each a list of numbers from -50 to 50"),
    "environments": (lambda v: _some(v, _word), "a list of names"),
    "sources": (_hashes, "two hex hashes, of baseline and optimized"),
    "choices": _TABLE,
    "goals": (_goals, f"by {' or '.join(GOALS)}, amounts of baseline and optimized, and noise"),
    "samples": (lambda v: _word(v, _HEX), "a hex hash"),
}
_OPTIONAL = ("share", "limit", "samples")
_TIMES = ("baseline_us", "optimized_us", "clock", "values")
"""What a result has all of, or nothing."""


# Text


def _lines(table: Mapping[str, Any]) -> list[str]:
    lines = [f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
    return [line + "," for line in lines[:-1]] + lines[-1:]


def _row(result: Result) -> dict[str, Any]:
    """Return the fields of a line. The speedup is for the reader; `_result` checks it."""
    row = {f.name: getattr(result, f.name) for f in fields(result)}
    kept = {name: value for name, value in row.items() if value not in (None, {}, ())}
    speedup = result.speedup
    return kept if speedup is None else {"speedup": float(f"{speedup:.4g}"), **kept}


def _sealed(key: str, result: Result) -> dict[str, Any]:
    row = _row(result)
    return {**row, "seal": _seal(key, row)}


def _seal(key: str, row: Mapping[str, Any]) -> str:
    """Return 12 hex digits of what a line says: no number in it changes by hand unseen."""
    return hashlib.sha256(json.dumps([key, row], sort_keys=True).encode()).hexdigest()[:12]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"it holds {key!r} twice; legal is once")
        table[key] = value
    return table


def _stored(data: dict[str, Any]) -> Stored:
    _check_names(data, {"schema", "product", "environments", "results"}, set())
    for name, legal in (("product", str), ("environments", dict), ("results", dict)):
        if not isinstance(data[name], legal):
            raise ValueError(f"{name}={data[name]!r} must be a {legal.__name__}")
    results = {key: _result(key, row) for key, row in data["results"].items()}
    return Stored(data["product"], data["environments"], results)


def _result(key: str, row: Any) -> Result:
    needed = {f.name for f in fields(Result) if f.default is f.default_factory is MISSING}
    times = {"speedup", *_TIMES}
    try:
        plain = _converted("it", row, *_TABLE)
        if times & plain.keys() or "goals" not in plain:
            needed |= times
        _check_names(plain, {"seal", *needed}, set(_FORMS))
        result = Result(**{k: v for k, v in row.items() if k not in ("speedup", "seal")})
        _check_speedup(row.get("speedup"), result.speedup)
        if row["seal"] != _seal(key, _row(result)):
            raise ValueError("its seal is broken: it is not what a run has recorded")
    except ValueError as error:
        raise ValueError(f"results[{key!r}]: {error}") from None
    return result


def _check_speedup(said: Any, found: float | None) -> None:
    """Refuse a line whose speedup is not that of its values."""
    if found is not None:
        speedup = _converted("speedup", said, *_RATIO)
        if not math.isclose(speedup, found, rel_tol=1e-3):
            raise ValueError(f"{speedup=} must be {found:.4g}, which its values give")


def _check_names(row: Mapping[str, Any], needed: set[str], known: set[str]) -> None:
    for name in sorted(needed - set(row)):
        raise ValueError(f"the field {name!r} is missing")
    for name in sorted(set(row) - needed - known):
        raise ValueError(f"unknown field {name!r}; legal: {', '.join(sorted(needed | known))}")


# The disk


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Hold the lock of `path`, links resolved; what the disk refuses becomes a StoreError."""
    done = False
    try:
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            yield target
            done = True
    except OSError as error:
        if done:  # the file is replaced; only its lock would not close
            return
        fault = f"could not be written, and is as it was: {error}"
        step = f"Free space in {path.parent} or make it writable, then run the same command again."
        raise _error(path, fault, step) from error


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    while True:
        with open(lock, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_named(lock, file.fileno()):
                try:
                    yield
                finally:
                    # Removed while held: who waits for it sees that its name is gone, and retries.
                    with suppress(OSError):
                        os.unlink(lock)
                return


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _replace_file(path: Path, text: str) -> None:
    """Replace `path` as a whole. On any failure it is as it was, and nothing else is left."""
    temporary = path.with_name(f".{path.name}.tmp")  # one name is enough: the lock is held
    try:
        with open(temporary, "w", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    # The write is done. Where the directory cannot be synced, a power cut may bring the old file
    # back, whole: no reason to say that nothing was written.
    with suppress(OSError):
        _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Messages: fault, what is legal, way out.

_RESTORE = "git checkout -- {path}"


def _error(path: Path, fault: str, way_out: str) -> StoreError:
    return StoreError(f"{path} {fault}\n    {way_out.replace('{path}', quote(str(path)))}")


def _not_json(path: Path, text: str, error: json.JSONDecodeError) -> StoreError:
    conflict = re.search(r"^(<{7}|\|{7}|={7}|>{7})( |$)", text, re.MULTILINE)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        fault = f"holds a merge conflict in line {line}; keep one side, record what it lacks:"
        step = "git checkout --ours -- {path} && pytest --aisp-update-expectations=missing"
        return _error(path, fault, step)
    body = text.strip()
    unfinished = error.pos >= len(text.rstrip()) or not body.endswith("}")
    if not body or (body.startswith("{") and unfinished):
        return _error(path, "is truncated; restore the committed file:", _RESTORE)
    return _error(path, f"is not JSON ({error}); restore the committed file:", _RESTORE)


def _check_schema(path: Path, data: Any) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    reads = "this one reads " + " and ".join(map(str, SCHEMAS))
    if type(schema) is int and schema > max(SCHEMAS):
        fault = f"was written by a newer pytest-aisp (schema {schema}; {reads})"
        raise _error(path, fault, "pip install --upgrade pytest-aisp")
    if type(schema) is not int or schema not in SCHEMAS:
        raise ValueError(f"schema={schema!r}; {reads}")


def _misplaced(path: Path, product: str) -> StoreError:
    folder = path.absolute().parent.name
    fault = f"is the place of {folder}, but these are results of {product}; move them:"
    home = quote(str(path.parent.parent / product / path.name))
    return _error(path, fault, f"mv -n {{path}} {home}")
