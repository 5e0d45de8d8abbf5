"""Every page refuses wrong sides: zeros, remembered answers, answers that are nearly right.

Each page's own inputs, reference and tolerance are used, at its own small size. Only the optimized
side is replaced. Without a GPU, CUDA C++ sides run emulated. Pages on several ranks are in
rank_mutants_test.py, because their sides need the other ranks.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from pathlib import Path

import pytest
import torch
from emulated_pages_test import GPU_ONLY
from mutants import MUTANTS, mutate, nearly, plain, units_of
from pytest_aisp_emulator import emulated
from pytest_aisp_emulator.compiler import COMPILER

from pytest_aisp.checking import check, numerics
from pytest_aisp.checking.controls import CannotTell, TooLoose
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.page.pair import SideError, is_plain
from pytest_aisp.page.sources import kernel_files
from pytest_aisp.worker.loader import load_page, pair_of

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAUGHT = (Wrong, SideError, TooLoose, CannotTell)


@functools.cache
def judged_on(path):
    """Return by test each pair of a page, with the rule that the test gives."""
    page = load_page(str(path), str(ROOT), f"pages_of_{path.parent.name}.{path.stem}")
    found = {name: pair_of(thing) for name, thing in vars(page).items()}
    given = keywords(path)
    return {name: (pair, Rule(**given[name])) for name, pair in found.items() if pair is not None}


def skips_of(path, name):
    """Return the marks with which the test says what it needs, such as torchvision."""
    page = load_page(str(path), str(ROOT), f"pages_of_{path.parent.name}.{path.stem}")
    marks = [mark for mark in getattr(page, name).pytestmark if mark.name == "skipif"]
    return [mark for mark in marks if isinstance(mark.args[0], bool)]  # text is of the page's names


def keywords(path):
    """Return by test the keywords that it gives to `assert_equivalent`."""
    tests = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    return {
        test.name: {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        for test in tests
        if test.name.startswith("test_")
        for call in ast.walk(test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pair.assert_equivalent"
    }


def runs_here(path):
    if DEVICE == "cuda" or "cuda_module" not in path.read_text():
        return True
    pairs = [pair for pair, _ in judged_on(path).values()]
    sides = [s for p in pairs for s in (p.baseline, *(v.side for v in p.variants))]
    if not kernel_files(sides, str(ROOT)):
        return True
    return COMPILER is not None and f"{path.parent.name}/{path.stem[:-5]}" not in GPU_ONLY


PAGES = [
    path
    for path in sorted((ROOT / "suites").rglob("*_test.py"))
    if not any(pair.multi_rank for pair, _ in judged_on(path).values())
]


def reference_of(pair, rule):
    sizes = [s for s in pair.check_sizes if is_plain(s)] or [*pair.cpu_sizes, *pair.sizes]
    return Reference(InputPool(pair, dict(sizes[0]), DEVICE, 1, 2), exact=rule.exact)


HERE = [path for path in PAGES if runs_here(path)]
each_pair = pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(
            path, name, id=f"{path.parent.name}/{path.stem}::{name}", marks=skips_of(path, name)
        )
        for path in HERE
        for name in judged_on(path)
    ],
)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """Perturb the reference less often, as a wrong side is refused without an exact bound too."""
    monkeypatch.setattr(numerics, "MORE_DRAWS", numerics.DRAWS)


@pytest.fixture(autouse=True)
def emulator():
    with emulated() if DEVICE == "cpu" else contextlib.nullcontext():
        yield


@pytest.mark.skipif(COMPILER is None, reason="needs g++; there is none here")
def test_only_pages_that_need_a_gpu_are_left_out():
    missing = {f"{path.parent.name}/{path.stem[:-5]}" for path in PAGES if path not in HERE}
    assert missing == (set() if DEVICE == "cuda" else {k for k in GPU_ONLY if "-" not in k})


@pytest.mark.slow
@each_pair
def test_a_page_refuses_wrong_sides(path, name):
    pair, rule = judged_on(path)[name]
    reference, honest = reference_of(pair, rule), plain(pair.baseline)
    assert check.check_sides(reference, [(honest, None), (honest, None)], rule).controls
    said = {}  # of each wrong side; a refused baseline would have another name
    for mutant in MUTANTS:
        if mutant is nearly and pair.state is not None and returns_nothing(pair):
            continue  # nothing is returned that could be nearly right
        side = mutate(mutant, honest, units_of(pair))
        side.__name__ = f"wrong_{mutant.__name__}"
        said[side.__name__] = "believed"
        try:
            check.check_sides(reference, [(honest, None), (side, None)], rule, controls=False)
        except CAUGHT as error:
            said[side.__name__] = str(error)
    assert {name: text for name, text in said.items() if name not in text} == {}


def returns_nothing(pair):
    pool = reference_of(pair, Rule()).pool
    return plain(pair.baseline)(pool.new_state(), *pool.value_set(0)) is None
