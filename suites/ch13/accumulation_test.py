"""Gradient accumulation: a batch in four parts needs about a third of the memory.

Problem    Compute the gradients of the mean loss over a batch of 8 x 1024 tokens, for 8 decoder
           blocks of width 1024 in bf16. The sequences are independent, so splitting the batch does
           not change the gradients.
Baseline   whole: one forward and one backward pass over the whole batch.
Optimized  accumulated: changes `whole`. The batch is processed in 4 micro-batches of 2 sequences.
           The mean loss of each micro-batch is divided by 4, and each backward pass adds to
           `.grad`. `.grad` is bf16, so each gradient is rounded 4 times.
Bound      Tensor cores. But the page is about memory. checkpointing_test.py counts the peak memory
           of `whole`: 180 units of activations and temporaries. A unit is one bf16 value per token
           and column. At any time, `accumulated` holds a quarter of these activations and
           temporaries. From the second micro-batch on, `accumulated` also holds the gradients of
           all weights. The predicted peak of `accumulated` is 961 MB, or 32 % of the peak of
           `whole`. `accumulated` is slower because it launches four times as many kernels.
Seen       The peak of `accumulated` is about 12 MB higher than 961 MB, which we cannot explain.
           Both sides are slower than predicted. For `whole`, checkpointing_test.py lists the
           causes. `accumulated` also multiplies smaller matrices: a result of 2048 x 1024 has only
           64 tiles of 128 x 256 elements, so it occupies 64 of 132 SMs. We cannot explain the rest
           of the extra time.
Use when   The batch does not fit in memory. If the batch fits, accumulation only costs time.
"""

from pytest_aisp import Cost, Work, compare

from . import decoder_costs
from .transformer import batch, flops_of, model_of, reference_gradients, weights_of

PARTS = 4


def state(device, layers, width, rows, length):
    return model_of(device, layers, width, length)


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(model, tokens, labels):
    return reference_gradients(model, tokens, labels)


def whole(model, tokens, labels):
    model.zero_grad()
    loss = model(tokens, labels)
    loss.backward()
    return loss.detach()


def accumulated(model, tokens, labels):
    model.zero_grad()
    total = 0.0
    for part, answers in zip(tokens.chunk(PARTS), labels.chunk(PARTS), strict=True):
        loss = model(part, answers) / PARTS
        loss.backward()
        total = total + loss.detach()
    return total


def work(layers, width, rows, length):
    weights = weights_of(layers, width)
    return Work(
        read=2 * weights,
        write=2 * weights,
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        roundings=8 * layers + 8 + PARTS,
    )


def whole_cost(layers, width, rows, length):
    tokens = rows * length
    return decoder_costs.layers(layers, width, tokens, length) + decoder_costs.ends(width, tokens)


def accumulated_cost(layers, width, rows, length):
    weights, matrices = weights_of(layers, width), 5 * layers + 2
    # The 4 launches divide the loss of a micro-batch and add it to the total.
    part = whole_cost(layers, width, rows // PARTS, length) + Cost(launches=4)
    added = Cost(read=4 * weights, write=2 * weights, launches=matrices + 2 * layers + 1)
    return PARTS * part + (PARTS - 1) * added


@compare(
    baseline=whole,
    optimized=[accumulated],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 8, "width": 1024, "rows": 8, "length": 1024}],
    check_sizes=[{"layers": 1, "width": 64, "rows": 4, "length": 33}],
    work=work,
    bound="tensor",
    costs={whole: whole_cost, accumulated: accumulated_cost},
    at_least="yardstick",
)
def test_accumulation(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.45)
