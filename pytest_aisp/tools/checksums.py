"""Check that stored results are unedited, and that a run recorded them.

The checksum of a line shows that nobody edited the line by hand. Anyone can compute a checksum, so
only the artifacts of the recording run show that something was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..results import run_reader
from ..results.merge import merge, recorded_result
from ..results.models import Result, Stored
from ..results.run_reader import RunError
from ..results.store import COMMITTED, StoreError, parse
from ..util import git
from ..util.cli_result import CliError, CliResult

ADVICE = (
    "Restore the file, or record on the machine itself:",
    "    pytest --aisp-update-expectations",
)
RUN = "of the run"
"""The key under which a run's environment is merged into stored results."""
STAGED = ""
"""The empty git ref: ``git show :FILE`` prints the file in git's index."""


NO_PROOF = (
    "A checksum does not show that anything was measured; the artifacts of the run do:",
    "    aisp results checksums --artifacts=FOLDER",
)
NOT_RECORDED = (
    "Give the folders of all runs that recorded these results, or record again:",
    "    pytest --aisp-update-expectations --aisp-artifacts",
)
FIELDS = ("baseline_us", "optimized_us", "share", "limit", "clock")


class Recording(NamedTuple):
    """The values that one run recorded for a case, and the run's environment."""

    result: Result
    environment: Mapping[str, object]


Recorded: TypeAlias = Mapping[tuple[str, str], Sequence[Recording]]
"""The results that runs recorded, keyed by the product and the case's key."""


def checksums_result(
    files: Sequence[Path], baselines: Path, against: str, artifacts: Sequence[Path] = ()
) -> CliResult:
    """Return the problems in the staged versions of `files`, which default to all changed files.

    Args:
        artifacts: the folders of the runs that recorded the changed results. Without any folder,
            only the checksums are checked.
    """
    recorded = _recorded(artifacts) if artifacts else None
    names = [file.as_posix() for file in files] or _changed(baselines, against)
    names = [name for name in names if name.endswith(".json") and not name.endswith("/peaks.json")]
    problems = [problem for name in names for problem in _problems(name, against, recorded)]
    if problems:
        lines = [line for problem in problems for line in problem.splitlines()]
        # problems with several lines already include advice
        complete = all("\n" in problem for problem in problems)
        advice = ADVICE if recorded is None else NOT_RECORDED
        return CliResult(lines if complete else [*lines, *advice], 1)
    if not names:
        none = f"no stored results staged below {baselines} differ from {against}"
        none = "none of these files contains stored results" if files else none
        return CliResult([f"{none}: nothing to refuse"])
    count = "1 file" if len(names) == 1 else f"{len(names)} files"
    unedited = f"{count} of stored results: unedited, the checksum of every line matches"
    if recorded is None:
        return CliResult([unedited, *NO_PROOF])
    folders = ", ".join(map(str, artifacts))
    return CliResult([unedited, f"every changed result is one that a run recorded: {folders}"])


def _recorded(artifacts: Sequence[Path]) -> Recorded:
    """Return the values that the runs in the folders `artifacts` recorded."""
    found: dict[tuple[str, str], list[Recording]] = {}
    try:
        for folder in artifacts:
            run = run_reader.load(folder)
            for line, row in zip(run.lines, run.rows(), strict=True):  # `rows` checks the samples
                if row.recorded and line.samples is not None:
                    result = recorded_result(row.recorded, RUN, line.samples.sha256)
                    one = Recording(result, row.environment)
                    found.setdefault((row.product, row.key), []).append(one)
    except (RunError, ValueError) as error:
        raise CliError(str(error)) from None
    return found


