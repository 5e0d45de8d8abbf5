"""Fast math: the right function gains more than the compiler's flag, and both keep the error small.

Problem    The softened potential of m bodies at n points in fp32: for each point, the sum of
           weight / sqrt(distance^2 + 0.01) over the bodies.
Baseline   accurate: `weight / sqrtf(square)`. Both functions are rounded as IEEE 754 says.
Optimized  flag: changes accurate. The same kernel, compiled with `--use_fast_math`. In the whole
           file, square roots and divisions become approximate, and subnormal numbers become zero.
           reciprocal_root: changes accurate. `weight * rsqrtf(square)`, without the flag. One
           special function replaces a square root and a division.
           root_and_flag: changes reciprocal_root. The same kernel, compiled with the flag. rsqrtf
           then becomes one instruction without a test for subnormal numbers. PyTorch would write
           all m * n distances.
Bound      Issue for accurate: about 30 instructions per pair, most of them to round the root and
           the quotient correctly. The special function unit for flag: a root and a
           reciprocal per pair, and the unit does 16 per cycle and SM, an eighth of the
           multiply-adds. The flag does not turn the two into one. Issue for reciprocal_root and
           root_and_flag: 13 and 10 instructions per pair. One of them loads a body, 16 bytes that
           all lanes share, from shared memory. If that takes four cycles instead of one, the load
           is the limit of both.
           Error: CUDA's guide promises 2 units in the last place for rsqrtf and for the approximate
           division. A sum of thousands of terms rounds more than that. So all sides must meet the
           same derived bound, and a variant may not be 1.5 times less exact than accurate. `-vv`
           prints each side's error.
Use when   A kernel issues roots or divisions for each few bytes. Write rsqrtf yourself: it is fast
           and needs no flag. Use the flag, or single intrinsics, if the result tolerates it. That
           is not so if the result is a small difference of large terms, or if arguments are
           outside of the range that an intrinsic such as `__sinf` is good for. In a kernel that
           waits for DRAM it gains nothing.
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("fast_math.cu")
fast_kernels = cuda_module("fast_math.cu", options={"use_fast_math": True})
BLOCK, SOFT = 256, 0.01


def inputs(device, m, n):
    return torch.rand(m, 4, device=device), torch.rand(n, 4, device=device)


def reference(bodies, points):
    weight = bodies[:, 3].double()
    parts = []
    for part in points.split(2**14):  # all distances at once would need too much memory
        square = torch.full((len(part), len(bodies)), SOFT, dtype=torch.float64, device=part.device)
        for axis in range(3):
            square = square + (bodies[:, axis].double() - part[:, axis, None].double()) ** 2
        parts.append((weight / square.sqrt()).sum(1))
    return torch.cat(parts)


def launch(kernel, bodies, points):
    m, n = len(bodies), len(points)
    out = torch.empty(n, device=points.device)
    kernel[-(-n // BLOCK), BLOCK](bodies, m, points, out, n)
    return out


def accurate(bodies, points):
    return launch(kernels.accurate, bodies, points)


def flag(bodies, points):
    return launch(fast_kernels.accurate, bodies, points)


def reciprocal_root(bodies, points):
    return launch(kernels.reciprocal_root, bodies, points)


def root_and_flag(bodies, points):
    return launch(fast_kernels.reciprocal_root, bodies, points)


def issued(each, special):
    """Return the cost of a side from its instructions and special functions per pair on sm_90."""

    def added(m, n):
        # An instruction takes the slot of a multiply-add, which is two operations.
        ops = {"fp32": 2 * each * m * n}
        return Cost(read=16 * (m + n), write=4 * n, sfu=special * m * n, ops=ops, launches=1)

    return added


@compare(
    baseline=accurate,
    optimized=[
        Variant(flag, sass="MUFU.SQRT", at_least={"sm90": 1.7}),
        Variant(reciprocal_root, sass="MUFU.RSQ", at_least={"sm90": 1.9}),
        Variant(root_and_flag, sass="MUFU.RSQ", at_least={"sm90": 2.4}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 4096, "n": 2**18}],
    check_sizes=[{"m": 301, "n": 515}, {"m": 1, "n": 33}],
    work=lambda m, n: Work(read=16 * (m + n), write=4 * n, flops={"fp32": 10 * m * n}, terms=m),
    bound="issue",
    costs={
        accurate: issued(30, special=2),
        flag: issued(11, special=2),
        reciprocal_root: issued(13, special=1),
        root_and_flag: issued(10, special=1),
    },
)
def test_fast_math(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
