"""What pytest collects, as one JSON file: what `aisp` knows of pages and cases.

    pytest --collect-only -p pytest_aisp.session.collect --aisp-catalog=FILE

It is loaded by `-p` alone. Pages stand for themselves: markers and words that the ini file selects
by leave nothing out, and nothing of the run before is written over.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from ..page.gpu_specs import ARCHS
from ..page.pair import Case
from ..page.sources import digest
from ..results.export import path_below
from ..tools.catalog import target_of
from .case_client import key_of
from .fixtures import chapter_of, where_is
from .options import SETTINGS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aisp")
    group.addoption("--aisp-catalog", metavar="FILE", help="write what is collected to FILE")
    group.addoption(
        "--aisp-catalog-of",
        metavar="TARGETS",
        help="import only the pages of these, as ch10:gemm,ch12; none where empty",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("aisp_catalog")) is None:
        return
    config.option.aisp_artifacts = None  # of the ini's addopts: a new run starts that folder anew
    pages = [str(path) for path in config.getini("aisp_pages") if path.exists()]
    if pages and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = pages
    of = config.getoption("aisp_catalog_of")
    wanted = None if of is None else set(filter(None, of.split(",")))
    config.pluginmanager.register(CatalogPlugin(config, Path(file), wanted), "aisp-catalog")


class CatalogPlugin:
    """Gathers what is collected.

    Args:
        wanted: chapters, and pages as ``ch10:gemm``; other pages are named and not imported.
    """

    def __init__(self, config: pytest.Config, file: Path, wanted: set[str] | None) -> None:
        self._config, self._file, self._wanted = config, file, wanted
        self._pages: dict[str, dict[str, str]] = {}
        self._cases: list[dict[str, Any]] = []
        self._unread: list[dict[str, str]] = []

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        folders, patterns = config.getini("aisp_pages"), config.getini("python_files")
        if not any(fnmatch(collection_path.name, pattern) for pattern in patterns):
            return None
        if folders and not any(collection_path.is_relative_to(folder) for folder in folders):
            return None  # pytest looks at what lies beside a folder on the way to it
        page = self._page(collection_path)
        self._pages[page["path"]] = page
        return None if self._wants(page) else True

    def _page(self, path: Path) -> dict[str, str]:
        chapter = chapter_of(path, self._config)
        name = target_of(chapter, path.name)
        return {"path": self._relative(path), "chapter": chapter, "name": name}

    def _wants(self, page: dict[str, str]) -> bool:
        return self._wanted is None or bool(self._wanted & {page["chapter"], page["name"]})

    def _relative(self, path: Path) -> str:
        return path_below(str(path), str(self._config.rootpath))

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("pair") if callspec is not None else None
        if isinstance(case, Case):
            self._cases.append(self._case(item, case))

    def _case(self, item: Any, case: Case) -> dict[str, Any]:
        pair, variant, root = case.pair, case.variant, str(self._config.rootpath)
        where = where_is(item, self._config)
        return {
            **self._page(Path(where["page"])),
            "title": ((item.module.__doc__ or "").strip().splitlines() or [""])[0],
            "nodeid": item.nodeid,
            "key": key_of(case, where),
            "function": where["function"],
            "variant": variant.name,
            "size": dict(case.size),
            "kind": case.kind,
            "gpus": case.gpus,
            "bound": pair.bound,
            "needs": list(pair.features(variant)),
            "archs": ["cpu"] if case.kind == "cpu" else list(pair.archs(variant)),
            "claims": {arch: pair.claim(variant, arch) for arch in ARCHS},
            "work": _work(case),
            "sources": {
                "baseline": digest(pair.baseline, root),
                "optimized": digest(variant.side, root),
            },
        }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            path = str(report.nodeid).partition("::")[0]
            text = str(report.longrepr) if report.failed else report.longrepr[-1]  # type: ignore[index]
            self._unread.append({"path": path, "outcome": report.outcome, "text": text})

    def pytest_sessionfinish(self) -> None:
        settings = self._config.stash[SETTINGS]
        found = {
            "root": str(settings.root),
            "baselines": str(settings.baselines),
            "folders": [self._relative(path) for path in settings.pages],
            "pages": list(self._pages.values()),
            "cases": self._cases,
            "unread": self._unread,
        }
        self._file.write_text(json.dumps(found), encoding="utf-8")


def _work(case: Case) -> dict[str, Any] | None:
    try:
        return asdict(case.pair.work_at(case.size, case.gpus))
    except Exception:  # the page's own function: a run of the page says what is wrong with it
        return None
