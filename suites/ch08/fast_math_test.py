"""Fast math: calling rsqrtf gains more than the compiler's flag, and the error stays small.

Problem    Compute the softened potential of m bodies at n points in fp32. The potential at a point
           is the sum of weight / sqrt(distance^2 + 0.01) over the bodies.
Baseline   accurate: `weight / sqrtf(square)`. Both the root and the quotient are rounded correctly
           (IEEE 754).
Optimized  flag: changes `accurate`. The same kernel is compiled with `--use_fast_math`. The flag
           applies to the whole file: square roots and divisions become approximate, and subnormal
           numbers become zero.
           reciprocal_root: changes `accurate`. A single special function, `weight *
           rsqrtf(square)`, replaces a square root and a division. The flag is not set.
           root_and_flag: changes `reciprocal_root`. The same kernel is compiled with the flag, so
           rsqrtf is one instruction, without a test for subnormal numbers. There is no library
           variant, because PyTorch would write all m * n distances.
Bound      Instruction issue limits `accurate`: a pair takes about 30 instructions, most of them to
           round the root and the quotient correctly. The special function unit limits `flag`: each
           pair needs a root and a reciprocal. An SM computes 16 special functions per cycle, an
           eighth of its rate of multiply-adds. The flag does not merge the root and the reciprocal
           into one function. Instruction issue limits `reciprocal_root` and `root_and_flag`, with
           13 and 10 instructions per pair. One of these instructions loads a body from shared
           memory, 16 bytes for all lanes. If such a load takes four cycles instead of one, shared
           memory limits `reciprocal_root` and `root_and_flag`. Error: CUDA's guide promises 2 units
           in the last place for rsqrtf and for the approximate division. Adding thousands of terms
           causes a larger error. So all sides must meet the same bound, which is derived from the
           sum. A variant's error may be at most 1.5 times the error of `accurate`. `-vv` prints
           each side's error.
Use when   A kernel computes roots or divisions for every few bytes that it loads. Write rsqrtf
           yourself: it is fast and needs no flag. Use the flag or single intrinsics only if the
           result tolerates their error. Do not use them if the result is a small difference of
           large terms, or if arguments are outside the range in which an intrinsic such as `__sinf`
           is accurate. In a kernel that waits for DRAM, fast math gains nothing.
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
