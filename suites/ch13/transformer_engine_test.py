"""Transformer Engine: compare its FP8 recipes for the scales of a linear layer.

Problem    Run the forward and backward pass of a linear layer. x (m, k), W (n, k) and the outputs
           y, dx and dW are bf16. W is the page's state. In the FP8 and FP4 variants, every call
           quantizes x, W and dy (the gradient of y).
Baseline   bf16: `torch.nn.functional.linear` and autograd.
Optimized  All variants are layers of Transformer Engine. If Transformer Engine is not installed,
           the variants are skipped, and the message says how to install it.
           te_bf16: changes `bf16`. The linear layer of Transformer Engine in bf16 shows the
           overhead of the layer without FP8.
           delayed: changes `te_bf16`. Operands are FP8. Each tensor has one scale, computed from
           its maxima in earlier calls.
           current: changes `delayed`. The scale is computed from the tensor's current maximum,
           which needs one more pass.
           blocks: changes `current`. There is one scale per 128 elements of x and dy, and per 128 x
           128 elements of W (Hopper).
           mxfp8: changes `blocks`. There is one scale per 32 elements, and the tensor cores apply
           the scales (Blackwell).
           nvfp4: changes `mxfp8`. Elements have 4 bits. There is one scale per 16 elements, and one
           scale per tensor (Blackwell).
Bound      Tensor cores: three matrix products. Hopper multiplies FP8 only if the summed dimension
           is contiguous in both operands. So each tensor is quantized into two copies, one of them
           transposed. The copies add DRAM traffic. On Hopper, exact accumulation adds partial sums
           on the CUDA cores every 128 terms. `delayed` and `current` accumulate in this way in the
           backward pass, and `blocks` does so in all three products.
Use when   Layers are large enough for products to take most of the time. Start with `current`,
           which needs no history and takes little more time than `delayed`. Use blocks when one
           outlier would ruin the scale of a whole tensor. In small layers, quantization and Python
           overhead take more time than FP8 saves.
"""

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

ABSENT = importlib.util.find_spec("transformer_engine") is None
INSTALLED = pytest.mark.skipif(
    ABSENT,
    reason="needs Transformer Engine: pip install --no-build-isolation transformer_engine[pytorch]",
)


def load_cudnn():
    """Load all libraries of PyTorch's cuDNN, so that Transformer Engine uses the same ones.

    Transformer Engine links each library of cuDNN by name, and PyTorch first loads only one of
    them. Without this function, Transformer Engine would load the others from the system, possibly
    in another version.
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
    """Return a function that runs a step of a layer with weights `w`, by `recipe` or in bf16."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    n, k = w.shape
    layer = te.Linear(k, n, bias=False, params_dtype=w.dtype, device=w.device)
    with torch.no_grad():
        layer.weight.copy_(w)
    # By default, two of the recipes use a type for dy with one mantissa bit less than the type for
    # x and W. Here, all recipes use e4m3 for dy too.
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
    # The first call has no history and uses a scale of 1, which suits values of about 1.
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


def step_cost(m, n, k, arithmetic, element=1, exact=0, maxima=False):
    """Return the cost of a step: three matrix products, and quantization if there is any.

    Args:
        m, n, k: the size.
        arithmetic: the type of the operands.
        element: bytes of an operand's element. Operands below 2 bytes are quantized first.
        exact: how many of the three products add partial sums on the CUDA cores. An addition takes
            the slot of a multiply-add, which counts as 2 operations.
        maxima: whether an extra pass computes the maxima.
    """
    operands, results = m * k + n * k + m * n, m * n + m * k + n * k
    added = 2 * exact * m * n * k / 128
    products = Cost(
        read=2 * element * operands,  # each is an operand of two products
        write=2 * results,
        ops={arithmetic: 6 * m * n * k, "fp32": added},
        launches=3,
    )
    if element == 2:
        return products
    quantized = Cost(read=2 * operands, write=2 * element * operands, launches=3)
    if maxima:
        quantized = Cost(read=2 * operands, launches=3) + quantized
    return quantized + products


def in_bf16(m, n, k):
    return step_cost(m, n, k, "bf16", element=2)


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
    # The variant `blocks` needs multiples of 128.
    check_sizes=[{"m": 128, "n": 256, "k": 384}],
    # FLOPs in the narrowest type and no bytes: a limit that no variant can beat.
    work=lambda m, n, k: Work(flops={"nvfp4": 6 * m * n * k}, terms=max(m, n, k)),
    bound="tensor",
    costs={
        bf16: in_bf16,
        te_bf16: in_bf16,
        delayed: lambda m, n, k: step_cost(m, n, k, "fp8", exact=2),
        current: lambda m, n, k: step_cost(m, n, k, "fp8", exact=2, maxima=True),
        blocks: lambda m, n, k: step_cost(m, n, k, "fp8", exact=3),
        mxfp8: lambda m, n, k: step_cost(m, n, k, "mxfp8"),
        nvfp4: lambda m, n, k: step_cost(m, n, k, "nvfp4", element=0.5, maxima=True),
    },
)
def test_transformer_engine(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
