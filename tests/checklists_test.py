"""The exploits and tests that the checklists name exist, and every exploit is in a checklist."""

from __future__ import annotations

import pytest
from checklists import BENCHMARK_CHEATS, VALIDITY_ISSUES
from tricks import BELIEVED, STATES, TRICKS
from validity import find_exploits, find_test

ITEMS = [*BENCHMARK_CHEATS, *(item for items in VALIDITY_ISSUES.values() for item in items)]
EXPLOITS = {one.exploit.name for one in find_exploits()}
each = pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.cheat)


def test_both_checklists_are_complete():
    assert len(BENCHMARK_CHEATS) == 40
    counts = [len(items) for items in VALIDITY_ISSUES.values()]
    assert counts == [7, 10, 11, 7, 7, 10, 7, 8, 12, 8, 8]
    assert sum(counts) == 95


@each
def test_an_item_names_what_catches_it_or_what_is_open(item):
    assert item.exploits or item.why or item.open  # a test alone does not say what catches it


@each
def test_the_exploits_of_an_item_exist(item):
    names = item.exploits.split()
    assert set(names) <= EXPLOITS
    assert len(set(names)) == len(names)


@each
def test_the_tests_of_an_item_exist(item):
    for name in item.tests.split():
        assert find_test(name)


def test_every_exploit_is_in_a_checklist():
    assert {name for item in ITEMS for name in item.exploits.split()} == EXPLOITS


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name)
def test_what_the_table_of_tricks_says_is_proved(trick):
    assert {trick.ordinary, trick.untrusted} <= STATES.keys()
    proofs = trick.proofs.split()
    assert proofs or {trick.ordinary, trick.untrusted} == {BELIEVED}
    for name in proofs:
        assert name in EXPLOITS or find_test(name)
