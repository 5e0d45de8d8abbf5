"""Row-parallel linear: reduce some rows while the next ones are multiplied.

Problem    y = x W^T with the inner dimension of x and W split over the ranks, as in the second
           linear of a tensor-parallel MLP: every rank gets the sum of all ranks' products, in bf16.
Baseline   whole: one product, then one all-reduce of it.
Optimized  halves: the product of two halves of the rows; the first one's all-reduce runs while the
           second is computed.
           quarters: the same with four parts.
           eighths: with eight.
           copied: with eight, whose products are written into symmetric memory and moved by copy
           engines ([copy_engines](copy_engines.py)); processors only add.
Bound      The wire, hidden behind the tensor cores: 8192 x 8192 outputs of an inner dimension of
           8192 a rank are 1.10 TFLOP, 1.47 ms at 750 TFLOP/s; their 128 MiB take 0.02 + 0.42 ms at
           316 GB/s: 1.91 ms in a row. Only the last part's all-reduce is left in the open: 1.70 ms
           in halves (1.12 times), 1.59 in quarters (1.20), 1.55 in eighths (1.24). Against that:
           NCCL's kernels hold some of the 132 processors. An eighth's product has 256 tiles of
           128 x 256, two waves where all processors are free and three where NCCL has a few, half
           as long again: eighths may lose what quarters, of 512 tiles, win. copied moves the same
           bytes with no processor but for the additions.
Seen       Two H200s. At an inner dimension of 8192: halves 1.03x, quarters 1.07x, eighths 1.03x,
           copied 1.26x; at 3584, the MLP of Llama 3 70B on eight ranks: 1.00x, 1.10x, 1.06x, 1.32x.
           NCCL's kernels and the products are in each other's way, with priority or with fewer
           channels no less. Of copied at 3584: products 0.65 ms by themselves, sums 0.48, 1.10 one
           after the other and 0.84 together, so 60 % of the sums is hidden (70 % with sixteen
           parts), and the products take 8 % longer meanwhile.
"""

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Variant, Work, compare

from .copy_engines import CopiedSums


def inputs(device, rows, inner, columns):
    """Return this rank's columns of x and of W."""
    x = torch.randn(rows, inner, device=device).bfloat16()
    return x, torch.randn(columns, inner, device=device).bfloat16()


def reference(ranks):
    total = sum(x.double() @ w.double().t() for x, w in ranks)
    return [total] * len(ranks)


def whole(x, w):
    out = x @ w.t()
    dist.all_reduce(out)
    return out


def overlapped(x, w, parts):
    out = x.new_empty(len(x), len(w))
    works = []
    for rows, part in zip(x.chunk(parts), out.chunk(parts), strict=True):
        torch.mm(rows, w.t(), out=part)
        works.append(dist.all_reduce(part, async_op=True))
    for work in works:
        work.wait()
    return out


def halves(x, w):
    return overlapped(x, w, 2)


def quarters(x, w):
    return overlapped(x, w, 4)


def eighths(x, w):
    return overlapped(x, w, 8)


def copied(x, w, parts=8):
    cut = x.chunk(parts)  # the last one may be shorter
    sums = CopiedSums(len(cut), (len(cut[0]), len(w)), x)

    def run():
        for k, rows in enumerate(cut):
            torch.mm(rows, w.t(), out=sums.mine[k, : len(rows)])
            sums.start(k)
        sums.wait()
        return sums.mine.flatten(0, 1)[: len(x)]

    yield run


@compare(
    baseline=whole,
    optimized=[
        Variant(halves, at_least="neutral"),
        quarters,
        eighths,
        Variant(copied, gpu_only="symmetric memory", at_least={"sm90": 1.15}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[
        {"rows": 8192, "inner": 8192, "columns": 8192},
        {"rows": 8192, "inner": 3584, "columns": 8192},
    ],
    check_sizes=[
        {"rows": 33, "inner": 17, "columns": 65},
        {"rows": 3, "inner": 130, "columns": 31},
    ],
    work=lambda rows, inner, columns, world: Work(
        read=2 * inner * (rows + columns),
        write=2 * rows * columns,
        flops={"bf16": 2 * rows * inner * columns},
        wire=2 * (world - 1) / world * 2 * rows * columns,
        terms=inner * world,
        roundings=2,
    ),
    bound="nvlink",
    conditions=Conditions(gpus=(2, 4)),
)
def test_tensor_parallel(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
