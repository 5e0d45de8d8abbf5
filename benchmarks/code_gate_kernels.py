"""Eight different kernels of 2 to 50 us on an H200, for the trials of `code_gate.py`.

scaled 2 us, in L2: one multiply-add per element, hardly longer than its launch.
transposed   5 us, in L2: a strided copy.
projected    10 us, in L2: a small bf16 GEMM.
gathered     15 us: random reads of 4 bytes.
softmaxed    10 us, DRAM: a reduction over rows.
lgammaed     20 us: fp32 arithmetic, bound by the clock.
added        50 us, DRAM: two streams read, one written.
multiplied   50 us: a bf16 GEMM on cold operands.

Each is the optimized side of an ordinary pair. The trials time it against itself; the baseline
fixes the types of the outputs and is never timed.
"""

import torch

from pytest_aisp import Conditions, Work, compare


def randn(device, *shape, dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype)


def vector(device, n):
    return (randn(device, n),)


def positive(device, n):
    return (torch.rand(n, device=device) * 8 + 2.5,)


def two_vectors(device, n):
    return randn(device, n), randn(device, n)


def matrix(device, rows, columns):
    return (randn(device, rows, columns),)


def logits(device, rows, columns):
    return (randn(device, rows, columns, dtype=torch.bfloat16),)


def operands(device, m, n, k):
    return (
        randn(device, m, k, dtype=torch.bfloat16),
        randn(device, k, n, dtype=torch.bfloat16),
    )


def table_and_places(device, n, count):
    return randn(device, n), torch.randint(0, n, (count,), device=device)


def two_passes(x):
    return x * 2 + 1


def scaled(x):
    return torch.add(1, x, alpha=2)


@compare(
    baseline=two_passes,
    optimized=[scaled],
    inputs=vector,
    reference=lambda x: x.double() * 2 + 1,
    sizes=[{"n": 2**19}],
    check_sizes=[{"n": 1023}],
    work=lambda n: Work(read=4 * n, write=4 * n, roundings=2),
    bound="l2",
    conditions=Conditions(l2="warm"),
)
def test_scaled(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def copied_twice(x):
    return x.clone().t().contiguous()


def transposed(x):
    return x.t().contiguous()


@compare(
    baseline=copied_twice,
    optimized=[transposed],
    inputs=matrix,
    reference=lambda x: x.t().contiguous(),
    sizes=[{"rows": 2048, "columns": 1024}],
    check_sizes=[{"rows": 33, "columns": 65}],
    work=lambda rows, columns: Work(read=4 * rows * columns, write=4 * rows * columns),
    bound="l2",
    conditions=Conditions(l2="warm"),
)
def test_transposed(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


def in_fp32(a, b):
    return (a.float() @ b.float()).bfloat16()


def projected(a, b):
    return a @ b


def product(a, b):
    return a.double() @ b.double()


def gemm_work(m, n, k):
    # Two roundings: a GEMM that splits K may add its parts in bf16 (PyTorch's default).
    return Work(
        read=2 * k * (m + n), write=2 * m * n, flops={"bf16": 2 * m * n * k}, terms=k, roundings=2
    )


@compare(
    baseline=in_fp32,
    optimized=[projected],
    inputs=operands,
    reference=product,
    sizes=[{"m": 2048, "n": 1024, "k": 1024}],
    check_sizes=[{"m": 65, "n": 33, "k": 129}],
    work=gemm_work,
    bound="tensor",
    conditions=Conditions(l2="warm"),
)
def test_projected(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def multiplied(a, b):
    return a @ b


@compare(
    baseline=in_fp32,
    optimized=[multiplied],
    inputs=operands,
    reference=product,
    sizes=[{"m": 4096, "n": 2048, "k": 2048}],
    check_sizes=[{"m": 65, "n": 33, "k": 129}],
    work=gemm_work,
    bound="tensor",
)
def test_multiplied(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def indexed(table, places):
    return table[places]


def gathered(table, places):
    return torch.gather(table, 0, places)


@compare(
    baseline=indexed,
    optimized=[gathered],
    inputs=table_and_places,
    reference=lambda table, places: table[places],
    sizes=[{"n": 2**23, "count": 2**20}],
    check_sizes=[{"n": 1023, "count": 2049}],
    work=lambda n, count: Work(read=12 * count, write=4 * count),
    bound="latency",
)
def test_gathered(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


def through_fp32(x):
    return torch.softmax(x.float(), -1).bfloat16()


def softmaxed(x):
    return torch.softmax(x, -1)


@compare(
    baseline=through_fp32,
    optimized=[softmaxed],
    inputs=logits,
    reference=lambda x: torch.softmax(x.double(), -1),
    sizes=[{"rows": 2048, "columns": 4096}],
    check_sizes=[{"rows": 33, "columns": 65}],
    work=lambda rows, columns: Work(
        read=2 * rows * columns, write=2 * rows * columns, terms=columns
    ),
    bound="dram",
)
def test_softmaxed(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def through_fp64(x):
    return torch.lgamma(x.double()).float()


def lgammaed(x):
    return torch.lgamma(x)


@compare(
    baseline=through_fp64,
    optimized=[lgammaed],
    inputs=positive,
    reference=lambda x: torch.lgamma(x.double()),
    sizes=[{"n": 2**22}],
    check_sizes=[{"n": 1023}],
    work=lambda n: Work(read=4 * n, write=4 * n, roundings=16),  # a chain of fp32 operations
    bound="issue",
)
def test_lgammaed(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def added_in_place(a, b):
    return a.clone().add_(b)


def added(a, b):
    return a + b


@compare(
    baseline=added_in_place,
    optimized=[added],
    inputs=two_vectors,
    reference=lambda a, b: a.double() + b.double(),
    sizes=[{"n": 2**24}],
    check_sizes=[{"n": 1023}],
    work=lambda n: Work(read=8 * n, write=4 * n),
    bound="dram",
)
def test_added(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
