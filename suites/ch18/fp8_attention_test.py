"""FP8 attention: the products run at twice the rate, but the exponentials do not.

Problem    Compute forward attention without a mask, with heads of 128. Queries, keys, values and
           outputs are in bf16. The number of heads times tokens is the same at each length. The
           scores have a standard deviation of 3, as in trained models. The values of different
           heads differ in magnitude by up to a factor of 4. Triton's interpreter multiplies bf16
           wrongly, so a CPU checks fp16.
Baseline   bf16: one Triton kernel with an online softmax, like `tuned` of
           `triton_attention_test.py`. All sides choose from the same tiles, with 2 or 3 stages.
Optimized  `fp8_scores` and `fp8_both` run the same kernel on e4m3 operands. The call first
           quantizes these operands, with one scale per head. One kernel finds the largest element
           of each tile. A second kernel takes the maximum per head and rounds.
           fp8_scores: Q and K are in e4m3, so QK^T runs in FP8. P and V stay in bf16.
           fp8_both: changes `fp8_scores`. P and V are in e4m3 too, so both products run in FP8.
           Hopper's tensor cores read FP8 only along the summed dimension, which is the tokens of V.
           So the quantizing kernel stores V transposed. Before it rounds P, the kernel multiplies
           the weights by 2^8, so the largest weight is 256. The largest e4m3 number is 448. Without
           this factor, weights below 2^-10 of the largest would become 0.
           cudnn: SDPA in bf16, `SDPBackend.CUDNN_ATTENTION`.
Bound      Tensor cores and exponentials, one after the other, because first all warps of a program
           multiply, and then all compute exponentials. FP8 halves only the time of the products.
           The number of exponentials stays the same, and each result needs a cast. Quantizing reads
           each input twice, and takes the same time at both lengths. The products take four times
           as long at 16384 tokens as at 4096, so FP8 gains more at 16384 tokens. At 4096 tokens,
           quantizing should take about as much time as `fp8_scores` saves, so the page claims no
           speedup for `fp8_scores`. cuDNN computes exponentials during the products. The costs
           predict that cuDNN in bf16 is faster than `fp8_both` at 4096 tokens, and nearly as fast
           at 16384. On Hopper, the operand P of an FP8 product has a different register layout from
           the result of QK^T. So threads must exchange values. The costs leave out this exchange
           and the casts.
Seen       `fp8_scores` gains a little, as predicted. On an H200, `fp8_both` takes about a quarter
           longer than predicted, with a larger gap at 4096 tokens than at 16384. We did not profile
           which step of `fp8_both` takes longer than predicted. On an H100, `bf16` takes more than
           a quarter longer than predicted at 16384 tokens, and `cudnn` about a fifth longer. On an
           H200, both gaps are smaller. The cost of `bf16` leaves out the maxima, sums and casts
           between the two products. We recorded neither power nor the clock rate, so we do not know
           the cause.
Use when   Sequences are long, the model tolerates the error, and no library has your form of
           attention. In all other cases, call cuDNN in bf16, because FP8 in Triton gains little
           over it. The check accepts the error that a relative rounding error of 2^-4 in Q, K, P, V
           and the outputs would cause. The tolerance is the same for `fp8_scores` and `fp8_both`,
           because both declare `precision="fp8"`. The tolerance is wide: at 4096 tokens, results
           that are a tenth too large would pass. Most of the error comes from Q and K. A score sums
           128 products, each with two rounding errors. At a standard deviation of 3, a score is
           then off by up to 0.15 (rms), so its weight has a relative error of the same size.
           Rounding P and V adds little error. So `fp8_scores` is barely more accurate than
           `fp8_both`. The tensor cores accumulate PV. On Hopper, they keep about 14 bits of a sum
           of FP8 products, many more bits than the operands have. One scale per head works if the
           tokens of a head have similar magnitudes. Outlier channels need a rotation first
           (`../ch19/outliers_test.py`), which this page does not show. If the error is too large,
           call the library in bf16.
"""

