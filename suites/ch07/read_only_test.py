"""The read-only path: loads marked read-only gain nothing where the L1 holds every load anyway.

Problem    out[i] = x[i-2] + ... + x[i+2] on n fp32 elements, x clamped at its ends: each element is
           loaded five times, four of them from the L1.
Baseline   plain: the loads are LDG, as for memory that another thread may write.
Optimized  ldg: the loads are `__ldg`, LDG.CONSTANT, which once led through a cache of its own.
           restricted: the pointers are `const float* __restrict__` and `float* __restrict__`, and
           the compiler proves by itself what `__ldg` asserts: LDG.CONSTANT again.
Bound      DRAM: 8 bytes an element, 0.25 ms for 1 GiB at 4.24 TB/s, on every side. Neutral is what
           is expected: since Volta both ways lead through one L1, which LDG fills as well, and with
           every load before the first store the compiler has nothing to gain from knowing that a
           store changes no x. The machine code of the three for sm90 has the same instructions but
           for CONSTANT; plain's 20 loads stand in a slightly other order. Where loads stand behind
           stores, `__restrict__` is worth what it lets the compiler move: another idea than this.
Seen       An H200 shows no difference, as predicted. But no side is bound by DRAM: all take
           0.32 ms, 80 % of the copy rate. unrolled in vector_width, a copy with one load an element
           and the same occupancy, reaches all of it, so the four other loads of an element do cost
           something; which resource they run out of is not explained.
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
    # A block sums 1024 elements and needs two more on either side.
    check_sizes=[{"n": 1023}, {"n": 3074}, {"n": st.integers(33, 5000)}],
    work=lambda n: Work(read=4 * n, write=4 * n, flops={"fp32": 4 * n}, terms=TAPS),
    bound="dram",
    costs=dict.fromkeys([plain, ldg, restricted], moved),
    at_least="neutral",
)
def test_read_only(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
