"""Find the cases that a change to the code can affect.

A page counts as changed if any file that it may use has changed: a file that the code names, or a
file that the page opened when its results were stored. The page's syntax then shows the
affected cases: a changed function affects only the variants that use it. If the syntax is unclear,
all cases of the page count as affected.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from ..page.imports import contents, named_files, normalized_file
from ..util.cli_result import CliError, CliResult
from ..util.git import GitError, GitSnapshot
from . import catalog
from .catalog import Catalog, CatalogCase
from .stored_results import listed_files

DECORATOR = "compare"
DYNAMIC = {"globals", "locals", "vars", "eval", "exec", "getattr", "import_module", "modules"}
"""Names that a page can use to look up a function dynamically."""
StoredFiles: TypeAlias = Mapping[str, Collection[str]]
"""The files that stored results list, keyed by the path of their page."""
OWN_NAMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class ComparedTest:
    """A test with `@compare`: the test's syntax without the variants, and each variant by name."""

    common: ast.stmt
    variants: dict[str, ast.expr] = field(default_factory=dict)


@dataclass
class PageSyntax:
    """The statements of a page.

    Attributes:
        named: the statements that define a name, keyed by that name. Tests are left out.
        unnamed: the statements that define no name and may affect all cases.
        tests: the tests with `@compare`.
        dynamic: whether the page may look up a function dynamically, such as with `getattr`.
    """

    named: dict[str, list[ast.stmt]] = field(default_factory=dict)
    unnamed: list[ast.stmt] = field(default_factory=list)
    tests: dict[str, ComparedTest] = field(default_factory=dict)
    dynamic: bool = False

    @classmethod
    def of(cls, text: str) -> PageSyntax:
        """Return the statements of the page whose source is `text`, without docstrings.

        Raises:
            SyntaxError: the text is not Python.
        """
        page, tree = cls(), ast.parse(text)
        for node in ast.walk(tree):
            words = {getattr(node, "id", ""), getattr(node, "attr", "")}
            page.dynamic |= bool(words & DYNAMIC)
            if isinstance(node, (ast.Module, *OWN_NAMES)) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        for statement in tree.body:
            if isinstance(statement, OWN_NAMES) and statement.name.startswith(("test_", "Test")):
                page._add_test(statement)
                continue
            names = list(_defined(statement))
            for name in names:
                page.named.setdefault(name, []).append(statement)
            if not names:
                page.unnamed.append(statement)
        return page

    def _add_test(self, test: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for call in test.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(DECORATOR):
                self.tests[test.name] = ComparedTest(test)
                for keyword in call.keywords:
                    if keyword.arg == "optimized":
                        value = keyword.value
                        listed = value.elts if isinstance(value, ast.List) else [value]
                        self.tests[test.name].variants = _by_name(listed)
                        keyword.value = ast.List([], ast.Load())

    def reach(self, test: str, variant: str) -> set[str]:
        """Return the names that a case uses, directly or through other statements of the page."""
        names: set[str] = set()
        todo: list[ast.AST] = [*self.unnamed]
        if (found := self.tests.get(test)) is not None:
            todo += [found.common, *(v for name, v in found.variants.items() if name == variant)]
        while todo:
            used = {x.id for x in ast.walk(todo.pop()) if isinstance(x, ast.Name)} - names
            names |= used
            todo += chain.from_iterable(self.named.get(name, ()) for name in used)
        return names

    def cases(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the test and of the variant, for each variant in a list."""
        return ((test, name) for test, each in self.tests.items() for name in each.variants)


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, OWN_NAMES):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((a.asname or a.name).partition(".")[0] for a in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        yield from (node.id for node in nodes if isinstance(node.ctx, ast.Store))


def _by_name(variants: Iterable[ast.expr]) -> dict[str, ast.expr]:
    """Return the variants keyed by name. Variants whose names are computed are left out."""
    found = {}
    for variant in variants:
        side = variant
        if isinstance(variant, ast.Call) and variant.args:
            [*named] = (k.value for k in variant.keywords if k.arg == "name")
            side = named[0] if named else variant.args[0]
        if isinstance(side, ast.Name):
            found[side.id] = variant
        elif isinstance(side, ast.Constant):
            found[str(side.value)] = variant
    return found


def _dump(nodes: Iterable[ast.AST]) -> list[str]:
    return [ast.dump(node) for node in nodes]


def touched(
    cases: Iterable[tuple[str, str]],
    new: PageSyntax,
    old: PageSyntax,
    changed_files: Collection[str],
    files_of: Callable[[ast.stmt], Collection[str]],
) -> set[tuple[str, str]]:
    """Return the cases that a change to their page can affect.

    Args:
        cases: the cases of the page, each as the names of its test and its variant.
        changed_files: the changed files, apart from the page, that the page may use.
        files_of: a function that returns the files that a statement of the new page may use.
    """
    every = set(cases)
    both = {name: (new.named.get(name, []), old.named.get(name, [])) for name in new.named}
    both |= {name: ([], statements) for name, statements in old.named.items() if name not in both}
    changed = {name for name, (now, then) in both.items() if _dump(now) != _dump(then)}
    unknown = set(changed_files)
    for name, statements in new.named.items():
        files = set(chain.from_iterable(map(files_of, statements))) & set(changed_files)
        changed |= {name} if files else set()
        unknown -= files
    if new.dynamic or old.dynamic or unknown or _dump(new.unnamed) != _dump(old.unnamed):
        return every
    reach = {case: new.reach(*case) | old.reach(*case) for case in (*new.cases(), *old.cases())}
    if not changed <= set().union(*reach.values()):
        return every
    return {c for c in every if _test_differs(c, new, old) or changed & reach[c]}


def _test_differs(case: tuple[str, str], new: PageSyntax, old: PageSyntax) -> bool:
    """Return whether a case is new, or its test or its variant's expression has changed."""
    test, variant = case
    now, then = new.tests.get(test), old.tests.get(test)
    if now is None or then is None:
        return True
    if variant not in now.variants or variant not in then.variants:
        return True
    return _dump([now.common, now.variants[variant]]) != _dump(
        [then.common, then.variants[variant]]
    )


def changed_result(pages: Catalog, ref: str, *, tell: Callable[[str], None]) -> CliResult:
    """Return the pytest ids of cases whose results may differ from those at the commit `ref`.

    Only changed pages are imported. If a page cannot be imported, its path is returned instead of
    its cases. Paths are relative to the working directory.

    Args:
        pages: a catalog of all pages.

    Raises:
        CliError: there is no commit `ref`, or no repository.
    """
    try:
        old = GitSnapshot.at(pages.root, ref)
    except GitError as error:
        raise CliError(str(error).replace("--aisp-against=", "")) from None
    lines: list[str] = []
    opened = listed_files(pages.baselines)
    with old.folder:
        changed = [page for page in pages.pages if _files_differ(pages, page.path, old, opened)]
        found = catalog.collect([page.name for page in changed], tell=tell) if changed else pages
        for path in dict.fromkeys(page.path for page in changed):
            cases = [case for case in found.cases if case.path == path]
            failed = any(page.path == path for page in found.unread)
            lines += [path] if failed else _touched_cases(pages, path, old, cases, opened)
    return CliResult([_relative(pages.root, line) for line in lines])


def _relative(root: Path, nodeid: str) -> str:
    path, colons, case = nodeid.partition("::")
    return f"{os.path.relpath(root / path)}{colons}{case}"


def _files_differ(pages: Catalog, path: str, old: GitSnapshot, opened: StoredFiles) -> bool:
    """Return whether a page is new or changed, or uses a file that may have changed."""
    here, then = pages.root / path, old.page(pages.root / path)
    if then is None or normalized_file(here) != normalized_file(then):
        return True
    return bool(_changed_files(pages, here, then, old, opened.get(path, ())))


def _changed_files(
    pages: Catalog, here: Path, then: Path, old: GitSnapshot, opened: Collection[str]
) -> set[str]:
    """Return the changed files that either version of the page may use, without the page itself.

    Args:
        opened: files that the page may open although the code does not name them.
    """
    new_files = contents(here, str(pages.root), pages.imports, opened=opened)
    old_files = contents(then, str(old.tree), pages.imports, opened=opened)
    names = new_files.keys() | old_files.keys()
    return {name for name in names if new_files.get(name) != old_files.get(name)}


def _touched_cases(
    pages: Catalog,
    path: str,
    old: GitSnapshot,
    cases: Collection[CatalogCase],
    opened: StoredFiles,
) -> list[str]:
    here, then = pages.root / path, old.page(pages.root / path)
    if then is None:
        return [case.nodeid for case in cases]

    def files_of(statement: ast.stmt) -> set[str]:
        return named_files(ast.unparse(statement), here, str(pages.root), pages.imports)

    ids = {(case.function, case.variant) for case in cases}
    try:
        new_page, old_page = (
            PageSyntax.of(each.read_text(encoding="utf-8")) for each in (here, then)
        )
        changed = _changed_files(pages, here, then, old, opened.get(path, ()))
        found = touched(ids, new_page, old_page, changed, files_of)
    except (SyntaxError, ValueError):  # the old page cannot be parsed
        found = ids
    return [case.nodeid for case in cases if (case.function, case.variant) in found]