import pytest
import torch
import triton
import triton.language as tl

from pytest_aisp import Conditions, Cost, Variant, Work, compare
from suites.rounding import to_even

from .attention_ladder import (
    REFUSED,
    SCALE,
    WIDTH,
    fused,
    in_float64,
    queries_keys_values,
    shape_of,
)
from .attention_ladder import cudnn as causal_or_not

HEAD = tl.constexpr(WIDTH)
LARGEST = tl.constexpr(448.0)  # of e4m3
SHIFT = tl.constexpr(8.0)  # added to the exponents of e4m3 weights, so weights are at most 2^8
ROWS = 128  # tokens that a program quantizes
CONFIGS = [
    triton.Config({"M": 128, "N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((64, 4, 2), (128, 8, 2), (128, 8, 3))
]


def launchable(configs, named, **meta):
    """Return the configs whose queries, keys and values fit into shared memory."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    wide = sum(named[name].element_size() for name in ("k", "v"))

    def needed(config):
        tile = config.kwargs
        queries = named["q"].element_size() * tile["M"]
        return WIDTH * (queries + wide * config.num_stages * tile["N"]) + 1024

    return [config for config in configs if needed(config) <= most]


@triton.jit
def largest_kernel(x, parts, tokens, ROWS: tl.constexpr):
    """Store the largest magnitude of ROWS tokens of a head."""
    part, head = tl.program_id(0), tl.program_id(1)
    row = part * ROWS + tl.arange(0, ROWS)
    at = x + (head.to(tl.int64) * tokens + row[:, None]) * HEAD + tl.arange(0, HEAD)[None, :]
    values = tl.load(at, mask=row[:, None] < tokens, other=0.0).to(tl.float32)
    tl.store(parts + head * tl.num_programs(0) + part, tl.max(tl.max(tl.abs(values), 1), 0))


@triton.jit
def quantize_kernel(
    x, parts, out, scales, tokens, room,
    TRANSPOSED: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Find a head's largest magnitude, and round ROWS of the head's tokens to e4m3."""
    part, head, each = tl.program_id(0), tl.program_id(1), tl.arange(0, COUNT)
    count = tl.num_programs(0)
    largest = tl.max(tl.load(parts + head * count + each, mask=each < count, other=0.0), 0)
    scale = tl.maximum(largest, 1e-12) / LARGEST
    tl.store(scales + head, scale, mask=part == 0)
    row, column = part * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD)
    here = row[:, None] < tokens
    at = x + (head.to(tl.int64) * tokens + row[:, None]) * HEAD + column[None, :]
    values = tl.load(at, mask=here, other=0.0).to(tl.float32)
    rounded = to_even(values / scale, DROPPED=20).to(tl.float8e4nv)
    if TRANSPOSED:
        to = out + (head.to(tl.int64) * HEAD + column[:, None]) * room + row[None, :]
        tl.store(to, rounded.T, mask=row[None, :] < tokens)
    else:
        to = out + (head.to(tl.int64) * tokens + row[:, None]) * HEAD + column[None, :]
        tl.store(to, rounded, mask=here)


@triton.jit
def rows_of(at, start, tokens, N: tl.constexpr):
    rows, columns = start + tl.arange(0, N), tl.arange(0, HEAD)
    inside = rows[:, None] < tokens
    return tl.load(at + rows[:, None] * HEAD + columns[None, :], mask=inside, other=0.0)


@triton.jit
def values_of(at, start, tokens, room, SMALL: tl.constexpr, N: tl.constexpr):
    if SMALL:  # stored as (HEAD, room)
        token, column = start + tl.arange(0, N), tl.arange(0, HEAD)
        inside = token[None, :] < tokens
        return tl.load(at + column[:, None] * room + token[None, :], mask=inside, other=0.0).T
    else:
        return rows_of(at, start, tokens, N)


@triton.jit
def add_keys(
    queries, keys, values, seen, start, most, total, sums, scale,
    SMALL: tl.constexpr, EXACT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add keys and values to the running maximum, sum and outputs of each row."""
    scores = tl.dot(queries, keys.T) * scale
    if seen is not None:
        scores = tl.where(start + tl.arange(0, N)[None, :] < seen, scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    top = now - SHIFT if SMALL else now
    weights = tl.exp2(scores - top[:, None])
    kept = tl.exp2(most - now)
    total = total * kept + tl.sum(weights, 1)
    # A GPU's cast rounds to even, but the interpreter's cast does not.
    rounded = to_even(weights, DROPPED=20) if SMALL and EXACT else weights
    sums = tl.dot(rounded.to(values.dtype), values, sums * kept[:, None])
    return now, total, sums


@triton.autotune(
    CONFIGS,
    key=["tokens", "SCALED", "SMALL"],
    prune_configs_by={"early_config_prune": launchable},
)
@triton.jit
def attention_kernel(
    q, k, v, q_scales, k_scales, v_scales, out, tokens, room, scale,
    SCALED: tl.constexpr, SMALL: tl.constexpr, EXACT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute attention. SCALED: Q and K are e4m3. SMALL: V and the weights are e4m3 too."""
    first, head = tl.program_id(0) * M, tl.program_id(1)
    here = head.to(tl.int64) * tokens * HEAD
    from_v = v + (head.to(tl.int64) * room * HEAD if SMALL else here)
    queries = rows_of(q + here, first, tokens, M)
    if SCALED:
        scale *= tl.load(q_scales + head) * tl.load(k_scales + head)
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, HEAD), tl.float32)
    whole = tokens // N * N
    for start in range(0, whole, N):
        keys = rows_of(k + here, start, tokens, N)
        values = values_of(from_v, start, tokens, room, SMALL, N)
        most, total, sums = add_keys(
            queries, keys, values, None, start, most, total, sums, scale, SMALL, EXACT, N
        )
    for start in range(whole, tokens, N):
        keys = rows_of(k + here, start, tokens, N)
        values = values_of(from_v, start, tokens, room, SMALL, N)
        most, total, sums = add_keys(
            queries, keys, values, tokens, start, most, total, sums, scale, SMALL, EXACT, N
        )
    result = sums / total[:, None]
    if SMALL:
        result *= tl.load(v_scales + head)
    rows = first + tl.arange(0, M)
    to = out + here + rows[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=rows[:, None] < tokens)


