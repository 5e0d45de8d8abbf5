"""Grouped FP8: one kernel for all experts, which reads the groups' sizes on the GPU.

Problem    Compute one matrix product of a mixture-of-experts layer in inference. x is (rows, k) in
           bf16, sorted by expert. Each expert has a W of shape (n, k), and computes y = x W^T in
           bf16 for its rows of x. The first expert is 4 times as likely as the last, and some
           experts may get no row. The index where each expert's rows end is only in GPU memory,
           because a router on the GPU computed it. The weights are the page's state.
Baseline   looped: copies the ends to the host, which waits for the GPU. For each expert with rows,
           the host calls `torch.mm` in bf16, which writes the expert's rows of the result.
           bf16: `grouped_mm` in bf16, the baseline of the second test.
Optimized  All variants multiply in e4m3, with a scale for each row of x and of W. W is quantized
           once, before the timed part. x is quantized in the call, with the same Triton kernel in
           all variants.
           looped_fp8: changes `looped`. `torch._scaled_mm` for each expert.
           grouped: changes `looped_fp8`. One Triton kernel computes all experts. The grid covers
           the largest possible number of tiles. Each program finds its expert from the ends, and
           programs without a tile exit.
           library: `torch._scaled_grouped_mm`, which reads the ends on the GPU too.
Bound      The host limits the loops at 64 experts. FP8 cannot gain if the host is the limit, so the
           page claims no speedup for `looped_fp8`. With 8 experts, the products take longer than
           their launches, so a loop loses only the wait for the ends and the tail of each product.
           DRAM limits `grouped` at 512 rows, because each weight is read for few rows. With more
           rows, tensor cores limit `grouped`. With few rows, the autotuner may choose tiles of 16
           rows. On Hopper, Triton multiplies such tiles in fp16, which is exact and fast enough to
           keep up with DRAM. The second test compares the GPU time of FP8 and bf16. FP8 halves the
           bytes of W and doubles the rate of the tensor cores, but has to quantize x. In this test,
           library differs from bf16 only in the type. `grouped` also has a different kernel.
Seen       On an H100, the loops at 64 experts (`looped` and `looped_fp8`) take two to four times as
           long as predicted. The prediction uses the rate `launch`. Calling `torch.mm` takes the
           host longer than this rate predicts, and calling `torch._scaled_mm` takes even longer. So
           at 64 experts, `looped_fp8` is slower than the loop in bf16. With few rows, the host
           limits `grouped` and `library`, too. The second test excludes the host's time. With many
           rows, all grouped products, including bf16, take about half as long again as predicted.
           The costs assume the rate of one large product and do not count empty rows of tiles. We
           did not measure which assumption matters. With 8 experts, `looped` and `looped_fp8` take
           up to a third longer than predicted. Their costs assume the rate of one large product
           too, and leave out the tail of each product. `grouped` is about as fast as `library`.
Use when   There are many experts, or the layer is part of a captured graph. A loop cannot be
           captured, because the host reads where groups end. Outside a graph, a loop is enough for
           a few large experts. No side gets the groups' sizes on the host. If you need these sizes
           on the host, run the router there, or use a fixed capacity per expert
           (`../ch17/capacity_test.py`). cuBLASLt needs each product's scales aligned to 16 bytes.
           So in the first test, group sizes are multiples of 4 rows, as if a dispatcher had padded
           the groups. In the second test, groups can have any number of rows. The check accepts the
           error that rounding x, W and the outputs by 2^-4 of each value would cause. All FP8 sides
           lose the same accuracy, because they quantize in the same way and sum in the tensor
           cores. For scales per block, see `fp8_blocks_test.py`.
"""

import functools
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare
from suites.rounding import to_even

LARGEST = 448.0  # of e4m3
POPULAR = 4.0
"""The first expert is this many times as likely to be chosen as the last one."""
SIDE = 128  # outputs of a tile, and channels of one step
CONFIGS = [
    triton.Config({"M": m}, num_warps=warps, num_stages=stages)
    for m, warps, stages in ((128, 8, 3), (128, 8, 4), (64, 4, 4), (16, 4, 4))
]
ROWS = "_scaled_mm with a scale a row before torch 2.13" if torch.__version__ < (2, 13) else ""
"""What this version of PyTorch cannot do on a CPU, or an empty string."""
UNSUPPORTED = "torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10)"


