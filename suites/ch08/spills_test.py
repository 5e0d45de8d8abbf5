"""Spills: more warps do not make up for registers that are spilled to memory.

Problem    Compute the logarithms of the determinants of n symmetric positive definite 16 x 16 fp32
           matrices. A thread computes the Cholesky factor of one matrix, and keeps 120 elements of
           the factor in registers. The matrices are interleaved: element (r, c) of a matrix comes
           right before element (r, c) of the next matrix.
Baseline   no_limit: a kernel without launch bounds, started with blocks of 128 threads. The
           compiler uses 160 registers per thread for sm_90, so 3 blocks fit on an SM.
Optimized  four_blocks: changes `no_limit`. `__launch_bounds__(128, 4)` allows 128 registers, so 4
           blocks fit on an SM. The compiler spills 24 bytes per thread to local memory.
           eight_blocks: changes `four_blocks`. `__launch_bounds__(128, 8)` allows 64 registers, so
           8 blocks fit on an SM. The compiler spills 520 bytes per thread to local memory, with 186
           stores (STL) and 204 loads (LDL) in the machine code.
           library: `torch.linalg.cholesky_ex`, and the sum of the logarithms of the diagonal. Like
           the kernels, `cholesky_ex` does not check whether the factorization failed.
           `torch.linalg.cholesky` would make the host wait for this check. `library` needs each
           matrix to be contiguous, so its time includes a transposing copy.
Bound      DRAM limits `no_limit` and `four_blocks`: the lower triangle is read once. A thread has
           many independent loads in flight, so 12 warps per SM are enough, and 16 gain nothing. The
           L2 limits `eight_blocks`: the local memory of an SM's 1024 threads does not fit in the
           L1. The costs count every spill as a transfer to or from the L2. All SMs together use 70
           MB of local memory. The L2 of an H200 has only 50 MB, so some of this traffic goes to
           DRAM. The costs leave out this DRAM traffic.
Seen       `eight_blocks` takes longer than predicted, because part of its local memory goes to
           DRAM. We did not measure how large that part is. `library` takes many times as long as
           predicted from its bytes. We did not examine which kernels its batched factorization
           uses.
Use when   A kernel needs so many registers that few warps fit on an SM, and a profiler shows that
           these warps wait. Raise the number of blocks per SM in small steps. After each step,
           check how many bytes of stack the compiler reports. Spilling a few bytes costs little,
           but on this page the additional warps gain nothing. If whole arrays spill, use fewer
           warps and more independent work per thread (`occupancy_ilp_test.py`), or share a matrix
           among the lanes of a warp. `../ch06/launch_bounds_test.py` has a kernel that needs few
           registers.
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("spills.cu")
BLOCK, SIDE = 128, 16
LOWER = SIDE * (SIDE + 1) // 2
SPILLS = 186 + 204  # stores and loads of local memory, in the machine code for sm_90
ISSUED = 1300  # instructions of a thread


def inputs(device, n):
    g = torch.randn(n, SIDE, SIDE, device=device) / SIDE**0.5
    a = g @ g.mT + torch.eye(SIDE, device=device)
    return (a.permute(1, 2, 0).contiguous(),)


def reference(a):
    return torch.linalg.slogdet(a.double().permute(2, 0, 1)).logabsdet


def launch(kernel, a):
    n = a.shape[2]
    out = torch.empty(n, device=a.device)
    kernel[-(-n // BLOCK), BLOCK](a, out, n)
    return out


def no_limit(a):
    return launch(kernels.no_limit, a)


def four_blocks(a):
    return launch(kernels.four_blocks, a)


def eight_blocks(a):
    return launch(kernels.eight_blocks, a)


def library(a):
    factor, _ = torch.linalg.cholesky_ex(a.permute(2, 0, 1))
    return 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)


def factored(n, spills=0):
    slots = 2 * (ISSUED + spills) * n  # an instruction takes the issue slot of a multiply-add
    l2 = 4 * (LOWER + spills) * n
    return Cost(read=4 * LOWER * n, write=4 * n, l2=l2, ops={"fp32": slots}, launches=1)


def copied_and_factored(n):
    matrix = 4 * SIDE**2 * n
    copy = Cost(read=matrix, write=matrix, launches=1)
    factor = Cost(read=matrix, write=matrix, ops={"fp32": SIDE**3 / 3 * n}, launches=1)
    zeros = Cost(write=matrix - 4 * LOWER * n, launches=1)  # zeros in the upper triangle
    # Reading a diagonal element takes a sector of 32 bytes. The logarithm, the sum and the product
    # follow.
    logarithm = Cost(read=32 * SIDE * n, write=4 * SIDE * n, launches=1)
    return (
        copy + factor + zeros + logarithm + Cost(read=4 * SIDE * n, launches=1) + Cost(launches=1)
    )


@compare(
    baseline=no_limit,
    optimized=[
        four_blocks,
        Variant(eight_blocks, sass="STL"),
        library,
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**19}],
    check_sizes=[{"n": 1}, {"n": 387}],
    work=lambda n: Work(
        read=4 * LOWER * n, write=4 * n, flops={"fp32": SIDE**3 / 3 * n}, terms=SIDE, roundings=SIDE
    ),
    bound="dram",
    costs={
        no_limit: factored,
        four_blocks: factored,
        eight_blocks: lambda n: factored(n, SPILLS),
        library: copied_and_factored,
    },
    at_least="yardstick",
)
def test_spills(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
