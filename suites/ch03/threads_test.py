"""Threads: remove `OMP_NUM_THREADS=1` from the container's environment.

Problem    Compute an (n, n) fp32 product (2 n^3 FLOPs) on the CPU, in a process that is already
           running.
Baseline   one_thread: `OMP_NUM_THREADS=1`. Container images and launchers such as `torchrun` set
           this variable, so that many workers on a host do not compete for its cores. On this page
           there is only one worker.
Optimized  every_core: changes `one_thread`. The variable is not set, so torch starts one thread per
           core.
Bound      Instruction issue. The cores share the FLOPs, so the gain grows with the number of cores.
           The gain stops growing when a core's share of the work takes less time than waking a
           thread.
Use when   One process has the host's cores to itself. If several workers share a host, give each
           worker its share of the cores instead.
"""

import torch

from pytest_aisp import Cost, Work, compare, fresh_process


def inputs(device, n):
    return torch.randn(n, n, device=device), torch.randn(n, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


@fresh_process(environment={"OMP_NUM_THREADS": "1"})
def one_thread(a, b):
    return a @ b


@fresh_process(environment={"OMP_NUM_THREADS": None})
def every_core(a, b):
    return a @ b


def product(n):
    return Cost(read=8 * n * n, write=4 * n * n, ops={"fp32": 2 * n**3})


@compare(
    baseline=one_thread,
    optimized=[every_core],
    inputs=inputs,
    reference=reference,
    sizes=[],
    check_sizes=[{"n": 33}],
    cpu_sizes=[{"n": 768}],
    work=lambda n: Work(read=8 * n * n, write=4 * n * n, flops={"fp32": 2 * n**3}, terms=n),
    bound="issue",
    costs={one_thread: product, every_core: product},
    at_least={"cpu": 1.2},
)
def test_threads(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
