"""Bank conflicts: shared memory serves lanes at once only if they read from different banks.

Problem    Each row of an (rows, 32) fp32 matrix has the coefficients of a polynomial. Evaluate each
           polynomial at its own x, with Horner's rule.
Baseline   strided: a block copies 128 rows into shared memory, so its loads from global memory are
           coalesced. Then each thread reads its own row from shared memory, 16 bytes at a time. The
           source code asks for 16-byte reads, but the compiler also creates them from a plain loop
           over floats. Shared memory serves a 16-byte read for 8 lanes at a time. The rows of these
           lanes are 32 floats apart, so all 8 lanes read from the same 4 of the 32 banks, and wait
           for each other.
Optimized  padded: changes `strided`. Four unused floats follow each row, so the rows are 36 floats
           apart. The 8 lanes read from all 32 banks. Many textbooks use rows of 33 floats, which
           have no conflicts either. But such rows are not aligned to 16 bytes, so they need four
           times as many reads, of 4 bytes each.
           swizzled: changes `strided`. Row r stores its group g of four coefficients in place g xor
           r % 8. The 8 lanes read from all 32 banks, without unused floats.
           straight: changes `padded`. No shared memory. A thread reads its row in eight 16-byte
           loads from global memory. A warp's lanes are 128 bytes apart, so each load touches 32
           lines of the L1. A load uses half of each sector, and the next load finds the other half
           in the L1. There is no library variant, because no library evaluates a polynomial per
           row.
Bound      DRAM limits `padded` and `swizzled`: each coefficient is read once. Shared memory limits
           strided: conflicts make its reads take eight times as long. Even so, these reads take
           only a little longer than the transfers from DRAM. So conflicts cost much less here than
           in a kernel that reads each word several times.
Seen       `straight` takes longer than predicted from its bytes. In `launch_bounds_test.py`,
           accesses also use half of each sector, and the kernels exceed their predicted times by
           about the same factor. We did not measure which unit limits the kernels.
Use when   The lanes of a warp access shared memory at a large, even stride, for example in rows
           whose length is a power of two. Pad or swizzle in units of the access: 4 bytes or 16. If
           each element is used once and a row fits in registers, also measure reads straight from
           global memory.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("bank_conflicts.cu")
BLOCK, TERMS = 128, 32


def inputs(device, rows):
    x = 2 * torch.rand(rows, device=device) - 1
    return torch.randn(rows, TERMS, device=device), x


def reference(c, x):
    c, x = c.double(), x.double()
    total = c[:, TERMS - 1]
    for k in reversed(range(TERMS - 1)):
        total = total * x + c[:, k]
    return total


def evaluate(kernel, c, x):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // BLOCK), BLOCK](c, x, out, x.numel())
    return out


def strided(c, x):
    return evaluate(kernels.strided, c, x)


def padded(c, x):
    return evaluate(kernels.padded, c, x)


def swizzled(c, x):
    return evaluate(kernels.swizzled, c, x)


def straight(c, x):
    return evaluate(kernels.straight, c, x)


def evaluated(rows, **more):
    return Cost(
        read=4 * (TERMS + 1) * rows,
        write=4 * rows,
        ops={"fp32": 2 * TERMS * rows},  # the first multiply-add multiplies zero
        launches=1,
        **more,
    )


def staged(rows, conflicts):
    """Return the cost of staging rows in shared memory. Conflicts make reads take `conflicts` times
    as long.

    Loads from global memory also count as `shared`, because the L1 and shared memory are one unit.
    """
    return evaluated(rows, shared=4 * TERMS * (1 + 1 + conflicts) * rows)


@compare(
    baseline=strided,
    optimized=[
        Variant(padded, sass=("LDS.128", "STS.128"), at_least={"sm90": 1.2}),
        Variant(swizzled, sass=("LDS.128", "STS.128"), at_least={"sm90": 1.2}),
        Variant(straight, sass="LDG.128", at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2**23}],
    check_sizes=[{"rows": 1023}, {"rows": st.integers(2, 400)}],
    work=lambda rows: Work(
        read=4 * (TERMS + 1) * rows,
        write=4 * rows,
        flops={"fp32": 2 * (TERMS - 1) * rows},
        terms=TERMS,
    ),
    bound="dram",
    costs={
        strided: lambda rows: staged(rows, conflicts=8),
        padded: lambda rows: staged(rows, conflicts=1),
        swizzled: lambda rows: staged(rows, conflicts=1),
        straight: evaluated,
    },
)
def test_bank_conflicts(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
