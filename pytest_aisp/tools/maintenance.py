"""Clean up a repository: remove files that runs left, and prune stored results."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ..results import store
from ..results.store import StoreError
from ..util.cli_result import CliError, CliResult, columns, size_text
from .catalog import Catalog
from .stored_results import Chapter, chapters

PROFILES, ARTIFACTS = "aisp-profile", "artifacts"
"""The default folder of profiles, and the default parent folder of runs' artifacts."""
RUN_FILES = ("results.jsonl", "results.json")
"""A folder that contains one of these files was written by a run."""
TEMPORARY = re.compile(r"\.(\w|-|\.)+\.json\.(lock|tmp|\d+)")
"""The names of files that a killed process leaves next to stored results."""


class Leftover(msgspec.Struct):
    """A file or folder that a run left behind. `remove` stores the outcome in this object."""

    path: str
    nbytes: int = msgspec.field(name="bytes")
    removed: bool = False
    error: str | None = None

    def remove(self) -> None:
        path = Path(self.path)
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            self.removed = True
        except OSError as error:
            self.error = str(error)


def clean_result(catalog: Catalog, *, yes: bool, as_json: bool = False) -> CliResult:
    """List leftovers of runs, and remove them if `yes`. The exit code is 2 if a removal fails."""
    items = list(leftovers(catalog.root, catalog.baselines))
    for leftover in items if yes else []:
        leftover.remove()
    errors = [f"{it.path} cannot be removed: {it.error}" for it in items if it.error is not None]
    if as_json:
        lines = [json.dumps({"left": msgspec.to_builtins(items)}, indent=1)]
    elif items:
        table = columns([(_size(it.nbytes), os.path.relpath(it.path)) for it in items])
        total = _size(sum(it.nbytes for it in items if it.error is None))
        summary = [f"{total} would be removed:", "    aisp machine clean --yes"]
        lines = [*table, *errors, *([f"{total} removed"] if yes else summary)]
    else:
        lines = ["nothing to clean"]
    return CliResult(lines, 2 if errors else 0)


def leftovers(root: Path, baselines: Path) -> Iterator[Leftover]:
    """Yield leftovers of runs under `root`: profiles, artifacts, temporary files in `baselines`.

    Files and folders behind a link are skipped. A folder that contains the stored results is
    skipped too. Links to the yielded folders are also yielded.
    """
    stored = baselines.resolve()
    candidates = [root / PROFILES, *_artifact_folders(root / ARTIFACTS)]
    folders = [f for f in candidates if f.is_dir() and not _is_behind_link(f, root)]
    folders = [f for f in folders if not stored.is_relative_to(f.resolve())]
    for folder in folders:
        files = (Path(base) / name for base, _, names in os.walk(folder) for name in names)
        yield Leftover(str(folder), sum(file.lstat().st_size for file in files))
    targets = {folder.resolve() for folder in folders}
    for link in candidates:
        if link.is_symlink() and link.resolve() in targets:  # for example `latest`
            yield Leftover(str(link), 0)
    if stored.is_relative_to(root.resolve()):
        for file in sorted(baselines.glob("*/.*")):
            if (
                TEMPORARY.fullmatch(file.name)
                and file.is_file()
                and not _is_behind_link(file, root)
            ):
                yield Leftover(str(file), file.stat().st_size)


def _artifact_folders(folder: Path) -> Sequence[Path]:
    """Return `folder` if a run wrote it, or the run folders inside `folder`."""
    if any((folder / name).exists() for name in RUN_FILES):
        return [folder]
    inside = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return [path for path in inside if any((path / name).exists() for name in RUN_FILES)]


def _is_behind_link(path: Path, root: Path) -> bool:
    return path.resolve() != root.resolve() / path.relative_to(root)


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "0 B"


def prune_result(
    catalog: Catalog, product: str | None, *, yes: bool, as_json: bool = False
) -> CliResult:
    """List the stored results whose case no longer exists, and remove them if `yes`.

    Results of a page that cannot be collected are kept, because its cases are unknown.

    Args:
        product: the product whose results are examined, or None for all products.
    """
    if not catalog.folders:
        raise CliError(
            "the ini file names no folder of pages, so it is unknown which cases are gone\n"
            "Name them in [tool.pytest.ini_options] of pyproject.toml:\n"
            '    aisp_pages = ["suites"]'
        )
    if missing := [f for f in catalog.folders if not (catalog.root / f).exists()]:
        raise CliError(
            f"{catalog.root / missing[0]} is not here, so it is unknown which cases are gone\n"
            "Check out the whole repository:\n    git sparse-checkout disable"
        )
    gone = [
        (chapter, key)
        for chapter, keys in _results_without_case(catalog, product)
        for key in (_prune(chapter, keys) if yes else keys)
    ]
    if not as_json:
        return CliResult(_prune_text(catalog, gone, yes))
    places = [
        {"product": c.stored.product, "chapter": c.name, "case": key, "file": str(c.path)}
        for c, key in gone
    ]
    plain = {"removed": yes, "gone": places, "unread": msgspec.to_builtins(catalog.unread)}
    return CliResult([json.dumps(plain, indent=1)])


def _prune_text(catalog: Catalog, gone: Sequence[tuple[Chapter, str]], yes: bool) -> list[str]:
    lines = [f"{chapter.path}: {key}" for chapter, key in gone]
    unread = [f"kept, because its page cannot be collected: {page.path}" for page in catalog.unread]
    if not gone:
        return ["every stored result has its case", *unread]
    count = "1 result" if len(gone) == 1 else f"{len(gone)} results"
    summary = [f"{count} would be removed:", "    aisp results prune --yes"]
    if yes:
        summary = [f"{count} removed"]
    return [*lines, *unread, *summary]


def _results_without_case(
    catalog: Catalog, product: str | None
) -> Iterator[tuple[Chapter, Sequence[str]]]:
    """Yield each chapter with results whose case no longer exists, and the keys of the results."""
    cases = {(case.chapter, case.key) for case in catalog.cases}
    unread = {Path(page.path).name for page in catalog.unread}
    for chapter in chapters(catalog.baselines, product):
        keys = [
            key
            for key in sorted(chapter.stored.results)
            if (chapter.name, key) not in cases and key.partition("::")[0] not in unread
        ]
        if keys:
            yield chapter, keys


def _prune(chapter: Chapter, keys: Sequence[str]) -> list[str]:
    try:
        return store.prune(chapter.path, keys)
    except StoreError as error:
        raise CliError(str(error)) from None
