"""The pages as they were at a commit: what `--aisp-against=REF` compares with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..util import git


class SnapshotError(Exception):
    """A commit that cannot be read; the last line says what to do."""


@dataclass
class GitSnapshot:
    """The tree under `root` as it was at a commit, unpacked in a folder of its own.

    Attributes:
        sha: the commit.
        label: the commit range that a verdict names: ``1a2b3c4d..HEAD + uncommitted changes``.
        folder: holds the old tree; it goes with this object.
        tree: where the old tree lies. Links that lead out of it are left out.
        moved: whether any tracked file under `root` differs from the commit.
    """

    root: Path
    sha: str
    label: str
    folder: tempfile.TemporaryDirectory[str]
    tree: Path
    moved: bool
    _renames: dict[str, str]
    _names: frozenset[str]
    _left_out: frozenset[str]

    @classmethod
    def at(cls, root: Path, ref: str) -> GitSnapshot:
        """Return the tree under `root` as it was at `ref`.

        Raises:
            SnapshotError: where there is no repository or no such commit here.
        """
        sha = _commit(root, ref)
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        here = _git(root, "rev-parse", "--short=8", "HEAD").strip()
        label = f"{sha[:8]}..{here}" + (" + uncommitted changes" if changed else "")
        folder = tempfile.TemporaryDirectory(prefix="aisp-past-")
        tree = Path(os.path.realpath(folder.name)) / "tree"
        try:
            names = _check_out(root, sha, tree)
        except SnapshotError as error:
            raise SnapshotError(_fetch(ref, f"its files cannot be had: {error}")) from None
        left_out = frozenset(_drop_links_out(tree))
        moved = bool(_git(root, "diff", "--name-only", "--relative", sha).strip())
        return cls(root, sha, label, folder, tree, moved, _renamed(root, sha), names, left_out)

    def page(self, path: Path) -> Path | None:
        """Return where the page at `path` lies in the old tree, under its old name.

        None for a page that the commit does not have.

        Raises:
            SnapshotError: for a page that it has, and that is not in the old tree.
        """
        name = self._name(path)
        if name is None or name not in self._names:
            old = None if name is None else self.tree / name  # reached through a link to a folder
            return old if old is not None and old.exists() else None
        if not (self.tree / name).exists():
            raise SnapshotError(
                f"{name} is in {self.sha[:8]}, but no longer in {self.tree}\n"
                "Something removed it; run the same command again"
            )
        return self.tree / name

    def unreached(self, path: Path) -> str:
        """Return why nothing is known of the page at `path` as it was, or an empty text."""
        name = self._name(path)
        if name is None:
            return f"{path} lies outside {self.root}"
        links = [str(link) for link in (Path(name), *Path(name).parents)]
        found = next((link for link in links if link in self._left_out), None)
        return f"{found} was a link out of {self.root}" if found else ""

    def _name(self, path: Path) -> str | None:
        """Return the old name of `path` below the root, or None where it lies elsewhere."""
        root = os.path.realpath(self.root)
        for folder in (os.path.realpath(path.parent), str(path.parent.absolute())):
            found = Path(folder, path.name)
            for base in (root, self.root):
                if found.is_relative_to(base):
                    name = found.relative_to(base).as_posix()
                    return self._renames.get(name, name)
        return None


def _check_out(root: Path, sha: str, tree: Path) -> frozenset[str]:
    """Write the files of `root` at `sha` into `tree`, and return their names.

    By an index of its own: `git archive` leaves out and rewrites what `.gitattributes` says.
    """
    index = {"GIT_INDEX_FILE": str(tree.with_name("index"))}
    top = Path(_git(root, "rev-parse", "--show-toplevel").removesuffix("\n"))
    prefix = _git(root, "rev-parse", "--show-prefix").removesuffix("\n")
    _run(top, "-c", "core.sparseCheckout=false", "read-tree", f"{sha}:{prefix}", **index)
    _run(top, "checkout-index", "--all", "--quiet", f"--prefix={tree}/", **index)
    return frozenset(os.fsdecode(_run(top, "ls-files", "-z", **index)).split("\0")) - {""}


def _drop_links_out(tree: Path) -> Iterator[str]:
    """Remove the links that lead out of `tree`, into today's or elsewhere; yield their names."""
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(tree):
                path.unlink()
                yield path.relative_to(tree).as_posix()


def _commit(root: Path, ref: str) -> str:
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
    except SnapshotError as error:
        if "not a git repository" in str(error):
            raise SnapshotError(
                f"--aisp-against={ref}: {root} is in no git repository\n"
                "It compares with a commit; run it in a clone"
            ) from None
    raise SnapshotError(_fetch(ref, "there is no such commit in this clone"))


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


def _run(root: Path, *args: str, **variables: str) -> bytes:
    try:
        return git.run_git(root, *args, **variables)
    except git.GitError as error:
        raise SnapshotError(str(error)) from None
