"""A side has changed if anything that it may use differs, however the side refers to it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from two_versions import compare_versions, write_files

from pytest_aisp.page.imports import used_files

PAGE = """
import functools
import importlib
import json
from pathlib import Path

import torch

from pytest_aisp import Work, compare
{imports}


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(x):
    return x.double() + x.double()

{defs}


def added(x):
    return x + x


def doubled(x{default}):
    {body}


def tripled(x):
    return 3 * x - x


@compare(
    baseline=added,
    optimized=[doubled, tripled],
    inputs=inputs,
    reference=reference,
    sizes=[{{"n": 64}}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    check_sizes=[{{"n": 7}}],
)
def test_doubling(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestPlain:
    def test_plain(self):
        assert 1 == 1
"""
TWICE = "def twice(x):\n    return 2 * x\n"
CLASS = """
class Doubler(torch.nn.Module):
    def forward(self, x):
        return twice(x)

    def method(self, x):
        return twice(x)
"""
BOTH = ["baseline", "optimized"]
HELPER, JSON = "chapter/helper.py", "chapter/tuning.json"
NUMBER = '{"factor": 2}'
READ = "json.loads((Path(__file__).parent / 'tuning.json').read_text())['factor']"

# For each way to refer to something: the page's parts, and other files.
KINDS = {
    "a method": ({"defs": TWICE + CLASS, "body": "return Doubler().method(x)"}, {}),
    "a global instance": (
        {"defs": TWICE + CLASS + "MODEL = Doubler()", "body": "return MODEL(x)"},
        {},
    ),
    "a bound method": (
        {"defs": TWICE + CLASS + "METHOD = Doubler().method", "body": "return METHOD(x)"},
        {},
    ),
    "a default argument": ({"defs": TWICE, "default": ", f=twice", "body": "return f(x)"}, {}),
    "a default value": (
        {"defs": "FACTOR = 2", "default": ", k=FACTOR", "body": "return k * x"},
        {},
    ),
    "a table": ({"defs": TWICE + "TABLE = {'f': twice}", "body": "return TABLE['f'](x)"}, {}),
    "a list": ({"defs": TWICE + "STEPS = [twice]", "body": "return STEPS[0](x)"}, {}),
    "a partial in a table": (
        {"defs": TWICE + "T = {1: functools.partial(twice)}", "body": "return T[1](x)"},
        {},
    ),
    "a nested function of a factory": (
        {
            "defs": f"def make():\n{textwrap.indent(TWICE, '    ')}    return twice\n\n"
            "F = [make()]",
            "body": "return F[0](x)",
        },
        {},
    ),
    "a decorator": (
        {
            "defs": "def deco(f):\n    return lambda x: 2 * f(x)\n\n\n"
            "@deco\ndef same(x):\n    return x\nTABLE = [same]",
            "body": "return TABLE[0](x)",
        },
        {},
    ),
    "a class attribute": (
        {"defs": "class Options:\n    factor = 2\n", "body": "return Options.factor * x"},
        {},
    ),
    "a property": (
        {
            "defs": "class Options:\n    @property\n    def factor(self):\n        return 2\n\n"
            "O = Options()",
            "body": "return O.factor * x",
        },
        {},
    ),
    "an inherited method": (
        {
            "defs": TWICE
            + "class A:\n    def f(self, x):\n        return twice(x)\n\n\nclass B(A):\n"
            "    pass\n\nONE = B()",
            "body": "return ONE.f(x)",
        },
        {},
    ),
    "a name looked up": ({"defs": TWICE, "body": "return globals()['twi' + 'ce'](x)"}, {}),
    "a module-level statement": (
        {"defs": "import math\nmath.factor = 2", "body": "import math\n    return math.factor * x"},
        {},
    ),
    "a helper's helper": (
        {"imports": "from .helper import twice", "body": "return twice(x)"},
        {
            HELPER: "from .other import TABLE\n\n\ndef twice(x):\n    return TABLE['f'](x)\n",
            "chapter/other.py": TWICE + "TABLE = {'f': twice}",
        },
    ),
    "a module that imports another": (
        {"imports": "from . import helper", "body": "return helper.other.twice(x)"},
        {HELPER: "from . import other\n", "chapter/other.py": TWICE},
    ),
    "an import from a package": (
        {"imports": "from chapter.parts.ops import TABLE", "body": "return TABLE['f'](x)"},
        {"chapter/parts/__init__.py": "", "chapter/parts/ops.py": TWICE + "TABLE = {'f': twice}"},
    ),
    "a package's init": (
        {"imports": "from chapter import parts", "body": "return parts.TABLE['f'](x)"},
        {"chapter/parts/__init__.py": TWICE + "TABLE = {'f': twice}"},
    ),
    "another name of a helper": (
        {
            "imports": "from .helper import once as helped",
            "defs": "TABLE = {'f': helped}",
            "body": "return TABLE['f'](x)",
        },
        {HELPER: "def twice(x):\n    return x + x + 0\n\n\ndef once(x):\n    return x + x\n"},
    ),
    "a star import": (
        {"imports": "from .helper import *", "body": "return TABLE['f'](x)"},
        {HELPER: TWICE + "TABLE = {'f': twice}"},
    ),
    "a relative import inside the side": (
        {"body": "from .helper import TABLE\n    return TABLE['f'](x)"},
        {HELPER: TWICE + "TABLE = {'f': twice}"},
    ),
    "importlib": (
        {"defs": "M = importlib.import_module('chapter.helper')", "body": "return M.TABLE['f'](x)"},
        {HELPER: TWICE + "TABLE = {'f': twice}"},
    ),
    "a number in a JSON file": (
        {"defs": f"FACTOR = {READ}", "body": "return FACTOR * x"},
        {JSON: NUMBER},
    ),
    "a JSON file read by a helper": (
        {"imports": "from .helper import FACTOR", "body": "return FACTOR * x"},
        {HELPER: f"import json\nfrom pathlib import Path\n\nFACTOR = {READ}\n", JSON: NUMBER},
    ),
    "a file opened in a call": ({"body": f"return {READ} * x"}, {JSON: NUMBER}),
    "a model built in a helper": (
        {
            "imports": "from .helper import build",
            "defs": "MODEL = build()",
            "body": "return MODEL(x)",
        },
        {HELPER: "import torch\n" + TWICE + CLASS + "\n\ndef build():\n    return Doubler()\n"},
    ),
}
# What a change replaces, and by what.
EDITS = [
    ("2 * x", "x * 2"),
    ("factor = 2", "factor = 4 // 2"),
    ('"factor": 2', '"factor": 2.0'),
    ("FACTOR = 2", "FACTOR = 4 // 2"),
    ("return 2\n", "return 4 // 2\n"),
    ("2 * f(x)", "f(x) * 2"),
    ("import once as", "import twice as"),
]


@pytest.fixture
def changed(tmp_path, fresh_imports):
    """Write a page of one kind and its changed version; return the changed roles."""

    def roles(parts, files, edit):
        given = {"imports": "", "defs": "", "default": "", "body": "return 2 * x", **parts}
        both = {"chapter/some_test.py": PAGE.format(**given), **files}
        old = write_files(tmp_path / "old", both)
        today = write_files(tmp_path / "today", {name: edit(text) for name, text in both.items()})
        sys.path.insert(0, today)
        return compare_versions(old, today, "chapter/some_test.py", size={"n": 64}).roles()

    return roles


def replaced(text):
    for old, new in EDITS:
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_behind_a_side_is_found(changed, kind):
    parts, files = KINDS[kind]
    assert "optimized" in changed(parts, files, replaced)


@pytest.mark.parametrize("kind", KINDS)
def test_a_comment_behind_a_side_is_no_change(changed, kind):
    parts, files = KINDS[kind]
    assert changed(parts, files, lambda text: text if text[:1] in "{" else f"# old\n{text}") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3 * x - x", "x + x"),
        ("torch.randn", "torch.rand"),
        ("x.double() + x.double()", "2 * x.double()"),
        ("4 * n, write", "8 * n, write"),
        ('"n": 64', '"n": 128'),
        ("assert 1 == 1", "assert 2 == 2"),
    ],
    ids=["another side", "inputs", "reference", "work", "sizes", "a plain test"],
)
def test_code_that_is_no_part_of_the_sides_is_no_change(changed, old, new):
    assert changed({"body": "return x * 2"}, {}, lambda text: text.replace(old, new)) == []


def test_only_the_side_that_changed_is_named(changed):
    assert changed({}, {}, lambda text: text.replace("x + x", "x.add(x)")) == ["baseline"]


def test_files_of_libraries_and_outside_the_root_are_not_used(tmp_path):
    page = tmp_path / "root" / "page_test.py"
    page.parent.mkdir()
    (tmp_path / "outside.py").write_text("")
    page.write_text("import torch\nfrom .. import outside\nNAME = '../outside.py'\n")
    assert list(used_files(page, str(page.parent), ["."])) == ["page_test.py"]


def test_headers_of_kernel_files_are_used(tmp_path):
    files = {
        "ch01/page_test.py": "K = cuda_module('k.cu', include_path=[ROOT / 'common'])\n",
        "ch01/k.cu": '#include "near.cuh"\n#include <cstdint>\n  # include <shared/far.cuh>\n',
        "ch01/near.cuh": '#include "../farther.h"\n',
        "farther.h": "",
        "common/shared/far.cuh": "",
        "common/shared/other.cuh": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    used = used_files(tmp_path / "ch01/page_test.py", str(tmp_path), ["."])
    assert list(used) == sorted(files.keys() - {"common/shared/other.cuh"})


def test_a_file_that_is_not_python_any_more_is_still_compared(changed):
    files = {HELPER: "x = (\n"}
    parts = {"body": "return x * 2", "defs": "TEXT = Path(__file__).parent / 'helper.py'"}
    assert changed(parts, files, lambda text: text.replace("x = (", "y = (")) == BOTH


def test_this_projects_pages_use_their_helpers():
    root = Path(__file__).parents[1]
    used = used_files(root / "suites/ch15/prefix_cache_test.py", str(root), ["."])
    assert {"suites/decoder.py", "suites/serving.py"} <= set(used)
