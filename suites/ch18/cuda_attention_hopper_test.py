"""Attention on Hopper: keep the tensor cores busy while exponentials are computed.

Problem    As in `cuda_attention_test.py`, compute forward attention in bf16, with heads of 128,
           with and without a causal mask. The number of heads times tokens is the same at each
           length.
Baseline   mma_sync: FlashAttention-2, with `mma.sync`. A block of 4 warps takes 128 queries, and 64
           keys at a time. The next keys and values are copied while the tensor cores multiply.
Optimized  tma: changes `mma_sync`. The tensor memory accelerator copies the same tiles.
           wgmma: changes `tma`. There are four changes. Two warpgroups multiply with `wgmma`,
           directly from shared memory. The warpgroups take 128 keys at a time, not 64. An SM has
           one block of 8 warps, not two blocks of 4. The last keys come first, so only the first
           tile needs a mask.
           scores_ahead: changes `wgmma`. A warpgroup issues the scores of the next keys together
           with the outputs of the current keys, and then waits once for all of them.
           specialized: changes `scores_ahead`. A separate producer warpgroup loads the tiles, and
           no barrier stops the whole block.
           pingpong: changes `specialized`. The two warpgroups take turns on the tensor cores. One
           warpgroup computes weights while the other warpgroup's products run.
           overlapped: changes `pingpong`. A warpgroup computes weights as soon as its scores are
           ready, while its own output products run. FlashAttention-3 has the same overlap, with
           larger blocks.
           flash: `SDPBackend.FLASH_ATTENTION`, which is FlashAttention-2.
           cudnn: `SDPBackend.CUDNN_ATTENTION`, which uses wgmma and TMA on Hopper.
Bound      `mma_sync`, `tma` and `flash` are limited by `mma.sync`, which does not reach the rate of
           `wgmma` on Hopper (`../ch10/gemm_test.py`), and then by the exponentials. `wgmma` and
           `scores_ahead` are limited by products and then by exponentials, because block-wide
           barriers keep both warpgroups in step. Tensor cores limit `specialized`, `pingpong` and
           `overlapped`. One warpgroup can compute exponentials while the other warpgroup's products
           run. `specialized` allows this overlap, and pingpong forces it.
Seen       On an H100, `pingpong` and `overlapped` gain at most a little over `specialized`, and
           only with 1024 tokens. So the warpgroups of `specialized` must already alternate.
           `mma_sync` takes longer than predicted, because its threads copy all tiles themselves,
           and the cost leaves out these instructions. `tma` takes as long as predicted. With 1024
           tokens, all sides take longer than predicted. A block then has few tiles of keys. The
           times of `wgmma` at the three lengths suggest that the start and end of a block take a
           fixed time, which the cost leaves out. With 1024 tokens, `cudnn` is faster than every
           other side. With the causal mask, all sides also lose time, most of it with short
           sequences. The reason is probably that blocks have different numbers of tiles, so SMs are
           idle while the last blocks run.
Use when   Call `scaled_dot_product_attention`, which chooses cuDNN on Hopper. Write your own kernel
           only for attention that no library has, and stop at `specialized`, the last change that
           gains.
"""

from dataclasses import replace

import pytest
import torch

from pytest_aisp import Cost, Sweep, Variant, compare, cuda_module, tensor_map

