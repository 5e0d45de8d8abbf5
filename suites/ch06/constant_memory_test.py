"""Constant memory: use it for numbers that all lanes of a warp read together, not for tables.

Problem    test_constant_memory evaluates one fixed polynomial of 64 coefficients at n fp32 points.
           test_table decodes n bytes of mu-law sound (G.711) into int16 by a table of 256 entries.
           The problem fixes the coefficients and the table, so they are in the kernel file.
Baseline   series_in_global: the coefficients are in global memory. Every warp executes one load per
           coefficient, and the L1 serves these loads.
           decode_in_constant: the table is in constant memory, because it never changes.
Optimized  series_in_constant: changes `series_in_global`. The coefficients are in constant memory.
           All lanes of a warp read the same coefficient, so one uniform load (ULDC) fetches two
           coefficients for the whole warp.
           series_in_code: changes `series_in_constant`. The coefficients are part of the
           instructions, so they need no load.
           decode_in_global: changes `decode_in_constant`. The table is in global memory, and the L1
           keeps it.
           decode_in_shared: changes `decode_in_global`. Each block copies the table into shared
           memory.
           decode_computed: changes `decode_in_global`. There is no table: shifts and a few
           additions compute each value. There is no library variant, because PyTorch has no call
           for either problem.
Bound      test_constant_memory: instruction issue. Each coefficient costs one multiply-add. In
           `series_in_constant`, it also costs part of a uniform load. The L1 limits
           series_in_global: each coefficient needs one load, and an SM starts one load in the time
           of four multiply-adds.
           test_table: DRAM. The constant cache limits `decode_in_constant`, because the 32 codes of
           a warp need many different words. The cost assumes that the cache serves one word per
           clock. This rate was not measured. `decode_computed` needs 13 integer instructions per
           code. An SM issues these instructions at half the rate of multiply-adds, so they take
           longer than the transfers from and to DRAM.
Seen       `decode_in_constant` takes about two cycles of an SM for each different word, twice as
           many as the cost assumes. We did not confirm this with a profiler. `series_in_code` takes
           longer than its instructions predict. A block issues almost no instructions until its
           points arrive from DRAM. An SM holds only 8 blocks, so at times it has nothing to issue.
           `series_in_global` and `series_in_constant` exceed their predicted times by similar
           amounts. We did not measure how often the SM has nothing to issue.
Use when   All threads read the same few numbers in the same order, and the numbers are set before
           the launch. The arguments of a kernel are in constant memory too. If the numbers are
           known when you compile, write them as `constexpr`. If a thread evaluates several points,
           it loads each coefficient only once, so it gains less from constant memory. If the data
           decides which entry of a table a lane reads, use the L1 or shared memory.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("constant_memory.cu")
BLOCK, TERMS = 256, 64
CODES_EACH = 16
CONFLICTS = 2.8  # different words in the busiest bank for 32 random codes, mean over warps
WORDS = 28.4  # different words that 32 random codes need, mean over warps


def points(device, n):
    return (2 * torch.rand(n, device=device) - 1,)


def series(x):
    x, total = x.double(), 0.0
    for k in reversed(range(TERMS)):
        rounded = torch.tensor((-1.0) ** k / (k + 1), dtype=torch.float32).double().item()
        total = total * x + rounded
    return total


def evaluate(kernel, x):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // BLOCK), BLOCK](x, out, x.numel())
    return out


def series_in_global(x):
    return evaluate(kernels.series_in_global, x)


def series_in_constant(x):
    return evaluate(kernels.series_in_constant, x)


def series_in_code(x):
    return evaluate(kernels.series_in_code, x)


def sound(device, n):
    return (torch.randint(0, 256, (n,), device=device, dtype=torch.uint8),)


def linear(codes):
    bits = 255 - codes.long()
    size = (2 * (bits % 16) + 33) * 2 ** (bits // 16 % 8) * 4 - 132
    return torch.where(bits >= 128, -size, size)


def decode(kernel, codes):
    out = torch.empty(codes.shape, device=codes.device, dtype=torch.int16)
    kernel[-(-codes.numel() // (BLOCK * CODES_EACH)), BLOCK](codes, out, codes.numel())
    return out


def decode_in_constant(codes):
    return decode(kernels.decode_in_constant, codes)


def decode_in_global(codes):
    return decode(kernels.decode_in_global, codes)


def decode_in_shared(codes):
    return decode(kernels.decode_in_shared, codes)


def decode_computed(codes):
    return decode(kernels.decode_computed, codes)


def evaluated(n, instructions, loads=0):
    """Return the cost of n points.

    Args:
        instructions: instructions per point, counted in the machine code for sm_90. An instruction
            takes the issue slot of a multiply-add.
        loads: coefficients per point that are loaded from the L1. They count as `shared`, because
            the L1 and shared memory are one unit.
    """
    return Cost(
        read=4 * n,
        write=4 * n,
        shared=4 * loads * n,
        ops={"fp32": 2 * instructions * n},
        blocks=-(-n // BLOCK),
        launches=1,
    )


def decoded(n, shared=0, integers=0):
    """Return the cost of n codes.

    Args:
        shared: bytes per code that shared memory or the L1 could move in the time of the look-up.
        integers: integer instructions per code, which take the slots of two multiply-adds each.
    """
    ops = {"fp32": 4 * integers * n}
    return Cost(read=n, write=2 * n, shared=shared * n, ops=ops, launches=1)


def by_banks(n):
    # A bank gives a word of 4 bytes per clock, even to a lane that needs only 2 bytes.
    return decoded(n, shared=4 * CONFLICTS)


def by_words(n):
    # One word per clock. In a clock, shared memory would give 128 bytes to the 32 lanes.
    return decoded(n, shared=128 * WORDS / 32)


@compare(
    baseline=series_in_global,
    optimized=[
        Variant(series_in_constant, at_least={"sm90": 1.7}),
        Variant(series_in_code, at_least={"sm90": 2.0}),
    ],
    inputs=points,
    reference=series,
    sizes=[{"n": 2**26}],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 1000)}],
    work=lambda n: Work(read=4 * n, write=4 * n, flops={"fp32": 2 * (TERMS - 1) * n}, terms=TERMS),
    bound="issue",
    costs={
        series_in_global: lambda n: evaluated(n, instructions=144, loads=TERMS),
        series_in_constant: lambda n: evaluated(n, instructions=110),
        series_in_code: lambda n: evaluated(n, instructions=79),
    },
)
def test_constant_memory(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=decode_in_constant,
    optimized=[
        Variant(decode_in_global, at_least={"sm90": 8.5}),
        Variant(decode_in_shared, at_least={"sm90": 8.5}),
        Variant(decode_computed, at_least={"sm90": 7.5}),
    ],
    inputs=sound,
    reference=linear,
    sizes=[{"n": 2**28}],
    # A block decodes 4096 codes.
    check_sizes=[{"n": 1023}, {"n": 8193}, {"n": st.integers(33, 6000)}],
    work=lambda n: Work(read=n, write=2 * n),
    bound="dram",
    costs={
        decode_in_constant: by_words,
        **dict.fromkeys([decode_in_global, decode_in_shared], by_banks),
        decode_computed: lambda n: decoded(n, integers=13),
    },
)
def test_table(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
