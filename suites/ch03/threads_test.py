"""Threads: take `OMP_NUM_THREADS=1` out of the container.

Problem    An (n, n) fp32 product on the CPU, 2 n^3 FLOPs, in a process that is already running.
Baseline   one_thread: `OMP_NUM_THREADS=1`, as images and launchers set it (`torchrun` does) so
           that many workers on a host do not fight for its cores. Here there is one worker.
Optimized  every_core: the variable is absent, so that torch takes a thread for each core.
Bound      Instruction issue: the FLOPs divide among the cores, 2x on 2 cores (seen: 1.8 to 2.0x),
           on many until the shares are too small to be worth waking a thread for; on one core 1x.
"""

import torch

from pytest_aisp import Work, compare, fresh_process


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
    at_least={"cpu": 1.2},
)
def test_threads(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
