"""Inference as one CUDA graph: the host launches once, not 60 times.

Problem    Run the forward pass of 12 fp32 residual MLP blocks (norm, up, GELU, down, add) on 16
           rows, as a small model does for one request.
Baseline   eager: 5 launches per block, 60 in total.
Optimized  captured: changes `eager`. A CUDA graph is replayed with one launch. The graph runs the
           same kernels on the same addresses, so new rows and weights are written in place. The
           time includes neither these writes nor the capture. If a caller's rows are at another
           address, an additional copy is needed.
Bound      The host limits `eager`. The GPU limits `captured`: 60 small kernels run one after
           another.
Seen       `eager` takes longer than predicted, on an H100 by about a quarter. The rate `launch` was
           measured with an addition, and the host probably takes longer to call a product or a
           norm. We did not time these calls. `captured` takes longer than its cost predicts. The
           cost counts the starts of its 60 kernels, and assumes that bytes and FLOPs run at the
           rates of a full GPU. But products of 16 rows leave most SMs idle. We did not time the
           kernels individually. The speedup varies more between processes than on other pages, and
           its values form two groups. We cannot explain this.
Use when   The same shapes repeat, the host cannot launch as fast as the GPU runs, and no step
           between the launches needs the host. Do not capture work that waits for the GPU or
           changes shape.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, capture, compare

ROWS, BLOCKS, WIDEN = 16, 12, 4


def inputs(device, width):
    def weight(fan_in, fan_out):
        return torch.randn(fan_in, fan_out, device=device) / fan_in**0.5

    weights = [(weight(width, WIDEN * width), weight(WIDEN * width, width)) for _ in range(BLOCKS)]
    return torch.randn(ROWS, width, device=device), weights


def forward(x, weights):
    for up, down in weights:
        x = x + F.gelu(F.layer_norm(x, x.shape[1:]) @ up) @ down
    return x


def reference(x, weights):
    return forward(x.double(), [(up.double(), down.double()) for up, down in weights])


def eager(x, weights):
    return forward(x, weights)


def captured(x, weights):
    yield capture(lambda: forward(x, weights))


def block(width, launches, host_steps):
    """Return the cost of one block, whose activations stay in the L2."""
    return Cost(
        read=4 * (2 * WIDEN * width + ROWS) * width,
        write=4 * ROWS * width,
        ops={"fp32": 4 * ROWS * WIDEN * width**2},
        launches=launches,
        host_steps=host_steps,
    )


@compare(
    baseline=eager,
    optimized=[captured],
    inputs=inputs,
    reference=reference,
    sizes=[{"width": 256}],
    check_sizes=[{"width": 33}],
    work=lambda width: Work(
        read=4 * (2 * BLOCKS * WIDEN * width + ROWS) * width,
        write=4 * ROWS * width,
        flops={"fp32": 4 * BLOCKS * ROWS * WIDEN * width**2},
        terms=WIDEN * width,
        roundings=5 * BLOCKS,
    ),
    bound="launch",
    costs={
        # A block creates seven tensors, three of them in the norm.
        eager: lambda width: BLOCKS * block(width, launches=5, host_steps=7),
        captured: lambda width: (
            Cost(launches=1, graph_nodes=5 * BLOCKS) + BLOCKS * block(width, 0, 0)
        ),
    },
    at_least={"sm90": 1.1},
)
def test_forward_graph(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
