"""Which cases of a page a change can affect, derived from the page's syntax."""

from __future__ import annotations

import ast

import pytest

from pytest_aisp.tools.changed_cases import PageSyntax, touched

PAGE = '''
"""About a page."""

import torch
from .helper import shared, special

kernels = cuda_module("one.cu")
FACTOR = 2
TABLE = {}


def half(x):
    return x / FACTOR


def inputs(device, n):
    """Make inputs."""
    return shared(n)


def slow(x):
    return x + x


def first(x):
    return kernels.scale(x)


def second(x):
    return half(special(x))


def third(x):
    return 3 * x


@compare(
    baseline=slow,
    optimized=[first, Variant(second, name="other"), Variant(third, rtol=1e-3)],
    inputs=inputs,
    sizes=[{"n": 64}],
)
def test_a(pair):
    pair.assert_equivalent()


@compare(baseline=third, optimized=second, inputs=inputs, sizes=[{"n": 8}])
def test_b(pair):
    pair.assert_equivalent()


def test_plain():
    assert TABLE == {}
'''
A = {("test_a", name) for name in ("first", "other", "third")}
ALL = {*A, ("test_b", "second")}
FILES = {"one.cu": ["one.cu"], "special": ["helper.py"]}
"""What a statement of the page names, and which files it may use then."""


def found(new, old=PAGE, files=(), cases=ALL):
    def files_of(statement):
        text = ast.unparse(statement)
        return {file for word, names in FILES.items() if word in text for file in names}

    return touched(cases, PageSyntax.of(new), PageSyntax.of(old), set(files), files_of)


@pytest.mark.parametrize(
    ("old", "new", "cases"),
    [
        ("About a page", "About this page", set()),
        ("    return 3 * x", "    # three times\n    return (3 * x)", set()),
        ("Make inputs.", "Return inputs.", set()),
        ("TABLE == {}", "not TABLE", set()),
        ("kernels.scale(x)", "kernels.scale(2 * x)", {("test_a", "first")}),
        ("x / FACTOR", "x / FACTOR / 1", {("test_a", "other"), ("test_b", "second")}),
        ("FACTOR = 2", "FACTOR = 4", {("test_a", "other"), ("test_b", "second")}),
        ("rtol=1e-3", "rtol=1e-4", {("test_a", "third")}),
        ("3 * x", "x * 3", {("test_a", "third"), ("test_b", "second")}),
        ("x + x", "2 * x", A),
        ('[{"n": 64}]', '[{"n": 128}]', A),
        ('[{"n": 8}]', '[{"n": 9}]', {("test_b", "second")}),
        ("shared(n)", "shared(n + 0)", ALL),
    ],
)
def test_a_change_touches_what_uses_it(old, new, cases):
    assert old in PAGE
    assert found(PAGE.replace(old, new)) == cases


def test_a_new_name_of_a_function_touches_its_users():
    expected = {("test_a", "other"), ("test_b", "second")}
    assert found(PAGE.replace("half", "halve")) == expected


def test_a_new_variant_touches_no_other_case():
    new = PAGE.replace("[first,", "[fourth, first,")
    new += "\n\ndef fourth(x):\n    return x\n"
    assert found(new, cases={*ALL, ("test_a", "fourth")}) == {("test_a", "fourth")}


def test_a_new_test_touches_its_own_cases():
    old = PAGE.replace("def test_b", "def test_c")
    assert found(PAGE, old) == {("test_b", "second")}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TABLE = {}", "TABLE = {1: 2}"),
        ("TABLE = {}", "TABLE = {}\nTABLE[1] = first"),
        ("TABLE = {}", "TABLE = {}\ntorch.set_num_threads(1)"),
        ("FACTOR = 2", "FACTOR = globals()['TABLE']"),
    ],
    ids=["a name that no case uses", "a table", "a statement", "a dynamic name"],
)
def test_a_change_of_unknown_reach_touches_all_cases(old, new):
    assert found(PAGE.replace(old, new)) == ALL


def test_a_function_of_a_table_touches_all_cases():
    page = PAGE.replace("TABLE = {}", "TABLE = {}\nTABLE[1] = first")
    assert found(page.replace("kernels.scale(x)", "kernels.other(x)"), page) == ALL


def test_variants_without_a_known_name_are_always_touched():
    page = PAGE.replace("[first, ", "[*[first], ")
    new = page.replace('"n": 8', '"n": 9')
    assert found(new, page) == {("test_a", "first"), ("test_b", "second")}


@pytest.mark.parametrize(
    ("file", "cases"),
    [
        ("one.cu", {("test_a", "first")}),
        ("helper.py", ALL),
        ("elsewhere.py", ALL),
    ],
)
def test_a_changed_file_touches_what_names_it(file, cases):
    assert found(PAGE, files=[file]) == cases
