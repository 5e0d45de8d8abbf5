"""What the ledger points to exists, all of it; and it points to everything that is here."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from checklists import BENCHMARK_CHEATS, VALIDITY_ISSUES
from validity import find_exploits

TESTS = Path(__file__).parent
ITEMS = [*BENCHMARK_CHEATS, *(item for items in VALIDITY_ISSUES.values() for item in items)]
EXPLOITS = {one.exploit.name for one in find_exploits()}
each = pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.cheat)


@functools.cache
def functions_of(file):
    """The test functions of a file, those that pytest collects."""
    parsed = ast.parse((TESTS / file).read_text())
    return {n.name for n in parsed.body if isinstance(n, ast.FunctionDef)}


def test_both_lists_are_whole():
    assert len(BENCHMARK_CHEATS) == 40
    counts = {name: len(items) for name, items in VALIDITY_ISSUES.items()}
    assert list(counts.values()) == [7, 10, 11, 7, 7, 10, 7, 8, 12, 8, 8]
    assert sum(counts.values()) == 95


@each
def test_an_item_says_what_becomes_of_it(item):
    assert item.exploits or item.why or item.open  # a test alone does not say what catches it


@each
def test_the_exploits_of_an_item_exist(item):
    names = item.exploits.split()
    assert set(names) <= EXPLOITS
    assert len(set(names)) == len(names)


@each
def test_the_functions_of_an_item_exist(item):
    for name in item.tests.split():
        file, _, function = name.partition("::")
        assert function in functions_of(file), name
        assert function.startswith("test_")


def test_every_exploit_is_in_the_ledger():
    assert EXPLOITS - {name for item in ITEMS for name in item.exploits.split()} == set()
