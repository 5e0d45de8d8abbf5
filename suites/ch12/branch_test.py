"""Branch on a value: let the GPU choose instead of the host.

Problem    Advance n oscillators in time. The step size depends on the data: take 32 small steps if
           any position is beyond a limit, and one large step if none is. With fast=1, one position
           is beyond the limit. With fast=0, none is.
Baseline   ask: a kernel sets a flag. The host waits for the flag and launches one branch.
Optimized  predicated: changes `ask`. The host launches both branches without waiting. Each kernel
           reads the flag, and exits at once if the flag selects the other branch.
           captured: changes `predicated`. A CUDA graph contains the same kernels, which is possible
           because nothing waits.
           conditional: changes `captured`. The branches are the two bodies of a conditional node,
           which starts only the kernels of the selected body.
Bound      The host limits `ask` and `predicated`. With fast=0, `ask` waits and launches one step,
           and `predicated` launches 33 steps. The GPU limits `captured`, and also conditional with
           fast=1: a small kernel takes longer to start than to do its work. With fast=0, `captured`
           still starts 33 steps, which may take longer than the wait that it avoids. With fast=0,
           `conditional` starts only one step, so the host's launch of the graph is the limit. We
           did not measure how long a conditional node takes to decide, so the predicted time leaves
           out the decision.
Seen       On an H200, a launch through `cuda_module` takes the host about twice as long as
           predicted, because the predicted time of a launch was measured with a torch operator. So
           `ask` and `predicated` take about twice the predicted time, and `captured` is faster than
           `ask` even with fast=0. `predicated` is predicted to take as long with fast=0 as with
           fast=1, because the host launches the same kernels. In the record, it takes longer with
           fast=1. The record is of few processes, whose times on the host's clock vary, so we do
           not know whether this difference is real. With fast=1, `captured` takes longer than
           predicted. A step reads the flag and then the arrays, so it waits for the L2 twice. The
           predicted time of a kernel in a graph was measured with an addition to one number, which
           waits only once. With fast=1, `conditional` takes about as long as `captured`, although
           the steps of `conditional` read no flag. So the node's decision may take as long as the
           reads of the flag. We did not measure the decision alone. With fast=0, `conditional`
           starts 31 fewer kernels than with fast=1, but saves only about half of the time of 31
           starts. So the host is the limit: launching a graph with a conditional node by
           `cuda.core` takes several times as long as launching a kernel. We did not measure which
           part of this launch takes the time. Because of the slow launch, `conditional` is only
           slightly faster than `captured` with fast=0.
Use when   The next kernels depend on a value on the GPU. Predicate if the branches are short:
           predicated kernels work with or without a graph. Use a conditional node if a branch has
           many kernels and is often skipped. A conditional node with an else needs a driver for
           CUDA 12.8 or newer. If the value is on the host anyway, branch there.
"""

from types import SimpleNamespace

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


def oscillators_of(y):
    """Return the array that a call advances, the flag, and a function that launches kernels."""
    n = y.shape[1]
    flag = torch.zeros(1, dtype=torch.int32, device=y.device)
    blocks = -(-n // BLOCK), BLOCK
    return SimpleNamespace(y=y, now=torch.empty_like(y), fast=flag, n=n, blocks=blocks)


def load_inputs(all_of):
    all_of.fast.zero_()
    kernels.copy_in[all_of.blocks](all_of.y, all_of.now, LIMIT, all_of.fast, all_of.n)


def small_steps(all_of):
    for _ in range(STEPS):
        kernels.step[all_of.blocks](1 / STEPS, all_of.now, all_of.n)


def large_step(all_of):
    kernels.step[all_of.blocks](1.0, all_of.now, all_of.n)


def branch_of_host(all_of):
    if is_set(all_of.fast):
        small_steps(all_of)
    else:
        large_step(all_of)


def both_branches(all_of):
    load_inputs(all_of)
    step_if = kernels.step_if[all_of.blocks]
    for _ in range(STEPS):
        step_if(1 / STEPS, all_of.now, all_of.fast, 1, all_of.n)
    step_if(1.0, all_of.now, all_of.fast, 0, all_of.n)


def ask(y):
    all_of = oscillators_of(y)

    def call():
        load_inputs(all_of)
        branch_of_host(all_of)
        return all_of.now.clone()

    yield call


def predicated(y):
    all_of = oscillators_of(y)

    def call():
        both_branches(all_of)
        return all_of.now.clone()

    yield call


def captured(y):
    all_of = oscillators_of(y)
    replay = capture(lambda: both_branches(all_of))

    def call():
        replay()
        return all_of.now.clone()

    yield call


def branched(all_of):
    """Return a graph in which the GPU chooses between the branches."""
    load_inputs(all_of)  # this call and the next one load the kernels before the capture
    large_step(all_of)
    builder = begun_graph()
    condition = builder.create_condition()
    with stream_of(builder):
        load_inputs(all_of)
        kernels.choose[1, 1](int(condition.handle), all_of.fast)
    if_fast, if_slow = builder.if_else(condition)
    for body, advance in ((if_fast, small_steps), (if_slow, large_step)):
        body.begin_building()
        with stream_of(body):
            advance(all_of)
        body.end_building()
    return builder.end_building().complete()


def conditional(y):
    all_of = oscillators_of(y)
    graph = branched(all_of) if torch.cuda.is_available() else None

    def call():
        if graph is not None:
            launch_graph(graph)
        else:  # without a GPU, the host selects the branch
            load_inputs(all_of)
            kernels.choose[1, 1](0, all_of.fast)
            branch_of_host(all_of)
        return all_of.now.clone()

    yield call


def around(n, between, **starts):
    """Return the cost of a call: clear the flag, copy y in, do `between`, copy the result."""
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
    """Return the cost of both branches. The kernels of the skipped branch only read the flag."""
    small, large = STEPS * stepped(n, **starts), stepped(n, **starts)
    steps = small + Cost(**starts) if fast else STEPS * Cost(**starts) + large
    return around(n, steps, **starts)


def by_node(n, fast):
    steps = (STEPS if fast else 1) * stepped(n, graph_nodes=1)
    return Cost(launches=1) + around(n, Cost(graph_nodes=1) + steps, graph_nodes=1)


@compare(
    baseline=ask,
    optimized=[
        Variant(predicated, at_least="yardstick"),  # with fast=0 it launches far more than ask
        Variant(captured, at_least={"sm90": 1.3}),
        Variant(
            conditional,
            at_least={"sm90": 1.3},
            marks=[pytest.mark.skipif(old_driver(12080), reason=NEEDED)],
        ),
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
