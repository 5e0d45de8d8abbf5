"""The read-only path: `__ldg` gains nothing, because the L1 caches ordinary loads too.

Problem    Compute out[i] = x[i-2] + ... + x[i+2] on n fp32 elements, with indices clamped to the
           ends of x. Each element is loaded five times, four times from the L1.
Baseline   plain: ordinary loads (LDG), which are right even if another thread may write to the
           memory.
Optimized  ldg: changes `plain`. The loads are `__ldg` (LDG.CONSTANT), which used a separate cache
           on old GPUs.
           restricted: changes `plain`. The pointers are `const float* __restrict__` and `float*
           __restrict__`. Then the compiler may assume that nothing writes to x, and emits
           LDG.CONSTANT without `__ldg`.
Bound      DRAM: each side reads x once and writes out once. Since Volta both kinds of loads go
           through one L1. All loads come before the first store, so the compiler gains nothing from
           knowing that no store changes x. Apart from CONSTANT, the three sides have the same
           instructions, some in a different order (nvcc 13.0 for sm_90).
Seen       No side reaches the copy rate. `unrolled` of vector_width reaches it, with one load per
           element and the same occupancy. So the other four loads of each element cost time. Four
           of the five loads of a warp touch two lines. The L1 looks up one line per cycle
           (row_mapping of chapter 8). These lookups take about half of the time, so they alone are
           not the limit. We did not measure what else takes time.
Use when   Declare pointers `__restrict__` when loads come after stores, because the compiler may
           then move the loads. Do not write `__ldg` by hand for speed on Volta or later.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("read_only.cu")
BLOCK, EACH, REACH = 256, 4, 2
TAPS = 2 * REACH + 1


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(x):
    n, ends = x.numel(), torch.ones(REACH, dtype=torch.float64, device=x.device)
    longer = torch.cat([ends * x[0], x.double(), ends * x[-1]])
    return sum(longer[tap : tap + n] for tap in range(TAPS))


def launch(kernel, x):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // (EACH * BLOCK)), BLOCK](x, out, x.numel())
    return out


def plain(x):
    return launch(kernels.plain, x)


def ldg(x):
    return launch(kernels.ldg, x)


def restricted(x):
    return launch(kernels.restricted, x)


def moved(n):
    return Cost(read=4 * n, write=4 * n, ops={"fp32": 4 * n}, launches=1)


@compare(
    baseline=plain,
    optimized=[Variant(ldg, sass="LDG.CONSTANT"), Variant(restricted, sass="LDG.CONSTANT")],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27}],
    # A block computes 1024 sums and needs two more elements at each end.
    check_sizes=[{"n": 1023}, {"n": 3074}, {"n": st.integers(33, 5000)}],
    work=lambda n: Work(read=4 * n, write=4 * n, flops={"fp32": 4 * n}, terms=TAPS),
    bound="dram",
    costs=dict.fromkeys([plain, ldg, restricted], moved),
    at_least="neutral",
)
def test_read_only(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
