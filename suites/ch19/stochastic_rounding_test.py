"""Stochastic rounding: weights in bf16 learn from steps that are smaller than their last bit.

Problem    test_stochastic_rounding takes one step of gradient descent for n bf16 weights, and
           increments a step counter. test_stochastic_rounding_is_unbiased takes 32 steps at once.
           Each step is between an eighth and a half of the weights' last bit. The test returns the
           average distance by which each group of 16384 weights has moved.
Baseline   fp32_copy: one Triton kernel updates an fp32 copy of the weights and rounds it to bf16.
           in_fp32: all 32 steps in fp32.
Optimized  stochastic: changes `fp32_copy`. There is no copy. The new weight rounds up or down at
           random. The closer the exact weight is to the upper number, the more often it rounds up.
           The kernel draws the random bits with Philox, from the step number and a seed, which is
           an input.
           many_stochastic: changes `in_fp32`. Each step rounds stochastically.
Bound      DRAM. `fp32_copy` moves 12 bytes per weight, stochastic 6. In the code for sm90,
           `stochastic` has 28 instructions per weight and `fp32_copy` has 16. These instructions
           overlap with DRAM traffic. One call of Philox gives the random bits for four weights.
           With one call per weight, instructions would be the limit. The second test has little
           DRAM traffic, checks only the result, and claims no speedup.
Seen       On an H100, `in_fp32` takes as long as its DRAM traffic plus its steps. So traffic and
           steps probably do not overlap, although the cost of `in_fp32` assumes that they do.
Use when   Memory has no room for fp32 copies, or the optimizer's step takes a long time. A single
           weight is less accurate: stochastic rounding has an error of up to one last bit, and
           rounding to nearest has an error of at most half a last bit. But the error of stochastic
           rounding is zero on average, so the errors of many steps cancel, and small steps are not
           lost. With rounding to nearest, the weights of the second test would not move at all, and
           the check would reject them. The check accepts a rounding error of bf16: in each weight
           in the first test, and in the distance in the second test.
"""

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

RATE = 2.0**-10  # the learning rate
BLOCK = 1024
GROUP, STEPS = 16384, 32
COPYING, INSTRUCTIONS = 16, 28  # per weight, counted in the code for sm90


@triton.jit
def stochastic_bf16(value, bits):
    """Round fp32 to bf16: up with a probability of (distance to the lower number) / step."""
    raised = value.to(tl.int32, bitcast=True) + (bits & 0xFFFF)
    return ((raised >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def random_bits(seed, step, at, BLOCK: tl.constexpr):
    """Return random bits for BLOCK elements from `at` on. A call of Philox returns 4 x 32 bits."""
    lane = at // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.philox(seed, lane, step + lane * 0, lane * 0, lane * 0)
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK,)).to(tl.int32, bitcast=True)


