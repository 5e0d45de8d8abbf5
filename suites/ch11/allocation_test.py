"""Stream-ordered allocation: temporaries from a pool, without a call that waits for the GPU.

Problem    The variances of the first 1/steps, 2/steps, ... of n fp32 values. Each of the `steps`
           steps allocates four tensors: two means, the differences from the first one, and their
           squares. The last two grow from step to step. A mean of 2^17 values or more takes several
           blocks, for which torch allocates two more tensors.
Baseline   device_malloc: each tensor is allocated by `cudaMalloc` and freed by `cudaFree`, as in
           CUDA code that allocates where it needs memory. In PyTorch, the variable
           `PYTORCH_NO_CUDA_MEMORY_CACHING` does this.
Optimized  stream_ordered: `backend:cudaMallocAsync`. Each tensor comes from the driver's pool
           by `cudaMallocAsync`, and goes back by `cudaFreeAsync`, in the order of the stream. The
           pool keeps its memory, because PyTorch sets its release threshold to the largest value.
           With the driver's default of 0, the pool gives free memory back to the GPU at each wait.
           cached: PyTorch's default. Its own allocator keeps freed memory and hands it out again,
           without any call of the driver.
Bound      The host: its launches and its calls of the allocator. `cudaFree` waits until the GPU is
           idle. So on device_malloc the host cannot launch ahead, and both calls also change the
           GPU's page tables. The costs count one wait for each tensor. They count a call of the
           driver's pool like a call of torch that launches nothing, because no rate for it was
           measured.
Seen       device_malloc takes more than twice as long as predicted: `cudaMalloc` and `cudaFree` of
           a tensor take more than twice as long as a wait. cached makes no such calls, but it takes
           1.5 times as long as predicted: the rate of a launch was measured with an addition, not
           with means. stream_ordered takes longer than cached by about as much as predicted.
Use when   You write CUDA code with temporaries: take them from `cudaMallocAsync` with a release
           threshold, or from the framework's allocator. In PyTorch, keep the default.
           `PYTORCH_NO_CUDA_MEMORY_CACHING` is meant for finding memory bugs.
           `../ch13/allocator_test.py` compares the memory that the allocators leave unused.
"""

import torch

from pytest_aisp import Conditions, Cost, Work, compare, fresh_process

TENSORS = 4  # tensors that a step allocates
SPLIT = 2**17  # values from which torch sums by several blocks, which need two more tensors each


def inputs(device, steps, n):
    return torch.randn(n, device=device), steps


def lengths(steps, n):
    return [n * (k + 1) // steps for k in range(steps)]


def reference(x, steps):
    parts = [x.double()[:length] for length in lengths(steps, x.numel())]
    return torch.stack([((part - part.mean()) ** 2).mean() for part in parts])


def variances(x, steps):
    results = []
    for length in lengths(steps, x.numel()):
        part = x[:length]
        apart = part - part.mean()
        results.append((apart * apart).mean())
    return torch.stack(results)


@fresh_process(environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
def device_malloc(x, steps):
    return variances(x, steps)


@fresh_process(environment={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"})
def stream_ordered(x, steps):
    return variances(x, steps)


@fresh_process(environment={"PYTORCH_ALLOC_CONF": None})
def cached(x, steps):
    return variances(x, steps)


def step_cost(length, calls, waits):
    """Return the cost of a step.

    An allocation and its release make `calls` calls of the driver, and wait `waits` times for the
    GPU. A mean by several blocks needs two more allocations and a memset, which is a host step.
    """
    split = length >= SPLIT
    tensors, memsets = TENSORS + 4 * split, 2 * split
    return Cost(
        l2=24 * length,
        ops={"fp32": 4 * length},
        launches=4,
        host_steps=1 + memsets + calls * tensors,
        syncs=waits * tensors,
    )


def with_calls(calls, waits):
    """Return a function of the size that returns the cost of all steps and of the last stack."""

    def cost(steps, n):
        total = Cost(read=4 * n, write=4 * steps, launches=1, host_steps=calls)
        for length in lengths(steps, n):
            total = total + step_cost(length, calls, waits)
        return total

    return cost


@compare(
    baseline=device_malloc,
    optimized=[stream_ordered, cached],
    inputs=inputs,
    reference=reference,
    sizes=[{"steps": 32, "n": 2**20}],
    check_sizes=[{"steps": 5, "n": 333}],
    work=lambda steps, n: Work(
        read=4 * n, write=4 * steps, flops={"fp32": 2 * n}, terms=n, roundings=4
    ),
    bound="host",
    conditions=Conditions(l2="warm"),  # with a cold one, a case takes two minutes
    costs={
        device_malloc: with_calls(calls=0, waits=1),
        stream_ordered: with_calls(calls=2, waits=0),
        cached: with_calls(calls=0, waits=0),
    },
)
def test_allocation(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
