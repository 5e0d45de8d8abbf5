"""Wave quantization: one block more than the number of SMs costs as much as a whole wave.

Problem    For each of 1024 * blocks vectors of 4 floats, find the squared distance to the nearest
           of `codes` codewords. `blocks` is the number of blocks that the baseline launches. The
           page measures a curve over this number, at points chosen for the 132 SMs of an H200.
Baseline   whole: blocks of 256 threads, with 4 vectors per thread. So a block has 1024 vectors, and
           a thread uses each codeword four times after loading it from shared memory.
Optimized  halves: changes `whole`. Blocks have 128 threads, so there are twice as many blocks.
           quarters: changes `halves`. Blocks have 64 threads, so there are four times as many
           blocks as in `whole`.
           split: changes `whole`. Four blocks share 1024 vectors, and each of the four compares
           these vectors with a quarter of the codewords. An atomic minimum combines the four
           results. A separate kernel first sets all results to infinity. There is no library
           variant, because no library offers this search as one call. In torch, the search takes a
           product and a minimum, which write and read all distances.
Bound      Instruction issue. An SM has four schedulers, and each warp belongs to one of them. A
           block of `whole` gives each scheduler two warps, which keep the scheduler busy nearly all
           the time. So two blocks on one SM take twice as long as one block. The scheduler with the
           most warps determines the time. With 132 blocks, each SM has one block. With 133, one SM
           has two blocks, and the other 131 SMs wait for it. So the time of whole rises in steps,
           one after every 132 blocks. `halves` has one warp per scheduler and block, so its steps
           are half as high. `quarters` has two warps per block. These warps use only two of the
           four schedulers, so the steps of `quarters` are as high as the steps of `halves`. `split`
           keeps eight warps per block, but each warp has a quarter of the work, so its steps are a
           quarter as high as the steps of `whole`.
Seen       On an H200 with 133 blocks or more, all sides take at most a tenth longer than predicted.
           `whole` takes the same time with 133, 198 and 264 blocks, and one and a half times as
           long with 265 blocks. So the step after 264 blocks is as high as predicted. The step
           after 132 blocks is not recorded on one GPU: 66 and 132 blocks are recorded only on an
           H100, and the other points only on an H200. Just after a step, with 133, 265 and 529
           blocks, all three sides gain, and `split` gains most. The gains shrink as the number of
           waves grows. With 264 and 528 blocks, where no SM is idle, `halves` and `quarters` are a
           few percent slower than `whole`, and `split` is slightly faster. On an H100 with 66
           blocks, `halves` and `quarters` take one half to two thirds longer than predicted,
           probably because a scheduler then has a single warp. The scheduler issues nothing while
           this warp waits for a result, a codeword or a barrier. In `whole`, a second warp fills
           part of this time. On an H100 with 132 blocks, `halves` and `quarters` gain nothing, and
           `quarters` takes a quarter longer than predicted. `quarters` is slower than `halves` at
           every point, probably because its blocks load the same codewords with half as many
           threads. `split` gains a little even where no SM is idle, probably because a scheduler
           has more warps to choose from.
Use when   A grid has few blocks per SM, and the number of blocks is not a multiple of the number of
           SMs. An example is a matrix product with large tiles. Compute blocks / SMs. If the
           quotient is just above 1 or 2, split the inner loop, or choose a smaller tile with at
           least four warps per block. If the quotient is just below 1 or 2, or above about 10, keep
           the large tile, because a large tile reuses more data. The time of a persistent kernel
           that processes whole tiles one after another has the same steps. If a kernel is limited
           by memory latency, the blocks of an SM do not slow each other down. The time then rises
           in a step only when no SM has room for another block.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Work, compare, cuda_module

kernels = cuda_module("wave_quantization.cu")
SMS, SCHEDULERS, LANES = 132, 4, 32  # on an H200, for costs
THREADS, EACH, PARTS = 256, 4, 4
# Instructions per vector and codeword: 4 subtractions, 4 multiplications or multiply-adds, a
# minimum, and a fourth of a load. The loop adds 5 instructions per 16 pairs of vector and codeword.
# The peak counts 2 FLOPs per issue slot, because it assumes multiply-adds.
SLOTS = 9.25 + 5 / 16


def inputs(device, blocks, codes):
    """Return vectors and codewords that consist of small integers, so that all distances are
    exact."""
    vectors, codebook = (
        torch.randint(-500, 500, (n, 4), device=device).float()
        for n in (THREADS * EACH * blocks, codes)
    )
    return vectors, codebook


def reference(vectors, codebook):
    codebook = codebook.double()
    parts = vectors.double().split(2**16)  # all distances at once would not fit in memory
    return torch.cat([distances(part, codebook).amin(1) for part in parts])


def distances(a, b):
    return (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T


def search(vectors, codebook, threads):
    out = torch.empty(len(vectors), device=vectors.device)
    blocks = len(vectors) // (EACH * threads)
    kernels.whole_codebook[blocks, threads](vectors, codebook, out, len(codebook))
    return out


def whole(vectors, codebook):
    return search(vectors, codebook, THREADS)


def halves(vectors, codebook):
    return search(vectors, codebook, THREADS // 2)


def quarters(vectors, codebook):
    return search(vectors, codebook, THREADS // 4)


def split(vectors, codebook):
    out = torch.full((len(vectors),), torch.inf, device=vectors.device)
    grid = len(vectors) // (EACH * THREADS), PARTS
    bits = out.view(torch.int32)
    kernels.part_of_codebook[grid, THREADS](vectors, codebook, bits, len(codebook))
    return out


def searched(blocks, codes, threads, parts=1):
    """Return the cost if each block has `threads` threads and 1 / `parts` of the codewords."""
    vectors = THREADS * EACH * blocks
    launched = parts * vectors // (EACH * threads)
    blocks_of_an_sm = -(-launched // SMS)
    warps = -(-blocks_of_an_sm * threads // (LANES * SCHEDULERS))  # on the busiest scheduler
    slots = SLOTS * LANES * EACH * codes / parts * warps * SCHEDULERS * SMS
    return Cost(read=16 * (vectors + codes), write=4 * vectors, ops={"fp32": 2 * slots}, launches=1)


def filled_and_searched(blocks, codes):
    fill = Cost(write=4 * THREADS * EACH * blocks, launches=1)
    return fill + searched(blocks, codes, THREADS, PARTS)


@compare(
    baseline=whole,
    optimized=[halves, quarters, split],
    inputs=inputs,
    reference=reference,
    sizes=[{"blocks": blocks, "codes": 4096} for blocks in (66, 132, 133, 198, 264, 265, 528, 529)],
    check_sizes=[
        {"blocks": 1, "codes": 33},
        {"blocks": 2, "codes": 1},
        {"blocks": 1, "codes": 515},
        {"blocks": st.integers(1, 2), "codes": st.integers(1, 40)},
    ],
    work=lambda blocks, codes: Work(
        read=16 * (THREADS * EACH * blocks + codes),
        write=4 * THREADS * EACH * blocks,
        flops={"fp32": 12 * THREADS * EACH * blocks * codes},
    ),
    bound="issue",
    costs={
        whole: lambda blocks, codes: searched(blocks, codes, THREADS),
        halves: lambda blocks, codes: searched(blocks, codes, THREADS // 2),
        quarters: lambda blocks, codes: searched(blocks, codes, THREADS // 4),
        split: filled_and_searched,
    },
    sweep=Sweep("blocks", judged=[133]),
)
def test_wave_quantization(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
