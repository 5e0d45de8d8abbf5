"""Normalized sources: comments and formatting do not change them, and every other change does.

The expected hashes were the same in CPython 3.10.2, 3.11.7, 3.12.7, 3.13.2 and 3.14.2.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest

from pytest_aisp.page import normalize

SYNTAX = (Path(__file__).parent / "data" / "syntax.txt").read_text()
"""Most of Python's syntax."""


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    ("docstrings", "expected"), [(False, "c1982c8b9f400727"), (True, "e9c963a336433ced")]
)
def test_syntax_has_the_same_hash_in_every_version_of_python(docstrings, expected):
    text = normalize.module(SYNTAX, docstrings=docstrings)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_a_formatted_module_is_the_same():
    formatted = ast.unparse(ast.parse(SYNTAX))
    assert formatted != SYNTAX
    assert normalize.module(formatted) == normalize.module(SYNTAX)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1  # one"),
        ("x = 1", "\n\n# one\nx=(1)\n"),
        ("x = 1", '"""A module."""\nx = 1\n"""A variable."""'),
        (
            "def f(x): return x",
            'def f(\n    x,\n):\n    """Same."""\n    return (\n        x\n    )',
        ),
        ("x = 1e3, 0xff, 'a', 'bc'", 'x = (1000.0, 255, u"a", "b" \'c\',)'),
        ("x = f'{y}'", "x = f'{y:}' ''"),
    ],
)
def test_comments_docstrings_and_formatting_are_not_part_of_python(one, other):
    assert normalize.module(one) == normalize.module(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 0", "x = False"),
        ("x = -1", "x = 1"),
        ("x = 'a'", "x = b'a'"),
        ("x = 'a # b'", "x = 'a # c'"),
        ("x = '''a\n  b'''", "x = '''a\n    b'''"),
        ("x = 'None'", "x = None"),
        ("x = (y)", "x = (y,)"),
        ("x = a - (b - c)", "x = a - b - c"),
        ("x = [None]", "x = []"),
        ("x = {**a}", "x = {None: a}"),
        ("x = f'{y}'", "x = f'{y!r}'"),
        ("x = f'{y}'", "x = '{y}'"),
        ("def f(*, a, b=1): pass", "def f(*, a=1, b): pass"),
        ("def f(x: int): pass", "def f(x: float): pass"),
        ("if x:\n  y\nz", "if x:\n  y\n  z"),
        ("match x:\n  case None: pass", "match x:\n  case False: pass"),
        ("match x:\n  case [*_]: pass", "match x:\n  case [_]: pass"),
        ("from . import x", "from .. import x"),
        ("return_ = lambda: (yield)", "return_ = lambda: None"),
    ],
)
def test_other_changes_of_python_change_it(one, other):
    assert normalize.module(one) != normalize.module(other)


def test_a_long_sum_needs_no_recursion():
    text = "x = " + " + ".join(f"a{i}" for i in range(700))
    assert normalize.module(text).count("BinOp") == 699
    assert normalize.module("no python") is None


TWO = """
f, g = lambda x: x, lambda x: -x
@decorated
# a comment
def h(x):
    class A:
        def h(self): return x
    return A
class A:
    y = 1
class A:
    y = 2
"""


def test_definitions_are_found_by_line_and_by_name():
    code = compile(TWO, "two.py", "exec")
    inner = {c.co_name: c for c in code.co_consts if hasattr(c, "co_name")}
    lambdas = normalize.function(TWO, inner["<lambda>"])
    assert lambdas.count("Lambda(") == 2  # they begin on the same line
    assert normalize.function(TWO, inner["h"]).startswith("FunctionDef(name='h'")
    assert "decorated" in normalize.function(TWO, inner["h"])
    assert normalize.class_(TWO, "A").count("ClassDef(") == 2
    assert normalize.class_(TWO, "h.<locals>.A").count("ClassDef(") == 1
    assert normalize.function("edited = 1", inner["h"]) is None


KERNEL = r"""
#include <cuda.h>
#define SCALE(x)  ((x) * 2.f) // twice
#define LONG(x) \
    SCALE(x)
extern "C" __global__ void k(float* x, int n) {
    #pragma unroll 4
    for (int i = 0; i < n; ++i) x[i] = SCALE(x[i]) + 1'000;  /* a comment */
    asm volatile("add.s32 %0, %0, 1; // kept" : "+r"(n));
}
"""


def tokens(*texts):
    return normalize.cuda(texts)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("++i)", "++i /* one\n more */ )  // say 'why\n"),
        ("x[i] = SCALE", "x [i]=SCALE"),
        (") {\n", ")\n\n{\n"),
        ("// twice", ""),
        ("    #pragma", "#  pragma"),
        ("/* a comment */", '// R"(a comment \\\n that goes on'),
        ("\n", "\r\n"),
    ],
)
def test_comments_and_formatting_are_not_part_of_cuda(old, new):
    assert tokens(KERNEL.replace(old, new)) == tokens(KERNEL) != tokens("")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("++i", "+ +i"),
        ("unroll 4", "unroll 8"),
        ("unroll 4\n", "unroll 4 "),
        ("SCALE(x)  ((", "SCALE (x) (("),
        ("1'000", "1'001"),
        ("// kept", "// changed"),
        ("add.s32 %0,", "add.s32  %0,"),
        ("<cuda.h>", "<cuda//b.h>"),
        ("int n)", "intn)"),
        ("/* a comment */", "x[0] = 'a';"),
    ],
)
def test_other_changes_of_cuda_change_it(old, new):
    assert old in KERNEL
    assert tokens(KERNEL.replace(old, new)) != tokens(KERNEL)


def test_raw_strings_keep_their_text():
    one, other = ('auto s = R"x(a // b\n  )" /* c */)x";', 'auto s = R"x(a // b\n)" /* c */)x";')
    assert tokens(one) != tokens(other)
    assert tokens(one) == tokens(one + " // d")


def test_white_space_matters_if_a_macro_makes_a_string_of_code():
    macro = "#define TEXT(x) #x\n"
    assert tokens("f(a+b)") == tokens("f(a + b)")
    assert tokens(macro, "f(a+b)") != tokens(macro, "f(a + b)")
    assert tokens(macro, "f(a + b)") == tokens(macro, "f(a\n  +  /* plus */ b)")
    assert tokens("#define PASTE(x) x##1\n", "f(a+b)")[1] == tokens("f(a + b)")[0]
