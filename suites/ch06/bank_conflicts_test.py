"""Bank conflicts: shared memory serves a warp at once only if its lanes use different banks.

Problem    Evaluate one polynomial of 32 coefficients for each row of an (rows, 32) fp32 matrix,
           each at its own x, by Horner's rule.
Baseline   strided: a block copies 128 rows into shared memory, so that its loads are coalesced.
           Then each thread walks its own row. The rows are 32 floats apart, so the 32 lanes of a
           warp read 32 words of one bank, and the bank serves one word per clock.
Optimized  padded: of strided. One unused float follows each row, so the rows are 33 floats apart,
           and the lanes meet 32 banks.
           swizzled: of strided. Row r holds its coefficients in the order column xor r. The lanes
           meet 32 banks, without unused floats.
           straight: of padded. No shared memory. A thread reads its row in eight 16-byte loads. A
           warp's lanes are 128 bytes apart, so each load touches 32 sectors and uses half of each.
           The next load finds the other half in the L1.
           There is no library rung: none evaluates a polynomial per row.
Bound      DRAM for padded and swizzled: 136 bytes per row. The limit of strided is shared memory,
           where each float that is read occupies its bank as long as 32 floats without conflicts.
Use when   The lanes of a warp access shared memory at a stride that is a multiple of 2 floats. An
           odd stride has no conflicts. Read rows straight from global memory if each element is
           used once and the row fits in registers.
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
        ops={"fp32": 2 * TERMS * rows},
        launches=1,
        **more,
    )


def staged(rows, conflicts):
    """Return the cost with each row written to shared memory once, and read with `conflicts`."""
    return evaluated(rows, shared=4 * TERMS * (1 + conflicts) * rows)


@compare(
    baseline=strided,
    optimized=[
        Variant(padded, sass=("LDS", "STS")),
        Variant(swizzled, sass=("LDS", "STS")),
        Variant(straight, sass="LDG.128"),
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
        strided: lambda rows: staged(rows, conflicts=32),
        padded: lambda rows: staged(rows, conflicts=1),
        swizzled: lambda rows: staged(rows, conflicts=1),
        straight: evaluated,
    },
)
def test_bank_conflicts(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
