"""Gradient accumulation: a batch in four parts needs a quarter of the activations.

Problem    Gradients of the mean loss over a batch of 8 x 1024 tokens, for 8 decoder blocks of width
           1024 in bf16. Whether a sequence comes alone or with others, its gradient is the same.
Baseline   whole: one forward and one backward of the batch. Activations are 21.6 units of (tokens,
           width) a block ([checkpointing](checkpointing_test.py) counts them), 2.9 GB.
Optimized  accumulated: 4 micro-batches of 2 sequences, each with a quarter of its mean loss;
           backward adds to `.grad`. It is bf16, so a sum is rounded 4 times and not once.
Bound      Tensor cores, and memory is the point. whole: activations, some 10 units of temporaries
           and 3 of the loss, 186 x 16.8 MB = 3.1 GB. accumulated: a quarter of it, 0.78 GB,
           and the gradients, 0.20 GB, which are there from the second part on: 0.98 GB, 0.31. In
           time 3 more passes read the weights and add to gradients, 5 x 0.2 GB a pass: 3 GB, 0.7
           ms; and products of 2048 rows fill 132 SMs less evenly than those of 8192. Both do 5.4
           TFLOP, 7.1 ms at 750 TFLOP/s: 0.8 to 0.9 times.
Seen       An H200: memory as predicted, 2.8 GiB and 0.91 (0.32). Time 15.6 and 19.2 ms, 0.81 times;
           both take twice the products' time: the rest is attention, norms, rotation and SwiGLU,
           each a kernel of its own. As called accumulated takes 49 ms: its 2,500 kernels cost the
           host more than the GPU.
"""

from pytest_aisp import Work, compare

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
        terms=max(width, rows * length),
        roundings=8 * layers + 8 + PARTS,
    )


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
    at_least="yardstick",
)
def test_accumulation(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.45)
