"""ILP: independent loads in one thread hide latency that other warps cannot hide.

Problem    test_ilp computes the sigmoid of n fp32 elements. test_long_chain integrates logistic
           growth for n elements in 256 steps of two dependent multiply-adds.
Baseline   single: one element per thread.
           growth_single: one element per thread.
Optimized  in_turn: changes `single`. A thread has four elements, and loads an element only after it
           has stored the previous one, because the compiler must assume that out and x overlap.
           two: changes `single`. A thread has two elements, and loads both before it uses the
           first.
           four: like `two`, with four elements. `four` and `in_turn` differ only in the order of
           loads and stores.
           eight: like `four`, with eight elements.
           library: `torch.sigmoid`.
           growth_four: changes `growth_single`. A thread has four elements, whose steps alternate.
           Both kernels are unrolled to 128 multiply-adds per iteration of the loop, so their loops
           cost the same.
Bound      test_ilp: DRAM. The 2048 threads of an SM have 8 KiB in flight with one element each, and
           more are needed (`../ch07/vector_width_test.py`). While a thread computes the
           exponential and the division, it has no load in flight, so `single` would need even more
           bytes in flight. `single` also starts a block for every 256 elements, and these starts
           alone take longer than the transfers from and to DRAM.
           test_long_chain: instruction issue. With 16 warps per scheduler, another warp always has
           a step ready, so the four chains of `growth_four` gain nothing.
Seen       `in_turn` has one load in flight per thread, like `single`, but starts a quarter of the
           blocks, so it is faster than `single`. The bytes in flight explain the time of `in_turn`
           within an eighth. `in_turn` takes about as long as scale_stride of `grid_stride_test.py`,
           which has as many bytes in flight and starts few blocks. `single` is slow for two
           reasons: too few bytes in flight and too many block starts. By the costs, each of the two
           alone would take about the same time, and the costs assume that they overlap completely.
           `single` takes longer, so they probably overlap only partly. We did not measure how much
           time each costs. `pairs` of `half_storage_test.py` is slow for the same reasons.
Use when   A kernel waits for memory with all warps resident, or few warps fit on an SM. Load all
           elements of a thread into registers before you use the first. If enough warps hide the
           latency, as in test_long_chain, this gains nothing.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("ilp.cu")
BLOCK = 256
THREADS = 2048  # threads that an SM runs at once, for costs
STEPS, RATE = 256, 0.02


def launch(kernel, each, *arguments):
    x = arguments[-1]
    out = torch.empty_like(x)
    kernel[-(-x.numel() // (each * BLOCK)), BLOCK](*arguments, out, x.numel())
    return out


def normal(device, n):
    return (torch.randn(n, device=device),)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x.double()))


def single(x):
    return launch(kernels.single, 1, x)


def in_turn(x):
    return launch(kernels.in_turn, 4, x)


def two(x):
    return launch(kernels.two, 2, x)


def four(x):
    return launch(kernels.four, 4, x)


def eight(x):
    return launch(kernels.eight, 8, x)


def library(x):
    return torch.sigmoid(x)


def populations(device, n):
    return (0.01 + 0.49 * torch.rand(n, device=device),)


def grown(x):
    y = x.double()
    for _ in range(STEPS):
        y = y + RATE * (y - y * y)
    return y


def growth_single(x):
    return launch(kernels.growth_single, 1, RATE, x)


def growth_four(x):
    return launch(kernels.growth_four, 4, RATE, x)


def squashed(n, each=0, loads=0):
    """Return the cost with `each` elements per thread, of which `loads` are loaded together.

    0 stands for the library's unknown number.
    """
    blocks = -(-n // (each * BLOCK)) if each else 0
    return Cost(
        read=4 * n,
        write=4 * n,
        in_flight=4 * THREADS * (loads or each),
        sfu=2 * n,
        ops={"fp32": 4 * n},
        blocks=blocks,
        launches=1,
    )


def stepped(n):
    return Cost(read=4 * n, write=4 * n, ops={"fp32": 4 * STEPS * n}, launches=1)


@compare(
    baseline=single,
    optimized=[
        Variant(in_turn, at_least={"sm90": 1.05}),
        Variant(two, at_least={"sm90": 1.3}),
        Variant(four, at_least={"sm90": 1.45}),
        Variant(eight, at_least={"sm90": 1.4}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=normal,
    reference=sigmoid,
    sizes=[{"n": 2**27}],
    check_sizes=[{"n": 1023}, {"n": 4097}, {"n": st.integers(33, 5000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs={
        single: lambda n: squashed(n, each=1),
        two: lambda n: squashed(n, each=2),
        in_turn: lambda n: squashed(n, each=4, loads=1),
        four: lambda n: squashed(n, each=4),
        eight: lambda n: squashed(n, each=8),
        library: squashed,
    },
)
def test_ilp(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=growth_single,
    optimized=[growth_four],
    inputs=populations,
    reference=grown,
    sizes=[{"n": 2**25}],
    check_sizes=[{"n": 1023}, {"n": st.integers(33, 2000)}],
    # No flops are declared: the fp32 rate was measured with matrix products. A chain in registers
    # may run faster, and the harness would then report skipped work.
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="issue",
    costs=dict.fromkeys([growth_single, growth_four], stepped),
    at_least="neutral",
)
def test_long_chain(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
