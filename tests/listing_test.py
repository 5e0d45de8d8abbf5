"""The code that a report shows of a page's sides: what they use of it, and nothing is run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from made_runs import KERNELS, PAGE

from pytest_aisp.report.source_view import LONGEST, Page, chunks, diff, reached

SUITES = Path(__file__).parents[1] / "suites"


@pytest.fixture
def page(tmp_path):
    """Return a page that was written with `text`, its kernel file beside it."""

    def page(text=PAGE):
        (tmp_path / "doubling.cu").write_text(KERNELS)
        path = tmp_path / "doubling_test.py"
        path.write_text(text)
        return Page.read(path)

    return page


def test_a_side_is_listed_with_what_it_uses(page):
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


def test_docstring_title_and_sides_are_read_and_nothing_is_run(page):
    found = page(PAGE + "\nraise SystemExit('this page was run')\n")
    assert found.title == "Doubling: one read instead of two."
    assert found.doc.endswith("Double {number} numbers.")
    assert found.sides("test_doubling") == ("added", ("doubled",))
    assert found.sides("test_nothing") == ("", ())


def test_what_changed_names_both_sides(page):
    found = page()
    changed = diff(found.side("added"), found.side("doubled"), ("added", "doubled"))
    lines = changed.splitlines()
    assert lines[:2] == ["--- added", "+++ doubled"]
    assert "-def added(x):" in lines
    assert "+__device__ float twice(float x) { return 2 * x; }" in lines
    assert " BLOCK = 256" not in lines  # beyond the context


def test_names_that_a_side_binds_itself_are_no_use_of_the_page(page):
    text = "def wide():\n    return 1\n\n\ndef side(x):\n    wide = x\n    return wide\n"
    assert page(text).side("side") == "def side(x):\n    wide = x\n    return wide"


def test_a_side_without_a_definition_has_no_listing(page):
    assert page("from elsewhere import side\n").side("side") == ""


def test_a_kernel_file_that_is_gone_leaves_the_rest(page, tmp_path):
    found = page()
    found.path.with_name("doubling.cu").unlink()
    found = Page.read(found.path.rename(tmp_path / "other_test.py"))
    assert found.modules == {"kernels": "doubling.cu"}


def test_a_long_listing_says_how_much_is_missing(page):
    body = "\n".join(f"    x = {n}" for n in range(LONGEST + 9))
    assert page(f"def side(x):\n{body}\n").side("side").endswith("\n... 10 more lines")


def test_braces_in_comments_and_texts_end_nothing():
    text = '// { \n/* } { */\n__device__ int one() { return sizeof("}{"); }\nint two;  // a word\n'
    assert chunks(text) == [
        '// { \n/* } { */\n__device__ int one() { return sizeof("}{"); }',
        "int two;  // a word",
    ]


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
def test_what_a_kernel_uses_is_found_by_its_name(declared, name):
    parts = chunks(f"{declared}\n__global__ void kernel() {{ use({name}); }}\nint unused;\n")
    found = reached(parts, ["kernel"])
    assert len(found) == 2
    assert name in found[0]
    assert "unused" not in "".join(found)


def test_every_side_of_the_suites_is_listed():
    missing = []
    for path in sorted(SUITES.glob("ch*/*_test.py")):
        page = Page.read(path)
        for function in [name for name in page.defined if name.startswith("test_")]:
            baseline, variants = page.sides(function)
            names = [name for name in (baseline, *variants) if name]
            missing += [(path.name, name) for name in names if not page.side(name)]
            for name in names:  # the Python part of it is whole statements
                ast.parse(page.side(name).partition("\n// ")[0])
    assert missing == []
