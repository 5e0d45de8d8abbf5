"""The code of sides in a report: read from the page and its kernel files, never run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from made_runs import KERNELS, PAGE

from pytest_aisp.report.source_view import MAX_LINES, Page, diff, kernel_parts, page_diffs

SUITES = Path(__file__).parents[1] / "suites"


@pytest.fixture
def page(tmp_path):
    """Return a function that writes a page with `text` and its kernel file, and reads it."""

    def page(text=PAGE):
        (tmp_path / "doubling.cu").write_text(KERNELS)
        path = tmp_path / "doubling_test.py"
        path.write_text(text)
        return Page.read(path)

    return page


def test_side_is_shown_with_everything_it_uses(page):
    assert page().side("doubled") == "\n".join(
        [
            "BLOCK = 256",
            *("", "", "def launch(kernel, x):"),
            "    return kernel[x.numel() // BLOCK, BLOCK](x)",
            *("", "", "def doubled(x):", "    return launch(kernels.doubled, x)"),
            *("", "", "// doubling.cu", ""),
            "// added: adds x to itself.",
            "// doubled: doubles it.",
            "",
            "__device__ float twice(float x) { return 2 * x; }",
            "",
            'extern "C" __global__ void doubled(const float* x, float* out)'
            " { out[threadIdx.x] = twice(x[0]); }",
        ]
    )


def test_docstring_and_sides_are_read_without_running_the_page(page):
    found = page(PAGE + "\nraise SystemExit('this page was run')\n")
    assert found.title == "Doubling: one read instead of two."
    assert found.doc.endswith("Double {number} numbers.")
    assert found.sides("test_doubling") == ("added", ("doubled",))
    assert found.sides("test_nothing") == ("", ())


def test_diff_names_both_sides(page):
    found = page()
    changed = diff(found.side("added"), found.side("doubled"), ("added", "doubled"))
    lines = changed.splitlines()
    assert lines[:2] == ["--- added", "+++ doubled"]
    assert "-def added(x):" in lines
    assert "+__device__ float twice(float x) { return 2 * x; }" in lines
    assert " BLOCK = 256" not in lines  # beyond the context


LADDER = """'''A ladder.

Optimized  second: changes `first`. It adds two.
           third: changes
           `second`. It adds three.
           fourth: changes `nothing` that is here.
           missing: changes `first`.
           sixth: changes `fifth`. Its test is made by a function.
'''
{sides}

@compare(baseline=first, optimized=[second, Variant(third), fourth, fifth])
def test_ladder(pair): ...

@compare(baseline=first, optimized=[third])
def test_again(pair): ...

test_sixth = test(fifth, sixth)
"""
RUNGS = ("first", "second", "third", "fourth", "fifth", "sixth")


def test_diff_of_a_page_is_from_the_side_that_a_variant_changes(page):
    sides = "\n".join(f"def {name}(x): return x + {n}" for n, name in enumerate(RUNGS))
    lines = list(page_diffs(page(LADDER.format(sides=sides))))
    assert [line[4:] for line in lines if line.startswith(("---", "+++"))] == [
        *("first", "second"),
        *("second", "third"),
        *("first", "fourth"),
        *("first", "fifth"),
        *("fifth", "sixth"),
    ]
    start = lines.index("+++ third")
    assert lines[start + 2 : start + 4] == [
        "-def second(x): return x + 1",
        "+def third(x): return x + 2",
    ]


def test_local_name_of_a_side_is_not_a_use_of_the_page(page):
    text = "def wide():\n    return 1\n\n\ndef side(x):\n    wide = x\n    return wide\n"
    assert page(text).side("side") == "def side(x):\n    wide = x\n    return wide"


def test_side_of_a_library_has_no_code(page):
    assert page("from elsewhere import side\n").side("side") == ""


def test_side_from_a_module_beside_the_page_has_its_code(page, tmp_path):
    (tmp_path / "sides.py").write_text("TWO = 2\n\n\ndef doubled(x):\n    return TWO * x\n")
    found = page("from .sides import doubled as side, missing\nfrom .gone import other\n")
    assert found.side("side") == "TWO = 2\n\n\ndef doubled(x):\n    return TWO * x"
    assert found.side("missing") == found.side("other") == ""


def test_page_without_its_kernel_file_is_read(page, tmp_path):
    found = page()
    found.path.with_name("doubling.cu").unlink()
    found = Page.read(found.path.rename(tmp_path / "other_test.py"))
    assert found.modules == {"kernels": "doubling.cu"}


def test_long_side_is_cut(page):
    body = "\n".join(f"    x = {n}" for n in range(MAX_LINES + 9))
    assert page(f"def side(x):\n{body}\n").side("side").endswith("\n... 10 more lines")


def test_braces_in_comments_and_strings_do_not_count():
    one = '// {\n/* } { */\n__device__ int one() {\n\n  return sizeof("}{");\n}'
    text = f"{one}\n\nint two;  // a word\n"
    assert kernel_parts(text, ["one"]) == [one]
    assert kernel_parts(text, ["two"]) == ["int two;  // a word"]


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ("struct Sums {\n  float at[4];\n};", "Sums"),
        ("constexpr int M = 128, N = 64;", "N"),
        ("#define WIDTH 4", "WIDTH"),
        ("using Half = unsigned short;", "Half"),
        ("enum Kind { SMALL, LARGE };", "LARGE"),
        ("template <int n>\n__device__ auto twice(int x) {\n  return 2 * x;\n}", "twice"),
        ('extern "C" __global__ void __launch_bounds__(256)\n    slow(int x) {\n}', "slow"),
        ("namespace {\n__device__ int hidden() { return 1; }\n}", "hidden"),
    ],
)
def test_declaration_that_a_kernel_uses_is_found(declared, name):
    kernel = f"__global__ void kernel() {{ use({name}); }}"
    first, second = kernel_parts(f"{declared}\n\n{kernel}\n\nint unused;\n", ["kernel"])
    assert (first, second) == (declared, kernel)


def test_every_side_of_the_suites_has_code():
    missing = []
    for path in sorted(SUITES.glob("ch*/*_test.py")):
        page = Page.read(path)
        for function in [name for name in page.defined if name.startswith("test_")]:
            baseline, variants = page.sides(function)
            names = [name for name in (baseline, *variants) if name]
            missing += [(path.name, name) for name in names if not page.side(name)]
            for name in names:  # the Python part consists of whole statements
                ast.parse(page.side(name).partition("\n// ")[0])
    assert missing == []
