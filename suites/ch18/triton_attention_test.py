"""Attention in Triton: keep the scores on the chip, tune the tiles, load them by TMA.

Problem    Compute forward attention in bf16, with heads of 128, with and without a causal mask. The
           number of heads times tokens is the same at each length. The scores have a standard
           deviation of 3, as in trained models. Triton's interpreter multiplies bf16 wrongly, so a
           CPU checks fp16.
Baseline   eager: computes scores by `matmul`, applies the mask, computes the softmax in fp32,
           rounds, and multiplies by the values with `matmul`.
Optimized  tiled: changes `eager`. One kernel with an online softmax keeps the scores on the chip. A
           program takes 64 queries, and 64 keys at a time.
           tuned: changes `tiled`. A program takes 128 queries. Autotuning chooses the faster of two
           forms: 64 keys at a time with 4 warps, or 128 keys with 8 warps.
           descriptors: changes `tuned`. The tensor memory accelerator (TMA) loads and stores tiles.
           flash: `SDPBackend.FLASH_ATTENTION`, which is FlashAttention-2.
           cudnn: `SDPBackend.CUDNN_ATTENTION`, which uses wgmma and TMA on Hopper.
Bound      DRAM limits `eager`, because each step reads and writes all scores. The L2 limits
           `tiled`, because each program of 64 queries reads keys and values from it. Tensor cores
           limit `cudnn`. The kernels in Triton use wgmma on Hopper. The costs assume that their
           exponentials run after the products, because first all warps of a program multiply, and
           then all compute exponentials. There is no variant with warps that only load: Triton 3.9
           fails to compile this loop with `warp_specialize`, for Hopper and for Blackwell.
Seen       All cases were recorded on an H100. Without a mask, `cudnn` takes a fifth to a third
           longer than predicted, and at 16384 tokens it takes longer than the same call in
           `cuda_attention_hopper_test.py`. The GPU's clock was probably lower in the timings with
           `eager`. `tuned` takes a quarter to a half longer than predicted. `descriptors` differs
           from `tuned` only in how tiles are loaded, and is closer to its prediction. `eager` takes
           up to a quarter longer than predicted. We did not time the kernels of `eager` alone. With
           the causal mask, every side misses its prediction by more: `tiled` takes up to 40 %
           longer than predicted, and `tuned` takes up to twice as long. The misses of the other
           sides lie in between. A causal program has between one tile and all tiles of keys, and
           the costs do not count SMs that wait for the longest program. We did not measure these
           waits. At 1024 tokens with the mask, `tuned` is slower than `tiled`, and `descriptors` is
           barely faster than `tiled`. A program of `tuned` or `descriptors` has twice as many
           queries as a program of `tiled`, so there are half as many programs. `cudnn` is the
           fastest side everywhere. `flash` is slower than every kernel in Triton.
Use when   You need attention that no library has: Triton takes the least code. Use `descriptors`,
           and tune the tile sizes. For plain or causal attention, call the library. The same ladder
           in CUDA C++ is in `cuda_attention_hopper_test.py`.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Sweep, Variant, compare

from .attention_ladder import (
    REFUSED,
    SCALE,
    WIDTH,
    cudnn,
    flash,
    fused,
    in_float64,
    library_cost,
    mma_cost,
    queries_keys_values,
    scores_of,
    shape_of,
    sizes,
    work_of,
)

HEAD = tl.constexpr(WIDTH)
L2 = 50 * 2**20  # bytes of an H200's, for costs
CONFIGS = [
    triton.Config({"M": 128, "N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((64, 4, 2), (128, 8, 2))
]


def launchable(configs, named, **meta):
    """Return the configs whose queries, keys and values fit into shared memory."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]

    def needed(config):
        tile = config.kwargs
        return 2 * WIDTH * (tile["M"] + 2 * config.num_stages * tile["N"]) + 1024

    return [config for config in configs if needed(config) <= most]


TUNED = triton.autotune(
    CONFIGS, key=["tokens", "causal"], prune_configs_by={"early_config_prune": launchable}
)


