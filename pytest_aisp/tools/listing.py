"""`aisp bench list-targets`: the pages that can be run, and what is on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..common.answers import Answer, columns
from ..pages.skus import ARCHS
from .catalogue import Catalogue

HEADS = ("target", "title", "variants", "bound", "needs", "archs")
TITLE = 60
"""Characters of a title in the table."""


@dataclass(frozen=True)
class Listed:
    """One page: what its pairs are called, bound by and need, each word once."""

    target: str
    path: str
    title: str
    variants: tuple[str, ...]
    bound: tuple[str, ...]
    needs: tuple[str, ...]
    archs: tuple[str, ...]
    gpus: tuple[int, ...]
    cases: int

    @classmethod
    def of(cls, cases: Sequence[Mapping[str, Any]]) -> Listed:
        """Return the page of `cases`."""
        return cls(
            cases[0]["name"],
            cases[0]["path"],
            cases[0]["title"],
            tuple(dict.fromkeys(case["variant"] for case in cases)),
            tuple(dict.fromkeys(case["bound"] for case in cases)),
            tuple(dict.fromkeys(need for case in cases for need in case["needs"])),
            tuple(sorted({a for case in cases for a in case["archs"]}, key=ARCHS.index)),
            tuple(sorted({case["gpus"] for case in cases})),
            len(cases),
        )

    def row(self) -> tuple[str, ...]:
        """Return its line of the table."""
        title = self.title if len(self.title) <= TITLE else f"{self.title[: TITLE - 3]}..."
        needs = [*self.needs, *(f"{n} GPUs" for n in self.gpus if n > 1)]
        words = (self.variants, self.bound, needs or ["-"], self.archs)
        return self.target, title, *(", ".join(w) for w in words)


def answer(found: Catalogue, *, as_json: bool) -> Answer:
    """Return the pages of `found` with their cases; exit code 1 where one cannot be imported."""
    names = dict.fromkeys(case["name"] for case in found.cases)
    pages = [Listed.of([case for case in found.cases if case["name"] == n]) for n in names]
    code = 1 if found.broken else 0
    if as_json:
        plain = {"targets": [asdict(page) for page in pages], "broken": found.broken}
        return Answer([json.dumps(plain, indent=1)], code)
    lines = columns([HEADS, *(page.row() for page in pages)]) if pages else ["no page is here"]
    return Answer([*lines, *(f"cannot be imported: {why}" for why in found.broken)], code)
