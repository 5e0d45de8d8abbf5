"""Stored results on disk: `baselines/<product>/<chapter>.json` read, merged and written.

A file is replaced as a whole or not at all, and one that cannot be read is never written over.

Writers take turns by `flock` on `.<chapter>.json.lock`, a hidden file beside the results: there,
because a lock in /tmp would not hold off another node on a shared disk. Whoever holds it removes
it, so that git never sees one; what a killed process leaves behind is empty and blocks nobody.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .merging import Change, merge, tidy
from .stored import Environments, Results, Stored
from .stored_text import COMMITTED, RESTORE, dump, misplaced, parse, store_error


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
        raise store_error(path, f"cannot be read: {error}", "ls -ld {path}") from error
    except ValueError as error:
        fault = f"was not written by pytest-aisp: {error}{COMMITTED}"
        raise store_error(path, fault, RESTORE) from error
    return parse(path, text)


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
        raise misplaced(path, product)
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
            _replace_file(target, dump(tidy(stored, stored.environments, kept)))
    return removed


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
