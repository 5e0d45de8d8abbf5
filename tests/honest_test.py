"""Honest pages of everyday code pass."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from pytest_aisp.page.pair import MARK
from pytest_aisp.results.messages import CheckTask
from pytest_aisp.worker.engine import Engine

TESTS = Path(__file__).parent


def honest_pages():
    """Yield the file, the name and the pair of every honest page."""
    for path in sorted((TESTS / "honest").glob("*.py")):
        page = importlib.import_module(f"honest.{path.stem}")
        for name, thing in vars(page).items():
            for mark in getattr(thing, "pytestmark", ()):
                if mark.name == MARK:
                    yield path, name, mark.kwargs["pair"]


def params():
    for path, name, pair in honest_pages():
        for variant in pair.variants:
            yield pytest.param(path, name, variant.name, id=f"{name}-{variant.name}")


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.mark.parametrize(("path", "name", "variant"), list(params()))
def test_an_honest_page_passes(engine, path, name, variant):
    [pair] = [pair for _, other, pair in honest_pages() if other == name]
    engine.check(
        CheckTask(
            at="check",
            page=str(path),
            root=str(TESTS),
            module=f"honest_{path.stem}",
            function=name,
            variant=variant,
            size=pair.sizes[0],
            device="cpu",
        )
    )


def test_there_are_at_least_sixty_honest_pages():
    assert len(list(honest_pages())) >= 60