def inputs(device, total, tokens):
    q, k, v, _ = queries_keys_values(device, total, tokens, causal=False)
    # Different magnitudes per head reveal wrong scales. The scores do not change.
    size = 2.0 ** (torch.arange(q.shape[1], device=device) % 3 - 1)[:, None, None]
    q, k, v = q * size, k / size, v * size
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    return q.to(dtype), k.to(dtype), v.to(dtype)


def reference(q, k, v):
    return in_float64(q, k, v, causal=False)


def sizes_of(q, k, v):
    """Return the number of heads, the number of tokens, and the row length of transposed V."""
    heads, tokens = shape_of(q, k, v, (torch.bfloat16, torch.float16))
    return heads, tokens, triton.cdiv(tokens, 16) * 16


def quantized(x, heads, tokens, room, transposed=False):
    """Return `x` in e4m3, and one scale per head."""
    count = triton.cdiv(tokens, ROWS)
    parts = torch.empty(heads, count, device=x.device)
    scales = torch.empty(heads, device=x.device)
    shape = (heads, WIDTH, room) if transposed else (heads, tokens, WIDTH)
    out = torch.empty(shape, device=x.device, dtype=torch.float8_e4m3fn)
    largest_kernel[count, heads](x, parts, tokens, ROWS=ROWS, num_warps=8)
    quantize_kernel[count, heads](
        x, parts, out, scales, tokens, room,
        TRANSPOSED=transposed, COUNT=triton.next_power_of_2(count), ROWS=ROWS, num_warps=8,
    )  # fmt: skip
    return out, scales