def launchable(configs, named, **meta):
    """Keep configs whose tiles of all stages fit into shared memory."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    return [c for c in configs if c.num_stages * (c.kwargs["M"] + SIDE) * SIDE + 1024 <= most]


@triton.jit
def rows_kernel(x, out, scales, k, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * k + at, mask=at < k, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-12) / LARGEST
    rounded = to_even(values / scale, DROPPED=20).to(tl.float8e4nv)
    tl.store(out + row * k + at, rounded, mask=at < k)
    tl.store(scales + row, scale)


@triton.jit
def rows_of_tile(tile, ends, experts, M: tl.constexpr, PADDED: tl.constexpr):
    """Return the expert of a tile, its first row, and the end of the expert's rows."""
    number = tl.arange(0, PADDED)
    inside = number < experts
    end = tl.load(ends + number, mask=inside, other=0)
    begin = tl.load(ends + number - 1, mask=inside & (number > 0), other=0)
    tiles = tl.where(inside, (end - begin + M - 1) // M, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((inside & (after <= tile)).to(tl.int32), 0)
    own = number == expert
    first = tl.sum(tl.where(own, begin + (tile - after + tiles) * M, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@triton.autotune(
    CONFIGS, key=["rows", "n", "k", "experts"], prune_configs_by={"early_config_prune": launchable}
)
@triton.jit
def grouped_kernel(
    x, w, x_scales, w_scales, ends, out, rows, n, k, experts,
    M: tl.constexpr, SIDE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    # Eight tiles of rows at a time reuse the L2.
    columns, index = tl.cdiv(n, SIDE), tl.program_id(0)
    tiles = tl.num_programs(0) // columns
    block, inside = index // (8 * columns), index % (8 * columns)
    height = min(tiles - 8 * block, 8)
    expert, first, end = rows_of_tile(8 * block + inside % height, ends, experts, M, PADDED)
    if expert >= experts:
        return
    row, output = first + tl.arange(0, M), inside // height * SIDE + tl.arange(0, SIDE)
    here, there, at = row[:, None] < end, output[:, None] < n, tl.arange(0, SIDE)[None, :]
    left = x + row[:, None].to(tl.int64) * k + at
    right = w + (expert.to(tl.int64) * n + output[:, None]) * k + at
    total = tl.zeros((M, SIDE), tl.float32)
    for start in range(0, k, SIDE):
        a = tl.load(left + start, mask=here, other=0.0)
        b = tl.load(right + start, mask=there, other=0.0)
        total = tl.dot(a, b.T, total)
    total *= tl.load(x_scales + row, mask=row < end, other=0.0)[:, None]
    total *= tl.load(w_scales + expert * n + output, mask=output < n, other=0.0)[None, :]
    place = out + row[:, None].to(tl.int64) * n + output[None, :]
    result = to_even(total, DROPPED=16).to(tl.bfloat16)
    tl.store(place, result, mask=here & (output[None, :] < n))


def state(device, experts, rows, n, k, multiple):
    return torch.randn(experts, n, k, device=device, dtype=torch.bfloat16)


def inputs(device, experts, rows, n, k, multiple):
    chances = torch.linspace(POPULAR, 1.0, experts, device=device)
    chosen = torch.multinomial(chances, rows // multiple, replacement=True)
    sizes = multiple * (chosen[:, None] == torch.arange(experts, device=device)).sum(0)
    return torch.randn(rows, k, device=device, dtype=torch.bfloat16), sizes.cumsum(0).int()


def reference(w, x, ends):
    exact = x.double()
    parts = zip(groups_of(ends), w, strict=True)
    return torch.cat([exact[begin:end] @ weight.double().t() for (begin, end), weight in parts])


def groups_of(ends):
    """Wait for the GPU, and return where the rows of each expert begin and end."""
    if ends.is_cuda and not torch.cuda.is_available():
        return [(0, 0)] * len(ends)  # --aisp-compile runs the page with tensors that have no values
    return list(pairwise([0, *ends.tolist()]))


def quantized_weights(w):
    """Return W in e4m3, and a scale for each row of each expert."""
    small = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    scales = w.abs().amax(dim=2).float().clamp(min=1e-12) / LARGEST
    for one, of_w, of_scales in zip(small, w, scales, strict=True):
        one.copy_(of_w / of_scales[:, None])
    return small, scales


def quantized_rows(x):
    rows, k = x.shape
    small = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, device=x.device)
    block = triton.next_power_of_2(k)
    rows_kernel[(rows,)](x, small, scales, k, LARGEST=LARGEST, BLOCK=block, num_warps=8)
    return small, scales


def looped(w, x, ends):
    out = x.new_empty(len(x), w.shape[1])
    for (begin, end), weight in zip(groups_of(ends), w.mT, strict=True):
        if begin < end:
            torch.mm(x[begin:end], weight, out=out[begin:end])
    return out


def looped_fp8(w, x, ends):
    small, scales = quantized_weights(w)
    ready = list(zip(small.mT, scales[:, None], strict=True))

    def call():
        of_x, x_scales = quantized_rows(x)
        x_scales, out = x_scales[:, None], x.new_empty(len(x), w.shape[1])
        for (begin, end), (weight, of_weight) in zip(groups_of(ends), ready, strict=True):
            if begin < end:
                torch._scaled_mm(
                    of_x[begin:end], weight, x_scales[begin:end], of_weight,
                    out_dtype=x.dtype, use_fast_accum=True, out=out[begin:end],
                )  # fmt: skip
        return out

    yield call


def grouped(w, x, ends):
    small, scales = quantized_weights(w)
    yield lambda: multiplied(x, small, scales, ends)


def multiplied(x, w, w_scales, ends):
    """Return the products of all experts.

    Raises:
        ValueError: the kernel does not support these tensors.
    """
    experts, n, k = w.shape
    rows = len(x)
    if x.shape != (rows, k) or k % SIDE:
        raise ValueError(f"x needs {k} channels, a multiple of {SIDE}, not {tuple(x.shape)}")
    if ends.shape != (experts,) or ends.dtype != torch.int32:
        raise ValueError(f"ends needs {experts} int32 numbers, not {ends.dtype} {ends.shape}")
    of_x, x_scales = quantized_rows(x)
    out = x.new_empty(rows, n)

    def grid(meta):
        # An upper bound: all rows fill whole tiles, and each expert has one partial tile more.
        return ((rows // meta["M"] + min(experts, rows)) * triton.cdiv(n, SIDE),)

    grouped_kernel[grid](
        of_x, w, x_scales, w_scales, ends, out, rows, n, k, experts,
        SIDE=SIDE, PADDED=triton.next_power_of_2(experts),
    )  # fmt: skip
    return out


def library(w, x, ends):
    small, scales = quantized_weights(w)

    def call():
        of_x, x_scales = quantized_rows(x)
        return torch._scaled_grouped_mm(
            of_x, small.mT, x_scales, scales, offs=ends, out_dtype=x.dtype, use_fast_accum=True
        )

    yield call


def bf16(w, x, ends):
    return F.grouped_mm(x, w.mT, offs=ends)


def used(experts, rows, multiple):
    """Return the expected number of experts that have at least one row."""
    chances = torch.linspace(POPULAR, 1.0, experts, dtype=torch.float64)
    absent = (1 - chances / chances.sum()) ** (rows // multiple)
    return float((1 - absent).sum())


def products(experts, rows, n, k, multiple, kind="fp8", **starts):
    """Return the cost of the products of all experts."""
    wide = {"fp8": 1, "bf16": 2}[kind]
    return Cost(
        read=wide * (rows * k + used(experts, rows, multiple) * n * k),
        write=2 * rows * n,
        ops={kind: 2 * rows * n * k},
        **starts,
    )


def quantizing(rows, k):
    return Cost(read=2 * rows * k, write=rows * k, launches=1)


def loop(experts, rows, n, k, multiple, kind="fp8"):
    """Return the cost of a loop. The ends are copied to the host, and each expert has 3 views."""
    many = used(experts, rows, multiple)
    starts = {"launches": many, "host_steps": 3 * many}
    read = Cost(launches=1, syncs=1)
    return read + products(experts, rows, n, k, multiple, kind=kind, **starts)


def looped_cost(**size):
    return loop(**size, kind="bf16")


def looped_fp8_cost(rows, k, **size):
    return quantizing(rows, k) + loop(rows=rows, k=k, **size)


def grouped_cost(experts, rows, n, k, multiple):
    return quantizing(rows, k) + products(experts, rows, n, k, multiple, launches=1)


def library_cost(experts, rows, n, k, multiple):
    """Return the cost of `library`. A second kernel prepares its pointers."""
    return quantizing(rows, k) + products(experts, rows, n, k, multiple, launches=2)


def bf16_cost(experts, rows, n, k, multiple):
    return products(experts, rows, n, k, multiple, kind="bf16", launches=2)


def work(experts, rows, n, k, multiple):
    return Work(
        read=used(experts, rows, multiple) * n * k + 2 * rows * k,
        write=2 * rows * n,
        flops={"fp8": 2 * rows * n * k},
    )


def shapes(multiple, *each):
    keys = ("experts", "rows", "n", "k")
    return [{**dict(zip(keys, shape, strict=True)), "multiple": multiple} for shape in each]


TIMED = ((64, 512, 1536, 2048), (64, 32768, 1536, 2048), (8, 16384, 7168, 4096))
judged = functools.partial(compare, state=state, inputs=inputs, reference=reference, work=work)
ON_SOME_GPUS = Variant(
    library,
    precision="fp8",
    at_least="yardstick",
    gpu_only="_scaled_grouped_mm",
    marks=[pytest.mark.skipif(UNSUPPORTED, reason="_scaled_grouped_mm is for sm90, sm100, sm103")],
)


@judged(
    baseline=looped,
    optimized=[
        Variant(looped_fp8, precision="fp8", at_least="yardstick", gpu_only=ROWS),
        Variant(grouped, precision="fp8"),
        ON_SOME_GPUS,
    ],
    sizes=shapes(4, *TIMED),
    # First, an expert needs two tiles of rows, and n needs two tiles. Then, some experts have no
    # rows.
    check_sizes=shapes(4, (2, 220, 144, 128), (6, 8, 16, 256)),
    bound="launch",
    costs={
        looped: looped_cost,
        looped_fp8: looped_fp8_cost,
        grouped: grouped_cost,
        library: library_cost,
    },
    conditions=Conditions(needs="fp8"),
)
def test_fp8_grouped(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@judged(
    baseline=bf16,
    optimized=[Variant(grouped, precision="fp8"), ON_SOME_GPUS],
    sizes=shapes(1, *TIMED),
    check_sizes=shapes(1, (2, 219, 144, 128), (6, 7, 16, 256)),
    bound="tensor",
    costs={bf16: bf16_cost, grouped: grouped_cost, library: library_cost},
    conditions=Conditions(needs="fp8"),
)
def test_fp8_grouped_against_bf16(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The kernel rejects unsupported tensors before the launch."""

    @pytest.mark.parametrize(
        ("x", "ends", "words"),
        [
            (torch.ones(4, 64), torch.tensor([4, 4]).int(), "a multiple of 128"),
            (torch.ones(4, 256), torch.tensor([4, 4]).int(), "128 channels"),
            (torch.ones(4, 128), torch.tensor([4, 4]), "int32"),
            (torch.ones(4, 128), torch.tensor([4]).int(), "2 int32 numbers"),
        ],
        ids=["odd channels", "other channels", "int64", "one expert"],
    )
    def test_tensors(self, x, ends, words):
        w = torch.ones(2, 16, 64 if x.shape[1] == 64 else 128)
        with pytest.raises(ValueError, match=words):
            multiplied(x.bfloat16(), w.to(torch.float8_e4m3fn), w[:, :, 0], ends)


class TestGroups:
    def test_sizes_are_drawn_and_uneven(self):
        """Every row belongs to one expert, and the first expert has the most rows."""
        _, ends = inputs("cpu", experts=8, rows=65536, n=1, k=1, multiple=4)
        rows = ends.diff(prepend=torch.tensor([0]))
        assert int(ends[-1]) == 65536
        assert bool((rows % 4 == 0).all())
        assert 3 < int(rows[0]) / int(rows[-1]) < 5

    def test_costs_count_the_experts_that_have_rows(self):
        drawn = (inputs("cpu", experts=64, rows=512, n=1, k=1, multiple=4)[1] for _ in range(2000))
        seen = [len(ends.unique()) - int(ends[0] == 0) for ends in drawn]
        assert abs(sum(seen) / 2000 - used(experts=64, rows=512, multiple=4)) < 0.5
