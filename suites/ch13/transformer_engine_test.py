"""Transformer Engine: a linear layer's step in FP8, one recipe for the scales after the other.

Problem    Forward and backward of a linear layer, x (m, k) and W (n, k) in bf16: y, dx and dW in
           bf16. The weights are the page's state; every call quantizes x, W and dy anew.
Baseline   bf16: `torch.nn.functional.linear` and autograd.
Optimized  All others by Transformer Engine, which is optional: without it they say how to install.
           te_bf16: its linear layer in bf16, so that what else it costs is not taken for FP8's.
           delayed: FP8 with a scale a tensor, from the maxima of earlier calls: one pass.
           current: a scale a tensor, from its own maximum: a pass more.
           blocks: a scale for each 128 elements of x and dy and for each 128 x 128 of W (Hopper).
           mxfp8: a scale for each 32 elements, which the tensor cores apply (Blackwell).
           nvfp4: four bits, a scale for each 16 elements and one for the tensor (Blackwell).
Bound      Tensor cores: 3 products, 6 m n k operations. At m, n, k = 8192, 8192, 4096 they take 2.2
           ms in bf16 at 750 TFLOP/s, 1.25 in FP8 at 1320. Hopper multiplies FP8 only along rows of
           both operands, so each tensor is written as it is and transposed: 4 bytes for each of 134
           million elements, 0.13 ms at 4.24 TB/s, and 0.06 for the maxima of current. So delayed
           1.6x and current 1.5x, less what the exact accumulation that their backward passes ask
           for costs; blocks has that in all three and adds up scaled parts every 128 terms: 1.3x if
           its products reach 1100 TFLOP/s. te_bf16 1.0x. A Blackwell has twice bf16's rate in
           mxfp8 and at least four times in nvfp4, so 1.7x, and 2x or more. Python takes up to 0.2
           ms a call here and must stay hidden behind the GPU.
Seen       An H200, Transformer Engine 2.20.2: te_bf16 1.00x, delayed 1.69x, current 1.61x, blocks
           1.28x; 1170 TFLOP/s of delayed, quantization included.
"""

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Variant, Work, compare

ABSENT = importlib.util.find_spec("transformer_engine") is None
INSTALLED = pytest.mark.skipif(
    ABSENT,
    reason="needs Transformer Engine: pip install --no-build-isolation transformer_engine[pytorch]",
)


def load_cudnn():
    """Load all of PyTorch's cuDNN, so that Transformer Engine shares it.

    It links every library of cuDNN by name. PyTorch loads the first at once and the others when a
    page needs them; for the rest the system's would be taken, of another version.
    """
    mapped = Path("/proc/self/maps").read_text()
    if first := re.search(r"(/\S+)/libcudnn\.so", mapped):
        for library in sorted(Path(first[1]).glob("libcudnn_*.so.*")):
            ctypes.CDLL(str(library))


if not ABSENT and "transformer_engine" not in sys.modules:
    load_cudnn()


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return x, torch.randn(m, n, device=device, dtype=torch.bfloat16)


def reference(w, x, dy):
    w, x, dy = w.double(), x.double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


def bf16(w, x, dy):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = F.linear(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def stepped(w, x, dy, recipe=None):
    """Return the step of a layer with the weights `w`, in bf16 or by a recipe of that name."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    n, k = w.shape
    layer = te.Linear(k, n, bias=False, params_dtype=w.dtype, device=w.device)
    with torch.no_grad():
        layer.weight.copy_(w)
    # dy too in e4m3, which two of the recipes would by themselves give a bit less than x and W.
    scaling = getattr(recipes, recipe)(fp8_format=recipes.Format.E4M3) if recipe else None

    def step():
        leaf = x.detach().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=scaling):
            y = layer(leaf)
        return y.detach(), *torch.autograd.grad(y, (leaf, layer.weight), dy)

    return step


def te_bf16(w, x, dy):
    yield stepped(w, x, dy)


def delayed(w, x, dy):
    # Its first call knows no maxima and scales by 1, which suits values around 1 as well.
    yield stepped(w, x, dy, "DelayedScaling")


def current(w, x, dy):
    yield stepped(w, x, dy, "Float8CurrentScaling")


def blocks(w, x, dy):
    yield stepped(w, x, dy, "Float8BlockScaling")


def mxfp8(w, x, dy):
    yield stepped(w, x, dy, "MXFP8BlockScaling")


def nvfp4(w, x, dy):
    yield stepped(w, x, dy, "NVFP4BlockScaling")


def engine(side, **properties):
    return Variant(side, gpu_only="Transformer Engine", marks=[INSTALLED], **properties)


@compare(
    baseline=bf16,
    optimized=[
        engine(te_bf16, needs="te", at_least="yardstick"),
        engine(delayed, needs=("te", "fp8"), precision="fp8", at_least={"sm90": 1.3}),
        engine(current, needs=("te", "fp8"), precision="fp8", at_least={"sm90": 1.3}),
        engine(blocks, needs=("te", "wgmma"), precision="fp8", at_least={"sm90": 1.15}),
        engine(mxfp8, needs="te_mxfp8", precision="mxfp8"),
        engine(nvfp4, needs=("te", "fp4"), precision="nvfp4"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 4096}],
    # Blocks want multiples of 128.
    check_sizes=[{"m": 128, "n": 256, "k": 384}],
    # Without the bytes, and in the narrowest type: a share of what no rung can exceed.
    work=lambda m, n, k: Work(flops={"nvfp4": 6 * m * n * k}, terms=max(m, n, k)),
    bound="tensor",
)
def test_transformer_engine(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
