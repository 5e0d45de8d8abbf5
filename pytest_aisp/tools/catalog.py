"""List the pages and cases that pytest collects in the working directory.

A target is a chapter, such as `ch10`, or a page of a chapter, such as `ch10:gemm`. The commands of
`aisp suite` turn targets into pytest commands.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from subprocess import Popen

import msgspec

from ..page.gpu_specs import ARCHS
from ..results.messages import Json
from ..results.models import Result
from ..timing.predict import explains
from ..util.cli_result import CliError, CliResult, columns
from ..worker.client import ReplayError, ReplayWorker

COLLECTOR = "pytest_aisp.session.collect"
LAST_LINES = 20
"""If pytest cannot collect, this many of the last lines of output are shown."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page, with its path below pytest's root, its chapter, and its target."""

    path: str
    chapter: str
    name: str

    def is_in(self, targets: Collection[str]) -> bool:
        return self.chapter in targets or self.name in targets


class CatalogCase(Page, frozen=True, kw_only=True):
    """A case of a page, as `session.collect` writes it.

    Attributes:
        claims: the claims, keyed by arch.
        versus: ``library`` if the baseline is a library, else empty.
        work: the fields of `Work`, or None if the page's `work` function fails.
        costs: the arguments of a side's `Cost` for each of its phases, keyed by role.
        seen: the roles of the sides that the section `Seen` of the page's docstring names.
        sources: a digest of each side's syntax, keyed by role.
        text_sources: a digest of each side's text, keyed by role.
    """

    title: str
    nodeid: str
    key: str
    function: str
    variant: str
    size: Mapping[str, Json]
    kind: str
    gpus: int
    bound: str
    needs: Sequence[str]
    archs: Sequence[str]
    claims: Mapping[str, float | str | None]
    versus: str = ""
    work: Mapping[str, Json] | None
    costs: Mapping[str, Sequence[Mapping[str, Json]]] = {}
    seen: Sequence[str] = ()
    sources: Mapping[str, str]
    text_sources: Mapping[str, str] = {}

    def stale_roles(self, result: Result) -> set[str]:
        """Return the roles of the sides whose code has changed since `result` was stored."""
        then = result.with_syntax(self.sources, self.text_sources).sources
        roles = then.keys() | self.sources.keys()
        return {role for role in roles if then.get(role) != self.sources.get(role)}

    def is_unexplained(self, role: str, predicted: float, result: Result) -> bool:
        """Return whether a stored time is off the predicted time, and the page does not say why.

        A cost is of the side's current code, so the time of older code needs no explanation.
        """
        known = explains(predicted, result.seconds[role]) or role in self.seen
        return not known and role not in self.stale_roles(result)


class UnreadPage(msgspec.Struct, frozen=True):
    """A page that could not be collected, with pytest's outcome and its message."""

    path: str
    outcome: str
    text: str


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """The pages and cases that pytest collects in the working directory.

    Attributes:
        root: pytest's root folder. The paths of pages are relative to it.
        baselines: the folder of stored results.
        folders: the folders of pages that the ini file names. If there are none, pytest searches
            the working directory.
        pages: all pages, imported or not.
        cases: the cases of the imported pages.
        unread: the pages that could not be collected.
        imports: the folders below the root that Python imports from, relative to the root.
        modules: the files of all imported modules that belong to no library.
    """

    root: Path
    baselines: Path
    folders: Sequence[str]
    pages: Sequence[Page]
    cases: Sequence[CatalogCase]
    unread: Sequence[UnreadPage] = ()
    imports: Sequence[str] = (".",)
    modules: Sequence[str] = ()

    @property
    def import_errors(self) -> list[str]:
        """The pages that cannot be imported, each with the last line of its error."""
        failed = [page for page in self.unread if page.outcome == "failed"]
        return [f"{page.path}: {page.text.strip().splitlines()[-1]}" for page in failed]

    def paths(self, targets: Sequence[str]) -> list[str]:
        """Return pytest's arguments for `targets`, relative to the working directory.

        If there are no targets, the arguments are the folders of pages.
        """
        chosen = self.pages_of(targets) if targets else self.folders
        return [os.path.relpath(self.root / path) for path in chosen]

    def pages_of(self, targets: Sequence[str]) -> list[str]:
        """Return the paths of the pages of `targets`, relative to `root`."""
        return [page.path for page in self.pages if page.is_in(targets)]

    def check_targets(self, targets: Sequence[str]) -> None:
        """Raise `CliError` if a target names no page."""
        names = sorted({page.name for page in self.pages})
        chapters = sorted({page.chapter for page in self.pages})
        for target in targets:
            if target in (*names, *chapters):
                continue
            among = names if ":" in target else [*chapters, *names]
            near = difflib.get_close_matches(target, among, n=3, cutoff=0.6)
            if not near:  # the chapter in the target is missing or wrong: search by the page's name
                page = target.rpartition(":")[2]
                near = [name for name in names if name.partition(":")[2] == page]
            known = (
                f"the nearest: {', '.join(near)}" if near else f"chapters: {', '.join(chapters)}"
            )
            raise CliError(f"unknown target {target!r}; {known}\n    aisp suite list")


