"""Row-parallel linear: all-reduce some rows while the GPU multiplies the next rows.

Problem    y = x W^T, with the inner dimension of x and W split over the ranks, as in the second
           linear layer of a tensor-parallel MLP. Every rank gets the sum of all ranks' products, in
           bf16. Llama 3 70B on eight ranks has an inner dimension of 3584.
Baseline   whole: one product, then one all-reduce of the product.
Optimized  halves: changes `whole`. The rows are split into two halves. The all-reduce of the first
           half runs while the GPU computes the second half.
           quarters: changes `halves`. There are four parts.
           eighths: changes `halves`. There are eight parts.
           copied: changes `eighths`. The products are written into symmetric memory and moved by
           copy engines ([copy_engines](copy_engines.py)). The SMs only add.
Bound      Tensor cores. The products hide the transfers over NVLink, except for the last part's
           all-reduce. With more parts, the last all-reduce is shorter, but each product is smaller
           and leaves more SMs idle in its last wave. NCCL's kernels also occupy some SMs. NVLink
           multicast was off (README). With four GPUs or more, multicast could shorten NCCL's
           all-reduces.
Seen       On two GPUs, the three variants with NCCL take longer than predicted: over 25 % at an
           inner dimension of 3584, and less at 8192. The prediction uses the rate of an all-reduce
           of 512 MiB, and NCCL is slower with the smaller parts (see the README's plot). But even
           at the plot's rates, the products should hide the all-reduces of all parts except the
           last. `copied`, which sends the same bytes without NCCL's kernels, is within an eighth of
           its prediction. So most of the loss probably occurs because NCCL's kernels and the
           products slow each other down. Neither a high priority nor fewer NCCL channels helped.
           All sides were timed as CUDA graphs, so the times leave out the host, which makes several
           calls per part for `copied`. At an inner dimension of 3584, `halves` gains nothing on two
           or four GPUs. On four GPUs, `quarters` gains a little more than on two. At 8192, `copied`
           gains less on four GPUs than on two. At 3584, `copied` is slower than `whole` on four
           GPUs. At the link rates of two GPUs, its predicted time is little more than half of the
           measured time. On four GPUs, each sum takes three copies in and three copies out, one
           after another. Each copy is half as large as on two. We did not measure which part takes
           so long: the copies, the additions or the barriers. At 8192, the longer products hide
           more of this time.
Use when   The product takes longer than its all-reduce, and both are long enough to be cut into
           parts. With NCCL, use quarters. In CUDA graphs, `copied` gains the most on two GPUs. On
           four GPUs, `copied` gains only if the products are long.
"""

import torch
import torch.distributed as dist

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .copy_engines import CopiedSums
from .wire_costs import all_reduce_of, all_reduced, copied_sum


def inputs(device, rows, inner, columns):
    """Return this rank's columns of x and W."""
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
    cut = x.chunk(parts)  # the last part may be shorter
    sums = CopiedSums(len(cut), (len(cut[0]), len(w)), x)

    def run():
        for k, rows in enumerate(cut):
            torch.mm(rows, w.t(), out=sums.mine[k, : len(rows)])
            sums.start(k)
        sums.wait()
        return sums.mine.flatten(0, 1)[: len(x)]

    yield run


def product(rows, inner, columns, sent=0, nccl=0, launches=1):
    """Return the cost of a product while `sent` bytes of the previous part are sent."""
    return Cost(
        read=2 * (rows + columns) * inner,
        write=2 * rows * columns,
        ops={"bf16": 2 * rows * inner * columns},
        sent=sent,
        nccl=nccl,
        launches=launches,
    )


def one_by_one(rows, inner, columns, world):
    return product(rows, inner, columns) + all_reduce_of(2 * rows * columns, world)


def in_parts(parts):
    """Return a function from the sizes to the cost with `parts` parts."""

    def cost(rows, inner, columns, world):
        last = all_reduce_of(2 * rows / parts * columns, world)
        part = product(rows / parts, inner, columns)
        beside = product(rows / parts, inner, columns, nccl=last.nccl, launches=2)
        return part + (parts - 1) * beside + last

    return cost


def by_copies(rows, inner, columns, world, parts=8):
    """Return the cost. Each part has two barriers, and one pull, add and push per other rank."""
    nbytes = 2 * rows / parts * columns
    part = product(rows / parts, inner, columns)
    sent, launches = all_reduced(nbytes, world), 3 * world
    beside = product(rows / parts, inner, columns, sent=sent, launches=launches)
    return part + (parts - 1) * beside + copied_sum(nbytes, world)


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
    costs={
        whole: one_by_one,
        halves: in_parts(2),
        quarters: in_parts(4),
        eighths: in_parts(8),
        copied: by_copies,
    },
    conditions=Conditions(gpus=(2, 4)),
)
def test_tensor_parallel(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
