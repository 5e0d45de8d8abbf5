"""List the commits between two others, and find commits that change a file used by a page."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from ..page.imports import normalized_file, used_files
from ..util.cli_result import CliError, with_progress
from ..util.git import GitError, NoGit, run_git, try_git

NO_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
FIELDS = "%H%x00%P%x00%an%x00%as%x00%s"


class Commit(Struct, frozen=True):
    """A commit: its hash, the hashes of its parents, its author, date and subject."""

    sha: str
    parents: Sequence[str]
    author: str
    date: str
    subject: str

    @property
    def short(self) -> str:
        return self.sha[:8]

    @property
    def is_merge(self) -> bool:
        return len(self.parents) > 1

    def __str__(self) -> str:
        merge = " (a merge)" if self.is_merge else ""
        return f"{self.short} {self.date} {self.author}: {self.subject}{merge}"


class Version(Struct, frozen=True):
    """A commit, with a hash of each file that a page may use at that commit.

    Attributes:
        files: the hashes, keyed by path below the root. Comments and formatting do not affect a
            hash. Without the page at that commit, there are no hashes.
        page: the path of the page at the commit, below the root.
    """

    commit: Commit
    files: dict[str, str]
    page: str

    @property
    def code(self) -> str:
        """A hash of all files. A new name of the page does not change the hash."""
        others = sorted((n, each) for n, each in self.files.items() if n != self.page)
        return _hash(repr((self.files.get(self.page), others)))


def commits_between(root: Path, good: str, bad: str) -> tuple[Commit, list[Commit]]:
    """Return the commit `good`, and the commits after it up to `bad`, the oldest first.

    Only first parents are followed, so a merge counts as one commit.

    Raises:
        CliError: a commit or the repository does not exist, or `bad` does not descend from `good`
            through first parents.
    """
    first = find_commit(root, good, f"--good={good}")
    last = find_commit(root, bad, f"--bad={bad}")
    if first.sha == last.sha:
        raise CliError(f"--good={good} and --bad={bad} are the same commit, {first.short}")
    if try_git(root, "merge-base", "--is-ancestor", first.sha, last.sha) is None:
        raise CliError(_not_before(root, good, first, bad, last))
    line = _log(root, "--first-parent", "--reverse", f"{first.sha}..{last.sha}")
    if first.sha not in line[0].parents[:1]:
        branched = [*line[0].parents, line[0].sha][0][:8]
        raise CliError(
            f"--good={good} is on a branch that was merged before --bad={bad}\n"
            f"Only first parents are searched; give the commit where that line begins:\n"
            f"    --good={branched}"
        )
    return first, line


def find_commit(root: Path, ref: str, name: str) -> Commit:
    """Return the commit `ref`, which messages call `name`.

    Raises:
        CliError: the commit or the repository does not exist.
    """
    try:
        sha = run_git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").decode()
    except NoGit as error:
        raise CliError(str(error)) from None
    except GitError as error:
        if "not a git repository" in str(error):
            raise CliError(
                f"{root} is in no git repository\nA search needs the commits; run it in a clone"
            ) from None
        raise CliError(f"{name}: there is no such commit in this clone{_deepen(root)}") from None
    return _log(root, "-1", sha.strip())[0]


def _deepen(root: Path) -> str:
    shallow = try_git(root, "rev-parse", "--is-shallow-repository") == "true\n"
    return "\nIt is shallow:\n    git fetch --unshallow" if shallow else ""


def _not_before(root: Path, good: str, first: Commit, bad: str, last: Commit) -> str:
    """Say why `first` is not an ancestor of `last`, and what to do."""
    if try_git(root, "merge-base", "--is-ancestor", last.sha, first.sha) is not None:
        return (
            f"--bad={bad} is older than --good={good}\nExchange them:\n"
            f"    --good={last.short} --bad={first.short}"
        )
    why = f"--good={good} is not an ancestor of --bad={bad}: another branch, or a rewritten history"
    base = try_git(root, "merge-base", first.sha, last.sha)
    if base is None:
        return f"{why}\nThey have no commit in common{_deepen(root)}"
    return f"{why}\nTheir last commit in common:\n    --good={base[:8]}"


def _log(root: Path, *arguments: str) -> list[Commit]:
    lines = run_git(root, "log", f"--format={FIELDS}", *arguments).decode(errors="replace")
    fields = [line.split("\0", 4) for line in lines.split("\n") if line]
    return [Commit(sha, parents.split(), *rest) for sha, parents, *rest in fields]


@dataclass(frozen=True)
class Worktree:
    """A temporary git worktree, in which a search checks out commits.

    Attributes:
        top: the folder of the worktree.
        root: the folder in the worktree that corresponds to the root of the pages.
    """

    top: Path
    root: Path

    def check_out(self, commit: Commit) -> None:
        """Check out `commit`, and remove all files that earlier runs left in the worktree."""
        run_git(self.top, *NO_HOOKS, "checkout", "--quiet", "--force", "--detach", commit.sha)
        run_git(self.top, "clean", "-ffdxq")

    def version(
        self, commit: Commit, page: str, folders: Sequence[str], opened: Iterable[str] = ()
    ) -> Version:
        """Check out `commit`, and return it with the hashes of the files that `page` may use.

        Args:
            page: the path of the page below the root.
            folders: the folders below the root that Python imports from.
            opened: files below the root that the page may open without naming them in its code.
        """
        self.check_out(commit)
        path = self.root / page
        if not path.is_file():
            return Version(commit, {}, page)
        used = {name: self.root / name for name in opened if (self.root / name).is_file()}
        used |= used_files(path, str(self.root), folders)
        hashes = {name: _hash(normalized_file(file)) for name, file in used.items()}
        return Version(commit, hashes, page)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


@contextmanager
def worktree(root: Path, commit: Commit) -> Iterator[Worktree]:
    """Add a worktree at `commit` in a temporary folder, and remove it at the end.

    Raises:
        CliError: git cannot add the worktree.
    """
    with tempfile.TemporaryDirectory(prefix="aisp-bisect-", ignore_cleanup_errors=True) as folder:
        top = Path(os.path.realpath(folder)) / "tree"
        try:
            prefix = run_git(root, "rev-parse", "--show-prefix").decode().removesuffix("\n")
            add = ("worktree", "add", "--quiet", "--detach", str(top), commit.sha)
            run_git(root, *NO_HOOKS, *add)
        except GitError as error:
            raise CliError(f"git cannot add a worktree: {error}") from None
        try:
            yield Worktree(top, top / prefix)
        finally:
            with suppress(GitError):
                run_git(root, "worktree", "remove", "--force", "--force", str(top))


def page_names(root: Path, page: str, commits: Sequence[Commit]) -> dict[str, str]:
    """Return the path of a page below `root` at each of `commits`, keyed by the commit's hash.

    Args:
        page: the path at the last commit. Renames are followed from there back in the history.
    """
    command = ["-c", "core.quotePath=off", "log", "--first-parent", "-m", "--find-renames"]
    command += ["--diff-filter=R", "--relative", "--name-status", "--format=%x00%H"]
    text = run_git(root, *command, f"{commits[0].sha}..{commits[-1].sha}").decode()
    renames: dict[str, dict[str, str]] = {}
    for part in text.split("\0")[1:]:
        sha, *lines = part.split("\n")
        fields = [line.split("\t") for line in lines if line]
        renames[sha] = {new: old for _, old, new in fields}
    found: dict[str, str] = {}
    for commit in reversed(commits):
        found[commit.sha] = page
        page = renames.get(commit.sha, {}).get(page, page)
    return found


def versions(
    tree: Worktree,
    pages: Mapping[str, str],
    imports: Sequence[str],
    commits: Sequence[Commit],
    tell: Callable[[str], None],
    opened: Iterable[str] = (),
) -> list[Version]:
    """Return the versions at the first commit and at each commit that changes a used file.

    A used file is a file that the page may use. A commit is checked out only if it modifies a used
    file, or adds or removes any file.

    Args:
        pages: the path of the page at each commit, as `page_names` returns them.
        imports: the folders below the root that Python imports from.
        opened: files below the root that the page may open without naming them in its code.
    """

    def version(commit: Commit) -> Version:
        page = pages[commit.sha]
        folders = [*imports, *(str(folder) for folder in Path(page).parents)]
        return tree.version(commit, page, folders, opened)

    last = version(commits[0])
    found = [last]
    changes = _changes(tree.root, commits[0], commits[-1])
    for number, commit in enumerate(commits[1:], 1):
        tell(with_progress("look for commits that change the case", number, len(commits) - 1))
        changed = changes.get(commit.sha, set())
        if changed is not None and not changed & last.files.keys():
            continue
        before, last = last, version(commit)
        if last.code != before.code:
            found.append(last)
    return found


def _changes(root: Path, first: Commit, last: Commit) -> dict[str, set[str] | None]:
    """Return the files below `root` that each commit modifies, keyed by the commit's hash.

    The value is None if the commit also adds or removes files, or if git quotes a file's name.
    """
    command = ("log", "--first-parent", "-m", "--no-renames", "--relative", "--name-status")
    text = run_git(root, *command, "--format=%x00%H", f"{first.sha}..{last.sha}").decode()
    found: dict[str, set[str] | None] = {}
    for part in text.split("\0")[1:]:
        sha, *lines = part.split("\n")
        pairs = [line.split("\t", 1) for line in lines if line]
        plain = all(status == "M" and not path.startswith('"') for status, path in pairs)
        found[sha] = {path for _, path in pairs} if plain else None
    return found
