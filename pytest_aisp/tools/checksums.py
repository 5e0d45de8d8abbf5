"""`aisp seals`: are stored results what runs have recorded?

What it proves: each line says what the writer wrote (its seal, its speedup against its values); a
session's facts are those that were committed before; what is new names a commit of this repository.
What it cannot prove: that anything was measured. A seal keeps out edits, not forgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..results.models import Stored
from ..results.store import COMMITTED, StoreError, parse
from ..util import git
from ..util.cli_result import CliError, CliResult

ADVICE = (
    "Restore the file, or record on the machine itself:",
    "    pytest --aisp-update-expectations",
)
STAGED = ""
"""The ref of what is staged: git's index."""


def checksums_result(files: Sequence[Path], baselines: Path, against: str) -> CliResult:
    """Return what is wrong with the staged `files`, by default all that differ from `against`.

    Raises:
        Unanswerable: outside a git repository, or where it lacks `against`.
    """
    names = [file.as_posix() for file in files] or _changed(baselines, against)
    names = [name for name in names if name.endswith(".json") and not name.endswith("/peaks.json")]
    wrong = [fault for name in names for fault in faults(name, against)]
    if wrong:
        own = all("\n" in fault for fault in wrong)  # each says its way out
        lines = [line for fault in wrong for line in fault.splitlines()]
        return CliResult(lines if own else [*lines, *ADVICE], 1)
    if not names:
        none = f"no stored results staged below {baselines} differ from {against}"
        none = "none of these files holds stored results" if files else none
        return CliResult([f"{none}: nothing to refuse"])
    if len(names) == 1:
        return CliResult(["1 file of stored results is as runs recorded it"])
    return CliResult([f"{len(names)} files of stored results are as runs recorded them"])


def faults(name: str, against: str) -> Iterator[str]:
    """Yield what is wrong with one staged file of stored results."""
    try:
        now = _stored(STAGED, name)
    except StoreError as error:
        yield _fault(error)
        return
    try:
        before = _stored(against, name)
    except StoreError:  # what was committed broken is judged as it is now
        before = Stored(now.product)
    for key, facts in now.environments.items():
        old = before.environments.get(key)
        if old is not None and old != facts:
            yield f"{name} environments[{key!r}]: it says {facts}, and said {old}"
        if old is None and not _is_commit(facts.get("commit")):
            commit = facts.get("commit")
            yield f"{name} environments[{key!r}]: {commit=} is no commit of this repository"


def _fault(error: StoreError) -> str:
    """Return what is wrong, with its way out where that is another one than `ADVICE`."""
    return str(error).partition(COMMITTED)[0]


def _stored(ref: str, name: str) -> Stored:
    """Return the results in a file as it is at `ref`; none where it is not there."""
    path = Path(name)
    text = _git("show", f"{ref}:./{name}", missing=True)
    if text is None:
        return Stored(path.absolute().parent.name)
    try:
        return parse(path, text.decode())
    except UnicodeDecodeError as error:
        raise StoreError(f"{name} was not written by pytest-aisp: {error}") from None


def _changed(baselines: Path, against: str) -> list[str]:
    """Return the staged files of stored results that differ from `against`."""
    told = ("diff", "--cached", "--relative", "--name-only", "--diff-filter=d", "-z", against)
    found = _git(*told, "--", str(baselines)) or b""
    return [name for name in found.decode().split("\0") if name]


def _is_commit(commit: object) -> bool:
    return (
        commit is not None and _git("cat-file", "-e", f"{commit}^{{commit}}", missing=True) == b""
    )


def _git(*args: str, missing: bool = False) -> bytes | None:
    """Return what git says; None where it fails and what was asked for may be `missing`."""
    try:
        return git.run_git(Path(), *args)
    except git.NoGit as error:
        raise CliError(str(error)) from None
    except git.GitError as error:
        if missing:
            return None
        why = "".join(str(error).splitlines()[:1])
    raise CliError(f"git {args[0]} fails: {why}\nRun it in a clone with that commit")
