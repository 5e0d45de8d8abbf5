"""Branch on a value: let the GPU choose, not the host.

Problem    n oscillators are advanced in time, with a step size that depends on the data: 32 small
           steps if any position is beyond a limit, else one large step. With fast=1 one position is
           beyond it, and with fast=0 none is.
Baseline   ask: a kernel sets a flag, the host waits for it, and launches one branch.
Optimized  predicated: of ask. The host does not wait and launches both branches. Each kernel reads
           the flag, and returns if its branch is not wanted.
           captured: of predicated. The same kernels as a CUDA graph, which has no wait in it.
           conditional: of captured. The branches are the two bodies of a conditional node, which
           starts the kernels of only one of them.
Bound      The host for ask and predicated. With fast=0, ask waits and launches one step, and
           predicated launches 33. The GPU for captured and conditional: each start of a small
           kernel takes longer than its work. With fast=0, conditional starts only one step. No
           rate was measured for the decision of a conditional node, so the predicted time lacks it.
Use when   The next kernels depend on a value on the GPU. Predicate if the branches are short: it
           needs no graph, and a graph can contain it. Use a conditional node if a branch that is
           often skipped has many kernels. An else needs a driver for CUDA 12.8 or newer, because
           older ones have only if. If the value is on the host anyway, branch there.
"""

import pytest
import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, capture, compare, cuda_module

from .conditional_graphs import begun_graph, launch_graph, old_driver, stream_of

kernels = cuda_module("branch.cu")
BLOCK = 256
LIMIT, STEPS = 8.0, 32
NEEDED = "an else branch needs a driver for CUDA 12.8 or newer"


def inputs(device, n, fast):
    y = torch.randn(2, n, device=device).clamp(-4, 4)
    if fast:
        y[0, torch.randint(n, (1,), device=device)] = 4 * LIMIT
    return (y,)


def reference(y):
    x, v = y.double()
    steps = STEPS if (x.abs() > LIMIT).any() else 1
    for _ in range(steps):
        v = v - x / steps
        x = x + v / steps
    return torch.stack([x, v])


def is_set(flag):
    """Wait for the GPU, and return whether it has set `flag`."""
    if flag.is_cuda and not torch.cuda.is_available():
        return False  # --aisp-compile runs the page with tensors that have no values
    return bool(flag.item())


class Oscillators:
    """The kernels of a call, the flag, and the array that they advance."""

    def __init__(self, y):
        self.y, self.now, self.n = y, torch.empty_like(y), y.shape[1]
        self.fast = torch.zeros(1, dtype=torch.int32, device=y.device)
        self.grid = -(-self.n // BLOCK), BLOCK

    def begin(self):
        self.fast.zero_()
        kernels.copy_in[self.grid](self.y, self.now, LIMIT, self.fast, self.n)

    def small_steps(self):
        for _ in range(STEPS):
            kernels.step[self.grid](1 / STEPS, self.now, self.n)

    def large_step(self):
        kernels.step[self.grid](1.0, self.now, self.n)

    def branch_of_host(self):
        if is_set(self.fast):
            self.small_steps()
        else:
            self.large_step()

    def both_branches(self):
        self.begin()
        for _ in range(STEPS):
            kernels.step_if[self.grid](1 / STEPS, self.now, self.fast, 1, self.n)
        kernels.step_if[self.grid](1.0, self.now, self.fast, 0, self.n)


def ask(y):
    oscillators = Oscillators(y)

    def call():
        oscillators.begin()
        oscillators.branch_of_host()
        return oscillators.now.clone()

    yield call


def predicated(y):
    oscillators = Oscillators(y)

    def call():
        oscillators.both_branches()
        return oscillators.now.clone()

    yield call


def captured(y):
    oscillators = Oscillators(y)
    replay = capture(oscillators.both_branches)

    def call():
        replay()
        return oscillators.now.clone()

    yield call


def branched(oscillators):
    """Return a graph in which the GPU chooses between the branches."""
    oscillators.begin()  # loads the kernels before the capture
    oscillators.large_step()
    builder = begun_graph()
    condition = builder.create_condition()
    with stream_of(builder):
        oscillators.begin()
        kernels.choose[1, 1](int(condition.handle), oscillators.fast)
    if_fast, if_slow = builder.if_else(condition)
    for body, steps in ((if_fast, oscillators.small_steps), (if_slow, oscillators.large_step)):
        body.begin_building()
        with stream_of(body):
            steps()
        body.end_building()
    return builder.end_building().complete()


def conditional(y):
    oscillators = Oscillators(y)
    graph = branched(oscillators) if torch.cuda.is_available() else None

    def call():
        if graph is not None:
            launch_graph(graph)
        else:  # without a GPU, the host chooses the branch
            oscillators.begin()
            kernels.choose[1, 1](0, oscillators.fast)
            oscillators.branch_of_host()
        return oscillators.now.clone()

    yield call


def around(n, between, **starts):
    """Return the cost of `between`, after the flag and the copy, and before the result's copy."""
    return (
        Cost(**starts)
        + Cost(read=8 * n, write=8 * n, **starts)
        + between
        + Cost(read=8 * n, write=8 * n, launches=1)
    )


def stepped(n, **starts):
    """Return the cost of one step. The arrays stay in the L2."""
    return Cost(l2=16 * n, ops={"fp32": 4 * n}, **starts)


def asked(n, fast):
    steps = (STEPS if fast else 1) * stepped(n, launches=1)
    return around(n, Cost(syncs=1) + steps, launches=1)


def both(n, fast, **starts):
    """Return the cost of both branches. The kernels of one of them only read the flag."""
    small, large = STEPS * stepped(n, **starts), stepped(n, **starts)
    steps = small + Cost(**starts) if fast else STEPS * Cost(**starts) + large
    return around(n, steps, **starts)


def by_node(n, fast):
    steps = (STEPS if fast else 1) * stepped(n, graph_nodes=1)
    return Cost(launches=1) + around(n, Cost(graph_nodes=1) + steps, graph_nodes=1)


@compare(
    baseline=ask,
    optimized=[
        predicated,
        captured,
        Variant(conditional, marks=[pytest.mark.skipif(old_driver(12080), reason=NEEDED)]),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**14, "fast": fast} for fast in (0, 1)],
    check_sizes=[
        {"n": 301, "fast": 0},
        {"n": 301, "fast": 1},
        {"n": st.integers(33, 600), "fast": st.integers(0, 1)},
    ],
    work=lambda n, fast: Work(read=8 * n, write=8 * n, flops={"fp32": 4 * n}, roundings=4 * STEPS),
    bound="host",
    costs={
        ask: asked,
        predicated: lambda n, fast: both(n, fast, launches=1),
        captured: lambda n, fast: Cost(launches=1) + both(n, fast, graph_nodes=1),
        conditional: by_node,
    },
)
def test_branch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
