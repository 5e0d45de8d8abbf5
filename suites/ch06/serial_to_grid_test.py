"""Serial to grid: a GPU is fast only with thousands of active threads.

Problem    Compute a * x + y on n fp32 elements. This page is a tutorial and claims no speedup,
           because nobody would ship `one_thread`.
Baseline   one_thread: the loop of a CPU program, in a kernel that is launched with one thread, `[1,
           1]`.
Optimized  one_block: changes `one_thread`. The 256 threads of one block share the elements. A block
           runs on one SM, so the GPU's other SMs stay idle.
           whole_grid: changes `one_block`. There is one thread per element, in n / 256 blocks on
           all SMs.
           library: `torch.add` with `alpha`.
Bound      Latency limits `one_thread` and `one_block`: a thread waits for its loads, and too few
           other threads run in the meantime. The costs leave out latency. At this n, the launch is
           a large part of the time of `whole_grid`.
Seen       On an H200, `one_block` takes less than 1/30 of the time of `one_thread`, and
           `whole_grid` takes about 1/100 of the time of `one_block`. `library` is as fast as
           `whole_grid`. `one_thread` takes thousands of times as long as predicted, and `one_block`
           more than a hundred times, because the costs leave out latency. `whole_grid` and
           `library` take about 60 % longer than predicted, probably for the same reason: all blocks
           run at once, and a thread waits for its loads only once. We did not measure the latency.
           These times are from CUDA graphs. In ordinary calls, the host is the limit of
           `whole_grid` and `library`, and `whole_grid` takes twice as long as `library`.
Use when   You write your first kernel: start from `whole_grid`. A kernel of one thread or one block
           is right only for a few numbers, such as the last step of a sum.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare, cuda_module

kernels = cuda_module("serial_to_grid.cu")
A = 0.75
BLOCK = 256


def inputs(device, n):
    return torch.randn(n, device=device), torch.randn(n, device=device)


def reference(x, y):
    return A * x.double() + y.double()


def launch(kernel, x, y, grid, block):
    out = torch.empty_like(x)
    kernel[grid, block](A, x, y, out, x.numel())
    return out


def one_thread(x, y):
    return launch(kernels.one_thread, x, y, grid=1, block=1)


def one_block(x, y):
    return launch(kernels.one_block, x, y, grid=1, block=BLOCK)


def whole_grid(x, y):
    return launch(kernels.whole_grid, x, y, grid=-(-x.numel() // BLOCK), block=BLOCK)


def library(x, y):
    return torch.add(y, x, alpha=A)


def added(n):
    return Cost(read=8 * n, write=4 * n, ops={"fp32": 2 * n}, launches=1)


@compare(
    baseline=one_thread,
    optimized=[one_block, whole_grid, library],
    inputs=inputs,
    reference=reference,
    # n is small, because one thread already needs milliseconds for this many elements.
    sizes=[{"n": 2**17}],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 2000)}],
    work=lambda n: Work(read=8 * n, write=4 * n, flops={"fp32": 2 * n}, terms=2),
    bound="latency",
    costs=dict.fromkeys([one_thread, one_block, whole_grid, library], added),
    at_least="yardstick",
)
def test_serial_to_grid(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