@triton.jit
def add_keys(queries, keys, values, seen, start, most, total, sums, scale, N: tl.constexpr):
    """Add keys and values to the running maximum, sum and outputs of each row."""
    scores = tl.dot(queries, keys.T) * scale
    if seen is not None:
        scores = tl.where(start + tl.arange(0, N)[None, :] < seen[:, None], scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - now[:, None])
    kept = tl.exp2(most - now)
    total = total * kept + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * kept[:, None])
    return now, total, sums


@triton.jit
def rows_of(at, start, tokens, N: tl.constexpr):
    rows, columns = start + tl.arange(0, N), tl.arange(0, HEAD)
    inside = rows[:, None] < tokens
    return tl.load(at + rows[:, None] * HEAD + columns[None, :], mask=inside, other=0.0)


@triton.jit
def pointers_body(q, k, v, out, tokens, scale, causal, M: tl.constexpr, N: tl.constexpr):
    # In a causal head, programs of later queries have more keys. These long programs start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1).to(tl.int64) * tokens * HEAD
    queries = rows_of(q + head, first, tokens, M)
    rows = first + tl.arange(0, M)
    seen = tl.minimum(tl.where(causal, rows + 1, tokens), tokens)
    end = tl.where(causal, tl.minimum(first + M, tokens), tokens)
    unmasked = tl.where(causal, first + 1, tokens) // N * N
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, HEAD), tl.float32)
    for start in range(0, unmasked, N):
        keys, values = rows_of(k + head, start, tokens, N), rows_of(v + head, start, tokens, N)
        most, total, sums = add_keys(
            queries, keys, values, None, start, most, total, sums, scale, N
        )
    for start in range(unmasked, end, N):
        keys, values = rows_of(k + head, start, tokens, N), rows_of(v + head, start, tokens, N)
        most, total, sums = add_keys(
            queries, keys, values, seen, start, most, total, sums, scale, N
        )
    to = out + head + rows[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    tl.store(to, (sums / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit(do_not_specialize=["causal"])
def tiled_kernel(q, k, v, out, tokens, scale, causal, M: tl.constexpr, N: tl.constexpr):
    pointers_body(q, k, v, out, tokens, scale, causal, M, N)


@TUNED
@triton.jit(do_not_specialize=["causal"])
def tuned_kernel(q, k, v, out, tokens, scale, causal, M: tl.constexpr, N: tl.constexpr):
    pointers_body(q, k, v, out, tokens, scale, causal, M, N)


@TUNED
@triton.jit(do_not_specialize=["causal"])
def descriptors_kernel(q, k, v, out, tokens, scale, causal, M: tl.constexpr, N: tl.constexpr):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1).to(tl.int64) * tokens * HEAD
    shape = [tokens, HEAD]
    from_q = tl.make_tensor_descriptor(q + head, shape, [HEAD, 1], [M, HEAD])
    from_k = tl.make_tensor_descriptor(k + head, shape, [HEAD, 1], [N, HEAD])
    from_v = tl.make_tensor_descriptor(v + head, shape, [HEAD, 1], [N, HEAD])
    to = tl.make_tensor_descriptor(out + head, shape, [HEAD, 1], [M, HEAD])
    queries = from_q.load([first, 0])
    rows = first + tl.arange(0, M)
    seen = tl.minimum(tl.where(causal, rows + 1, tokens), tokens)
    end = tl.where(causal, tl.minimum(first + M, tokens), tokens)
    unmasked = tl.where(causal, first + 1, tokens) // N * N
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, HEAD), tl.float32)
    for start in tl.range(0, unmasked, N):
        keys, values = from_k.load([start, 0]), from_v.load([start, 0])
        most, total, sums = add_keys(
            queries, keys, values, None, start, most, total, sums, scale, N
        )
    for start in tl.range(unmasked, end, N):
        keys, values = from_k.load([start, 0]), from_v.load([start, 0])
        most, total, sums = add_keys(
            queries, keys, values, seen, start, most, total, sums, scale, N
        )
    to.store([first, 0], (sums / total[:, None]).to(out.dtype.element_ty))


