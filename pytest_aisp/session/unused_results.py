"""Find stored results that no case still uses, such as the results of a renamed page.

A page is compared with its stored results only if this run collected the whole page. Cases that
were deselected afterwards count as collected. A deleted page is reported if its folder was an
argument of this run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ..results import store
from ..results.models import base_of
from ..results.row import Row
from ..results.store import StoreError
from ..util import git
from .options import COLLECTED, RECORDER, RUN, Settings

Page = tuple[str, str]
"""The chapter and the file name of a page."""


class CollectedCases:
    """The keys of all cases of the collected pages, including deselected cases."""

    def __init__(self) -> None:
        self._keys: dict[Page, set[str]] = {}
        self._failed: set[str] = set()

    def add(self, chapter: str, page: str, keys: Iterable[str]) -> None:
        """Add the keys of one test of a page."""
        self._keys.setdefault((chapter, page), set()).update(keys)

    def fail(self, page: str) -> None:
        """Record that the page with this file name was not collected completely."""
        self._failed.add(page)

    def of(self, chapter: str, page: str) -> set[str] | None:
        """Return the keys of a page's cases, or None if it was not collected completely."""
        return None if page in self._failed else self._keys.get((chapter, page))


def report_unused(config: pytest.Config) -> None:
    """Pass the unused results to the recorder, or from an xdist worker to its controller."""
    recorder, unused = config.stash.get(RECORDER, None), _unused_results(config)
    if recorder is not None:
        recorder.unused.update(unused)
    else:
        config.workeroutput["aisp_unused"] = unused  # type: ignore[attr-defined]


def _unused_results(config: pytest.Config) -> list[str]:
    """Return the stored results of this machine's product that no collected case uses.

    For example:
    ``baselines/nvidia-h200/ch07.json: gemm_test.py::test_gemm[tiled-n64]``.
    """
    run, collected = config.stash.get(RUN, None), config.stash.get(COLLECTED, None)
    if run is None or collected is None or config.option.collectonly:
        return []
    if run.settings.mode not in ("measure", "record"):
        return []
    settings = run.settings
    given = [config.invocation_params.dir / str(argument) for argument in config.args]
    folders = [path.resolve() for path in given if path.is_dir()]
    unused = []
    for path in sorted(settings.baselines.glob("*/*.json")):
        if path.name == "peaks.json" or base_of(path.parent.name) != run.machine.product:
            continue
        try:
            keys = sorted(store.load(path).results)
        except StoreError:  # the cases that need this file report it
            continue
        name = path.relative_to(settings.root) if path.is_relative_to(settings.root) else path
        unused += [
            f"{name}: {key}"
            for key in keys
            if _is_unused(path.stem, key, collected, folders, settings)
        ]
    return unused


def _is_unused(
    chapter: str, key: str, collected: CollectedCases, folders: list[Path], settings: Settings
) -> bool:
    page = key.partition("::")[0]
    known = collected.of(chapter, page)
    if known is not None:
        return key not in known
    places = list(_places(chapter, settings))
    gone = not any((place / page).exists() for place in places)
    return gone and any(place.is_relative_to(f) for place in places for f in folders)


def _places(chapter: str, settings: Settings) -> Iterator[Path]:
    """Yield the possible folders of a chapter. A dot in its name may separate folders."""
    for base in settings.pages or (settings.root,):
        yield (base / chapter).resolve()
        yield base.joinpath(*chapter.split(".")).resolve()
        if chapter == base.name:
            yield base.resolve()


def is_selected(config: pytest.Config, nodeid: str) -> bool:
    """Return whether the arguments of this run select a case, which may no longer exist."""
    option = config.option
    narrowed = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
    if narrowed or option.collectonly:
        return False
    page, _, name = nodeid.partition("::")
    for argument in config.args:
        path, _, wanted = str(argument).partition("::")
        place = (config.invocation_params.dir / path).resolve()
        if (config.rootpath / page).resolve().is_relative_to(place) and name.startswith(wanted):
            return True
    return False


def missing_files(rows: Iterable[Row], root: Path) -> list[str]:
    """Return the missing files of stored results that git tracks and that new cases need."""
    files = {row.file for row in rows if row.verdict == "new" and not Path(row.file).exists()}
    return [file for file in sorted(files) if git.try_git(root, "ls-files", "--", file)]