def target_of(chapter: str, page: str) -> str:
    """Return ``ch10:gemm``, the target of the page ``gemm_test.py`` or ``test_gemm.py``."""
    return f"{chapter}:{Path(page).stem.removesuffix('_test').removeprefix('test_')}"


def collect(
    targets: Sequence[str] | None = None, *, tell: Callable[[str], None] = lambda text: None
) -> Catalog:
    """Run pytest in a separate process, and return the pages and cases that it collects.

    Args:
        targets: the targets whose pages are imported. None imports all pages, and an empty list
            imports no page.
    """
    tell("collect the pages")
    with tempfile.TemporaryDirectory(prefix="aisp-catalog-") as folder:
        file = Path(folder) / "catalog.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", COLLECTOR]
        command += ["-p", "no:cacheprovider", f"--aisp-catalog={file}"]
        command += [] if targets is None else [f"--aisp-catalog-of={','.join(targets)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            output = (done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:]
            advice = ["pytest cannot collect here", "    pytest --collect-only -q"]
            raise CliError("\n".join([*output, *advice]))
        catalog = read(file)
    catalog.check_targets(targets or ())
    return catalog


def find_case(nodeid: str, tell: Callable[[str], None]) -> tuple[CatalogCase, Path]:
    """Return the case with the pytest id `nodeid`, and pytest's root.

    The id is relative to the working directory.

    Raises:
        CliError: there is no such case, or its page cannot be imported.
    """
    pages = collect((), tell=tell)
    file, _, test = nodeid.partition("::")
    path = os.path.relpath(Path.cwd() / file, pages.root)
    names = [page.name for page in pages.pages if page.path == path]
    found = collect(names, tell=tell) if names else pages
    cases = {case.nodeid: case for case in found.cases if case.path == path}
    if f"{path}::{test}" in cases:
        return cases[f"{path}::{test}"], found.root
    near = difflib.get_close_matches(f"{path}::{test}", cases, n=1, cutoff=0)
    reasons = [*found.import_errors, *(f"the nearest: {name}" for name in near)]
    how = "".join(f"; {reason}" for reason in reasons[:1])
    raise CliError(f"unknown case {nodeid!r}{how}\n    pytest --collect-only -q")


def read(file: Path) -> Catalog:
    """Return the catalog that `session.collect` wrote to `file`."""
    plain = json.loads(file.read_bytes())
    return msgspec.convert(plain, Catalog, dec_hook=lambda kind, value: kind(value))


HEADS = ("target", "title", "variants", "bound", "needs", "archs")
TITLE_WIDTH = 60


class TargetSummary(msgspec.Struct, frozen=True):
    """One page in `aisp suite list`. A value that several cases share is listed once."""

    target: str
    path: str
    title: str
    variants: Sequence[str]
    bound: Sequence[str]
    needs: Sequence[str]
    archs: Sequence[str]
    gpus: Sequence[int]
    cases: int

    @classmethod
    def of(cls, cases: Sequence[CatalogCase]) -> TargetSummary:
        return cls(
            cases[0].name,
            cases[0].path,
            cases[0].title,
            list(dict.fromkeys(case.variant for case in cases)),
            list(dict.fromkeys(case.bound for case in cases)),
            list(dict.fromkeys(need for case in cases for need in case.needs)),
            sorted({arch for case in cases for arch in case.archs}, key=ARCHS.index),
            sorted({case.gpus for case in cases}),
            len(cases),
        )

    def row(self) -> tuple[str, ...]:
        title = self.title
        if len(title) > TITLE_WIDTH:
            title = f"{title[: TITLE_WIDTH - 3]}..."
        needs = [*self.needs, *(f"{n} GPUs" for n in self.gpus if n > 1)]
        words = (self.variants, self.bound, needs or ["-"], self.archs)
        return self.target, title, *(", ".join(w) for w in words)


def list_targets_result(catalog: Catalog, *, as_json: bool) -> CliResult:
    """Return the pages with their cases. The exit code is 1 if a page cannot be imported."""
    names = dict.fromkeys(case.name for case in catalog.cases)
    pages = [TargetSummary.of([c for c in catalog.cases if c.name == name]) for name in names]
    errors = catalog.import_errors
    if as_json:
        plain = {"targets": msgspec.to_builtins(pages), "broken": errors}
        return CliResult([json.dumps(plain, indent=1)], 1 if errors else 0)
    lines = columns([HEADS, *(page.row() for page in pages)]) if pages else ["no pages found"]
    lines += [f"cannot be imported: {error}" for error in errors]
    return CliResult(lines, 1 if errors else 0)


PYTHON = ("python", "-m", "pytest")


def command_line(words: Sequence[str]) -> str:
    """Return a pytest command as a user would type it. `run` uses the Python of this process."""
    return shlex.join([*PYTHON, *words])


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Show a pytest command, run it, and return its exit code."""
    say(f"$ {command_line(words)}")
    process = Popen([sys.executable, *PYTHON[1:], *words])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal also sends Ctrl-C to pytest: wait until pytest ends
        code = process.wait()
    return code if code >= 0 else 128 - code  # a shell reports signals in this way


def run_all(commands: Sequence[Sequence[str]], say: Callable[[str], None]) -> int:
    """Run all of `commands` and return the highest exit code."""
    return max(run(words, say) for words in commands)


def measure_commands(
    paths: Sequence[str], profile: str, artifacts: Path | None, more: Sequence[str]
) -> list[list[str]]:
    """Return the commands that measure `paths`: one for each profiler, or one without profiler.

    A run can use only one profiler, and each profiler needs its own folder for reports. The profile
    `minimal` uses torch's profiler. The profile `full` adds `nsys` and `ncu` if they are installed.
    """
    profilers = {"none": [""], "minimal": ["torch"]}.get(profile)
    if profilers is None:
        from ..worker.nvidia_tools import profiler_installed

        profilers = ["torch", *filter(profiler_installed, ("nsys", "ncu"))]
    commands = []
    for profiler in profilers:
        options = [f"--aisp-profile={profiler}"] if profiler else []
        if artifacts is not None:
            folder = artifacts / profiler if profiler in ("nsys", "ncu") else artifacts
            options.append(f"--aisp-artifacts={folder}")
        commands.append([*options, *more, *paths])
    return commands


def verify_commands(paths: Sequence[str], more: Sequence[str]) -> list[list[str]]:
    """Return the commands that collect, check and compile `paths` without timing them."""
    stages = (["--collect-only", "-q"], ["--aisp-check"], ["--aisp-compile"])
    return [[*stage, *more, *paths] for stage in stages]


def replay_command(
    folder: Path, root: Path, paths: Collection[str], more: Sequence[str]
) -> list[str]:
    """Return the pytest command that computes new verdicts from the samples in `folder`.

    The recorded ids and `paths` are relative to pytest's `root`. If `paths` is empty, the command
    includes all recorded pages.
    """
    try:
        ids = [row.nodeid for row in ReplayWorker(folder).rows.values()]
    except ReplayError as error:
        raise CliError(str(error)) from None
    arguments = []
    for nodeid in ids:
        path, colons, case = nodeid.partition("::")
        if not paths or path in paths:
            arguments.append(f"{os.path.relpath(root / path)}{colons}{case}")
    if not arguments:
        raise CliError(f"{folder} has no case of these targets\n    aisp suite replay {folder}")
    return [f"--aisp-replay={folder}", *more, *arguments]
