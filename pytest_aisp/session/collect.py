"""Collect the cases of pages, for pytest to run and for `aisp` to list.

`aisp` loads this module as a plugin and reads the JSON file that it writes:

    pytest --collect-only -p pytest_aisp.session.collect --aisp-catalog=FILE

The catalog lists every page, even if the ini file selects only some tests by marker or keyword.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

import pytest

from ..page.cost import cost_at, is_seen, seen_section
from ..page.gpu_specs import ARCHS
from ..page.imports import import_folders
from ..page.pair import Case, Pair, Side, side_name
from ..page.sources import digest, libraries, text_digest
from ..results.export import path_below
from ..results.messages import Json
from ..worker.loader import pair_of
from .options import COLLECTED, PRODUCTS, SETTINGS
from .unused_results import CollectedCases

NO_XFAIL = """xfail is refused on a case, because it would turn a red verdict green
If a variant may be slower, declare at_least="yardstick". If it cannot run here, skip its cases:
    Variant(side, marks=[pytest.mark.skipif(...)])"""


@dataclass(frozen=True)
class CaseLocation:
    """The place where the test of a case is written.

    Attributes:
        nodeid: the pytest id of the test, relative to the root.
        typed: the pytest id, relative to the folder where pytest was started.
        page, module, function: the file of the page, its import name, and the test function.
        chapter: the name under which the page's results are stored.
        seen: the section `Seen` of the page's docstring, or "".
    """

    nodeid: str
    typed: str
    page: Path
    module: str
    function: str
    chapter: str
    seen: str

    @classmethod
    def of(cls, item: pytest.Function) -> CaseLocation:
        """Return the place where the test of `item` is written."""
        config = item.config
        path, colons, name = item.nodeid.partition("::")
        typed = os.path.relpath(config.rootpath / path, config.invocation_params.dir)
        return cls(
            nodeid=item.nodeid,
            typed=f"{typed}{colons}{name}",
            page=item.path,
            module=item.module.__name__,
            function=item.originalname,
            chapter=chapter_of(item.path, config),
            seen=seen_section(item.module.__doc__),
        )

    def key(self, case: Case) -> str:
        """Return the name of the stored result of `case` in its chapter's file."""
        return key_of(self.page.name, self.function, case)


def key_of(page: str, function: str, case: Case) -> str:
    """Return the name of the stored result of `case`, given its page's file name and its test."""
    return f"{page}::{function}[{case.id}]"


def chapter_of(path: Path, config: pytest.Config) -> str:
    """Return the chapter of the page at `path`. Its results are stored under that name."""
    settings = config.stash[SETTINGS]
    bases = [p for p in settings.pages if path.is_relative_to(p)] or [config.rootpath]
    folder = path.parent.relative_to(bases[0]) if path.is_relative_to(bases[0]) else path.parent
    return ".".join(folder.parts) or bases[0].name


def case_of(item: pytest.Item) -> Case | None:
    """Return the case that `item` tests, or None."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("pair") if callspec is not None else None
    return case if isinstance(case, Case) else None


def at_test(item: pytest.Item, message: str) -> str:
    """Return `message`, preceded by the place in the page where the test of `item` is written."""
    path, line, _ = item.location
    return f"{path}:{(line or 0) + 1}: {message}"


def refuse(item: pytest.Item, message: str) -> NoReturn:
    """Fail with one line that points at the test in its page, without a traceback."""
    pytest.fail(at_test(item, message), pytrace=False)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make each case a parameter of the test, with marks for the case's requirements."""
    pair, item = pair_of(metafunc.function), metafunc.definition
    if pair is None:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():  # then the page has done it
        refuse(
            item,
            "the page touches the GPU when imported: a page is imported on every machine\n"
            "Move code that needs a device into inputs or a side",
        )
    if metafunc.cls is not None:
        refuse(item, "@compare goes on a function of the page, not on a method")
    if item.get_closest_marker("parametrize") is not None:
        refuse(
            item,
            "@compare with @pytest.mark.parametrize has no stored key\n"
            "Put the parameter into sizes",
        )
    cases = list(pair.cases())
    for case in cases:
        if any(mark.name == "xfail" for mark in (*item.iter_markers(), *case.variant.marks)):
            refuse(item, f"{item.name}[{case.id}]: {NO_XFAIL}")
    products = item.config.stash.get(PRODUCTS, {})
    places = [(case, place) for case in cases for place in _places(pair, case, products)]
    params = [pytest.param(case, marks=marks, id=name) for case, (name, marks) in places]
    # An error here would end the whole run. The fixture refuses a test without a case.
    metafunc.parametrize("pair", params or [pytest.param(None, id="no-case")], indirect=True)
    page, chapter = item.path.name, chapter_of(item.path, item.config)
    keys = [key_of(page, item.originalname, case) for case in cases]
    item.config.stash.setdefault(COLLECTED, CollectedCases()).add(chapter, page, keys)


def _places(
    pair: Pair, case: Case, products: Mapping[str, str]
) -> list[tuple[str, list[pytest.MarkDecorator]]]:
    """Return the id and the marks of each test of `case`: one for each product that can time it.

    Args:
        products: the products in a fleet of machines, each with its arch; empty without a fleet. A
            case that no product can time is checked on the first product.
    """
    archs = [] if case.kind == "cpu" else pair.archs(case.variant)
    fitting = {name: arch for name, arch in products.items() if not arch or arch in archs}
    if len(fitting) < 2:
        product = next(iter(fitting or products), None)
        of = [] if product is None else [pytest.mark.aisp_product(product)]
        return [(case.id, _marks(pair, case) + of)]
    others = {name: [a for a in archs if arch and a != arch] for name, arch in fitting.items()}
    return [
        (
            f"{case.id}@{name}",
            [
                *(mark for mark in _marks(pair, case) if mark.name not in others[name]),
                pytest.mark.aisp_product(name),
            ],
        )
        for name in fitting
    ]


