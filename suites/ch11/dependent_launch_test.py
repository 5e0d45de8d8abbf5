"""Programmatic dependent launch: start a kernel before the previous kernel has ended.

Problem    Compute a chain of fp32 layers, x = relu(W x), with n neurons each, for one vector x. A
           layer needs the whole result of the previous layer. All weights are known in advance.
Baseline   launches: one kernel per layer. A kernel starts when the previous kernel has ended.
Optimized  waits_first: changes `launches`. Every layer except the first is a dependent launch. Each
           kernel allows the next kernel to start at once. The blocks of the next kernel start
           early, and `griddepcontrol.wait` makes them wait until the previous kernel has ended.
           Then they load their weights.
           loads_first: changes `waits_first`. A kernel loads its weights before the wait, not after
           it. So the loads run during the previous layer or an even earlier one.
           library: `torch.mv` and `relu_`, two kernels per layer.
Bound      Latency and DRAM. The weights are ten times as large as the L2, so each call reads them
           from DRAM. Reading the weights of a layer takes less time than starting the kernel,
           waiting for the first bytes, and ending the kernel. `waits_first` hides the start.
           `loads_first` also hides the DRAM latency, and reads while the previous layer ends. So
           only the time to read the weights and a short sum remain. The costs include neither
           latencies nor the hidden part of a start, so `launches`, `waits_first` and `loads_first`
           have the same predicted time.
Seen       `launches`, `waits_first` and `library` take a third to two thirds longer than predicted,
           on an H100 and an H200. The costs leave out latencies, which explains the difference:
           `loads_first` hides the latencies, and takes about as long as predicted on an H100.
Use when   You write short kernels that run one after another, as in decoding. Each kernel also
           needs data that the previous kernel does not compute, such as weights. The SMs must have
           room for the blocks of a kernel while the previous kernel is still running. Before the
           wait, write nothing, and read nothing that the previous kernel writes. Between long
           kernels, the gap is too short to matter.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Conditions, Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("dependent_launch.cu")
plain_kernels = cuda_module("dependent_launch_plain.cu")
BLOCK, WARP = 256, 32


def inputs(device, layers, n):
    # The root of 2 makes up for the half of the values that relu sets to zero.
    weights = torch.randn(layers, n, n, device=device) * (2 / n) ** 0.5
    return weights, torch.randn(n, device=device)


def reference(weights, x):
    x = x.double()
    for weight in weights.double():
        x = (weight @ x).relu()
    return x


def chained(weights, x, first, rest):
    """Launch a kernel for each layer: `first` for the first layer, `rest` for all others."""
    n, states = x.numel(), (torch.empty_like(x), torch.empty_like(x))
    for k, weight in enumerate(weights):
        start = first if k == 0 else rest
        start(weight, x, states[k % 2], n)
        x = states[k % 2]
    return x


def grid_of(x):
    return x.numel() * WARP // BLOCK


def launches(weights, x):
    layer = plain_kernels.plain[grid_of(x), BLOCK]
    return chained(weights, x, layer, layer)


def dependent(kernel, weights, x):
    # Earlier work may still be writing x or the weights, so the first launch is not dependent.
    first = kernel.launch(grid_of(x), BLOCK)
    return chained(weights, x, first, kernel.launch(grid_of(x), BLOCK, dependent=True))


def waits_first(weights, x):
    return dependent(kernels.waits_first, weights, x)


def loads_first(weights, x):
    return dependent(kernels.loads_first, weights, x)


def library(weights, x):
    for weight in weights:
        x = torch.mv(weight, x).relu_()
    return x


def layer_cost(n, launches):
    """Return the cost of a layer. Each block reads the vector x from the L2."""
    blocks = n * WARP // BLOCK
    return Cost(
        read=4 * n * n,
        write=4 * n,
        l2=4 * n * blocks,
        ops={"fp32": 2 * n * n},
        launches=launches,
    )


def chain_cost(layers, n):
    return layers * layer_cost(n, launches=1)


@compare(
    baseline=launches,
    optimized=[
        Variant(waits_first, needs="griddepcontrol", at_least={"sm90": 1.05}),
        Variant(loads_first, needs="griddepcontrol", at_least={"sm90": 1.3}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 128, "n": 1024}],
    check_sizes=[
        {"layers": 3, "n": 136},
        {"layers": st.integers(1, 4), "n": st.integers(1, 8).map(lambda blocks: 8 * blocks)},
    ],
    work=lambda layers, n: Work(
        read=4 * layers * n * n,
        write=4 * n,
        flops={"fp32": 2 * layers * n * n},
        terms=n,
    ),
    bound="latency",
    costs={
        **dict.fromkeys([launches, waits_first, loads_first], chain_cost),
        library: lambda layers, n: layers * layer_cost(n, launches=2),
    },
    # The weights evict each other from the L2 anyway. In `library`, the weights evict no other
    # data, so the plugin's check for a cold L2 would reject it.
    conditions=Conditions(l2="warm"),
)
def test_dependent_launch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
