"""A list of results: write each result straight into the final tensor.

Problem    Smooth `frames` frames of n fp32 values exponentially. The result has the state after
           every frame. Each state depends on the previous one, so every side loops over the frames.
Baseline   stacked: collect the states in a list and join them with `torch.stack`.
Optimized  preallocated: changes `stacked`. The whole result is allocated before the loop. `out=`
           writes each state into its slice of the result.
Bound      DRAM. A step reads its frame and writes its state, and the previous state is still in the
           L2. `torch.stack` reads and writes every state once more. `preallocated` saves only this
           copy. Both sides run as a CUDA graph, so the time does not include the allocations of
           `stacked`. `preallocated` also needs less peak memory.
Use when   The number of results is known before the loop. When each result is small, launches are
           the limit, and saving the copy makes no difference.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare

MEMORY = 4  # frames
RATE = 1 / MEMORY


def inputs(device, frames, n):
    return (torch.randn(frames, n, device=device),)


def reference(x):
    states = [x[0].double()]
    for frame in x[1:].double():
        states.append((1 - RATE) * states[-1] + RATE * frame)
    return torch.stack(states)


def stacked(x):
    states = [x[0]]
    for frame in x[1:]:
        states.append(torch.lerp(states[-1], frame, RATE))
    return torch.stack(states)


def preallocated(x):
    states = torch.empty_like(x)
    states[0] = x[0]
    for before, frame, state in zip(states, x[1:], states[1:], strict=False):
        torch.lerp(before, frame, RATE, out=state)
    return states


def smoothing(frames, n):
    """Return the cost of one step per frame. (stacked computes nothing for the first frame.)

    The state before a step is in the L2.
    """
    return frames * Cost(read=4 * n, write=4 * n, ops={"fp32": 3 * n}, launches=1)


@compare(
    baseline=stacked,
    optimized=[preallocated],
    inputs=inputs,
    reference=reference,
    sizes=[{"frames": 64, "n": 1 << 21}],
    check_sizes=[{"frames": 5, "n": 33}, {"frames": st.integers(1, 9), "n": st.integers(1, 300)}],
    cpu_sizes=[{"frames": 64, "n": 1 << 15}],
    work=lambda frames, n: Work(
        read=4 * frames * n,
        write=4 * frames * n,
        flops={"fp32": 3 * frames * n},
        terms=MEMORY,
        roundings=3 * MEMORY,  # difference, product and sum of each remembered frame
    ),
    bound="dram",
    costs={
        stacked: lambda frames, n: (
            smoothing(frames, n) + Cost(read=4 * frames * n, write=4 * frames * n, launches=1)
        ),
        preallocated: smoothing,
    },
    at_least={"sm90": 1.3, "cpu": 1.2},
)
def test_preallocated(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
