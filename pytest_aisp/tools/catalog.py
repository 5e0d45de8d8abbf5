"""The pages and cases here, as pytest collects them in a process of its own; targets by name.

A target is a chapter, `ch10`, or a page of it, `ch10:gemm`.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from ..page.gpu_specs import ARCHS
from ..util.cli_result import CliError, CliResult, columns
from ..worker.client import ReplayError, ReplayWorker

COLLECTOR = "pytest_aisp.session.collect"
LAST = 20
"""Lines of pytest's output that are shown where it collects nothing."""


@dataclass(frozen=True)
class Catalog:
    """What pytest collects here.

    Attributes:
        root: pytest's; paths of pages are relative to it.
        baselines: folder of stored results.
        folders: those of pages that the ini file names, relative to root too; without any, pages
            are what pytest finds from here.
        pages: ``path``, ``chapter`` and ``name`` (the target) of each, whether imported or not.
        cases: of the pages that were imported, as `session.collect` writes them.
        unread: ``path``, ``outcome`` and ``text`` of pages that could not be collected.
    """

    root: Path
    baselines: Path
    folders: Sequence[str]
    pages: Sequence[Mapping[str, str]]
    cases: Sequence[Mapping[str, Any]]
    unread: Sequence[Mapping[str, str]] = ()

    @property
    def broken(self) -> list[str]:
        """What pages say that cannot be imported."""
        failed = [page for page in self.unread if page["outcome"] == "failed"]
        return [f"{page['path']}: {page['text'].strip().splitlines()[-1]}" for page in failed]

    def paths(self, targets: Sequence[str]) -> list[str]:
        """Return what to give to pytest for `targets`, as one writes it here; without, for all."""
        chosen = self.chosen(targets) if targets else self.folders
        return [os.path.relpath(self.root / path) for path in chosen]

    def chosen(self, targets: Sequence[str]) -> list[str]:
        """Return the paths of the pages of `targets`, relative to `root`."""
        return [page["path"] for page in self.pages if _is_of(page, targets)]

    def known(self, targets: Sequence[str]) -> None:
        """Raise `Unanswerable` for a target that names no page; with the nearest that do."""
        names = sorted({page["name"] for page in self.pages})
        chapters = sorted({page["chapter"] for page in self.pages})
        for target in targets:
            if target not in (*names, *chapters):
                raise _unknown(target, names, chapters)


def _is_of(page: Mapping[str, str], targets: Sequence[str]) -> bool:
    return page["chapter"] in targets or page["name"] in targets


def _unknown(target: str, names: Sequence[str], chapters: Sequence[str]) -> CliError:
    among = names if ":" in target else [*chapters, *names]
    near = difflib.get_close_matches(target, among, n=3, cutoff=0.6)
    if not near:  # a page's name without its chapter, or with another's
        near = [name for name in names if name.partition(":")[2] == target.rpartition(":")[2]]
    legal = f"the nearest: {', '.join(near)}" if near else f"chapters: {', '.join(chapters)}"
    return CliError(f"unknown target {target!r}; {legal}\n    aisp suite list")


def target_of(chapter: str, page: str) -> str:
    """Return ``ch10:gemm``, the target of the page ``gemm_test.py`` or ``test_gemm.py``."""
    return f"{chapter}:{Path(page).stem.removesuffix('_test').removeprefix('test_')}"


