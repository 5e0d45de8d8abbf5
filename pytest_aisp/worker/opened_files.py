"""Record the files under the pages' root that pages open or import in this process.

`page.imports` finds files whose names are in the code. An audit hook also sees files whose names
are built at run time. A file is attributed to the module whose import opens the file, or else to
the page whose task runs. So a module that several pages import opens its files for all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..page.imports import import_folders, used_files
from ..page.sources import libraries

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
BYTECODE = "__pycache__"

Files = Mapping[str, set[str]]
"""Opened files, keyed by the page or module that opens them."""


@dataclass
class OpenedFiles:
    """The files under a root that pages opened in this process.

    Attributes:
        roots: the root as it was given, and without symbolic links, each with a slash.
        page: the page whose task runs.
        opened: the files that each page or module opened.
        lent: the files that functions of each module opened, for any page. A function may keep
            what it has read, so that the file is opened only once for all pages.
        written: files that the process wrote. They are output, and not part of the code.
    """

    roots: tuple[str, ...] = ()
    page: str = ""
    opened: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    lent: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    written: set[str] = field(default_factory=set)

    def watch(self, page: str, root: str) -> None:
        """Attribute the files that are opened from now on to `page`."""
        if not self.roots:
            sys.addaudithook(self._hook())  # stays until the process ends
        self.page = os.path.realpath(page)
        self.roots = f"{root}{os.sep}", f"{os.path.realpath(root)}{os.sep}"

    def of_page(self, page: str, root: str) -> tuple[list[str], list[str]]:
        """Return the files that a page opened, and those that its modules opened for any page.

        The names are relative to the root. Files whose names are in the code are left out.
        """
        named = _named_files(page, root)
        start, under = [os.path.realpath(page), *named], Path(root).resolve()

        def names(*tables: Files) -> set[str]:
            return {os.path.relpath(f, under) for f in self._reached(start, tables) - {*named}}

        mine = names(self.opened)
        return sorted(mine), sorted(names(self.opened, self.lent) - mine)

    def _reached(self, start: Iterable[str], tables: Iterable[Files]) -> set[str]:
        """Return the files that are opened from `start`, directly or through other modules."""
        todo, found = list(start), set[str]()
        while todo:
            opener = todo.pop()
            more = set().union(*(table.get(opener, ()) for table in tables)) - found
            found |= more
            todo += more
        return {file for file in found - self.written if os.path.isfile(file)}

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                with suppress(Exception):  # an exception would make the page's call fail
                    self._note(arguments[0], bool(arguments[2] & WRITES))
            elif event == "os.rename":
                with suppress(Exception):
                    self._note(arguments[1], True)

        return hook  # calls of bound methods take three times as long: Python looks up an attribute

    def _note(self, path: str | bytes, writes: bool) -> None:
        full = os.path.abspath(os.fsdecode(path))
        if not self._is_below(full):
            return
        file = os.path.realpath(full)
        if not writes and BYTECODE in file:
            file = importlib.util.source_from_cache(file)
        relative = file.removeprefix(self.roots[1])
        if any(part == BYTECODE or part.startswith(".") for part in relative.split(os.sep)):
            return
        if writes:
            self.written.add(file)
            return
        importer, users = self._openers(sys._getframe(2))
        if importer or users:
            self.opened[importer or self.page].add(file)
        for user in users:
            self.lent[user].add(file)

    def _openers(self, frame: FrameType | None) -> tuple[str, set[str]]:
        """Return the file of the module that is being imported, and the files of running functions.

        If no module is being imported, the first value is an empty string. Only files under the
        root count. If there are none, the plugin opened the file.
        """
        users = set[str]()
        while frame is not None:
            name = frame.f_code.co_filename
            if self._is_below(name):
                if frame.f_code.co_name == "<module>":
                    return os.path.realpath(name), users
                users.add(os.path.realpath(name))
            frame = frame.f_back
        return "", users

    def _is_below(self, path: str) -> bool:
        return path.startswith(self.roots) and not path.startswith(libraries())


@functools.cache
def _named_files(page: str, root: str) -> frozenset[str]:
    return frozenset(map(str, used_files(Path(page), root, import_folders(root)).values()))


OPENED = OpenedFiles()
