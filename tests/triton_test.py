"""Triton pages: without a GPU they are checked in the interpreter, and kernels are part of the
source."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import pytest
import torch

from pytest_aisp.page import sources
from pytest_aisp.worker.loader import load_page

pytest.importorskip("triton")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")

TUNED = """
    import triton
    import triton.language as tl


    @triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 8})], key=["n"])
    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) * FACTOR, mask=at < n)


    def tuned(x):
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out
"""
LAUNCHES = "tuned(x)"


@no_gpu
def test_a_tuned_kernel_is_checked_in_the_interpreter(page, pytester):
    page(LAUNCHES, defs=TUNED.replace("FACTOR", "2"))
    page(LAUNCHES, defs=TUNED.replace("FACTOR", "3"), name="tripling_test.py")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(["*AssertionError: doubled is wrong at n=33*", "*1 checked*"])
    assert result.ret == 1


INTERPRETED = """
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from pytest_aisp.kernels.fake_gpu import drive_interpreter

prepared = []
core = interpreter._patch_lang_core
interpreter._patch_lang_core = lambda *args: (prepared.append(args), core(*args))
drive_interpreter()
drive_interpreter()


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, twice(twice(tl.load(x + at))))


x = torch.arange(32.0)
out = torch.empty_like(x)
for launches in (1, 2):
    kernel[(4,)](x, out, BLOCK=8)
    assert torch.equal(out, 4 * x)
    assert len(prepared) == launches, len(prepared)
    assert tl.core.is_builtin(tl.load)
"""


@no_gpu
def test_the_interpreter_prepares_the_language_once_per_launch(pytester, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pytester.runpython(pytester.makepyfile(INTERPRETED)).ret == 0


@no_gpu
def test_in_process_runs_need_the_interpreter_from_the_start(page, pytester, monkeypatch):
    page(LAUNCHES, defs=TUNED.replace("FACTOR", "2"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    result = pytester.runpytest_subprocess("--aisp-check", "--aisp-in-process")
    result.stdout.fnmatch_lines(
        ["*doubled launches Triton kernels, which*", "*    TRITON_INTERPRET=1 pytest --pdb ..."]
    )
    assert result.ret == 1
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pytester.runpytest_subprocess("--aisp-check", "--aisp-in-process").ret == 0


SIDE = """
import triton
import triton.language as tl

import kernels_of_ours

CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]


@triton.jit
def twice(x):
    return 2 * x


@triton.autotune(CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda named: named["n"] % 2 == 0})
@triton.jit
def tuned_kernel(x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, twice(tl.load(x + at)))


def side(x):
    tuned_kernel[(1,)](x, 1)


def launcher(kernel):
    def closed(x):
        kernel[(1,)](x, 1)

    return closed


closed = launcher(tuned_kernel)


def elsewhere(x):
    kernels_of_ours.far_kernel[(1,)](x)


def nothing(x):
    return x
"""
FAR = """
import triton


@triton.jit
def far_kernel(x):
    pass


@triton.jit
def other_kernel(x):
    pass
"""


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Load the page with one change, always from the same path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within one second
    (tmp_path / "kernels_of_ours.py").write_text(FAR)

    def load(old="", new=""):
        sys.modules.pop("triton_test_page", None)
        path = tmp_path / "page.py"
        path.write_text(SIDE.replace(old, new) if old else SIDE)
        linecache.clearcache()
        return load_page(str(path), str(tmp_path), "triton_test_page")

    yield load
    for name in ("kernels_of_ours", "triton_test_page"):
        sys.modules.pop(name, None)


def named(page, side):
    root = str(Path(page.__file__).parent)
    return [kernel.__name__ for kernel in sources.triton_kernels([getattr(page, side)], root)]


def test_page_kernels_are_the_ones_that_sides_launch(ours):
    page = ours()
    assert named(page, "side") == ["tuned_kernel"]
    assert named(page, "closed") == ["tuned_kernel"]
    assert named(page, "elsewhere") == ["far_kernel"]
    assert named(page, "nothing") == []
    assert sources.kernel_files([page.side, page.elsewhere], str(Path(page.__file__).parent)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 * x", "3 * x"),  # what the kernel calls
        ("twice(tl.load(x + at))", "tl.load(x + at)"),
        ('"BLOCK": 128', '"BLOCK": 256'),  # a configuration, written far from the kernel
        ('{"BLOCK": 128}', '{"BLOCK": 128}, num_warps=8'),
    ],
)
@pytest.mark.parametrize("side", ["side", "closed"])
def test_a_sides_source_includes_kernels_and_configurations(ours, old, new, side):
    assert digest(ours(), side) == digest(ours(), side) != digest(ours(old, new), side)
    assert digest(ours(), "nothing") == digest(ours(old, new), "nothing")


def digest(page, side):
    return sources.digest(getattr(page, side), str(Path(page.__file__).parent))