def _problems(name: str, against: str, recorded: Recorded | None) -> Iterator[str]:
    """Yield the problems in the staged version of a file of stored results."""
    try:
        now = _stored(STAGED, name)
    except StoreError as error:
        # `ADVICE` replaces the error's own advice to restore the committed file.
        yield str(error).partition(COMMITTED)[0]
        return
    try:
        before = _stored(against, name)
    except StoreError:  # the file at `against` is already broken
        before = Stored(now.product)
    for key, facts in now.environments.items():
        old = before.environments.get(key)
        if old is not None and old != facts:
            yield f"{name} environments[{key!r}]: it is {facts}, and was {old}"
        if old is None and not _is_commit(facts.get("commit")):
            commit = facts.get("commit")
            yield f"{name} environments[{key!r}]: {commit=} is not a commit of this repository"
    if recorded is not None:
        for key, why in _unproved(now, before, recorded):
            yield f"{name} results[{key!r}]: {why}"


def _unproved(now: Stored, before: Stored, recorded: Recorded) -> Iterator[tuple[str, str]]:
    """Yield the key of each changed result that no run recorded, and the reason."""
    for key, result in now.results.items():
        old, runs = before.results.get(key), recorded.get((now.product, key), ())
        run = next((run for run in runs if run.result.samples == result.samples), None)
        if result == old:
            continue
        if result.samples is None:
            yield key, "it names no samples, because the run that recorded it kept no artifacts"
        elif run is None:
            yield key, f"its samples, {result.samples[:12]}..., are in none of these artifacts"
        elif wrong := _other_than_recorded(result, _sources(before, key, run), runs):
            yield key, f"the run recorded other {', '.join(wrong)}"
        else:
            new = [n for n in result.environments if n not in before.environments]
            if new and not any(run.environment.items() <= now.environments[n].items() for n in new):
                yield key, "the run recorded another environment"


def _sources(before: Stored, key: str, run: Recording) -> list[Result]:
    """Return the results that may be stored after a run recorded the case `key`.

    The results are the run's result, the result that was stored before, and both merged.
    """
    old = before.results.get(key)
    if old is None:
        return [run.result]
    merged, _ = merge(before, {key: run.result}, {RUN: run.environment}, replace=False)
    return [run.result, old, merged.results[key]]


def _other_than_recorded(
    result: Result, sources: Sequence[Result], runs: Sequence[Recording]
) -> list[str]:
    """Return the names of the fields of `result` whose values do not come from `sources`."""
    wrong = [
        name
        for name in (*FIELDS, "sources", "choices")
        if getattr(result, name) not in [getattr(one, name) for one in sources]
    ]
    recorded = [*(one.result for one in runs), *sources]
    sessions = [values for one in recorded for values in one.values]
    wrong += ["values"] if any(values not in sessions for values in result.values) else []
    return wrong + [
        metric
        for metric, amounts in result.goals.items()
        if amounts not in [one.goals.get(metric) for one in sources]
    ]


def _stored(ref: str, name: str) -> Stored:
    """Return the results in the file `name` at `ref`, or no results if the file is missing."""
    path = Path(name)
    text = _git("show", f"{ref}:./{name}", missing_ok=True)
    if text is None:
        return Stored(path.absolute().parent.name)
    try:
        return parse(path, text.decode())
    except UnicodeDecodeError as error:
        raise StoreError(f"{name} was not written by pytest-aisp: {error}") from None


def _changed(baselines: Path, against: str) -> list[str]:
    """Return the staged files in `baselines` that differ from `against`."""
    options = ("--cached", "--relative", "--name-only", "--diff-filter=d", "-z")
    output = _git("diff", *options, against, "--", str(baselines)) or b""
    return [name for name in output.decode().split("\0") if name]


def _is_commit(commit: object) -> bool:
    if commit is None:
        return False
    return _git("cat-file", "-e", f"{commit}^{{commit}}", missing_ok=True) == b""


def _git(*args: str, missing_ok: bool = False) -> bytes | None:
    """Return git's output. If git fails and `missing_ok` is True, return None."""
    try:
        return git.run_git(Path(), *args)
    except git.NoGit as error:
        raise CliError(str(error)) from None
    except git.GitError as error:
        if missing_ok:
            return None
        why = "".join(str(error).splitlines()[:1])
    raise CliError(f"git {args[0]} fails: {why}\nRun it in a clone with that commit")
