"""Affinity: bind the threads of an OpenMP team to neighboring cores.

Problem    Run a chain of short fp32 operations on the CPU. The threads of an OpenMP team share each
           operation. The team has half as many threads as the process has cores, as if the process
           were one of two workers on a host. If a core runs two threads at once (SMT), Linux counts
           it as two, and so does the page. An operation uses at most 32 threads, because torch
           gives each thread at least 32,768 values.
Baseline   free: the default. The kernel may move a thread to any core between two operations.
Optimized  close: changes `free`. `OMP_PROC_BIND=close` and `OMP_PLACES=cores` are set. Each thread
           stays on one core, and the cores are neighbors. On a host with two sockets and without
           SMT, all cores are on the same socket. With SMT, the team has a thread for every physical
           core, so `close` and `spread` bind the team in the same way.
           spread: changes `close`. With `OMP_PROC_BIND=spread`, the team is spread over both
           sockets, so each barrier has to synchronize both sockets.
Bound      Latency. The data stays in the caches of the cores, and each operation ends with a
           barrier for the team. After the kernel has moved a thread, the thread's data is in
           another core's cache. On an idle machine the kernel rarely moves threads, so `close` is
           neutral.
Use when   Each process has its own cores, on a host with several sockets or with other busy
           processes. A process binds its first thread to the first core that it may use. So make
           sure that two processes do not bind their threads to the same cores. Sharing cores is far
           slower than no binding. A team that streams data from memory and has few barriers may be
           faster with `spread`, because it uses the memory channels of both sockets.
"""

import os

import torch

from pytest_aisp import Cost, Variant, Work, compare, fresh_process

STEPS = 16
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
TEAM = {"OMP_NUM_THREADS": str(max(1, CORES // 2))}
ANYWHERE = {**TEAM, **dict.fromkeys(("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"))}


def bound_to(policy):
    """Return environment variables that give each thread of the team its own core."""
    return {**ANYWHERE, "OMP_PROC_BIND": policy, "OMP_PLACES": "cores"}


def inputs(device, n):
    return torch.randn(n, device=device), torch.randn(n, device=device)


def reference(x, y):
    x, y = x.double(), y.double()
    for _ in range(STEPS):
        x = y + 0.5 * x
    return x


def chain(x, y):
    for _ in range(STEPS):
        x = torch.add(y, x, alpha=0.5)
    return x


@fresh_process(environment=ANYWHERE)
def free(x, y):
    return chain(x, y)


@fresh_process(environment=bound_to("close"))
def close(x, y):
    return chain(x, y)


@fresh_process(environment=bound_to("spread"))
def spread(x, y):
    return chain(x, y)


def steps(n):
    return STEPS * Cost(read=8 * n, write=4 * n, ops={"fp32": 2 * n})


@compare(
    baseline=free,
    optimized=[Variant(close, at_least="neutral"), Variant(spread, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[],
    check_sizes=[{"n": 1023}],
    cpu_sizes=[{"n": 1 << 20}],
    work=lambda n: Work(read=8 * n, write=4 * n, flops={"fp32": 2 * STEPS * n}, roundings=STEPS),
    bound="latency",
    costs=dict.fromkeys((free, close, spread), steps),
)
def test_affinity(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
