"""Private pools: let graphs that never run at the same time share their memory.

Problem    Run a stack of 4 bf16 SwiGLU layers of width 2048. As in inference servers, the stack is
           captured as 8 CUDA graphs, one per batch size, from 1/8 of `tokens` to all `tokens`. A
           call replays each graph on the first rows of x.
Baseline   apart: each graph has a private pool, which is the default of `torch.cuda.graph`. A
           graph's temporaries keep their memory, although no two graphs run at once.
Optimized  shared: all graphs are captured into one pool, the largest first. The temporaries of a
           graph reuse the memory of the temporaries of earlier graphs. The outputs are still
           referenced, so no graph overwrites them.
Bound      Memory, not time: both sides replay the same kernels. At its peak, a layer holds its
           input, its output, and 3 tensors of the hidden width. `apart` needs this memory for every
           batch size. The sum of the batch sizes is 4.5 times the largest batch size. `shared`
           needs this memory only for the largest batch size. Both sides also need memory for the
           outputs of all batch sizes.
Use when   A program captures many graphs and replays them one after the other. Keep a reference to
           each graph's output while you capture the others, as this page does. If you drop the
           reference, another graph may overwrite the output. Graphs that may run at the same time
           must not share a pool.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, capture, compare

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
    """Return a list of views of x: the first rows for each batch size, the largest size first."""
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


def layer(rows, width):
    hidden = hidden_of(width)
    weights, wide, narrow = 2 * width * hidden, 2 * rows * hidden, 2 * rows * width  # bytes
    ops = {"bf16": 2 * rows * width * hidden}
    return (
        2 * Cost(read=weights + narrow, write=wide, ops=ops, launches=1)  # gate and up
        + Cost(read=wide, write=wide, launches=1)  # silu
        + Cost(read=2 * wide, write=wide, launches=1)
        + Cost(read=weights + wide, write=narrow, ops=ops, launches=1)  # down
        + Cost(read=2 * narrow, write=narrow, launches=1)
    )


def replayed(tokens, width):
    first, *others = [LAYERS * layer(tokens * size // SIZES, width) for size in range(1, SIZES + 1)]
    return sum(others, first)


@compare(
    baseline=apart,
    optimized=[shared],
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 8192, "width": 2048}],
    check_sizes=[{"tokens": 13, "width": 96}],
    work=work,
    bound="tensor",
    costs={apart: replayed, shared: replayed},
)
def test_graph_pools(pair):
    pair.assert_equivalent()
    pair.assert_memory(at_most=0.4, of="reserved")
