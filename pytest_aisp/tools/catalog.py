"""The pages and cases here, as pytest collects them in a process of its own; targets by name.

A target is a chapter, `ch10`, or a page of it, `ch10:gemm`.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..page.gpu_specs import ARCHS
from ..util.cli_result import CliError, CliResult, columns

COLLECTOR = "pytest_aisp.session.collect"
LAST = 20
"""Lines of pytest's output that are shown where it collects nothing."""


@dataclass(frozen=True)
class Catalogue:
    """What pytest collects here.

    Attributes:
        root: pytest's; paths of pages are relative to it.
        baselines: folder of stored results.
        folders: those of pages that the ini file names, relative to root too; without any, pages
            are what pytest finds from here.
        pages: ``path``, ``chapter`` and ``name`` (the target) of each, whether imported or not.
        cases: of the pages that were imported, as `session.catalogue` writes them.
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
    return CliError(f"unknown target {target!r}; {legal}\n    aisp bench list-targets")


def target_of(chapter: str, page: str) -> str:
    """Return ``ch10:gemm``, the target of the page ``gemm_test.py`` or ``test_gemm.py``."""
    return f"{chapter}:{Path(page).stem.removesuffix('_test').removeprefix('test_')}"


def collect(
    targets: Sequence[str] | None = None, *, tell: Callable[[str], None] = lambda text: None
) -> Catalogue:
    """Return what pytest collects from here; of all pages, or of those of `targets`.

    No target at all names the pages and imports none.

    Raises:
        Unanswerable: where pytest cannot be started here, or a target is unknown.
    """
    tell("collect the pages")
    with tempfile.TemporaryDirectory(prefix="aisp-catalogue-") as folder:
        file = Path(folder) / "catalogue.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", COLLECTOR]
        command += ["-p", "no:cacheprovider", f"--aisp-catalogue={file}"]
        command += [] if targets is None else [f"--aisp-catalogue-of={','.join(targets)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LAST:])
            raise CliError(f"{said}\npytest cannot collect here\n    pytest --collect-only -q")
        found = read(file)
    found.known(targets or ())
    return found


def read(file: Path) -> Catalogue:
    """Return the catalogue that `session.catalogue` wrote."""
    plain = json.loads(file.read_bytes())
    return Catalogue(Path(plain.pop("root")), Path(plain.pop("baselines")), **plain)


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


def list_targets_result(found: Catalogue, *, as_json: bool) -> CliResult:
    """Return the pages of `found` with their cases; exit code 1 where one cannot be imported."""
    names = dict.fromkeys(case["name"] for case in found.cases)
    pages = [Listed.of([case for case in found.cases if case["name"] == n]) for n in names]
    code = 1 if found.broken else 0
    if as_json:
        plain = {"targets": [asdict(page) for page in pages], "broken": found.broken}
        return CliResult([json.dumps(plain, indent=1)], code)
    lines = columns([HEADS, *(page.row() for page in pages)]) if pages else ["no page is here"]
    return CliResult([*lines, *(f"cannot be imported: {why}" for why in found.broken)], code)