@triton.jit
def fp32_copy_kernel(weights, copy, gradient, n, RATE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    slope = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(copy + at, mask=here, other=0.0) - RATE * slope
    tl.store(copy + at, value, mask=here)
    tl.store(weights + at, to_even(value, DROPPED=16).to(tl.bfloat16), mask=here)


@triton.jit
def stochastic_kernel(weights, gradient, seed, step, n, RATE: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    here = at < n
    slope = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(weights + at, mask=here, other=0.0).to(tl.float32) - RATE * slope
    bits = random_bits(tl.load(seed), tl.load(step), first, BLOCK)
    tl.store(weights + at, stochastic_bf16(value, bits).to(tl.bfloat16), mask=here)


@triton.jit
def distance_kernel(
    weights, steps, seed, out, STOCHASTIC: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0)
    first = group * GROUP
    start = tl.load(weights + first + tl.arange(0, GROUP)).to(tl.float32)
    change, value = tl.load(steps + group), start
    for step in range(STEPS):
        value += change
        if STOCHASTIC:
            bits = random_bits(tl.load(seed), step, first, GROUP)
            value = stochastic_bf16(value, bits)
    tl.store(out + group, tl.sum(value - start) / GROUP)


def state(device, n):
    weights = (RATE * torch.randn(n, device=device)).bfloat16()
    step = torch.zeros((), device=device, dtype=torch.int32)
    return SimpleNamespace(weights=weights, step=step, copy=weights.float())


def seed_of(device):
    return torch.randint(2**31, (1,), device=device)


def inputs(device, n):
    return torch.randn(n, device=device).bfloat16(), seed_of(device)


def reference(state, gradient, seed):
    state.weights = state.weights.double() - RATE * gradient.double()
    state.step = state.step + 1
    state.copy = None  # only one side uses it, so it is not compared


def fp32_copy(state, gradient, seed):
    n = gradient.numel()
    state.step += 1
    grid = (triton.cdiv(n, BLOCK),)
    fp32_copy_kernel[grid](state.weights, state.copy, gradient, n, RATE=RATE, BLOCK=BLOCK)


def stochastic(state, gradient, seed):
    n = gradient.numel()
    state.step += 1
    grid = (triton.cdiv(n, BLOCK),)
    stochastic_kernel[grid](state.weights, gradient, seed, state.step, n, RATE=RATE, BLOCK=BLOCK)


def inputs_of_groups(device, groups):
    weights = 1.25 + torch.rand(groups, GROUP, device=device) / 2
    # Multiples of 2^-20, because their sums in fp32 are exact.
    steps = torch.randint(2**10, 2**12, (groups,), device=device) * 2.0**-20
    sign = torch.randint(2, (groups,), device=device) * 2 - 1
    return weights.bfloat16(), steps * sign, seed_of(device)


def distances(weights, steps, seed):
    return STEPS * steps.double()


def moved(weights, steps, seed, **how):
    out = torch.empty_like(steps)
    grid = (steps.numel(),)
    distance_kernel[grid](weights, steps, seed, out, **how, STEPS=STEPS, GROUP=GROUP, num_warps=16)
    return out


def in_fp32(weights, steps, seed):
    return moved(weights, steps, seed, STOCHASTIC=False)


def many_stochastic(weights, steps, seed):
    return moved(weights, steps, seed, STOCHASTIC=True)


def step_cost(n, kept, instructions):
    """Return the cost of counting the step, then of a step with `kept` bytes per weight."""
    step = Cost(
        read=(kept + 2) * n,
        write=(kept + 2) * n if kept > 2 else kept * n,
        ops={"fp32": 2 * instructions * n},
        launches=1,
    )
    return Cost(launches=1) + step


def groups_cost(groups, instructions):
    return Cost(
        read=2 * groups * GROUP + 4 * groups,
        write=4 * groups,
        ops={"fp32": 2 * instructions * STEPS * groups * GROUP},
        launches=1,
    )


@compare(
    baseline=fp32_copy,
    optimized=[Variant(stochastic, precision="bf16", at_least={"sm90": 1.7})],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 1 << 27}],
    check_sizes=[{"n": 10007}],
    work=lambda n: Work(read=4 * n, write=2 * n),
    bound="dram",
    costs={
        fp32_copy: lambda n: step_cost(n, kept=4, instructions=COPYING),
        stochastic: lambda n: step_cost(n, kept=2, instructions=INSTRUCTIONS),
    },
)
def test_stochastic_rounding(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=in_fp32,
    optimized=[Variant(many_stochastic, precision="bf16", at_least="yardstick")],
    inputs=inputs_of_groups,
    reference=distances,
    sizes=[{"groups": 4096}],
    check_sizes=[{"groups": 9}],
    work=lambda groups: Work(read=2 * groups * GROUP, write=4 * groups),
    bound="dram",
    costs={
        in_fp32: lambda groups: groups_cost(groups, 1),
        many_stochastic: lambda groups: groups_cost(groups, INSTRUCTIONS),
    },
)
def test_stochastic_rounding_is_unbiased(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
