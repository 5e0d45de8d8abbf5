"""`aisp clean`: what runs left under the root of the pages; never stored results."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.answers import Answer, columns, size_text
from .catalogue import Catalogue

PROFILES, ARTIFACTS = "aisp-profile", "artifacts"
"""Where profiles lie without ``--aisp-artifacts``, and where artifacts of runs are gathered."""
OURS = ("results.jsonl", "results.json")
"""A folder that holds one of these was written by a run."""
LEFT = re.compile(r"\.(\w|-|\.)+\.json\.(lock|tmp|\d+)")
"""What a process that was killed leaves beside stored results."""
GO = "    aisp clean --yes"


@dataclass(frozen=True)
class Left:
    """A file or folder that a run left, and its bytes."""

    path: Path
    nbytes: int


def answer(found: Catalogue, *, yes: bool, as_json: bool = False) -> Answer:
    """Return what runs left, with sizes; removed where `yes`. Exit code 2 where one stays."""
    left = list(find(found.root, found.baselines))
    failed = {it.path: why for it in left if yes and (why := _removed(it.path)) is not None}
    write = _json if as_json else _text
    return Answer(write(left, failed, yes), 2 if failed else 0)


def _text(left: Sequence[Left], failed: Mapping[Path, str], yes: bool) -> list[str]:
    if not left:
        return ["nothing to clean"]
    rows = [(_size(it.nbytes), os.path.relpath(it.path)) for it in left]
    total = _size(sum(it.nbytes for it in left if it.path not in failed))
    closing = [f"{total} removed"] if yes else [f"{total} would be removed:", GO]
    stays = [f"{path} stays: {why}" for path, why in failed.items()]
    return [*columns(rows), *stays, *closing]


def _json(left: Sequence[Left], failed: Mapping[Path, str], yes: bool) -> list[str]:
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


def _removed(path: Path) -> str | None:
    """Remove `path`; return why that was not possible, or None."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return str(error)
    return None
