"""Compare a case at two commits with the code gate, by running pytest in a git worktree."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from subprocess import PIPE, STDOUT, Popen

from msgspec import Struct, convert

from ..page.gpu_specs import LIMITS
from ..page.pair import UNJUDGED
from ..page.sources import PACKAGE
from ..results import run_reader, stats, verdict
from ..results.messages import ChangedTask, PageSource
from ..results.row import Row
from ..results.run_reader import RecordedRun
from ..results.task_results import ChangedResult, TimeResult
from ..results.verdict import DISTURBED, NOT_COMPARED, Outcome, Reading
from ..util.cli_result import CliError
from ..util.git import GitSnapshot, renamed
from ..worker.client import WorkerProcess, interpreter
from . import catalog
from .commits import Commit, Worktree

COMPILES: Mapping[str, str | None] = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}
"""The environment of a process that compiles kernels for another machine."""
SASS_SECONDS = 120.0


class SideChange(Struct):
    """The speedup of a changed side over its version at another commit.

    Attributes:
        name: the name of the side's function.
        values: ln(speedup) of each repeated process, or of the first process if none was repeated.
        spread: the spread of one process's value.
        outcome: the decision of the code gate.
    """

    name: str
    values: list[float]
    spread: float
    outcome: Outcome

    @property
    def value(self) -> float:
        """The mean ln(speedup)."""
        return fmean(self.values)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(self.spread / len(self.values) ** 0.5)

    def interval(self) -> tuple[float, float]:
        """Return the 99 % interval of ln(speedup)."""
        return stats.interval(self.value, self.spread, len(self.values))

    def merged(self, again: SideChange) -> SideChange:
        """Return this measurement combined with `again`, with the outcome of `again`."""
        spread = max(self.spread, again.spread)
        return SideChange(again.name, [*self.values, *again.values], spread, again.outcome)


class Measurement(Struct, omit_defaults=True):
    """The result of timing the changed sides at a commit against another commit.

    Attributes:
        product, arch: the product name and the arch of the machine.
        sides: the changed sides, by role. A side that has not changed is left out.
        broken: the reason why the case cannot be measured at this commit, or empty.
        unclear: the reason why this measurement does not count, or empty.
    """

    product: str = ""
    sides: dict[str, SideChange] = {}
    broken: str = ""
    unclear: str = ""
    arch: str = ""


@dataclass(frozen=True)
class CommitRuns:
    """Runs of pytest in a worktree.

    Attributes:
        pages: the catalog of the user's own tree.
        case: the pytest id of the case without the page.
        names: the path of the page at each commit, relative to the root.
    """

    pages: catalog.Catalog
    tree: Worktree
    case: str
    names: Mapping[str, str]

    def page(self, commit: Commit) -> str:
        """Return the path of the page at `commit`, relative to the root."""
        return self.names[commit.sha]

    def nodeid(self, commit: Commit) -> str:
        """Return the case at `commit`, relative to the root."""
        return f"{self.page(commit)}::{self.case}"

    def require_case(self, commit: Commit) -> catalog.CatalogCase:
        """Return the case as pytest collects it at `commit`.

        Raises:
            CliError: the case cannot be collected, or its page imports a file of the user's tree
                instead of the worktree.
        """
        page, nodeid = self.page(commit), self.nodeid(commit)
        self.tree.check_out(commit)
        if not (self.tree.root / page).is_file():
            raise CliError(f"there is no {page} at {commit.short}; give a later commit")
        with tempfile.TemporaryDirectory(prefix="aisp-bisect-") as folder:
            file = Path(folder) / "catalog.json"
            words = ("--collect-only", "-q", "-p", catalog.COLLECTOR, f"--aisp-catalog={file}")
            output = self._run(*words, page)
            if not file.exists():
                raise CliError(f"pytest cannot collect {page} at {commit.short}: {_fault(output)}")
            found = catalog.read(file)
        cases = {case.nodeid: case for case in found.cases}
        if nodeid not in cases:
            errors = "".join(f": {text}" for text in found.import_errors[:1])
            names = "".join(f"\n    {each}" for each in cases)
            raise CliError(f"there is no case {nodeid} at {commit.short}{errors}{names}")
        top, own = os.path.realpath(self.pages.root), str(self.tree.top)
        files = map(os.path.realpath, found.modules)
        if mixed := [f for f in files if f.startswith(f"{top}{os.sep}") and not f.startswith(own)]:
            raise CliError(
                f"at {commit.short} the page imports today's {os.path.relpath(mixed[0], top)}\n"
                "Let pytest import from the repository, in its ini file:\n    pythonpath = src"
            )
        return cases[nodeid]

    def measure(
        self,
        commit: Commit,
        against: Commit,
        use: Callable[[RecordedRun], None] = lambda run: None,
    ) -> Measurement:
        """Return the result of timing the changed sides at `commit` against those at `against`.

        Args:
            use: a function that reads the run's folder before it is removed.

        Raises:
            RunError: `use` cannot read the folder.
        """
        self.tree.check_out(commit)
        page, old = self.page(commit), self.page(against)
        if not (self.tree.root / page).is_file():
            return Measurement(broken=f"there is no {page}")
        if page != old and renamed(self.tree.root, against.sha).get(page) != old:
            return Measurement(broken=f"git does not see that {old} was renamed to {page}")
        with tempfile.TemporaryDirectory(prefix="aisp-bisect-") as folder:
            options = (f"--aisp-against={against.sha}", f"--aisp-artifacts={folder}/run")
            output = self._run("-q", *options, self.nodeid(commit))
            try:
                run = run_reader.load(Path(folder) / "run")
                rows = [row for row in run.rows() if row.nodeid == self.nodeid(commit)]
            except run_reader.RunError:
                rows = []
            if not rows:
                return Measurement(broken=_fault(output))
            use(run)
        return read_row(rows[0], run.manifest.invalid, _fault(output))

    def sass_diff(
        self, case: catalog.CatalogCase, role: str, commit: Commit, against: str, arch: str
    ) -> list[str]:
        """Return the lines of the diff of a side's SASS from commit `against` to `commit`.

        If the SASS cannot be compared, there is one line, which gives the reason.

        Args:
            case: the case, which gives the function, the variant and the size.
            arch: the arch of the GPU on which the case was measured.
        """
        if arch not in LIMITS:
            return [f"not known on {arch or 'this machine'}"]
        self.tree.check_out(commit)
        root, name = self.tree.root, self.page(commit)
        module = Path(name).with_suffix("").as_posix().replace("/", ".")
        past = GitSnapshot.at(root, against)
        with past.folder:
            then = past.page(root / name)
            assert then is not None  # the page was measured at both commits
            task = ChangedTask(
                page=str(root / name),
                root=str(root),
                module=module,
                function=case.function,
                variant=case.variant,
                size=case.size,
                arch=arch,
                sass=role,
                past=PageSource(page=str(then), root=str(past.tree), module=f"aisp_past.{module}"),
            )
            with closing(WorkerProcess({**COMPILES, "PYTHONPATH": self._path()})) as worker:
                reply = worker.ask(task, SASS_SECONDS, lambda text: None)
        if reply.error is not None:
            return [f"not known: {(reply.message.splitlines() or [reply.error])[0]}"]
        return reply.read(ChangedResult).sass

    def _run(self, *words: str) -> str:
        """Run pytest in the worktree, and return its stdout and stderr."""
        baselines = f"aisp_baselines={self.pages.baselines}"
        command = [*interpreter(), "-m", "pytest", "-p", "no:cacheprovider", "-o", baselines]
        process = Popen(
            [*command, *words],
            cwd=self.tree.root,
            env={**os.environ, "PYTHONPATH": self._path(), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            errors="replace",
        )
        try:
            return process.communicate()[0]
        except BaseException:  # once terminated, pytest ends its worker processes
            process.terminate()
            process.wait()
            raise

    def _path(self) -> str:
        """Return the `PYTHONPATH` with which the page imports from the worktree.

        The worktree's version of this package is left out, so the installed plugin measures all
        commits, even commits of the plugin's own repository.
        """
        root, plugin = os.path.realpath(self.pages.root), os.path.dirname(PACKAGE)
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        outside = [p for p in given if not os.path.realpath(p).startswith(root) or p == plugin]
        folders = [f for f in self.pages.imports if os.path.realpath(f"{root}/{f}") != plugin]
        return os.pathsep.join([*(str(self.tree.root / f) for f in folders), *outside])


def read_row(row: Row, invalid: Sequence[str], fault: str) -> Measurement:
    """Return the measurement of a case from its row in a run.

    Args:
        invalid: the reasons why the run as a whole is invalid.
        fault: the error that pytest printed, which is used if the row gives no reason.
    """
    if row.verdict == DISTURBED or invalid:
        return Measurement(unclear="; ".join([*row.reasons, *invalid]))
    if row.value is None or row.spread is None:
        return Measurement(broken=row.need or "; ".join(row.reasons) or fault)
    if row.origins.get("claim") == UNJUDGED:
        return Measurement(broken="sweep= of the page does not judge this point")
    for text in row.remarks:
        if text.startswith(NOT_COMPARED):
            return Measurement(broken=text)
        if NOT_COMPARED in text:  # a side failed while it was timed, maybe on a busy machine
            return Measurement(unclear=text)
    names = {"baseline": row.baseline, "optimized": row.variant}
    sides = {}
    for role, name in names.items():
        results = [convert(r, TimeResult) for r in row.against if r["side"] == role]
        readings = [Reading(result.value, result.error) for result in results]
        if readings:
            sides[role] = _change(name, readings, row.spread)
    return Measurement(row.product, sides, arch=row.arch)


def _change(name: str, readings: Sequence[Reading], spread: float) -> SideChange:
    first, *votes = readings
    outcome = verdict.code_gate(spread, first).decide(first, votes)
    together = Reading(0.0, stats.rms(reading.error for reading in readings))
    values = [vote.value for vote in votes] or [first.value]
    return SideChange(name, values, verdict.effective_spread(spread, together), outcome)


def _fault(output: str) -> str:
    """Return the line of pytest's output that names an error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E  ")]
    named = [line for line in errors if re.match(r"[\w.]*(Error|Exception)\b", line)]
    usage = [line for line in lines if line.startswith("ERROR: ")]
    return [*named[:1], *errors[:1], *usage, *lines[-1:], "pytest printed nothing"][0]
