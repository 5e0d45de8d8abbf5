"""Dynamic shapes: compile once for all lengths, not once per length.

Problem    Compute GELU, RMS norm with a weight, and a residual in fp32, for sequences of several
           lengths. test_dynamic_shapes times the first pass over all lengths in a new process,
           including compilation. test_dynamic_shapes_later times a pass after everything is
           compiled.
Baseline   each_first: `dynamic=False`, so the code is compiled again for every new length.
           each: like `each_first`, but compiled before the timed part. In each kernel, the length
           is a constant.
Optimized  automatic_first: like `each_first`, with the default `dynamic=None`. The first length is
           compiled. At the second length, the compiler makes the changed dimension symbolic, and
           later lengths use the same kernel. So there are two compilations instead of six.
           marked_first: changes `each_first`. `torch._dynamo.mark_dynamic` makes the dimension
           symbolic from the first length on. So there is one compilation instead of six.
           marked: changes `each`. The kernel is the same as in `marked_first`, compiled before the
           timed part.
           eager: like `each`, but not compiled.
Bound      In the first pass, the limit is the compiler, on the host. We did not measure how long
           compilation takes, so the costs count only the kernels. All compiled sides take far
           longer than predicted. `each_first` compiles six times, `automatic_first` twice,
           `marked_first` once. All three start with empty Inductor and Triton caches, and their
           times include importing the compiler. In later passes, the limit is DRAM: all compiled
           sides do the same work and move the same bytes.
Seen       On an H100, `automatic_first` takes about two thirds of the time of `each_first`,
           although it compiles two times instead of six. If all compilations took equally long,
           more than half of the time of `each_first` would be left for other work, such as
           importing the compiler. We did not measure the parts.
Use when   Lengths vary. If you know which dimension varies, mark it to save one compilation. Dynamo
           stops compiling a function after `torch._dynamo.config.recompile_limit` recompilations,
           and then runs it eagerly. `TORCH_LOGS=recompiles` shows why it recompiled. If constant
           sizes make the code faster, as for matrix products and CUDA graphs, compile for each
           length, or for a few padded lengths.
"""

import contextlib
from importlib import import_module

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare, fresh_process


def lengths_of(lengths, tokens):
    """Return `lengths` different sequence lengths, from `tokens` to less than 1.25 * `tokens`."""
    return [tokens + tokens * step // (4 * lengths) for step in range(lengths)]


def inputs(device, lengths, tokens, width):
    weight = torch.rand(width, device=device) + 0.5
    rows = lengths_of(lengths, tokens)
    return [torch.randn(count, width, device=device) for count in rows], weight


def layer(x, weight):
    return x + F.rms_norm(F.gelu(x), x.shape[-1:], weight, eps=1e-5)


def reference(sequences, weight):
    return [layer(x.double(), weight.double()) for x in sequences]


# Each variant has its own function, because Dynamo keeps one cache per code object.
def each_first_layer(x, weight):
    return layer(x, weight)


def each_layer(x, weight):
    return layer(x, weight)


def automatic_layer(x, weight):
    return layer(x, weight)


def marked_first_layer(x, weight):
    return layer(x, weight)


def marked_layer(x, weight):
    return layer(x, weight)


def with_mark(x):
    """Return an alias of x whose first dimension is marked as dynamic. x is not marked."""
    alias = x.detach()
    torch._dynamo.mark_dynamic(alias, 0)
    return alias


def cold_caches(weight):
    """Return a context with empty compiler caches. On a CPU, it does nothing."""
    if not weight.is_cuda:
        return contextlib.nullcontext()
    return import_module("torch._inductor.utils").fresh_cache()


@fresh_process(warmup=0)
def each_first(sequences, weight):
    with cold_caches(weight):
        step = torch.compile(each_first_layer, dynamic=False)
        return [step(x, weight) for x in sequences]


@fresh_process(warmup=0)
def automatic_first(sequences, weight):
    with cold_caches(weight):
        step = torch.compile(automatic_layer)
        return [step(x, weight) for x in sequences]


@fresh_process(warmup=0)
def marked_first(sequences, weight):
    with cold_caches(weight):
        step = torch.compile(marked_first_layer)
        return [step(with_mark(x), weight) for x in sequences]


def each(sequences, weight):
    step = torch.compile(each_layer, dynamic=False)
    for x in sequences:
        step(x, weight)
    yield lambda: [step(x, weight) for x in sequences]


def marked(sequences, weight):
    step = torch.compile(marked_layer)
    for x in sequences:
        step(with_mark(x), weight)
    yield lambda: [step(x, weight) for x in sequences]


def eager(sequences, weight):
    yield lambda: [layer(x, weight) for x in sequences]


def total(lengths, tokens, width):
    """Return the total number of elements in all sequences."""
    return width * sum(lengths_of(lengths, tokens))


def work(lengths, tokens, width):
    bytes_each_way = 4 * total(lengths, tokens, width)
    return Work(read=bytes_each_way, write=bytes_each_way, terms=width, roundings=8)


def fused(lengths, tokens, width):
    moved = 4 * total(lengths, tokens, width)
    return Cost(read=moved, write=moved, launches=lengths)


def unfused(lengths, tokens, width):
    """Return the cost of three kernels per sequence: GELU, norm and sum."""
    moved = 4 * total(lengths, tokens, width)
    one = Cost(read=moved, write=moved, launches=lengths)
    return one + one + Cost(read=2 * moved, write=moved, launches=lengths)


@compare(
    baseline=each_first,
    optimized=[automatic_first, marked_first],
    inputs=inputs,
    reference=reference,
    sizes=[{"lengths": 6, "tokens": 8192, "width": 1024}],
    check_sizes=[{"lengths": 2, "tokens": 33, "width": 40}],
    work=work,
    bound="host",
    costs=dict.fromkeys([each_first, automatic_first, marked_first], fused),
)
def test_dynamic_shapes(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=each,
    optimized=[Variant(marked, at_least="neutral"), Variant(eager, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"lengths": 4, "tokens": 8192, "width": 1024}],
    check_sizes=[{"lengths": 2, "tokens": 33, "width": 40}],
    work=work,
    bound="dram",
    costs={**dict.fromkeys([each, marked], fused), eager: unfused},
)
def test_dynamic_shapes_later(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
