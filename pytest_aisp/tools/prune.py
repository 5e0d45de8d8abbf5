"""`aisp prune`: stored results whose case is gone, listed, and removed where that is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ..common.answers import Answer, Unanswerable
from ..results import store
from ..results.stored_text import StoreError
from . import products
from .catalogue import Catalogue

KEEP = "    aisp prune --yes"
Gone: TypeAlias = Sequence[tuple[products.Chapter, str]]


def answer(found: Catalogue, product: str | None, *, yes: bool, as_json: bool = False) -> Answer:
    """Return which results have no case, removed where `yes`; of every product, or of one.

    Pages that are skipped or broken here may have any case: their results are kept.

    Raises:
        Unanswerable: where not every page is known, or a file cannot be read or written.
    """
    if not found.folders:
        raise Unanswerable(
            "the ini file names no folder of pages: which cases are gone cannot be known\n"
            "Name them in [tool.pytest.ini_options] of pyproject.toml:\n"
            '    aisp_pages = ["suites"]'
        )
    if absent := [f for f in found.folders if not (found.root / f).exists()]:
        raise Unanswerable(
            f"{found.root / absent[0]} is not here: which of its cases are gone cannot be known\n"
            "Check all of the repository out:\n    git sparse-checkout disable"
        )
    gone = [
        (chapter, key)
        for chapter, keys in gone_of(found, product)
        for key in (_removed(chapter, keys) if yes else keys)
    ]
    return Answer(_json(found, gone, yes) if as_json else _text(found, gone, yes))


def _text(found: Catalogue, gone: Gone, yes: bool) -> list[str]:
    lines = [f"{chapter.path}: {key}" for chapter, key in gone]
    kept = [f"kept, its page cannot be collected here: {page['path']}" for page in found.unread]
    if not lines:
        return ["every stored result has its case", *kept]
    count = "1 result" if len(lines) == 1 else f"{len(lines)} results"
    did = [f"{count} removed"] if yes else [f"{count} would be removed:", KEEP]
    return [*lines, *kept, *did]


def _json(found: Catalogue, gone: Gone, yes: bool) -> list[str]:
    plain = {
        "removed": yes,
        "gone": [
            {
                "product": chapter.stored.product,
                "chapter": chapter.name,
                "case": key,
                "file": str(chapter.path),
            }
            for chapter, key in gone
        ],
        "unread": list(found.unread),
    }
    return [json.dumps(plain, indent=1)]


def gone_of(
    found: Catalogue, product: str | None
) -> Iterator[tuple[products.Chapter, Sequence[str]]]:
    """Yield the chapters that hold results without a case, with the keys of those."""
    keys: dict[str, set[str]] = {}
    for case in found.cases:
        keys.setdefault(case["chapter"], set()).add(case["key"])
    unread = {Path(page["path"]).name for page in found.unread}
    for name in _products(found.baselines, product):
        for chapter in products.chapters(found.baselines, name):
            gone = set(chapter.stored.results) - keys.get(chapter.name, set())
            if gone := {key for key in gone if key.partition("::")[0] not in unread}:
                yield chapter, sorted(gone)


def _products(baselines: Path, product: str | None) -> list[str]:
    there = sorted({file.parent.name for file in baselines.glob("*/*.json")})
    if product is not None and product not in there:
        raise products.no_product(baselines, product, there)
    return there if product is None else [product]


def _removed(chapter: products.Chapter, gone: Sequence[str]) -> list[str]:
    try:
        return store.prune(chapter.path, gone)
    except StoreError as error:
        raise Unanswerable(str(error)) from None
