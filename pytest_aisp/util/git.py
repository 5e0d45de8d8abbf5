"""Run git, and unpack the files of a commit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path


class GitError(Exception):
    """Git failed. The message is git's own."""


class NoGit(GitError):
    """Git cannot be run."""


def run_git(root: Path, *arguments: str, **variables: str) -> bytes:
    """Return git's output in the folder `root`, with environment `variables` set.

    Raises:
        GitError: git fails.
        NoGit: git cannot be run.
    """
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, env=environment)
    except OSError as error:
        raise NoGit(f"git cannot be run: {error}\nInstall git") from None
    if done.returncode:
        raise GitError(done.stderr.decode(errors="replace").strip())
    return done.stdout


def try_git(root: Path, *arguments: str, **variables: str) -> str | None:
    """Return git's output in the folder `root`, or None if git fails."""
    try:
        return run_git(root, *arguments, **variables).decode()
    except GitError:
        return None


def not_ignored(root: Path, names: Collection[str]) -> list[str]:
    """Return the files of `names`, relative to `root`, that git does not ignore.

    Outside of a repository, no file is ignored.
    """
    if not names:
        return []
    command = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *names)
    found = try_git(root, "--literal-pathspecs", *command)
    return sorted(names) if found is None else sorted({*found.split("\0")} & {*names})


class SnapshotError(GitError):
    """A commit cannot be read. The last line of the message says what to do."""


