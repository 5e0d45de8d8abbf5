"""FP8 with an unsupported inner dimension: pad it with zeros.

Problem    Compute y = x W^T in bf16, with x (m, k) and W (n, k). FP8 matrix products require k to
           be a multiple of 16, which it is not. The weights are the page's state.
Baseline   as_is: `torch.nn.functional.linear` in bf16, which takes any k.
Optimized  padded: changes `as_is`. In each call, zeros are appended to the rows of x and W, in
           bf16.
           fp8: changes `padded`. In each call, x and W are quantized to e4m3 with one scale each,
           then padded. `torch._scaled_mm` multiplies them.
           prepared: changes `fp8`. W is quantized and padded once, before the timed part.
Bound      Tensor cores, then DRAM for the eager kernels that quantize. These kernels move 16 bytes
           per element: 13 to quantize (see fp8_linear_test.py), and 3 to fill the padded tensor and
           copy into it.
Seen       `as_is` is far slower than predicted. The rows begin at multiples of 8 bytes, but TMA
           needs multiples of 16 bytes. We did not record which kernel cuBLAS chooses. fp8 and
           `prepared` are slower than predicted, because quantizing takes about twice as long as its
           memory traffic should take. The difference between fp8 and `prepared`, which is the time
           to quantize W, shows this factor, and so does fp8_linear_test.py. We cannot explain this
           factor.
Use when   k is not a multiple of 8. Padding alone, in bf16, gives most of the speedup. Use FP8 only
           if the weights can be quantized in advance.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare

LARGEST = 448.0  # the largest e4m3 number
GRAIN = 16


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def as_is(w, x):
    return F.linear(x, w)


def whole_rows(x):
    return F.pad(x, (0, -x.shape[1] % GRAIN))


def padded(w, x):
    return F.linear(whole_rows(x), whole_rows(w))


def quantized(x):
    scale = x.abs().amax().float().clamp(min=1e-12) / LARGEST
    return whole_rows((x * scale.reciprocal()).to(torch.float8_e4m3fn)), scale


def product(x, x_scale, w, w_scale):
    return torch._scaled_mm(
        x, w.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def fp8(w, x):
    return product(*quantized(x), *quantized(w))


def prepared(w, x):
    ready = quantized(w)
    yield lambda: product(*quantized(x), *ready)


def bf16_product(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def fp8_product(m, n, k):
    return Cost(read=(m + n) * k, write=2 * m * n, ops={"fp8": 2 * m * n * k}, launches=1)


def padding(rows, k, element):
    """Return the cost of `whole_rows`: fill a tensor with zeros, and copy into it."""
    fill = Cost(write=element * rows * whole(k), launches=1)
    return fill + Cost(read=element * rows * k, write=element * rows * k, launches=1)


def quantizing(rows, k):
    """Return the cost of `quantized`: four kernels for the scale, and others that move data."""
    elements = rows * k
    scale = Cost(read=2 * elements, write=2 * elements, launches=1)
    scale += Cost(read=2 * elements, launches=1) + Cost(launches=4)
    scaled = Cost(read=2 * elements, write=2 * elements, launches=1)
    rounded = Cost(read=2 * elements, write=elements, launches=1)
    return scale + scaled + rounded + padding(rows, k, element=1)


def whole(k):
    return k + -k % GRAIN


def padded_cost(m, n, k):
    return padding(m, k, element=2) + padding(n, k, element=2) + bf16_product(m, n, whole(k))


def prepared_cost(m, n, k):
    return quantizing(m, k) + fp8_product(m, n, whole(k))


@compare(
    baseline=as_is,
    optimized=[
        Variant(padded, at_least={"sm90": 2.0}),
        Variant(fp8, precision="fp8", at_least={"sm90": 1.8}),
        Variant(prepared, precision="fp8", at_least={"sm90": 2.6}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 4100}],
    # FP8 also needs n to be a multiple of 16.
    check_sizes=[{"m": 33, "n": 48, "k": 77}, {"m": 7, "n": 16, "k": 1028}],
    work=lambda m, n, k: Work(
        read=2 * (m * k + n * k), write=2 * m * n, flops={"fp8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        as_is: bf16_product,
        padded: padded_cost,
        fp8: lambda m, n, k: quantizing(n, k) + prepared_cost(m, n, k),
        prepared: prepared_cost,
    },
    conditions=Conditions(needs="fp8"),
)
def test_fp8_padding(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
