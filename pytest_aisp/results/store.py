"""Read, merge and write the stored results in `baselines/<product>/<chapter>.json`.

A file is replaced atomically, and a file that cannot be read is never overwritten.

Writers take turns with `flock` on `.<chapter>.json.lock`, a hidden file next to the results. A lock
in /tmp would not stop another node that shares the disk. The process that has the lock removes the
lock file at the end, so that the file never appears in git. A killed process may leave an empty
lock file, which blocks no other process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

import msgspec
from msgspec import Struct

from .merge import NO_TEXTS, Change, merge, tidy
from .messages import Json
from .models import Environments, Result, Results, Stored


def load(path: Path) -> Stored:
    """Return the stored results in `path`. Without a file, there are no results.

    Raises:
        StoreError: if the file cannot be read or was not written by `write`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Stored(path.absolute().parent.name)
    except OSError as error:
        raise store_error(path, f"cannot be read: {error}", "ls -ld {path}") from error
    except ValueError as error:
        fault = f"was not written by pytest-aisp: {error}{COMMITTED}"
        raise store_error(path, fault, RESTORE) from error
    return parse(path, text)


def write(
    path: Path,
    product: str,
    new: Results,
    environments: Environments,
    *,
    replace: bool,
    texts: Mapping[str, Mapping[str, str]] = NO_TEXTS,
) -> list[Change]:
    """Merge `new` into the file as `merge` does, and return the changed lines, sorted by key.

    The write is atomic, under the file's lock. If nothing changes, the file is not written.

    Raises:
        StoreError: if the file cannot be read or written. The file is then unchanged.
        ValueError: if a result's environment is unknown, or is stored with different facts.
    """
    if path.absolute().parent.name != product:
        raise misplaced(path, product)
    with _writing(path) as target:
        stored, changes = merge(load(path), new, environments, replace=replace, texts=texts)
        if changes:
            _replace_file(target, dump(stored))
    return changes


def prune(path: Path, gone: Collection[str]) -> list[str]:
    """Remove the entries with the keys `gone` and return the removed keys, sorted.

    No other entries are removed, so results that another run records at the same time stay.

    Raises:
        StoreError: if the file cannot be read or written. The file is then unchanged.
    """
    if not path.exists():
        return []
    with _writing(path) as target:
        stored = load(path)
        kept = {key: result for key, result in stored.results.items() if key not in gone}
        if removed := sorted(set(stored.results) - set(kept)):
            _replace_file(target, dump(tidy(stored, stored.environments, kept)))
    return removed


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Hold a lock on `path` inside the block, and raise OSErrors as StoreErrors."""
    done = False
    try:
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            yield target
            done = True
    except OSError as error:
        if done:  # the file was written, and only closing the lock failed
            return
        fault = f"could not be written and is unchanged: {error}"
        step = f"Free space in {path.parent} or make it writable, then run the same command again."
        raise store_error(path, fault, step) from error


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    while True:
        with open(lock, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_named(lock, file.fileno()):
                try:
                    yield
                finally:
                    # Removed while locked: a waiting process sees that the file is removed, and
                    # retries.
                    with suppress(OSError):
                        os.unlink(lock)
                return


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _replace_file(path: Path, text: str) -> None:
    """Replace `path` atomically. A failure changes nothing and leaves no extra file behind."""
    temporary = path.with_name(f".{path.name}.tmp")  # one name is enough under the lock
    try:
        with open(temporary, "w", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    # The write is done. If the directory cannot be synced, a power failure may restore the complete
    # old file, which does not count as a failed write.
    with suppress(OSError):
        _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SCHEMAS = (1, 2)
"""The schema versions of a file with only timed cases, and of a file with untimed cases."""


class StoreError(Exception):
    """A file of stored results cannot be read or written. The message ends with the remedy."""


def parse(path: Path, text: str) -> Stored:
    """Return the stored results in `text`, which is the content of `path`, now or at a commit.

    Raises:
        StoreError: if `write` did not write that text.
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
    """Return the text of the file for `stored`. Equal content gives equal text."""
    schema = SCHEMAS[0] if all(r.values for r in stored.results.values()) else SCHEMAS[1]
    lines = ["{", f'"schema": {schema},', f'"product": {json.dumps(stored.product)},']
    lines += ['"environments": {', *_lines(stored.environments), "},"]
    lines += ['"results": {', *_lines({k: _sealed(k, r) for k, r in stored.results.items()}), "}"]
    return "\n".join([*lines, "}", ""])


