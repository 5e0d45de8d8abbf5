"""Pack the working tree and its git history, and unpack them on nodes.

Ray can ship a working directory, but without the `.git` folder. So a fleet ships the tree itself:
all files that git does not ignore, with uncommitted changes, and a pack of the git objects that
``--aisp-against`` and the comparison with stored results need.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..util.git import GitError, run_git, try_git

LIMIT = 500 << 20
"""The largest size in bytes to ship, which is also Ray's limit for a package."""
FOLDER = "AISP_FLEET_FOLDER"
"""The environment variable with the folder in which a node unpacks trees."""
OLD = 86400.0
"""Seconds after which a tree that a killed run left behind is removed."""
CODE = (".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".ini", ".toml", ".cfg")
"""The suffixes of files that hold code and settings."""
LEFT_OUT = {"__pycache__", ".git", ".venv", "venv", ".pytest_cache", "node_modules"}
"""Folders that are not shipped from a tree without git."""


class ShippingError(Exception):
    """A tree cannot be shipped or unpacked. The message says what to do."""


@dataclass(frozen=True)
class Tree:
    """A packed working tree.

    Attributes:
        top: the folder here that was packed.
        data: a compressed tar file.
        digest: SHA-256 of the files' contents and of the commits.
        code: SHA-256 of the files with code and settings, which runs never write.
    """

    top: Path
    data: bytes
    digest: str
    code: str


def pack(root: Path, refs: Sequence[str] = (), *, limit: int = LIMIT) -> Tree:
    """Return the tree that contains `root`, with the history of HEAD and of `refs`.

    Raises:
        ShippingError: if the tree has more than `limit` bytes.
    """
    found = try_git(root, "rev-parse", "--show-toplevel")
    top = root if found is None else Path(found.removesuffix("\n"))
    files = _walk(top) if found is None else _listed(top)
    _refuse_large(files, top, limit)
    history = {} if found is None else _history(top, refs)
    digest, code = hashlib.sha256(history.get("commits", b"")), hashlib.sha256()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name in files:
            tar.add(top / name, f"tree/{name}", recursive=False)
            line = _hashed(top / name, name)
            digest.update(line)
            code.update(line if name.endswith(CODE) else b"")
        for name, data in history.items():
            info = tarfile.TarInfo(f"history/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    if buffer.tell() > limit:
        raise ShippingError(
            f"{top} has {buffer.tell() >> 20} MiB with its history; at most {limit >> 20} MiB are"
            " shipped to a node\nRun from a shallow clone:\n    git clone --depth=100 ..."
        )
    return Tree(top, buffer.getvalue(), digest.hexdigest(), code.hexdigest())


def _listed(top: Path) -> list[str]:
    """Return the files below `top` that git does not ignore, including files of submodules."""
    names = os.fsdecode(run_git(top, "ls-files", "-z", "-co", "--exclude-standard")).split("\0")
    found = set()
    for name in filter(None, names):
        path = top / name
        if path.is_dir() and not path.is_symlink():
            inner = _listed(path) if (path / ".git").exists() else []
            found |= {os.path.join(name, each) for each in inner}
        elif os.path.lexists(path):  # a deleted file is listed, too
            found.add(name)
    return sorted(found)


def _walk(top: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [os.path.relpath(os.path.join(folder, name), top) for name in files]
    return sorted(found)


def _refuse_large(files: Sequence[str], top: Path, limit: int) -> None:
    sizes = {name: (top / name).lstat().st_size for name in files}
    if sum(sizes.values()) <= limit:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in largest)
    raise ShippingError(
        f"{top} has {sum(sizes.values()) >> 20} MiB; at most {limit >> 20} MiB are shipped to a"
        f" node\nThe largest files: {named}\nPut what the pages do not need into .gitignore"
    )


def _hashed(path: Path, name: str) -> bytes:
    data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
    return f"{name}\0{len(data)}\0".encode() + hashlib.sha256(data).digest()


def _history(top: Path, refs: Sequence[str]) -> dict[str, bytes]:
    """Return a git pack, the commits that it contains, and the file ``shallow`` of a shallow clone.

    Stored results name blobs of code. These blobs are packed too, because a squash merge may have
    removed them from the history.
    """
    commits = [try_git(top, "rev-parse", "--verify", "-q", f"{ref}^{{commit}}") for ref in refs]
    head = try_git(top, "rev-parse", "--verify", "-q", "HEAD^{commit}")
    if head is None:  # nothing was committed yet
        return {}
    wanted = [head.strip(), *(c.strip() for c in commits if c)]
    try:
        pack = subprocess.run(
            ["git", "pack-objects", "--revs", "--stdout", "-q"],
            cwd=top,
            input="\n".join([*wanted, *_recorded_blobs(top), ""]).encode(),
            capture_output=True,
            check=True,
        ).stdout
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        raise ShippingError(f"the history of {top} cannot be packed: {why}") from None
    shallow = top / (try_git(top, "rev-parse", "--git-path", "shallow") or "").strip()
    limits = shallow.read_bytes() if shallow.is_file() else b""
    return {"pack": pack, "commits": "\n".join(wanted).encode(), "shallow": limits}


def _recorded_blobs(top: Path) -> list[str]:
    pattern = "[0-9a-f]{40}"
    listed = try_git(top, "grep", "--untracked", "-hoE", pattern, "--", "*.json") or ""
    checked = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        cwd=top,
        input="\n".join(sorted(set(re.findall(pattern, listed)))),
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return [line.split()[0] for line in checked.splitlines() if " blob " in line]


def fleet_folder() -> Path:
    """Return the folder in which this node unpacks trees, created if necessary.

    Raises:
        ShippingError: if the folder cannot be created.
    """
    folder = Path(os.environ.get(FOLDER) or f"/tmp/pytest-aisp-fleet-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ShippingError(_cannot_write(folder, error)) from None
    return folder


@contextlib.contextmanager
def unpacked(data: bytes, digest: str) -> Iterator[Path]:
    """Unpack a tree once per node, and yield its folder. The last user removes the folder.

    Raises:
        ShippingError: if the tree cannot be written, for example because the disk is full.
    """
    base = fleet_folder()
    folder = base / digest[:16]
    with contextlib.ExitStack() as files:
        try:
            turn, used = (
                files.enter_context(open(base / f"{folder.name}.{name}", "w"))
                for name in ("turn", "used")
            )
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(used, fcntl.LOCK_SH)
            if not (folder / "complete").exists():
                shutil.rmtree(folder, ignore_errors=True)
                _remove_old(base)
                _unpack(data, folder)
            fcntl.flock(turn, fcntl.LOCK_UN)
        except (OSError, tarfile.TarError, GitError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ShippingError(_cannot_write(base, error)) from None
        try:
            yield folder
        finally:
            _remove_unused(folder, used)


def _remove_unused(folder: Path, used: IO[str]) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _cannot_write(folder: Path, error: Exception) -> str:
    return (
        f"the working tree cannot be unpacked in {folder}: {error}\n"
        f"Free space there, or point {FOLDER} of that node at another folder"
    )


def _unpack(data: bytes, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        tar.extractall(folder, filter="fully_trusted")
    tree, history = folder / "tree", folder / "history"
    tree.mkdir(exist_ok=True)
    if history.is_dir():
        head = (history / "commits").read_text().split("\n")[0]
        run_git(tree, "init", "-q")
        if limits := (history / "shallow").read_bytes():
            (tree / ".git" / "shallow").write_bytes(limits)
        with open(history / "pack", "rb") as pack:
            command = ["git", "index-pack", "--stdin", "--fix-thin"]
            subprocess.run(command, cwd=tree, stdin=pack, capture_output=True, check=True)
        for number, commit in enumerate((history / "commits").read_text().split("\n")):
            run_git(tree, "update-ref", f"refs/aisp/{number}", commit)
        run_git(tree, "update-ref", "--no-deref", "HEAD", head)
        run_git(tree, "reset", "-q", "--mixed")
    (folder / "complete").touch()


def _remove_old(base: Path) -> None:
    """Remove old trees that a killed run left behind, unless a process still uses them."""
    for complete in base.glob("*/complete"):
        folder = complete.parent
        if time.time() - complete.stat().st_mtime < OLD:
            continue
        with open(base / f"{folder.name}.used", "w") as used:
            _remove_unused(folder, used)
