"""Two buffers: overlap loads with work, as more blocks per SM would.

Problem    A filter of 33 taps over fp32 elements, as a valid convolution. Blocks of 256 threads
           walk tiles of 1024 outputs through shared memory. The key of the curve is the number of
           blocks per SM, which is the size of the grid. No side wastes a resource to lower it.
Baseline   one_buffer: load a tile into shared memory, wait for all threads, filter it, wait again.
Optimized  loaded_ahead: changes one_buffer. The loads of the next tile begin before the barrier and
           end in registers. So they are on their way during the filter. It still has two barriers.
           two_buffers: changes loaded_ahead. Tiles alternate between two buffers in shared memory,
           so no thread has to wait before it stores the next tile. One barrier per tile is left.
           library: `torch.nn.functional.conv1d` by cuDNN. It chooses its own grid, so the key does
           not change it. PyTorch lets cuDNN use TF32 by default, so the page turns that off.
Bound      With one block per SM, latency: a tile is 4 KiB, and even an idle DRAM needs 0.34 us for
           it. At the full rate of a copy, an SM would receive 5 KiB in that time. one_buffer also
           has nothing in flight during the filter. With six blocks, DRAM: while one block filters,
           others load. So the curves meet.
Seen       On an H100, all three kernels take about two thirds longer than predicted with one block
           per SM, so their ratios are as predicted. With two blocks, one_buffer also takes that
           much longer, and the others a third. We did not time the filter alone. With two warps per
           scheduler, it probably waits for shared memory most of the time. two_buffers has one
           barrier less than loaded_ahead, and gains nothing by that. An earlier loaded_ahead gained
           nothing either: the loads of the next tile came after the barrier, and the compiler moved
           them behind the filter.
Use when   Few blocks fit an SM, because a tile or its accumulators are large, as in a matrix
           product. With many blocks per SM, one buffer is enough, and it leaves shared memory for
           more blocks. Use `cp.async` or TMA if the loads would need too many registers
           (`../ch07/async_copy_test.py`, `../ch07/tile_copy_test.py`).
"""

import torch

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("two_buffers.cu")
BLOCK, TAPS, TILE = 256, 33, 1024
SMS = 132  # of an H200, for costs
# A block waits about 0.4 us for a tile: 0.34 us for an idle DRAM, and the rest for the barriers. In
# that time, the GPU could do this many operations at its fp32 rate.
WAIT = 2.4e7
# Bytes of shared memory per output. For its 128 outputs, a warp has 9 loads of 16 bytes per lane,
# and 9 loads of taps that all lanes share. Each of these counts 128 bytes, as one cycle.
# Every element is also stored once.
SHARED = (9 * 16 * 32 + 9 * 128) / 128 + 4


def inputs(device, tiles, blocks):
    return (
        torch.randn(TAPS, device=device),
        torch.randn(TILE * tiles + TAPS - 1, device=device),
        blocks,
    )


def reference(taps, x, blocks):
    n, x = x.numel() - TAPS + 1, x.double()
    return sum(tap * x[k : k + n] for k, tap in enumerate(taps.double()))


def walk(kernel, taps, x, blocks):
    n = x.numel() - TAPS + 1
    out = torch.empty(n, device=x.device)
    tiles = n // TILE
    grid = blocks * torch.cuda.get_device_properties(x.device).multi_processor_count
    kernel[min(grid, -(-tiles // 2)), BLOCK](taps, x, out, tiles)
    return out


def one_buffer(taps, x, blocks):
    return walk(kernels.one_buffer, taps, x, blocks)


def loaded_ahead(taps, x, blocks):
    return walk(kernels.loaded_ahead, taps, x, blocks)


def two_buffers(taps, x, blocks):
    return walk(kernels.two_buffers, taps, x, blocks)


def library(taps, x, blocks):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return torch.nn.functional.conv1d(x[None, None], taps[None, None])[0, 0]


def filtered(tiles, blocks, slots=0):
    """Return the cost of a side. `slots` is its time, if its operations take less."""
    n = TILE * tiles
    ops = {"fp32": max(2 * TAPS * n, slots)}
    return Cost(read=4 * n, write=4 * n, shared=SHARED * n, ops=ops, launches=1)


def in_turn(tiles, blocks):
    """Return the cost if a block's loads and its filter take turns."""
    rounds = tiles / (SMS * blocks)
    # In a cycle, an SM does 256 operations or moves 128 bytes of shared memory.
    filter_alone = max(2 * TAPS, 2 * SHARED) * TILE * SMS
    return filtered(tiles, blocks, slots=(WAIT + filter_alone) * rounds)


def at_once(tiles, blocks):
    """Return the cost if a block filters while its next loads are under way."""
    return filtered(tiles, blocks, slots=WAIT * tiles / (SMS * blocks))


@compare(
    baseline=one_buffer,
    optimized=[
        Variant(loaded_ahead, at_least={"sm90": 1.4}),
        Variant(two_buffers, at_least={"sm90": 1.4}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"tiles": SMS * 2**10, "blocks": blocks} for blocks in (1, 2, 4, 6)],
    check_sizes=[{"tiles": 1, "blocks": 1}, {"tiles": 7, "blocks": 1}],
    work=lambda tiles, blocks: Work(
        read=4 * TILE * tiles, write=4 * TILE * tiles, flops={"fp32": 2 * TAPS * TILE * tiles}
    ),
    bound="latency",
    costs={
        one_buffer: in_turn,
        loaded_ahead: at_once,
        two_buffers: at_once,
        library: filtered,
    },
    sweep=Sweep("blocks", judged=[1]),
)
def test_two_buffers(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