def attended(like, q, k, v, q_scales, k_scales, v_scales, heads, tokens, room, **kinds):
    out = torch.empty_like(like)

    def grid(meta):
        return triton.cdiv(tokens, meta["M"]), heads

    attention_kernel[grid](
        q, k, v, q_scales, k_scales, v_scales, out, tokens, room, SCALE,
        EXACT=not like.is_cuda, **kinds,
    )  # fmt: skip
    return out


def bf16(q, k, v):
    sizes = sizes_of(q, k, v)
    return attended(q, q, k, v, None, None, None, *sizes, SCALED=False, SMALL=False)


def fp8_scores(q, k, v):
    sizes = sizes_of(q, k, v)
    (small_q, q_scales), (small_k, k_scales) = (quantized(x, *sizes) for x in (q, k))
    return attended(
        q, small_q, small_k, v, q_scales, k_scales, None, *sizes, SCALED=True, SMALL=False
    )


def fp8_both(q, k, v):
    sizes = sizes_of(q, k, v)
    (small_q, q_scales), (small_k, k_scales) = (quantized(x, *sizes) for x in (q, k))
    small_v, v_scales = quantized(v, *sizes, transposed=True)
    return attended(
        q, small_q, small_k, small_v, q_scales, k_scales, v_scales, *sizes, SCALED=True, SMALL=True
    )


def cudnn(q, k, v):
    return causal_or_not(q, k, v, causal=False)


def quantizing(total):
    """Return the cost of quantizing one tensor.

    The tensor has 32 MiB, which may not fit into the L2. So the second read counts as DRAM traffic
    too.
    """
    elements = total * WIDTH
    first = Cost(read=2 * elements, launches=1)
    return first + Cost(read=2 * elements, write=elements, launches=1)


def attending(total, tokens, small):
    """Return the cost of the kernel with `small` of its two products in FP8."""
    scores, elements = total * tokens, total * WIDTH
    read = {0: 6, 1: 4, 2: 3}[small] * elements  # queries, keys and values
    # Each key and value is loaded once per 128 queries, from the L2, during both products.
    l2 = {0: 4, 1: 3, 2: 2}[small] * WIDTH / 128 * scores
    product = 2 * scores * WIDTH
    ops = {"fp8": small * product, "bf16": (2 - small) * product}
    products = Cost(read=read, write=2 * elements, l2=l2, ops=ops, launches=1)
    return products + Cost(sfu=scores)


def library_cost(total, tokens):
    return fused(total, total * tokens)


@compare(
    baseline=bf16,
    optimized=[
        Variant(fp8_scores, precision="fp8", at_least="yardstick"),
        Variant(fp8_both, precision="fp8"),
        Variant(cudnn, at_least="yardstick", gpu_only="cuDNN"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"total": 2**17, "tokens": 4096}, {"total": 2**17, "tokens": 16384}],
    # Two heads with a partial second tile of keys, and a partial second tile of queries.
    check_sizes=[{"total": 140, "tokens": 70}, {"total": 387, "tokens": 129}],
    work=lambda total, tokens: Work(
        read=6 * total * WIDTH,
        write=2 * total * WIDTH,
        flops={"fp8": 4 * total * tokens * WIDTH},
    ),
    bound="tensor",
    costs={
        bf16: lambda total, tokens: attending(total, tokens, small=0),
        fp8_scores: lambda total, tokens: 2 * quantizing(total) + attending(total, tokens, small=1),
        fp8_both: lambda total, tokens: 3 * quantizing(total) + attending(total, tokens, small=2),
        cudnn: library_cost,
    },
    conditions=Conditions(needs="fp8"),
)
def test_fp8_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The launching helpers reject wrong inputs before the launch."""

    @pytest.mark.parametrize("side", [bf16, fp8_scores, fp8_both])
    @pytest.mark.parametrize(("shape", "dtype", "words"), REFUSED)
    def test_tensors(self, side, shape, dtype, words):
        q = torch.ones(shape, dtype=dtype)
        with pytest.raises(ValueError, match=words):
            side(q, q, q)
