"""Attention in CUDA C++: keep the scores on the chip, then use the tensor cores.

Problem    Compute forward attention in bf16, with heads of 128, with and without a causal mask. The
           number of heads times tokens is the same at each length. The scores have a standard
           deviation of 3, as in trained models.
Baseline   naive: three kernels write all scores, turn them into weights, and multiply them by the
           values. The arithmetic is fp32 in tiles of 64 x 64. Tiles above the diagonal are skipped.
Optimized  online: changes `naive`. One kernel computes the same tiles, keeps a running maximum and
           sum of each row, and corrects the outputs. So no score leaves the chip.
           mma_sync: changes `online`. There are three changes. The tensor cores multiply bf16, so
           weights are rounded to bf16. A block takes 128 queries, not 64. The next keys and values
           are copied while the tensor cores multiply. This is FlashAttention-2.
           flash: `SDPBackend.FLASH_ATTENTION`, which is FlashAttention-2 too.
           cudnn: `SDPBackend.CUDNN_ATTENTION`, which uses wgmma and TMA on Hopper.
Bound      Shared memory and fp32 multiply-adds limit `naive` and `online`. `naive` also writes and
           reads all scores, which takes less time than the arithmetic. `mma_sync` and `flash` are
           limited by `mma.sync`, which does not reach the rate of wgmma on Hopper
           (`../ch10/gemm_test.py`), and then by the exponentials. Tensor cores limit `cudnn`.
Seen       `naive` and `online` take at least one and a half times as long as predicted. Their costs
           assume that loads of shared memory, multiply-adds and exponentials overlap fully, which
           we did not profile. `mma_sync` takes longer than predicted, as in
           `cuda_attention_hopper_test.py`, because its threads copy all tiles themselves. With 1024
           tokens, `mma_sync` and `cudnn` miss their predictions by more than with longer sequences.
           With so few tokens, a block has few tiles of keys, so its start and end probably take a
           large share of its time. With the causal mask, every side misses its prediction by more
           than without the mask, probably because blocks have different numbers of tiles.
Use when   Call `scaled_dot_product_attention`. Keeping the scores on the chip always saves memory,
           but tensor cores save more time. The rungs for Hopper are in
           `cuda_attention_hopper_test.py`.
"""

import pytest
import torch

from pytest_aisp import Cost, Sweep, Variant, compare, cuda_module

from .attention_ladder import (
    CHECKED,
    REFUSED,
    WIDTH,
    cudnn,
    flash,
    in_float64,
    library_cost,
    mma_cost,
    mma_sync,
    queries_keys_values,
    scores_of,
    shape_of,
    sizes,
    work_of,
)

cores = cuda_module("cuda_attention.cu")
TILE, PITCH, WEIGHTS = 64, 132, 80  # as in cuda_attention.cu
MEMORY = {"scores": 8 * TILE * PITCH, "weighted": 4 * TILE * (PITCH + WEIGHTS)}
MEMORY["online"] = MEMORY["scores"] + 4 * TILE * WEIGHTS
"""Bytes of shared memory of each kernel."""


def naive(q, k, v, causal):
    heads, tokens = shape_of(q, k, v)
    tiles = -(-tokens // TILE)
    scores = torch.empty(heads, tokens, tokens, device=q.device)
    out = torch.empty_like(q)
    mask = int(causal)
    launch = cores.scores[(tiles * tiles, heads), 128, MEMORY["scores"]]
    launch(q, k, scores, tokens, WIDTH**-0.5, mask)
    cores.softmax[(tokens, heads), 128](scores, tokens, mask)
    launch = cores.weighted[(tiles, heads), 128, MEMORY["weighted"]]
    launch(scores, v, out, tokens, mask)
    return out


def online(q, k, v, causal):
    heads, tokens = shape_of(q, k, v)
    out = torch.empty_like(q)
    launch = cores.online[(-(-tokens // TILE), heads), 128, MEMORY["online"]]
    launch(q, k, v, out, tokens, WIDTH**-0.5, int(causal))
    return out


# Bytes of shared memory per score. A warp reads 512 bytes at a time.
MULTIPLIED = (32 * 4 * 12 * 512 + 8 * TILE * WIDTH) / TILE**2
ADDED = (16 * 4 * 16 * 512 + 4 * TILE * (WIDTH + TILE)) / TILE**2


def naive_cost(total, tokens, causal):
    elements, scores = total * WIDTH, scores_of(total, tokens, causal, TILE)
    product = {"fp32": 2 * scores * WIDTH}
    return (
        Cost(
            read=4 * elements,
            write=4 * scores,
            shared=MULTIPLIED * scores,
            ops=product,
            launches=1,
        )
        # Each row is read three times: once from DRAM and twice from the L2.
        + Cost(read=4 * scores, write=4 * scores, l2=16 * scores, sfu=2 * scores, launches=1)
        + Cost(
            read=4 * scores + 2 * elements,
            write=2 * elements,
            shared=ADDED * scores,
            ops=product,
            launches=1,
        )
    )


def online_cost(total, tokens, causal):
    elements, scores = total * WIDTH, scores_of(total, tokens, causal, TILE)
    return Cost(
        read=6 * elements,
        write=2 * elements,
        shared=(MULTIPLIED + ADDED - 4 * WIDTH / TILE) * scores,  # queries are written once
        sfu=scores,
        ops={"fp32": 4 * scores * WIDTH},
        launches=1,
    )


@compare(
    baseline=naive,
    optimized=[
        online,
        Variant(mma_sync, sass=("LDGSTS", "HMMA")),
        Variant(flash, at_least="yardstick"),
        Variant(cudnn, at_least="yardstick", gpu_only="cuDNN"),
    ],
    inputs=queries_keys_values,
    reference=in_float64,
    sizes=sizes(1024, 4096, 16384),
    check_sizes=CHECKED,
    work=work_of,
    bound="tensor",
    costs={
        naive: naive_cost,
        online: online_cost,
        mma_sync: mma_cost,
        flash: mma_cost,
        cudnn: library_cost,
    },
    sweep=Sweep("tokens"),
)
def test_cuda_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.2)


class TestRefused:
    """The launching helpers reject wrong inputs before the launch."""

    @pytest.mark.parametrize("side", [naive, online, mma_sync])
    @pytest.mark.parametrize(("shape", "dtype", "words"), REFUSED)
    def test_tensors(self, side, shape, dtype, words):
        q = torch.ones(shape, dtype=dtype)
        with pytest.raises(ValueError, match=words):
            side(q, q, q, False)
