"""Module loading: load each kernel only when it is first launched.

Problem    A process uses the GPU for the first time: it copies x and two weights to the GPU, and
           runs one layer of a network. The time includes creating the CUDA context, as when a
           server starts.
Baseline   eager: `CUDA_MODULE_LOADING=EAGER`. The driver loads all kernels of a library when the
           process first uses that library. Some container images set this variable, so that no
           request waits for a kernel to load.
Optimized  lazy: changes `eager`. The variable is not set. By default, the driver loads each kernel
           at its first launch.
Bound      The host: the driver creates a context and loads kernels. `eager` loads thousands of
           kernels of torch and cuBLAS, but the layer launches only a few of them. The costs count
           only the layer, because no rate for loading kernels was measured.
Seen       On an H200 machine, `lazy` takes less than a tenth of the time of `eager`, and saves
           about two seconds. Both sides take more than a thousand times as long as predicted,
           because the costs leave out the creation of the context and the loading of kernels. We
           did not measure how much time each of these two takes.
Use when   Always, unless the first launch of each kernel must be fast. Even then, a server can keep
           lazy loading and warm up with typical requests. A kernel takes GPU memory only after it
           is loaded, so measure free memory after the warm-up. The first launch of a kernel may
           wait until running kernels end. So if two kernels must overlap, launch each of them once
           beforehand.
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
