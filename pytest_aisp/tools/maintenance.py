"""`aisp machine clean`: what runs left under the root of the pages; never stored results."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..results import store
from ..results.store import StoreError
from ..util.cli_result import CliError, CliResult, columns, size_text
from . import stored_results
from .catalog import Catalog

PROFILES, ARTIFACTS = "aisp-profile", "artifacts"
"""Where profiles lie without ``--aisp-artifacts``, and where artifacts of runs are gathered."""
OURS = ("results.jsonl", "results.json")
"""A folder that holds one of these was written by a run."""
LEFT = re.compile(r"\.(\w|-|\.)+\.json\.(lock|tmp|\d+)")
"""What a process that was killed leaves beside stored results."""
GO = "    aisp machine clean --yes"


@dataclass(frozen=True)
class Left:
    """A file or folder that a run left, and its bytes."""

    path: Path
    nbytes: int


def clean_result(found: Catalog, *, yes: bool, as_json: bool = False) -> CliResult:
    """Return what runs left, with sizes; removed where `yes`. Exit code 2 where one stays."""
    left = list(find(found.root, found.baselines))
    failed = {it.path: why for it in left if yes and (why := _remove_left(it.path)) is not None}
    write = _clean_json if as_json else _clean_text
    return CliResult(write(left, failed, yes), 2 if failed else 0)


def _clean_text(left: Sequence[Left], failed: Mapping[Path, str], yes: bool) -> list[str]:
    if not left:
        return ["nothing to clean"]
    rows = [(_size(it.nbytes), os.path.relpath(it.path)) for it in left]
    total = _size(sum(it.nbytes for it in left if it.path not in failed))
    closing = [f"{total} removed"] if yes else [f"{total} would be removed:", GO]
    stays = [f"{path} stays: {why}" for path, why in failed.items()]
    return [*columns(rows), *stays, *closing]


def _clean_json(left: Sequence[Left], failed: Mapping[Path, str], yes: bool) -> list[str]:
    plain = [
        {
            "path": str(it.path),
            "bytes": it.nbytes,
            "removed": yes and it.path not in failed,
            "error": failed.get(it.path),
        }
        for it in left
    ]
    return [json.dumps({"left": plain}, indent=1)]


def find(root: Path, baselines: Path) -> Iterator[Left]:
    """Yield what runs left under `root`: profiles, artifacts, leftovers beside stored results.

    What lies behind a link is left alone, and so is whatever holds the stored results; a link to
    one of the folders goes with it.
    """
    folders = [root / PROFILES, *_artifacts(root / ARTIFACTS)]
    kept = baselines.resolve()
    ours = [f for f in folders if f.is_dir() and not _is_linked(f, root)]
    ours = [folder for folder in ours if not kept.is_relative_to(folder.resolve())]
    yield from (Left(folder, _bytes(folder)) for folder in ours)
    # `latest` and the like would lead nowhere.
    yield from (Left(f, 0) for f in folders if f.is_symlink() and f.resolve() in _real(ours))
    if kept.is_relative_to(root.resolve()):
        for file in sorted(baselines.glob("*/.*")):
            if LEFT.fullmatch(file.name) and file.is_file() and not _is_linked(file, root):
                yield Left(file, file.stat().st_size)


def _artifacts(folder: Path) -> Sequence[Path]:
    """Return `folder` where a run wrote into it, else the runs' folders in it."""
    if any((folder / name).exists() for name in OURS):
        return [folder]
    inside = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    return [path for path in inside if any((path / name).exists() for name in OURS)]


def _is_linked(path: Path, root: Path) -> bool:
    """Say whether a link lies on the way from `root` to `path`: it may lead anywhere."""
    return path.resolve() != root.resolve() / path.relative_to(root)


def _real(folders: Sequence[Path]) -> set[Path]:
    return {folder.resolve() for folder in folders}


def _bytes(folder: Path) -> int:
    files = (Path(base) / name for base, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files)


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "0 B"


def _remove_left(path: Path) -> str | None:
    """Remove `path`; return why that was not possible, or None."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return str(error)
    return None


KEEP = "    aisp results prune --yes"
Gone: TypeAlias = Sequence[tuple[stored_results.Chapter, str]]


def prune_result(
    found: Catalog, product: str | None, *, yes: bool, as_json: bool = False
) -> CliResult:
    """Return which results have no case, removed where `yes`; of every product, or of one.

    Pages that are skipped or broken here may have any case: their results are kept.

    Raises:
        Unanswerable: where not every page is known, or a file cannot be read or written.
    """
    if not found.folders:
        raise CliError(
            "the ini file names no folder of pages: which cases are gone cannot be known\n"
            "Name them in [tool.pytest.ini_options] of pyproject.toml:\n"
            '    aisp_pages = ["suites"]'
        )
    if absent := [f for f in found.folders if not (found.root / f).exists()]:
        raise CliError(
            f"{found.root / absent[0]} is not here: which of its cases are gone cannot be known\n"
            "Check all of the repository out:\n    git sparse-checkout disable"
        )
    gone = [
        (chapter, key)
        for chapter, keys in gone_of(found, product)
        for key in (_removed(chapter, keys) if yes else keys)
    ]
    return CliResult(_prune_json(found, gone, yes) if as_json else _prune_text(found, gone, yes))


def _prune_text(found: Catalog, gone: Gone, yes: bool) -> list[str]:
    lines = [f"{chapter.path}: {key}" for chapter, key in gone]
    kept = [f"kept, its page cannot be collected here: {page['path']}" for page in found.unread]
    if not lines:
        return ["every stored result has its case", *kept]
    count = "1 result" if len(lines) == 1 else f"{len(lines)} results"
    did = [f"{count} removed"] if yes else [f"{count} would be removed:", KEEP]
    return [*lines, *kept, *did]


def _prune_json(found: Catalog, gone: Gone, yes: bool) -> list[str]:
    plain = {
        "removed": yes,
        "gone": [
            {
                "product": chapter.stored.product,
                "chapter": chapter.name,
                "case": key,
                "file": str(chapter.path),
            }
            for chapter, key in gone
        ],
        "unread": list(found.unread),
    }
    return [json.dumps(plain, indent=1)]


def gone_of(
    found: Catalog, product: str | None
) -> Iterator[tuple[stored_results.Chapter, Sequence[str]]]:
    """Yield the chapters that hold results without a case, with the keys of those."""
    keys: dict[str, set[str]] = {}
    for case in found.cases:
        keys.setdefault(case["chapter"], set()).add(case["key"])
    unread = {Path(page["path"]).name for page in found.unread}
    for name in _products(found.baselines, product):
        for chapter in stored_results.chapters(found.baselines, name):
            gone = set(chapter.stored.results) - keys.get(chapter.name, set())
            if gone := {key for key in gone if key.partition("::")[0] not in unread}:
                yield chapter, sorted(gone)


def _products(baselines: Path, product: str | None) -> list[str]:
    there = sorted({file.parent.name for file in baselines.glob("*/*.json")})
    if product is not None and product not in there:
        raise stored_results.no_product(baselines, product, there)
    return there if product is None else [product]


def _removed(chapter: stored_results.Chapter, gone: Sequence[str]) -> list[str]:
    try:
        return store.prune(chapter.path, gone)
    except StoreError as error:
        raise CliError(str(error)) from None
