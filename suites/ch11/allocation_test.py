"""Stream-ordered allocation: temporaries from a pool, without a call that waits for the GPU.

Problem    Compute `steps` variances of n fp32 values: of the first 1/steps of the values, of the
           first 2/steps, and so on. Each step allocates four tensors: the mean, the differences
           from the mean, their squares, and the mean of the squares. The differences and the
           squares get larger with each step. torch computes a mean of 2^17 values or more with
           several blocks, which need two more tensors.
Baseline   device_malloc: each tensor is allocated by `cudaMalloc` and freed by `cudaFree`, as in
           CUDA code that allocates where it needs memory. In PyTorch, the environment variable
           `PYTORCH_NO_CUDA_MEMORY_CACHING` has this effect.
Optimized  stream_ordered: `backend:cudaMallocAsync`. `cudaMallocAsync` takes each tensor from the
           driver's pool, and `cudaFreeAsync` returns it, in stream order. The pool keeps freed
           memory, because PyTorch sets the pool's release threshold to the largest value. With the
           driver's default threshold of 0, the pool releases its free memory at each wait for the
           GPU.
           cached: PyTorch's default. PyTorch's own allocator keeps freed memory and hands it out
           again, without a driver call.
Bound      The host, which launches kernels and calls the allocator. In `device_malloc`, `cudaFree`
           waits until the GPU is idle, so the host cannot launch ahead. `cudaMalloc` and `cudaFree`
           also change the GPU's page tables. The costs of `device_malloc` count one wait for each
           tensor. We did not measure how long a call to the driver's pool takes, so the costs of
           `stream_ordered` count it as a torch call that launches nothing.
Seen       `device_malloc` takes more than twice as long as predicted, because `cudaMalloc` and
           `cudaFree` of a tensor take more than twice as long as a wait. `cached` calls neither
           function, but takes 1.5 times as long as predicted. The predicted time of a launch was
           measured with an addition, not with means. The difference between `stream_ordered` and
           `cached` is about as predicted.
Use when   You write CUDA code that needs temporary memory. Allocate it by `cudaMallocAsync`, with a
           release threshold, or by the framework's allocator. In PyTorch, keep the default.
           `PYTORCH_NO_CUDA_MEMORY_CACHING` is only for finding memory bugs.
           `../ch13/allocator_test.py` compares how much reserved memory each allocator leaves
           unused.
"""

import torch

from pytest_aisp import Conditions, Cost, Work, compare, fresh_process

TENSORS = 4  # tensors that a step allocates
SPLIT = 2**17  # smallest n for which a mean takes several blocks, and so two more tensors


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

    Allocating and freeing a tensor takes `calls` driver calls and `waits` waits for the GPU. If
    several blocks compute a mean, it needs two more allocations and a memset (a host step).
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
    """Return a side's cost function, which adds up all steps and the final `torch.stack`."""

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
    conditions=Conditions(l2="warm"),  # with a cold L2, a case takes two minutes
    costs={
        device_malloc: with_calls(calls=0, waits=1),
        stream_ordered: with_calls(calls=2, waits=0),
        cached: with_calls(calls=0, waits=0),
    },
)
def test_allocation(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