@dataclass
class GitSnapshot:
    """An old tree under `root`, unpacked in a separate folder.

    Attributes:
        sha: the commit, or a hash of the files that replace files of HEAD.
        label: the origin of the old code, in words that follow "its version": ``at 1a2b3c4d..HEAD +
            uncommitted changes``, ``in baselines/cpu/ch01.json``.
        folder: the temporary folder with the old tree, which is deleted with this object.
        tree: the path of the old tree. Links to targets outside the tree are left out.
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
        """Return the tree under `root` at `ref`.

        Raises:
            SnapshotError: `root` is in no repository, or the repository has no such commit.
            NoGit: git cannot be run.
        """
        sha = _commit(root, ref)
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        here = _git(root, "rev-parse", "--short=8", "HEAD").strip()
        label = f"at {sha[:8]}..{here}" + (" + uncommitted changes" if changed else "")
        folder = tempfile.TemporaryDirectory(prefix="aisp-past-")
        tree = Path(os.path.realpath(folder.name)) / "tree"
        try:
            names = _check_out(root, sha, tree)
        except GitError as error:
            raise SnapshotError(_fetch(ref, f"its files cannot be read: {error}")) from None
        left_out = frozenset(_drop_links_out(tree))
        moved = bool(_git(root, "diff", "--name-only", "--relative", sha).strip())
        return cls(root, sha, label, folder, tree, moved, renamed(root, sha), names, left_out)

    @classmethod
    def of_files(cls, root: Path, files: Mapping[str, str], page: Path, label: str) -> GitSnapshot:
        """Return the tree under `root` at HEAD, with the recorded `files` in place of its own.

        Blobs that this clone lacks are fetched from the remote, if the remote allows that.

        Args:
            files: git blobs by path relative to `root`.
            page: today's page. If `files` has only one other path with the page's name, the page
                was moved from there.

        Raises:
            SnapshotError: there is no repository, or a missing blob could not be fetched.
            NoGit: git cannot be run.
        """
        name = page.resolve().relative_to(root.resolve()).as_posix()
        same = [path for path in files if Path(path).name == page.name]
        if name not in files and len(same) != 1:
            raise SnapshotError(f"the stored result does not name {name}")
        _require_blobs(root, files.values())
        sha = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        folder = tempfile.TemporaryDirectory(prefix="aisp-record-")
        tree = Path(os.path.realpath(folder.name)) / "tree"
        names = _check_out(root, "HEAD", tree, files)
        left_out = frozenset(_drop_links_out(tree))
        moved = {} if name in files else {name: same[0]}
        return cls(root, sha, label, folder, tree, True, moved, names, left_out)

    def page(self, path: Path) -> Path | None:
        """Return the old tree's version of the file `path`, or None if the file is new.

        If the file was renamed, the old version has the old name.

        Raises:
            SnapshotError: the file was deleted from the temporary folder.
        """
        name = self._name(path)
        if name is None or name not in self._names:
            old = None if name is None else self.tree / name  # may be in a linked folder
            return old if old is not None and old.exists() else None
        if not (self.tree / name).exists():
            raise SnapshotError(
                f"{name} is in {self.sha[:8]}, but no longer in {self.tree}\n"
                "Something removed it; run the same command again"
            )
        return self.tree / name

    def unreached(self, path: Path) -> str:
        """Return the reason why the old version of `path` is unknown, or an empty string."""
        name = self._name(path)
        if name is None:
            return f"{path} lies outside {self.root}"
        links = [str(link) for link in (Path(name), *Path(name).parents)]
        link = next((link for link in links if link in self._left_out), None)
        return f"{link} was a link out of {self.root}" if link else ""

    def _name(self, path: Path) -> str | None:
        """Return the old name of `path`, relative to the root, or None outside the root."""
        root = os.path.realpath(self.root)
        for folder in (os.path.realpath(path.parent), str(path.parent.absolute())):
            full = Path(folder, path.name)
            for base in (root, self.root):
                if full.is_relative_to(base):
                    name = full.relative_to(base).as_posix()
                    return self._renames.get(name, name)
        return None


def _require_blobs(root: Path, blobs: Collection[str]) -> None:
    """Fetch the blobs that this clone lacks. Raise a SnapshotError if any is still missing."""

    def lacking() -> list[str]:
        return [blob for blob in blobs if try_git(root, "cat-file", "-e", blob) is None]

    if not try_git(root, "rev-parse", "--git-dir"):
        run_git(root, "--version")  # git itself may be missing
        raise SnapshotError(f"{root} is in no git repository")
    if missing := lacking():
        fetch = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "origin")
        try_git(root, *fetch, *missing, GIT_TERMINAL_PROMPT="0")
        missing = lacking()
    if not missing:
        return
    if try_git(root, "rev-parse", "--is-shallow-repository") == "true\n":
        raise SnapshotError("this clone lacks the recorded code\n    git fetch --unshallow")
    if try_git(root, "config", "--get-regexp", r"^remote\..*\.promisor$"):
        raise SnapshotError(
            "this partial clone lacks the recorded code, and its remote did not send it\n"
            "    git fetch --refetch --no-filter"
        )
    raise SnapshotError(
        "the recorded code is gone: the history was rewritten, or the code was never committed;"
        " record it again"
    )


def _check_out(
    root: Path, sha: str, tree: Path, files: Mapping[str, str] | None = None
) -> frozenset[str]:
    """Write the files of `root` at `sha` into `tree`, and return their names.

    Args:
        files: git blobs by path, which replace files of the commit.

    The files are checked out with a separate index. `git archive` would be wrong here, because
    `.gitattributes` can exclude files from archives.
    """
    index = {"GIT_INDEX_FILE": str(tree.with_name("index"))}
    top = Path(_git(root, "rev-parse", "--show-toplevel").removesuffix("\n"))
    prefix = _git(root, "rev-parse", "--show-prefix").removesuffix("\n")
    run_git(top, "-c", "core.sparseCheckout=false", "read-tree", f"{sha}:{prefix}", **index)
    if files:
        entries = [("--cacheinfo", f"100644,{blob},{path}") for path, blob in files.items()]
        run_git(top, "update-index", "--add", "--replace", *chain.from_iterable(entries), **index)
    run_git(top, "checkout-index", "--all", "--quiet", f"--prefix={tree}/", **index)
    return frozenset(os.fsdecode(run_git(top, "ls-files", "-z", **index)).split("\0")) - {""}


def _drop_links_out(tree: Path) -> Iterator[str]:
    """Remove the links in `tree` that lead outside of `tree`, and yield the names of the links."""
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(tree):
                path.unlink()
                yield path.relative_to(tree).as_posix()


def _commit(root: Path, ref: str) -> str:
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
    except NoGit:
        raise
    except GitError as error:
        if "not a git repository" in str(error):
            raise SnapshotError(
                f"--aisp-against={ref}: {root} is in no git repository\n"
                "It compares with a commit; run it in a clone"
            ) from None
    raise SnapshotError(_fetch(ref, "there is no such commit in this clone"))


def _fetch(ref: str, why: str) -> str:
    bare = ref.removeprefix("origin/")
    command = f"git fetch --depth=1 origin {bare}"
    if ref == bare:
        command += " && use --aisp-against=FETCH_HEAD"
    return f"--aisp-against={ref}: {why}\nA shallow clone lacks it; fetch it first:\n    {command}"


def renamed(root: Path, sha: str) -> dict[str, str]:
    """Return the old names of the files under `root` that were renamed since `sha`."""
    args = ("diff", "--relative", "--find-renames", "--diff-filter=R", "--name-status", "-z", sha)
    fields = _git(root, *args).split("\0")
    return {fields[i + 2]: fields[i + 1] for i in range(0, len(fields) - 2, 3)}


def _git(root: Path, *arguments: str) -> str:
    return run_git(root, *arguments).decode()
