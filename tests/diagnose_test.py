"""Why a side is wrong: it computes in TF32."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pytest_aisp import Variant, Work, compare
from pytest_aisp.checking.diagnose import explain_tf32
from pytest_aisp.checking.numerics import Wrong
from pytest_aisp.isolation import global_state
from pytest_aisp.isolation.global_state import restore, snapshot
from pytest_aisp.results.messages import CheckTask
from pytest_aisp.worker.engine import Engine

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; none is here")
matmul = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def switches():
    before = snapshot()
    yield
    restore(before)


@pytest.fixture
def tf32():
    """Switch TF32 on for the CPU."""
    matmul.fp32_precision = "tf32"


def rounded(x):
    """Return `x` as TF32 does."""
    return ((x.view(torch.int32) + 4096) >> 13 << 13).view(torch.float32)


def inputs(device, n):
    return torch.randn(n, 64, device=device), torch.randn(64, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


def exact(a, b):
    return a @ b


def switched(a, b):
    return rounded(a) @ rounded(b) if matmul.fp32_precision == "tf32" else a @ b


def always(a, b):
    return rounded(a) @ rounded(b)


def dropping(a, b):
    return a[:, 1:] @ b[1:]


def page(baseline, variant, inputs=inputs, reference=reference):
    def test(pair):
        """Do nothing: the engine needs only the pair."""

    return compare(
        baseline=baseline,
        optimized=[variant],
        inputs=inputs,
        reference=reference,
        sizes=[{"n": 65}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(terms=64),
        bound="tensor",
    )(test)


def images(device, n):
    return torch.randn(4, 16, n, n, device=device), torch.randn(8, 16, 3, 3, device=device)


def convolve(x, w):
    return F.conv2d(x, w)


def shifted_products(x, w):
    size = x.shape[-1] - 2
    patches = F.unfold(x, 3).transpose(1, 2).double() @ w.flatten(1).double().T
    return patches.transpose(1, 2).reshape(len(x), len(w), size, size).float()


def convolution(x, w):
    return F.conv2d(x.double(), w.double())


@triton.jit
def matmul_kernel(a, b, out, n, BLOCK: tl.constexpr):
    row, column, k = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, 64)
    x = tl.load(a + row * 64 + k[None, :], row < n, 0.0)
    y = tl.load(b + k[:, None] * n + column, column < n, 0.0)
    tl.store(out + row * n + column, tl.dot(x, y), (row < n) & (column < n))


def dotted(a, b):
    out = torch.empty(a.shape[0], b.shape[1], device=a.device)
    matmul_kernel[(1,)](a, b, out, len(a), BLOCK=64)
    return out


PAGES = {
    "convolution": page(convolve, shifted_products, images, convolution),
    "declared convolution": page(
        Variant(convolve, precision="tf32"), shifted_products, images, convolution
    ),
    "dotted": page(exact, dotted),
    "baseline": page(switched, exact),
    "variant": page(exact, switched),
    "declared": page(Variant(switched, precision="tf32"), exact),
    "always": page(exact, always),
    "dropping": page(exact, dropping),
}


def check(name, monkeypatch, device="cpu"):
    monkeypatch.setattr(global_state, "_before_imports", {})  # the test has set the switches
    monkeypatch.setitem(sys.modules, "tf32_page", SimpleNamespace(**PAGES))
    pair = PAGES[name].pytestmark[0].kwargs["pair"]
    where = {"page": __file__, "root": "/", "module": "tf32_page", "device": device, "at": "check"}
    variant = pair.variants[0].name
    Engine().check(CheckTask(**where, function=name, variant=variant, size={"n": 65}))


SWITCH = "this looks like TF32: torch.backends.mkldnn.matmul.fp32_precision is on, and without TF32"


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("baseline", "baseline=Variant(switched, precision='tf32')"),
        ("variant", "Variant(switched, precision='tf32')"),
    ],
)
def test_a_side_that_is_right_without_tf32_is_told_so(tf32, monkeypatch, name, declared):
    before = snapshot()
    with pytest.raises(Wrong) as wrong:
        check(name, monkeypatch)
    assert snapshot() == before
    first, second = str(wrong.value).splitlines()
    assert first.startswith("switched is wrong at n=33: ")
    assert second == f"{SWITCH} switched is right; declare {declared} or switch TF32 off"


def test_tf32_may_be_declared_or_switched_off(tf32, monkeypatch):
    check("declared", monkeypatch)
    matmul.fp32_precision = "ieee"
    check("baseline", monkeypatch)


@pytest.mark.parametrize("name", ["always", "dropping"])
def test_a_side_that_is_wrong_without_tf32_too_is_not_excused(tf32, monkeypatch, name):
    with pytest.raises(Wrong) as wrong:
        check(name, monkeypatch)
    assert "switch TF32 off" not in str(wrong.value)


@pytest.fixture
def on_a_gpu():
    """Return what `explain_tf32` says of a side on a GPU that is right with these precisions."""

    def explained(side, right):
        def run(precision):
            if precision not in right():
                raise Wrong

        types = {"output": torch.float32}
        reference = SimpleNamespace(pool=SimpleNamespace(device="cuda:0"), types=types)
        return explain_tf32(reference, side, run, is_baseline=False)

    return explained


def test_the_switch_of_convolutions_is_on_by_default_on_a_gpu(on_a_gpu):
    def right():
        return ["tf32"] if torch.backends.cudnn.conv.fp32_precision == "tf32" else ["tf32", None]

    said = on_a_gpu(exact, right)
    assert said.startswith("this looks like TF32: torch.backends.cudnn.allow_tf32 is on, and ")
    torch.set_float32_matmul_precision("high")
    said = on_a_gpu(exact, right)
    both = "torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 are on"
    assert both in said


def test_triton_multiplies_fp32_in_tf32_by_default(on_a_gpu):
    assert on_a_gpu(exact, lambda: ["tf32"]) == ""
    assert on_a_gpu(dotted, lambda: []) == ""
    assert on_a_gpu(dotted, lambda: ["tf32"]) == (
        "this looks like TF32, in which tl.dot multiplies fp32 values by default; declare"
        " Variant(dotted, precision='tf32') or write tl.dot(..., input_precision='ieee')"
    )


@needs_gpu
def test_convolutions_on_a_gpu_are_tf32_by_default(monkeypatch):
    with pytest.raises(Wrong) as wrong:
        check("convolution", monkeypatch, "cuda")
    assert str(wrong.value).splitlines()[1] == (
        "this looks like TF32: torch.backends.cudnn.allow_tf32 is on, and without TF32 convolve is"
        " right; declare baseline=Variant(convolve, precision='tf32') or switch TF32 off"
    )
    check("declared convolution", monkeypatch, "cuda")
    torch.backends.cudnn.allow_tf32 = False
    check("convolution", monkeypatch, "cuda")


@needs_gpu
def test_triton_on_a_gpu_is_tf32_by_default(monkeypatch):
    with pytest.raises(Wrong) as wrong:
        check("dotted", monkeypatch, "cuda")
    assert "in which tl.dot multiplies fp32 values by default" in str(wrong.value)


def test_mixed_interfaces_of_tf32_can_be_read_and_restored(monkeypatch):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    before = snapshot()
    assert before["torch's cudnn.allow_tf32"] == "mixed"
    check("variant", monkeypatch)
    torch.backends.cudnn.allow_tf32 = True
    restore(before)
    assert snapshot() == before