def _marks(pair: Pair, case: Case) -> list[pytest.MarkDecorator]:
    names = ("aisp_cpu",) if case.kind == "cpu" else pair.archs(case.variant)
    marks = [getattr(pytest.mark, name) for name in names]
    marks += [pytest.mark.aisp_gpus(n=case.gpus)] if case.gpus > 1 else []
    return [*marks, *case.variant.marks]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aisp")
    group.addoption("--aisp-catalog", metavar="FILE", help="write what is collected to FILE")
    group.addoption(
        "--aisp-catalog-of",
        metavar="TARGETS",
        help="import only the pages of these targets, such as ch10:gemm,ch12 (empty: of none)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("aisp_catalog")) is None:
        return
    config.option.aisp_artifacts = None  # addopts may set it
    pages = [str(path) for path in config.getini("aisp_pages") if path.exists()]
    if pages and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = pages
    text = config.getoption("aisp_catalog_of")
    targets = None if text is None else set(filter(None, text.split(",")))
    config.pluginmanager.register(CatalogPlugin(config, Path(file), targets), "aisp-catalog")


class CatalogPlugin:
    """Writes the catalog to `file`.

    Args:
        targets: chapters, and pages such as ``ch10:gemm``. Other pages are listed, but not
            imported.
    """

    def __init__(self, config: pytest.Config, file: Path, targets: set[str] | None) -> None:
        self._config, self._file, self._targets = config, file, targets
        self._pages: dict[str, dict[str, str]] = {}
        self._cases: list[dict[str, Json]] = []
        self._unread: list[dict[str, str]] = []
        root = str(config.rootpath)
        self._digest = functools.cache(lambda side: digest(side, root))  # most have several cases
        self._text_digest = functools.cache(lambda side: text_digest(side, root))

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        folders, patterns = config.getini("aisp_pages"), config.getini("python_files")
        if not any(fnmatch(collection_path.name, pattern) for pattern in patterns):
            return None
        if folders and not any(collection_path.is_relative_to(folder) for folder in folders):
            return None  # pytest also visits neighboring files
        page = self._page(collection_path)
        self._pages[page["path"]] = page
        if self._targets is None or self._targets & {page["chapter"], page["name"]}:
            return None
        return True

    def _page(self, path: Path) -> dict[str, str]:
        from ..tools.catalog import target_of

        chapter = chapter_of(path, self._config)
        name = target_of(chapter, path.name)
        return {"path": self._relative(path), "chapter": chapter, "name": name}

    def _relative(self, path: Path) -> str:
        return path_below(str(path), str(self._config.rootpath))

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        case = case_of(item)
        if case is not None and isinstance(item, pytest.Function):
            self._cases.append(self._case(item, case))

    def _case(self, item: pytest.Function, case: Case) -> dict[str, Json]:
        pair, variant = case.pair, case.variant
        location = CaseLocation.of(item)
        sides = {"baseline": pair.baseline, "optimized": variant.side}
        names = {"baseline": side_name(pair.baseline), "optimized": variant.name}
        return {
            **self._page(location.page),
            "title": ((item.module.__doc__ or "").strip().splitlines() or [""])[0],
            "nodeid": item.nodeid,
            "key": location.key(case),
            "function": location.function,
            "variant": variant.name,
            "size": dict(case.size),
            "kind": case.kind,
            "gpus": case.gpus,
            "bound": pair.bound,
            "needs": list(pair.features(variant)),
            "archs": ["cpu"] if case.kind == "cpu" else list(pair.archs(variant)),
            "versus": pair.versus or "",
            "claims": {arch: case.claim(arch) for arch in ARCHS},
            "work": _work(case),
            "costs": _costs(case, sides),
            "seen": [r for r, name in names.items() if is_seen(name, r, location.seen)],
            "sources": {role: self._digest(side) for role, side in sides.items()},
            "text_sources": {role: self._text_digest(side) for role, side in sides.items()},
        }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            path = str(report.nodeid).partition("::")[0]
            text = str(report.longrepr) if report.failed else report.longrepr[-1]  # type: ignore[index]
            self._unread.append({"path": path, "outcome": report.outcome, "text": text})

    def pytest_sessionfinish(self) -> None:
        settings = self._config.stash[SETTINGS]
        catalog = {
            "root": str(settings.root),
            "baselines": str(settings.baselines),
            "folders": [self._relative(path) for path in settings.pages],
            "pages": list(self._pages.values()),
            "cases": self._cases,
            "unread": self._unread,
            "imports": import_folders(str(settings.root)),
            "modules": _module_files(),
        }
        self._file.write_text(json.dumps(catalog), encoding="utf-8")


def _module_files() -> list[str]:
    """Return the files of all imported modules that belong to no library."""
    modules = list(sys.modules.values())
    files = [getattr(module, "__dict__", {}).get("__file__") for module in modules]
    return sorted({f for f in files if isinstance(f, str) and not f.startswith(libraries())})


def _costs(case: Case, sides: Mapping[str, Side]) -> dict[str, Json]:
    """Return the phases of each side that has a declared cost, keyed by role."""
    at = {role: cost_at(case.pair, side, case.size, case.gpus) for role, side in sides.items()}
    return {role: cost.amounts() for role, cost in at.items() if cost is not None}


def _work(case: Case) -> dict[str, Json] | None:
    try:
        return case.pair.work_at(case.size, case.gpus).declared()
    except Exception:  # when the page runs, it reports this error
        return None
