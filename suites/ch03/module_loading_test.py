"""Module loading: load each kernel only when it is first launched.

Problem    The first use of the GPU by a process: copy x and two weights to the GPU, and run one
           layer of a network. The time includes creating the CUDA context, as at the start of a
           server.
Baseline   eager: `CUDA_MODULE_LOADING=EAGER`. The driver loads all kernels of a library when the
           process first uses that library. Container images set this so that no later request waits
           for a kernel to load.
Optimized  lazy: eager without the variable. By default, the driver loads each kernel at its first
           launch.
Bound      The host: the driver creates a context and loads kernels. eager loads thousands of
           kernels of torch and cuBLAS, of which the layer launches a few. The costs count only the
           layer, because no rate for loading kernels is measured. So both sides take far longer
           than predicted.
Use when   Always, unless the first launch of each kernel must be fast. A server can keep lazy
           loading and warm up with typical requests instead. Each kernel takes GPU memory only when
           it is loaded, so measure free memory after the warm-up. A first launch may wait until
           running kernels end. So if two kernels must overlap, launch each of them once before.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare, fresh_process


def inputs(device, n):
    return torch.randn(n, n), torch.randn(n, n) * n**-0.5, torch.randn(n, n) * n**-0.5, device


def reference(x, up, down, device):
    x, up, down = (each.double().to(device) for each in (x, up, down))
    return x + F.gelu(x @ up) @ down


def layer(x, up, down, device):
    x, up, down = (each.to(device) for each in (x, up, down))
    return x + F.gelu(x @ up) @ down


@fresh_process(environment={"CUDA_MODULE_LOADING": "EAGER"}, warmup=0)
def eager(x, up, down, device):
    return layer(x, up, down, device)


@fresh_process(environment={"CUDA_MODULE_LOADING": None}, warmup=0)
def lazy(x, up, down, device):
    return layer(x, up, down, device)


def first_call(n):
    product = Cost(read=8 * n * n, write=4 * n * n, ops={"fp32": 2 * n**3}, launches=1)
    gelu = Cost(read=4 * n * n, write=4 * n * n, launches=1)
    return (
        3 * Cost(h2d=4 * n * n, launches=1, syncs=1)
        + 2 * product
        + gelu
        + Cost(read=8 * n * n, write=4 * n * n, launches=1)
    )


@compare(
    baseline=eager,
    optimized=[lazy],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 512}],
    check_sizes=[{"n": 33}],
    work=lambda n: Work(wire=12 * n * n, flops={"fp32": 4 * n**3}, terms=n, roundings=4),
    bound="host",
    costs={eager: first_call, lazy: first_call},
)
def test_module_loading(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
