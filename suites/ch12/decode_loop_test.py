"""Autoregressive loop: capture one step, so that the number of steps can vary.

Problem    Predict the next `steps` vectors of 8 sequences with an fp32 recurrent network of 4
           layers. Each prediction is the input of the next step, so the steps run one after
           another.
Baseline   eager: 13 launches per step.
Optimized  captured_step: changes `eager`. One step is a CUDA graph that reads and overwrites its
           own input and hidden state. The graph contains five copies. Before the first step, the
           host copies the input and the state to the graph's tensors. After each step, the host
           copies the prediction out. So the host makes two launches per step.
           captured_loop: changes `eager`. All steps are one graph, which the host launches once.
           The graph has no copies, but it always makes the same number of steps.
Bound      The host limits `eager`. The GPU limits the other sides: their small kernels run one
           after another, and a product of 8 rows leaves most SMs idle. The costs count the start of
           each kernel, and assume that all SMs share the work of reading the weights from the L2.
Seen       `captured_loop` takes several times as long as predicted, so its kernels take longer to
           run than to start. A product with 8 rows and 256 columns has only a few tiles. So a few
           SMs read all weights of a layer, and each SM loops over the whole inner dimension. We did
           not measure how long a product takes, or whether cuBLAS splits it and adds the parts in a
           second kernel. `captured_step` takes longer than `captured_loop`. The difference is about
           the time of six copies and one graph launch per step, as in `launch_cost_test.py`.
           `eager` takes almost twice as long as predicted, because the predicted time of a launch
           was measured with an addition, not with products.
Use when   A model's output is its next input, as in decoding and forecasting. Capture one step if
           the number of steps varies, or if the host must look at a result between steps. Capture
           the whole loop if the number of steps is fixed. A whole loop needs no copies, but its
           graph has about `steps` times as many nodes to instantiate.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, capture, compare

ROWS, LAYERS = 8, 4
KERNELS = 3 * LAYERS + 1


def inputs(device, steps, width):
    def weights():  # scaled so that the states neither vanish nor become chaotic
        return 0.7 * torch.randn(LAYERS, width, width, device=device) / width**0.5

    first, head = torch.randn(ROWS, width, device=device), torch.randn(width, width, device=device)
    hidden = torch.randn(LAYERS, ROWS, width, device=device)
    return first, hidden, weights(), weights(), head / width**0.5, steps


def one_step(x, hidden, ups, recurrent, head):
    """Return the prediction and the new hidden state of each layer."""
    states = []
    for h, up, back in zip(hidden, ups, recurrent, strict=True):
        x = torch.mm(x, up).addmm_(h, back).tanh_()
        states.append(x)
    return x @ head, states


def rollout(x, hidden, ups, recurrent, head, steps):
    hidden, ups, recurrent = hidden.unbind(0), ups.unbind(0), recurrent.unbind(0)
    outputs = []
    for _ in range(steps):
        x, hidden = one_step(x, hidden, ups, recurrent, head)
        outputs.append(x)
    return outputs


def reference(x, hidden, ups, recurrent, head, steps):
    x, hidden, ups, recurrent, head = (t.double() for t in (x, hidden, ups, recurrent, head))
    outputs = []
    for _ in range(steps):
        states = []
        for h, up, back in zip(hidden, ups, recurrent, strict=True):
            x = torch.tanh(x @ up + h @ back)
            states.append(x)
        x, hidden = x @ head, states
        outputs.append(x)
    return outputs


def eager(x, hidden, ups, recurrent, head, steps):
    return rollout(x, hidden, ups, recurrent, head, steps)


def captured_step(x, hidden, ups, recurrent, head, steps):
    ups, recurrent = ups.unbind(0), recurrent.unbind(0)
    x_now, hidden_now = torch.zeros_like(x), torch.zeros_like(hidden)
    states_now = hidden_now.unbind(0)

    def advance():
        y, states = one_step(x_now, states_now, ups, recurrent, head)
        x_now.copy_(y)
        for kept, state in zip(states_now, states, strict=True):
            kept.copy_(state)

    replay = capture(advance)

    def call():
        x_now.copy_(x)
        hidden_now.copy_(hidden)
        outputs = []
        for _ in range(steps):
            replay()
            outputs.append(x_now.clone())
        return outputs

    yield call


def captured_loop(x, hidden, ups, recurrent, head, steps):
    yield capture(lambda: rollout(x, hidden, ups, recurrent, head, steps))


def step_cost(width, **starts):
    """Return the cost of one step. The weights and the states stay in the L2."""
    weights, products = (2 * LAYERS + 1) * width**2, 2 * (2 * LAYERS + 1) * ROWS * width**2
    return Cost(l2=4 * weights, ops={"fp32": products}, **starts)


@compare(
    baseline=eager,
    optimized=[
        Variant(captured_step, at_least={"sm90": 1.7}),
        Variant(captured_loop, at_least={"sm90": 2.2}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"steps": 64, "width": 256}],
    check_sizes=[
        {"steps": 3, "width": 33},
        {"steps": st.integers(1, 5), "width": st.integers(2, 40)},
    ],
    work=lambda steps, width: Work(
        flops={"fp32": 2 * (2 * LAYERS + 1) * steps * ROWS * width**2},
        terms=2 * width,
        roundings=2 * KERNELS * steps,
    ),
    bound="launch",
    costs={
        eager: lambda steps, width: steps * step_cost(width, launches=KERNELS),
        captured_step: lambda steps, width: (
            Cost(launches=2)
            + steps * step_cost(width, launches=2, graph_nodes=KERNELS + LAYERS + 1)
        ),
        captured_loop: lambda steps, width: (
            Cost(launches=1) + steps * step_cost(width, graph_nodes=KERNELS)
        ),
    },
)
def test_decode_loop(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
