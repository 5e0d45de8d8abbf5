"""Unrolling: the compiler already unrolls the inner loop, so unroll over the outputs.

Problem    Evaluate one polynomial of 128 coefficients at n fp32 points, with Horner's rule. The
           coefficients are in shared memory. The number of coefficients is an argument of the
           kernels.
Baseline   compiled: one point per thread, and a plain loop. For sm_90, the compiler unrolls this
           loop 16 times and loads four coefficients at once (LDS.128), without any pragma.
Optimized  rolled: changes `compiled`. `#pragma unroll 1`. This variant is no optimization: it shows
           the cost of a loop that the compiler cannot unroll.
           by_16: changes `compiled`. `#pragma unroll 16`. The compiler also chose this factor for
           `compiled`.
           known: changes `compiled`. The number of coefficients is a constant of the kernel, so the
           loop is fully unrolled, without a counter or a branch.
           four_points: changes `compiled`. A thread has four points, so it uses a loaded
           coefficient four times, and has four independent chains. There is no library variant,
           because PyTorch has no such function.
Bound      Instruction issue. A step needs one multiply-add. `compiled` also needs a quarter of a
           load and a share of the loop's instructions, so it issues about 1.6 instructions per
           step. `rolled` issues 6 instructions per step: a multiply-add, a load, two counters, a
           comparison and a branch. In `four_points`, four points share the loads and the loop. 64
           warps per SM hide the latency of the chains. All lanes load the same 16 bytes at the same
           time. The costs assume that such a load takes one cycle of shared memory. If a load took
           four cycles, one per register of a lane, the loads would limit `compiled`, `by_16` and
           `known`, and only `four_points` would gain.
Seen       `rolled` takes as long as predicted, and the other sides take longer. A load of 16 bytes
           does not take four cycles, because the loads of `compiled` alone would then take longer
           than the kernel does. `four_points` has few loads and also takes longer than predicted,
           so the loads are not the only reason. The costs leave out that each block first loads the
           coefficients and waits at a barrier, whose time we did not measure.
Use when   Look at the machine code before you write a pragma: often the compiler has already
           unrolled the loop. Write a pragma if a loop stays rolled because it contains a branch or
           a call. Make the trip count a template argument if it has few possible values. If outputs
           share operands, unroll over the outputs, which also saves loads. Unrolling needs more
           registers and more of the instruction cache.
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("unrolling.cu")
BLOCK, COUNT = 256, 128


def inputs(device, n):
    return torch.randn(COUNT, device=device), 2 * torch.rand(n, device=device) - 1


def reference(coefficients, x):
    exponents = torch.arange(COUNT - 1, -1, -1, device=x.device)
    parts = x.double().split(2**20)  # all powers at once would need too much memory
    return torch.cat([part[:, None] ** exponents @ coefficients.double() for part in parts])


def launch(kernel, points, coefficients, x):
    out = torch.empty_like(x)
    n = x.numel()
    kernel[-(-n // (points * BLOCK)), BLOCK](coefficients, COUNT, x, out, n)
    return out


def compiled(coefficients, x):
    return launch(kernels.compiled, 1, coefficients, x)


def rolled(coefficients, x):
    return launch(kernels.rolled, 1, coefficients, x)


def by_16(coefficients, x):
    return launch(kernels.by_16, 1, coefficients, x)


def known(coefficients, x):
    return launch(kernels.known, 1, coefficients, x)


def four_points(coefficients, x):
    return launch(kernels.four_points, 4, coefficients, x)


def issued(each):
    """Return the cost of a side from its instructions per point and coefficient on sm_90."""

    def evaluated(n):
        # An instruction takes the slot of a multiply-add, which is two operations.
        ops = {"fp32": 2 * each * COUNT * n}
        return Cost(read=4 * (n + COUNT), write=4 * n, ops=ops, launches=1)

    return evaluated


@compare(
    baseline=compiled,
    optimized=[
        Variant(rolled, at_least="yardstick"),
        Variant(by_16, at_least="neutral"),
        Variant(known, at_least="neutral"),  # it gains nothing if shared memory is the limit
        four_points,
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**25}],
    check_sizes=[{"n": 1}, {"n": 835}],
    # No flops are declared: if the clock is higher now than when the fp32 rate was measured, the
    # harness would report skipped work.
    work=lambda n: Work(read=4 * (n + COUNT), write=4 * n, terms=COUNT, roundings=COUNT),
    bound="issue",
    costs={
        compiled: issued(25 / 16),
        rolled: issued(6),
        by_16: issued(25 / 16),
        known: issued(5 / 4),
        four_points: issued(73 / 64),
    },
)
def test_unrolling(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
