"""Private pools: one pool of memory for the graphs of all batch sizes.

Problem    A stack of 4 SwiGLU layers of width 2048 in bf16, captured as CUDA graphs for 8 numbers
           of tokens from 1/8 of `tokens` to all of it, as inference servers capture their batch
           sizes; a call replays each on the first rows of x.
Baseline   apart: each graph has a private pool, which is what `torch.cuda.graph` gives it: what one
           graph's temporaries need, no other may use, although no two graphs run at once.
Optimized  shared: all are captured into one pool, the largest first. A graph's temporaries lie
           where those of another did; outputs are still held, so none is overwritten.
Bound      Memory. A layer holds silu(gate), up and their product, 3 x 5440 columns of bf16 at its
           most beside rows of width 2048 in and out: 41 KB a token, 0.33 GB for 8192. Apart, 1/8 +
           2/8 + ... + 8/8 = 4.5 times that, and 0.15 GB of outputs, 1.65 GB; shared once and the
           outputs, 0.48 GB: 0.29. Time is none of this page's: both replay the same kernels.
Seen       An H200: 1.5 GiB taken from it, and 422 MiB: 0.27.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Work, capture, compare

from .transformer import hidden_of

LAYERS, SIZES = 4, 8


def inputs(device, tokens, width):
    hidden = hidden_of(width)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    gates, ups = torch.randn(2, LAYERS, hidden, width, device=device) * width**-0.5
    downs = torch.randn(LAYERS, width, hidden, device=device) * hidden**-0.5
    return x, gates.bfloat16(), ups.bfloat16(), downs.bfloat16()


def stack(x, gates, ups, downs):
    for gate, up, down in zip(gates, ups, downs, strict=True):
        x = x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    return x


def batches(x):
    """Return the first rows of x, of each batch size, the largest first."""
    return [x[: len(x) * size // SIZES] for size in range(SIZES, 0, -1)]


def reference(x, *weights):
    weights = [w.double() for w in weights]
    return tuple(stack(rows.double(), *weights) for rows in batches(x))


def replays(graphs):
    return lambda: tuple(graph() for graph in graphs)


def apart(x, *weights):
    yield replays([capture(lambda rows=rows: stack(rows, *weights)) for rows in batches(x)])


def shared(x, *weights):
    pool = torch.cuda.graph_pool_handle() if x.is_cuda else None
    steps = [lambda rows=rows: stack(rows, *weights) for rows in batches(x)]
    yield replays([capture(step, pool=pool) for step in steps])


def work(tokens, width):
    rows = sum(tokens * size // SIZES for size in range(1, SIZES + 1))
    weights = 3 * LAYERS * width * hidden_of(width)
    return Work(
        read=2 * (SIZES * weights + rows * width),
        write=2 * rows * width,
        flops={"bf16": 2 * rows * weights},
        terms=hidden_of(width),
        roundings=4 * LAYERS,
    )


@compare(
    baseline=apart,
    optimized=[shared],
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 8192, "width": 2048}],
    check_sizes=[{"tokens": 13, "width": 96}],
    work=work,
    bound="tensor",
)
def test_graph_pools(pair):
    pair.assert_equivalent()
    pair.assert_memory(at_most=0.4, of="reserved")
