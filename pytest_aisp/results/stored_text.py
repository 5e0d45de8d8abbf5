"""A file of stored results as text: one result and one environment a line, sorted and sealed.

A review then shows what changed. Each line ends with a seal over all that it says; it keeps out
edits, not forgers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from shlex import quote
from typing import Any

from .fields import FORMS, RATIO, TABLE, TIMES, converted
from .stored import Result, Stored

SCHEMAS = (1, 2)
"""Of a file in which every case was timed, as all were once, and of one with others in it."""


class StoreError(Exception):
    """A file of stored results that cannot be read or written. The last line is the way out."""


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
        fault = f"was not written by pytest-aisp: {error}{COMMITTED}"
        raise store_error(path, fault, RESTORE) from error
    if stored.product != product:
        raise misplaced(path, stored.product)
    return stored


def dump(stored: Stored) -> str:
    """Return the text of the file that holds `stored`: the same text for the same content."""
    schema = SCHEMAS[0] if all(r.values for r in stored.results.values()) else SCHEMAS[1]
    lines = ["{", f'"schema": {schema},', f'"product": {json.dumps(stored.product)},']
    lines += ['"environments": {', *_lines(stored.environments), "},"]
    lines += ['"results": {', *_lines({k: _sealed(k, r) for k, r in stored.results.items()}), "}"]
    return "\n".join([*lines, "}", ""])


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
    times = {"speedup", *TIMES}
    try:
        plain = converted("it", row, *TABLE)
        if times & plain.keys() or "goals" not in plain:
            needed |= times
        _check_names(plain, {"seal", *needed}, set(FORMS))
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
        speedup = converted("speedup", said, *RATIO)
        if not math.isclose(speedup, found, rel_tol=1e-3):
            raise ValueError(f"{speedup=} must be {found:.4g}, which its values give")


def _check_names(row: Mapping[str, Any], needed: set[str], known: set[str]) -> None:
    for name in sorted(needed - set(row)):
        raise ValueError(f"the field {name!r} is missing")
    for name in sorted(set(row) - needed - known):
        raise ValueError(f"unknown field {name!r}; legal: {', '.join(sorted(needed | known))}")


RESTORE = "git checkout -- {path}"
"""The way out of a file that was not written by us."""
COMMITTED = "; restore the committed file:"
"""How a fault ends whose way out is `RESTORE`."""


def store_error(path: Path, fault: str, way_out: str) -> StoreError:
    """Return the error of a file; `way_out` is the command to type, ``{path}`` the file in it."""
    return StoreError(f"{path} {fault}\n    {way_out.replace('{path}', quote(str(path)))}")


def _not_json(path: Path, text: str, error: json.JSONDecodeError) -> StoreError:
    conflict = re.search(r"^(<{7}|\|{7}|={7}|>{7})( |$)", text, re.MULTILINE)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        fault = f"holds a merge conflict in line {line}; keep one side, record what it lacks:"
        step = "git checkout --ours -- {path} && pytest --aisp-update-expectations=missing"
        return store_error(path, fault, step)
    body = text.strip()
    unfinished = error.pos >= len(text.rstrip()) or not body.endswith("}")
    if not body or (body.startswith("{") and unfinished):
        return store_error(path, f"is truncated{COMMITTED}", RESTORE)
    return store_error(path, f"is not JSON ({error}){COMMITTED}", RESTORE)


def _check_schema(path: Path, data: Any) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    reads = "this one reads " + " and ".join(map(str, SCHEMAS))
    if type(schema) is int and schema > max(SCHEMAS):
        fault = f"was written by a newer pytest-aisp (schema {schema}; {reads})"
        raise store_error(path, fault, "pip install --upgrade pytest-aisp")
    if type(schema) is not int or schema not in SCHEMAS:
        raise ValueError(f"schema={schema!r}; {reads}")


def misplaced(path: Path, product: str) -> StoreError:
    """Return the error of a file that holds another product's results than its folder says."""
    folder = path.absolute().parent.name
    fault = f"is the place of {folder}, but these are results of {product}; move them:"
    home = quote(str(path.parent.parent / product / path.name))
    return store_error(path, fault, f"mv -n {{path}} {home}")
