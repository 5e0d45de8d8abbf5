"""Two buffers: overlap loads with compute if few blocks fit on an SM.

Problem    Apply a filter of 33 taps to fp32 elements, without padding. Blocks of 256 threads loop
           over tiles of 1024 outputs. The inputs of a tile go through shared memory. The x-axis of
           the curve is the number of blocks per SM. The size of the grid sets this number.
Baseline   one_buffer: load a tile into shared memory, wait for all threads, filter the tile, and
           wait again.
Optimized  loaded_ahead: changes `one_buffer`. The loads of the next tile are issued before the
           barrier, into registers, so they are in flight during the filter. Two barriers per tile
           remain.
           two_buffers: changes `loaded_ahead`. Tiles alternate between two buffers in shared
           memory, so no thread has to wait before it stores the next tile. One barrier per tile
           remains.
           library: `torch.nn.functional.conv1d` by cuDNN. cuDNN chooses its own grid, so `library`
           takes the same time at every point of the curve. PyTorch lets cuDNN use TF32 by default,
           so the page turns TF32 off.
Bound      With one block per SM, latency is the limit: a tile is 4 KiB, and the latency of an idle
           DRAM is 0.34 us. In 0.34 us, an SM would receive 5 KiB at the full rate of a copy. In
           `one_buffer`, nothing is loaded while the block filters. With six blocks per SM, DRAM is
           the limit: while one block filters, others load, so all sides take about the same time.
Seen       With one block per SM, all three kernels take two thirds longer than predicted on an
           H100, and one half longer on an H200. So the ratios of their times are as predicted. On
           an H100 with two blocks per SM, `one_buffer` again takes two thirds longer than
           predicted, and the other two kernels take a third longer. With four blocks per SM,
           `one_buffer` takes 25 % longer than predicted, and the other two sides take 8 % longer.
           With six, all three are within about an eighth of their predictions, and `one_buffer` is
           almost as fast as the others. On an H200 with six, `one_buffer` takes almost 40 % longer
           than its memory traffic alone. We did not measure why. We did not time the filter alone.
           With two warps per scheduler, the filter probably waits for shared memory most of the
           time. `two_buffers` has one barrier less per tile than `loaded_ahead`, but is not faster
           with any number of blocks. An earlier version of `loaded_ahead` gained nothing: the loads
           of the next tile came after the barrier, and the compiler moved them behind the filter.
           `library` is slower than all three kernels on both GPUs. It takes more than seven times
           as long as its memory traffic on an H100, and more than ten times as long on an H200. On
           the H200, the profiler shows that cuDNN launches a single kernel, for direct grouped
           convolution in two dimensions. We do not know why this kernel is so slow.
Use when   Few blocks fit on an SM because a tile or its accumulators are large, as in a matrix
           product. With many blocks per SM, one buffer is enough and leaves shared memory for more
           blocks. Use `cp.async` or TMA if the loads would need too many registers
           (`../ch07/async_copy_test.py`, `../ch07/tile_copy_test.py`).
"""

import torch

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("two_buffers.cu")
BLOCK, TAPS, TILE = 256, 33, 1024
SMS = 132  # of an H200, for costs
# A block waits about 0.4 us for a tile: 0.34 us for the latency of an idle DRAM, and the rest for
# the barriers. In 0.4 us, the GPU could do this many operations at its fp32 rate.
WAIT = 2.4e7
# Bytes of shared memory per output. For its 128 outputs, a warp does 9 loads of 16 bytes per lane,
# and 9 loads of taps, which all lanes share. A load of taps takes one cycle and counts as 128
# bytes. Every element is also stored once, in 4 bytes.
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
    """Return the cost of a side. To include waiting, count at least `slots` operations."""
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
