"""Training in lower precision: products in TF32, bf16 or fp16, weights and update in fp32.

Problem    One AdamW step of 2 decoder blocks of width 1024 on 4 x 1024 tokens. Weights, gradients
           and moments are fp32 on every side, and the loss is returned.
Baseline   fp32: TF32 switched off, as torch has it from the start: products on the CUDA cores.
Optimized  tf32: TF32 switched on; tensor cores round fp32 operands to 11 significant bits. Whoever
           trains in fp32 today has it on, so the variants below are to be held against this one.
           bf16: autocast; weights are cast at their use, activations stay in bf16.
           fp16: autocast and a `GradScaler`, since gradients of a mean loss lie below what fp16 can
           hold: the loss is multiplied by 2^16, the fp32 gradients divided before the update.
Bound      Tensor cores: 0.67 TFLOP take 13.5 ms at 50 TFLOP/s of fp32, 1.8 ms at 380 of TF32 and
           0.90 ms at 750 of bf16. The rest is traffic, some 100 passes a block over 4096 rows of
           1024 and the optimizer's 28 bytes of 25 M weights: 0.80 + 0.17 ms in fp32, half of it
           and 12 bytes a weight of casts in bf16, 0.64 ms. fp16 reads and writes the gradients
           once more to divide them: 0.05 ms. Predicted against fp32: tf32 5.3x, bf16 9.4x, fp16 9x;
           bf16 against tf32 1.8x.
           That training stays on its way is what the check says: loss, gradients, moments and
           weights after 1 and 3 steps, and after the up to 16 of a timed window, lie around those
           of float64 as roundings of the declared type allow.
Seen       An H200: fp32 16.9 ms, tf32 2.7x, bf16 5.4x, fp16 5.2x; bf16 against tf32 2.0x. What is
           not a product weighs more than predicted: attention in fp32 takes a kernel made for
           Ampere whose products stay fp32 where TF32 is on, and the 180 kernels of a step take some
           2 ms besides the products in any type.
"""

import contextlib

import torch

from pytest_aisp import Conditions, Variant, Work, compare

from .transformer import batch, flops_of, reference_step, training, weights_of


def state(device, layers, width, rows, length):
    return training(device, layers, width, length, torch.float32)


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(state, tokens, labels):
    return reference_step(state, tokens, labels)


@contextlib.contextmanager
def products_in(precision):
    matmul = torch.backends.cuda.matmul  # the flag is the process's: put it back
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def step(state, tokens, labels):
    state.optimizer.zero_grad()
    loss = state.model(tokens, labels)
    loss.backward()
    state.optimizer.step()
    return loss.detach()


def fp32(state, tokens, labels):
    with products_in("ieee"):
        return step(state, tokens, labels)


def tf32(state, tokens, labels):
    with products_in("tf32"):
        return step(state, tokens, labels)


def bf16(state, tokens, labels):
    state.optimizer.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = state.model(tokens, labels)
    loss.backward()
    state.optimizer.step()
    return loss.detach()


def fp16(state, tokens, labels):
    # It begins with 2^16, and must not grow with how often the step was timed.
    scaler = torch.amp.GradScaler(tokens.device.type, growth_interval=1 << 30)

    def scaled():
        state.optimizer.zero_grad()
        with torch.autocast(tokens.device.type, torch.float16):
            loss = state.model(tokens, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(state.optimizer)
        scaler.step(state.optimizer)
        scaler.update()
        return loss.detach()

    yield scaled


@compare(
    baseline=fp32,
    optimized=[
        Variant(tf32, precision="tf32", at_least={"sm90": 2.3}),
        Variant(bf16, precision="bf16", at_least={"sm90": 4.6}),
        Variant(fp16, precision="fp16", at_least={"sm90": 4.4}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 2, "width": 1024, "rows": 4, "length": 1024}],
    check_sizes=[{"layers": 1, "width": 64, "rows": 5, "length": 33}],
    work=lambda layers, width, rows, length: Work(
        read=16 * weights_of(layers, width),
        write=16 * weights_of(layers, width),
        # the fastest arithmetic of any side: its peak is the limit of all
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        terms=max(width, rows * length),
        roundings=8 * layers + 8,
    ),
    bound="tensor",
    conditions=Conditions(owns=["tf32"]),
)
def test_amp_training(pair):
    pair.assert_equivalent()
    if pair.variant == "bf16":
        pair.assert_energy(at_most=0.35)
    pair.assert_speedup()
