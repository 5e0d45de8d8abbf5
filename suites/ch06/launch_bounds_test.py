"""Launch bounds: a promise about block size that gains nothing if registers are not the limit.

Problem    Compute the products of n pairs of 4 x 4 fp32 matrices, one pair per thread.
Baseline   unbounded: a kernel without launch bounds, started with blocks of 256 threads. The
           compiler assumes 1024 threads per block, which would allow 64 registers per thread. The
           kernel needs fewer.
Optimized  bounded: changes `unbounded`. `__launch_bounds__(256)`. This bound allows 255 registers,
           but the kernel does not need them, so the machine code is the same.
           eight_blocks: changes `bounded`. `__launch_bounds__(256, 8)` asks for 8 blocks per SM,
           which leaves 32 registers per thread. So the compiler loads some rows later, and for
           sm_90 it also spills a register.
           library: `torch.bmm`.
Bound      DRAM: two matrices read and one written per thread. `bounded` needs 38 registers for
           sm_90, so 6 blocks fit on an SM. Each thread has six or more loads of 16 bytes in flight,
           far more than DRAM needs, so the two additional blocks of `eight_blocks` gain nothing.
           `eight_blocks` may even be slower than `bounded`, because it loads some rows later and
           spills. The matrices of neighboring threads are 64 bytes apart, so in all three kernels,
           an access uses half of each sector, and the next access finds the other half in the L1.
Seen       All kernels take longer than their bytes predict. `straight` of `bank_conflicts_test.py`,
           which also uses half of each sector, exceeds its prediction by about the same factor. We
           did not measure which unit limits these kernels. On an H200, `eight_blocks` is slower
           than `unbounded`. We did not measure whether the later loads or the spill make it slower.
           `library` takes many times as long as any of the three kernels. A 4 x 4 product is far
           too small for a tile of a matrix kernel, but we did not examine the kernel that `bmm`
           picks.
Use when   Declare the block size if a kernel cannot start because a block needs too many registers,
           or if it spills although its blocks are small. Request a number of blocks per SM only if
           a measurement shows that more warps help, and check that nothing spills.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("launch_bounds.cu")
BLOCK, SIDE = 256, 4


def inputs(device, n):
    return torch.randn(n, SIDE, SIDE, device=device), torch.randn(n, SIDE, SIDE, device=device)


def reference(a, b):
    return a.double() @ b.double()


def launch(kernel, a, b):
    out = torch.empty_like(a)
    kernel[-(-len(a) // BLOCK), BLOCK](a, b, out, len(a))
    return out


def unbounded(a, b):
    return launch(kernels.unbounded, a, b)


def bounded(a, b):
    return launch(kernels.bounded, a, b)


def eight_blocks(a, b):
    return launch(kernels.eight_blocks, a, b)


def library(a, b):
    return torch.bmm(a, b)


def multiplied(n):
    matrix = 4 * SIDE**2
    return Cost(read=2 * matrix * n, write=matrix * n, ops={"fp32": 2 * SIDE**3 * n}, launches=1)


@compare(
    baseline=unbounded,
    optimized=[
        bounded,
        Variant(eight_blocks, at_least="yardstick"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**22}],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 600)}],
    work=lambda n: Work(
        read=8 * SIDE**2 * n, write=4 * SIDE**2 * n, flops={"fp32": 2 * SIDE**3 * n}, terms=SIDE
    ),
    bound="dram",
    costs=dict.fromkeys([unbounded, bounded, eight_blocks, library], multiplied),
    at_least="neutral",
)
def test_launch_bounds(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