from .attention_ladder import (
    CHECKED,
    REFUSED,
    SCALE,
    STAGED,
    WIDTH,
    cudnn,
    flash,
    fused,
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

staged = cuda_module("cuda_attention_hopper_tma.cu")
hopper = cuda_module("cuda_attention_hopper.cu")
RING = 5 * 128 * 256 + 1024
"""Bytes of shared memory with wgmma: queries, two stages of keys and values, alignment."""


def maps(q, k, v, rows):
    return [
        tensor_map(x[0], (1, height, 64), swizzle=128)
        for x, height in ((q, 128), (k, rows), (v, rows))
    ]


def by_tma(kernel, q, k, v, causal, rows, threads, shared):
    """Run a TMA kernel with 128 queries per block and `rows` keys at a time."""
    heads, tokens = shape_of(q, k, v)
    out = torch.empty_like(q)
    launch = kernel[(-(-tokens // 128), heads), threads, shared]
    launch(*maps(q, k, v, rows), out, tokens, SCALE, int(causal))
    return out


def tma(q, k, v, causal):
    return by_tma(staged.tma, q, k, v, causal, 64, 128, STAGED)


def wgmma(q, k, v, causal):
    return by_tma(hopper.wgmma_tiles, q, k, v, causal, 128, 256, RING)


def scores_ahead(q, k, v, causal):
    return by_tma(hopper.scores_ahead, q, k, v, causal, 128, 256, RING)


def specialized(q, k, v, causal):
    return by_tma(hopper.specialized, q, k, v, causal, 128, 384, RING)


def pingpong(q, k, v, causal):
    return by_tma(hopper.pingpong, q, k, v, causal, 128, 384, RING)


def overlapped(q, k, v, causal):
    return by_tma(hopper.overlapped, q, k, v, causal, 128, 384, RING)


def hopper_cost(total, tokens, causal):
    """Return the cost of a kernel whose products and exponentials overlap."""
    scores = scores_of(total, tokens, causal, 128)
    return fused(total, scores, l2=4 * WIDTH * scores / 128)


def serial_cost(total, tokens, causal):
    """Return the cost of a kernel whose exponentials start after its products."""
    cost = hopper_cost(total, tokens, causal)
    return replace(cost, sfu=0) + Cost(sfu=cost.sfu)


WITH_WGMMA = {"needs": ("tma", "wgmma")}
LOADING = ("HGMMA", "USETMAXREG")  # a producer warpgroup gives its registers to the others


@compare(
    baseline=mma_sync,
    optimized=[
        Variant(tma, needs="tma", sass=("UTMALDG", "HMMA")),
        Variant(wgmma, sass="HGMMA", at_least={"sm90": 1.05}, **WITH_WGMMA),
        Variant(scores_ahead, sass="HGMMA", at_least={"sm90": 1.1}, **WITH_WGMMA),
        Variant(specialized, sass=LOADING, at_least={"sm90": 1.3}, **WITH_WGMMA),
        Variant(pingpong, sass=(*LOADING, "BAR.ARV"), at_least={"sm90": 1.4}, **WITH_WGMMA),
        Variant(overlapped, sass=(*LOADING, "BAR.ARV"), at_least={"sm90": 1.4}, **WITH_WGMMA),
        Variant(flash, at_least="yardstick"),
        Variant(cudnn, at_least="yardstick", gpu_only="cuDNN"),
    ],
    inputs=queries_keys_values,
    reference=in_float64,
    sizes=sizes(1024, 4096, 16384),
    # The same sizes, then two heads with a partial second tile of 128 x 128, then three stages.
    check_sizes=[
        *CHECKED,
        {"total": 258, "tokens": 129, "causal": True},
        {"total": 900, "tokens": 450, "causal": False},
        {"total": 389, "tokens": 389, "causal": True},
    ],
    work=work_of,
    bound="tensor",
    costs={
        mma_sync: mma_cost,
        tma: mma_cost,
        wgmma: serial_cost,
        scores_ahead: serial_cost,
        specialized: hopper_cost,  # no barrier stops both warpgroups
        pingpong: hopper_cost,
        overlapped: hopper_cost,
        flash: mma_cost,
        cudnn: library_cost,
    },
    sweep=Sweep("tokens"),
)
def test_cuda_attention_hopper(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The launching helpers reject wrong inputs before the launch."""

    @pytest.mark.parametrize("side", [mma_sync, tma, overlapped])
    @pytest.mark.parametrize(("shape", "dtype", "words"), REFUSED)
    def test_tensors(self, side, shape, dtype, words):
        q = torch.ones(shape, dtype=dtype)
        with pytest.raises(ValueError, match=words):
            side(q, q, q, False)
