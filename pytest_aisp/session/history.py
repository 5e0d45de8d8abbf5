"""The pages as they were at a commit: what `--aisp-against=REF` compares with."""

from __future__ import annotations

import io
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..common import git


class HistoryError(Exception):
    """A commit that cannot be read; the last line says what to do."""


@dataclass
class Past:
    """The tree under `root` as it was at a commit, unpacked in a folder of its own.

    Attributes:
        sha: the commit.
        label: the commit range that a verdict names: ``1a2b3c4d..HEAD + uncommitted changes``.
        folder: where the old tree lies; it goes with this object.
        moved: whether any tracked file under `root` differs from the commit.
    """

    root: Path
    sha: str
    label: str
    folder: tempfile.TemporaryDirectory[str]
    moved: bool
    _renames: dict[str, str]

    @classmethod
    def at(cls, root: Path, ref: str) -> Past:
        """Return the tree under `root` as it was at `ref`.

        Raises:
            HistoryError: where there is no repository or no such commit here.
        """
        sha = _commit(root, ref)
        prefix = _git(root, "rev-parse", "--show-prefix").strip()
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        here = _git(root, "rev-parse", "--short=8", "HEAD").strip()
        label = f"{sha[:8]}..{here}" + (" + uncommitted changes" if changed else "")
        folder = tempfile.TemporaryDirectory(prefix="aisp-past-")
        try:
            archive = _run(root, "archive", f"{sha}:{prefix}")
        except HistoryError:
            raise HistoryError(_fetch(ref, "its files are not in this clone")) from None
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder.name, filter="data")
        moved = bool(_git(root, "diff", "--name-only", "--relative", sha).strip())
        return cls(root, sha, label, folder, moved, _renamed(root, sha))

    def page(self, path: Path) -> Path | None:
        """Return where the page at `path` lies in the old tree, under its old name; or None."""
        name = path.resolve().relative_to(self.root.resolve()).as_posix()
        old = Path(self.folder.name) / self._renames.get(name, name)
        return old if old.exists() else None


def _commit(root: Path, ref: str) -> str:
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
    except HistoryError as error:
        if "not a git repository" in str(error):
            raise HistoryError(
                f"--aisp-against={ref}: {root} is in no git repository\n"
                "It compares with a commit; run it in a clone"
            ) from None
    raise HistoryError(_fetch(ref, "there is no such commit in this clone"))


def _fetch(ref: str, why: str) -> str:
    bare = ref.removeprefix("origin/")
    return (
        f"--aisp-against={ref}: {why}\n"
        f"A shallow clone lacks it; fetch it first:\n    git fetch --depth=1 origin {bare}"
        + (" && use --aisp-against=FETCH_HEAD" if ref == bare else "")
    )


def _renamed(root: Path, sha: str) -> dict[str, str]:
    """Return old names by new ones of the files under `root` that were renamed since `sha`."""
    args = ("diff", "--relative", "--find-renames", "--diff-filter=R", "--name-status", "-z", sha)
    fields = _git(root, *args).split("\0")
    return {fields[i + 2]: fields[i + 1] for i in range(0, len(fields) - 2, 3)}


def _git(root: Path, *args: str) -> str:
    return _run(root, *args).decode()


def _run(root: Path, *args: str) -> bytes:
    try:
        return git.asked(root, *args)
    except git.GitError as error:
        raise HistoryError(str(error)) from None
