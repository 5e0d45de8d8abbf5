"""Products with stored results: which one is asked about, its chapters, peaks and arch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..page.gpu_specs import ARCHS, GPUS
from ..results import store
from ..results.models import Stored, base_of
from ..results.store import COMMITTED, StoreError, parse
from ..timing import peaks
from ..timing.peaks import Peaks, PeaksError
from ..util import git
from ..util.cli_result import CliError, CliResult
from ..util.device import Machine


@dataclass(frozen=True)
class Chapter:
    """The stored results of one chapter on one product."""

    name: str
    path: Path
    stored: Stored


def chosen(baselines: Path, asked: str | None, machine: Machine) -> list[str]:
    """Return the products asked about: one, and the same with several GPUs.

    It is `asked`, else the machine's, else the only one that has results. ``nvidia-h200-x2`` is
    itself alone.

    Raises:
        Unanswerable: where it has no results, or nothing says which one is meant.
    """
    there = sorted({file.parent.name for file in baselines.glob("*/*.json")})
    bases = sorted({base_of(product) for product in there})
    if asked is None:
        mine = machine.product in bases
        asked = machine.product if mine else bases[0] if len(bases) == 1 else None
    if asked is None or (asked not in there and asked not in bases):
        raise no_product(baselines, asked or machine.product, there)
    return [p for p in there if p == asked or base_of(p) == asked]


def no_product(baselines: Path, product: str, there: Sequence[str]) -> CliError:
    """Return the error of a product without results, with those `there`."""
    if not there:
        return CliError(
            f"no results are stored in {baselines}; record them on a quiet machine\n"
            "    pytest --aisp-update-expectations"
        )
    return CliError(
        f"no results of {product} are stored in {baselines}; there are those of"
        f" {', '.join(there)}; choose with\n    --product={there[0]}"
    )


def chapters(baselines: Path, product: str) -> Iterator[Chapter]:
    """Yield the stored chapters of `product`, by name.

    Raises:
        Unanswerable: for a file that cannot be read.
    """
    for path in sorted((baselines / product).glob("*.json")):
        if path.name != "peaks.json":
            try:
                yield Chapter(path.stem, path, store.load(path))
            except StoreError as error:
                raise CliError(str(error)) from None


def peaks_of(baselines: Path, product: str) -> Peaks | None:
    """Return the stored peaks of `product`: with several GPUs, those of one and of their links.

    Raises:
        Unanswerable: for a file that cannot be read.
    """
    names = dict.fromkeys((base_of(product), product))
    try:
        found = [peaks.stored(peaks.path_of(baselines, name)) for name in names]
    except (PeaksError, OSError) as error:
        raise CliError(str(error)) from None
    return found[0] if len(found) == 1 else peaks.joined(*found)


def arch_of(product: str, given: str | None, machine: Machine) -> str:
    """Return the arch whose claims `product` is held against.

    It is `given`, else the machine's where this is its product, else what the table of GPUs says of
    the name: results do not hold it.

    Raises:
        Unanswerable: for a word that is no arch, or a name that the table does not have.
    """
    legal = f"legal are {', '.join(ARCHS)}"
    if given is not None and given not in ARCHS:
        raise CliError(f"--arch={given}: unknown arch; {legal}")
    base = base_of(product)
    if given or machine.product == base:
        return given or machine.arch
    if base.startswith("cpu-"):
        return "cpu"
    for arch, names in GPUS.items():
        if set(names.lower().split(", ")) & set(base.split("-")):
            return arch
    raise CliError(f"nothing here says which arch {product} has; {legal}\n    --arch={ARCHS[1]}")


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