def _lines(table: Mapping[str, Json]) -> list[str]:
    lines = [f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
    return [line + "," for line in lines[:-1]] + lines[-1:]


def _row(result: Result) -> dict[str, Json]:
    """Return the fields of a result's line. The speedup is only for human readers."""
    row: dict[str, Json] = msgspec.to_builtins(result)
    speedup = result.speedup
    return row if speedup is None else {"speedup": float(f"{speedup:.4g}"), **row}


def _sealed(key: str, result: Result) -> dict[str, Json]:
    row = _row(result)
    return {**row, "seal": _seal(key, row)}


def _seal(key: str, row: Mapping[str, Json]) -> str:
    """Return 12 hex digits of a line's hash, which show whether a number was edited by hand."""
    return hashlib.sha256(json.dumps([key, row], sort_keys=True).encode()).hexdigest()[:12]


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    table: dict[str, Json] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"it contains the key {key!r} twice")
        table[key] = value
    return table


class _File(Struct, forbid_unknown_fields=True):
    """The text of a file of stored results, before each result is checked."""

    schema: int
    product: str
    environments: dict[str, dict[str, Json]]
    results: dict[str, dict[str, Json]]


def _stored(data: Json) -> Stored:
    file = msgspec.convert(data, _File)
    results = {key: _result(key, row) for key, row in file.results.items()}
    return Stored(file.product, file.environments, results)


def _result(key: str, row: dict[str, Json]) -> Result:
    try:
        result = Result.of({k: v for k, v in row.items() if k not in ("speedup", "seal")})
        speedup = msgspec.convert(row.get("speedup"), float | None)
        expected = result.speedup or 0.0
        if not math.isclose(speedup or 0.0, expected, rel_tol=1e-3):
            raise ValueError(f"{speedup=} must be {expected:.4g}, which its values give")
        if row.get("seal") != _seal(key, _row(result)):
            raise ValueError("its seal is wrong: the line was changed after a run recorded it")
    except ValueError as error:
        raise ValueError(f"results[{key!r}]: {error}") from None
    return result


RESTORE = "git checkout -- {path}"
"""The command that restores a file after something other than this plugin changed it."""
COMMITTED = "; restore the committed file:"
"""The last part of an error message, which offers the command `RESTORE`."""


def store_error(path: Path, fault: str, way_out: str) -> StoreError:
    """Return an error about a file. The path replaces ``{path}`` in the command `way_out`."""
    return StoreError(f"{path} {fault}\n    {way_out.replace('{path}', quote(str(path)))}")


def _not_json(path: Path, text: str, error: json.JSONDecodeError) -> StoreError:
    conflict = re.search(r"^(<{7}|\|{7}|={7}|>{7})( |$)", text, re.MULTILINE)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        fault = f"has a merge conflict in line {line}; keep one side, then record the rest:"
        step = "git checkout --ours -- {path} && pytest --aisp-update-expectations=missing"
        return store_error(path, fault, step)
    body = text.strip()
    unfinished = error.pos >= len(text.rstrip()) or not body.endswith("}")
    if not body or (body.startswith("{") and unfinished):
        return store_error(path, f"is truncated{COMMITTED}", RESTORE)
    return store_error(path, f"is not JSON ({error}){COMMITTED}", RESTORE)


def _check_schema(path: Path, data: Json) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    reads = "this one reads " + " and ".join(map(str, SCHEMAS))
    if type(schema) is int and schema > max(SCHEMAS):
        fault = f"was written by a newer pytest-aisp (schema {schema}; {reads})"
        raise store_error(path, fault, "pip install --upgrade pytest-aisp")
    if type(schema) is not int or schema not in SCHEMAS:
        raise ValueError(f"schema={schema!r}; {reads}")


def misplaced(path: Path, product: str) -> StoreError:
    """Return the error for a file whose product is not the product of its folder."""
    folder = path.absolute().parent.name
    fault = f"belongs to {folder}, but its results are of {product}; move the file:"
    home = quote(str(path.parent.parent / product / path.name))
    return store_error(path, fault, f"mv -n {{path}} {home}")