def inputs(device, total, tokens, causal):
    *tensors, causal = queries_keys_values(device, total, tokens, causal)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    return *(x.to(dtype) for x in tensors), causal


def eager(q, k, v, causal):
    scores = (q * WIDTH**-0.5) @ k.mT
    if causal:
        tokens = q.shape[2]
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


def launched(kernel, q, k, v, causal, **options):
    heads, tokens = shape_of(q, k, v, (torch.bfloat16, torch.float16))
    out = torch.empty_like(q)

    def grid(meta):
        return triton.cdiv(tokens, meta["M"]), heads

    kernel[grid](q, k, v, out, tokens, SCALE, int(causal), **options)
    return out


def scratch(size, alignment, stream):
    """Allocate memory for the kernel's TMA descriptors: 128 bytes each per program."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def tiled(q, k, v, causal):
    return launched(tiled_kernel, q, k, v, causal, M=64, N=64, num_warps=4, num_stages=2)


def tuned(q, k, v, causal):
    return launched(tuned_kernel, q, k, v, causal)


def descriptors(q, k, v, causal):
    triton.set_allocator(scratch)
    return launched(descriptors_kernel, q, k, v, causal)


def eager_cost(total, tokens, causal):
    elements, scores = total * WIDTH, total * tokens
    product = {"bf16": 2 * scores * WIDTH}
    cost = Cost(read=2 * elements, write=2 * elements, launches=1)
    cost += Cost(read=4 * elements, write=2 * scores, ops=product, launches=1)
    if causal:
        cost += Cost(write=tokens**2, launches=1) + Cost(
            read=tokens**2, write=tokens**2, launches=1
        )
        # masked_fill copies the scores first. Each head reads the mask, from the L2 if it fits.
        mask = scores if tokens**2 > L2 else 0
        cost += Cost(read=2 * scores, write=2 * scores, launches=1)
        cost += Cost(read=2 * scores + mask, write=2 * scores, l2=5 * scores, launches=1)
    return (
        cost
        + Cost(read=2 * scores, write=4 * scores, launches=1)  # to fp32
        + Cost(read=4 * scores, write=4 * scores, sfu=scores, launches=1)
        + Cost(read=4 * scores, write=2 * scores, launches=1)  # to bf16
        + Cost(read=2 * scores + 2 * elements, write=2 * elements, ops=product, launches=1)
    )


def in_step(total, tokens, causal, rows=128):
    """Return the cost of a kernel with `rows` queries, whose exponentials do not overlap."""
    scores = scores_of(total, tokens, causal, rows)
    cost = fused(total, scores, l2=4 * WIDTH * scores / rows)
    return replace(cost, sfu=0) + Cost(sfu=cost.sfu)


@compare(
    baseline=eager,
    optimized=[
        tiled,
        tuned,
        Variant(descriptors, needs="tma"),
        Variant(flash, at_least="yardstick", gpu_only="FlashAttention"),
        Variant(cudnn, at_least="yardstick", gpu_only="cuDNN"),
    ],
    inputs=inputs,
    reference=in_float64,
    sizes=sizes(1024, 4096, 16384),
    # Two heads with a partial second tile of keys, and a partial second tile of queries.
    check_sizes=[
        {"total": 140, "tokens": 70, "causal": False},
        {"total": 129, "tokens": 129, "causal": True},
    ],
    work=work_of,
    bound="tensor",
    costs={
        eager: eager_cost,
        tiled: lambda total, tokens, causal: in_step(total, tokens, causal, rows=64),
        tuned: in_step,
        descriptors: in_step,
        flash: mma_cost,
        cudnn: library_cost,
    },
    sweep=Sweep("tokens"),
)
def test_triton_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.2)


class TestRefused:
    """The launching helpers reject wrong inputs before the launch."""

    @pytest.mark.parametrize("side", [tiled, tuned, descriptors])
    @pytest.mark.parametrize(("shape", "dtype", "words"), REFUSED)
    def test_tensors(self, side, shape, dtype, words):
        q = torch.ones(shape, dtype=dtype)
        with pytest.raises(ValueError, match=words):
            side(q, q, q, False)