def collect(
    targets: Sequence[str] | None = None, *, tell: Callable[[str], None] = lambda text: None
) -> Catalog:
    """Return what pytest collects from here; of all pages, or of those of `targets`.

    No target at all names the pages and imports none.

    Raises:
        Unanswerable: where pytest cannot be started here, or a target is unknown.
    """
    tell("collect the pages")
    with tempfile.TemporaryDirectory(prefix="aisp-catalog-") as folder:
        file = Path(folder) / "catalog.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", COLLECTOR]
        command += ["-p", "no:cacheprovider", f"--aisp-catalog={file}"]
        command += [] if targets is None else [f"--aisp-catalog-of={','.join(targets)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LAST:])
            raise CliError(f"{said}\npytest cannot collect here\n    pytest --collect-only -q")
        found = read(file)
    found.known(targets or ())
    return found


def read(file: Path) -> Catalog:
    """Return the catalog that `session.collect` wrote."""
    plain = json.loads(file.read_bytes())
    return Catalog(Path(plain.pop("root")), Path(plain.pop("baselines")), **plain)


HEADS = ("target", "title", "variants", "bound", "needs", "archs")
TITLE = 60
"""Characters of a title in the table."""


@dataclass(frozen=True)
class Listed:
    """One page: what its pairs are called, bound by and need, each word once."""

    target: str
    path: str
    title: str
    variants: tuple[str, ...]
    bound: tuple[str, ...]
    needs: tuple[str, ...]
    archs: tuple[str, ...]
    gpus: tuple[int, ...]
    cases: int

    @classmethod
    def of(cls, cases: Sequence[Mapping[str, Any]]) -> Listed:
        """Return the page of `cases`."""
        return cls(
            cases[0]["name"],
            cases[0]["path"],
            cases[0]["title"],
            tuple(dict.fromkeys(case["variant"] for case in cases)),
            tuple(dict.fromkeys(case["bound"] for case in cases)),
            tuple(dict.fromkeys(need for case in cases for need in case["needs"])),
            tuple(sorted({a for case in cases for a in case["archs"]}, key=ARCHS.index)),
            tuple(sorted({case["gpus"] for case in cases})),
            len(cases),
        )

    def row(self) -> tuple[str, ...]:
        """Return its line of the table."""
        title = self.title if len(self.title) <= TITLE else f"{self.title[: TITLE - 3]}..."
        needs = [*self.needs, *(f"{n} GPUs" for n in self.gpus if n > 1)]
        words = (self.variants, self.bound, needs or ["-"], self.archs)
        return self.target, title, *(", ".join(w) for w in words)


def list_targets_result(found: Catalog, *, as_json: bool) -> CliResult:
    """Return the pages of `found` with their cases; exit code 1 where one cannot be imported."""
    names = dict.fromkeys(case["name"] for case in found.cases)
    pages = [Listed.of([case for case in found.cases if case["name"] == n]) for n in names]
    code = 1 if found.broken else 0
    if as_json:
        plain = {"targets": [asdict(page) for page in pages], "broken": found.broken}
        return CliResult([json.dumps(plain, indent=1)], code)
    lines = columns([HEADS, *(page.row() for page in pages)]) if pages else ["no page is here"]
    return CliResult([*lines, *(f"cannot be imported: {why}" for why in found.broken)], code)


PROFILES = ("none", "minimal", "full")
PYTHON = ("python", "-m", "pytest")
"""As it is shown; what is run is this Python, wherever it is."""


def shown(words: Sequence[str]) -> str:
    """Return the command as one types it."""
    return shlex.join([*PYTHON, *words])


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Show a pytest command, run it, return its exit code."""
    say(f"$ {shown(words)}")
    process = Popen([sys.executable, *PYTHON[1:], *words])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has told pytest too, which closes its run
        code = process.wait()
    return code if code >= 0 else 128 - code  # as a shell says it: ended by a signal


def worst(commands: Sequence[Sequence[str]], say: Callable[[str], None]) -> int:
    """Run each of `commands`, whatever the others say; return the highest exit code."""
    return max(run(words, say) for words in commands)


def measuring(
    paths: Sequence[str], profile: str, artifacts: Path | None, more: Sequence[str]
) -> list[list[str]]:
    """Return the commands that measure `paths`: one, and one more for each further profiler.

    A run has one profiler, and each one's reports need a folder of their own: `minimal` is torch's,
    `full` also `nsys` and `ncu` where they are installed.
    """
    if profile == "none":
        return [[*_kept(artifacts), *more, *paths]]
    from ..worker.nvidia_tools import profiler_installed

    tools = [name for name in ("nsys", "ncu") if profile == "full" and profiler_installed(name)]
    commands = [["--aisp-profile=torch", *_kept(artifacts), *more, *paths]]
    for tool in tools:
        folder = None if artifacts is None else artifacts / tool
        commands.append([f"--aisp-profile={tool}", *_kept(folder), *more, *paths])
    return commands


def replaying(folder: Path, root: Path, paths: Collection[str], more: Sequence[str]) -> list[str]:
    """Return the command that judges the recorded cases in `folder` again, and no others.

    Args:
        root: pytest's, which recorded ids are relative to.
        paths: pages to which it is restricted, relative to `root`; none means all.

    Raises:
        Unanswerable: where nothing is recorded, or nothing of `paths`.
    """
    try:
        ids = [str(row["nodeid"]) for row in ReplayWorker(folder).rows.values()]
    except ReplayError as error:
        raise CliError(str(error)) from None
    ids = [i for i in ids if not paths or i.partition("::")[0] in paths]
    if not ids:
        raise CliError(f"{folder} holds no case of these targets\n    aisp suite replay {folder}")
    return [f"--aisp-replay={folder}", *more, *(_from_here(root, i) for i in ids)]


def _from_here(root: Path, nodeid: str) -> str:
    """Return a case's id, relative to pytest's root, as one writes it in this folder."""
    path, colons, case = nodeid.partition("::")
    return f"{os.path.relpath(root / path)}{colons}{case}"


def _kept(folder: Path | None) -> list[str]:
    return [] if folder is None else [f"--aisp-artifacts={folder}"]


def verifying(paths: Sequence[str], more: Sequence[str]) -> list[list[str]]:
    """Return the commands that prove `paths` without timing: collect, check, compile."""
    stages = (["--collect-only", "-q"], ["--aisp-check"], ["--aisp-compile"])
    return [[*stage, *more, *paths] for stage in stages]
