"""An input pipeline from end to end: move bytes, not floats, and move them while the GPU computes.

Problem    `batches` batches of 256 images arrive in host memory, in uint8. Normalize each batch to
           fp32 with the mean and standard deviation of each channel, and compute the class scores
           with a small fp32 MLP. The result has the scores of all batches. Each rung has its own
           test, and the last test compares the first rung with the last.
Baseline   on_host: normalize on the CPU, then copy fp32 to the GPU from pageable memory.
           on_gpu: the baseline of `pinned`.
           pinned: the baseline of `overlapped`.
Optimized  on_gpu: changes `on_host`. Copy the bytes, and normalize on the GPU. The copy is a
           quarter as large.
           pinned: changes `on_gpu`. The CPU first copies the batch into a pinned buffer, which is
           allocated once. From this buffer, the batch is copied to the GPU. `pinned` alone may gain
           nothing, because in `on_gpu` the driver makes the same copy, piece by piece. The next
           rung needs the pinned buffer.
           overlapped: changes `pinned`. Copies to the GPU do not block. The CPU fills one of two
           pinned buffers while the GPU copies and computes the other.
Bound      The CPU. `on_host` normalizes on the CPU, in three passes over floats. The copy from
           pageable memory, which the driver makes through its own buffer, limits `on_gpu`. The
           CPU's copies into pinned memory limit `overlapped`, and all other work overlaps with
           them.
Seen       On an H100 machine, all sides take longer than predicted: `on_host` more than five times
           as long, `on_gpu` four to five times, `pinned` three times, and `overlapped` twice. No
           rate was measured for the CPU's work, so the costs leave out the normalization of
           `on_host`, the driver's copies of `on_gpu`, and the copies into pinned memory. We did not
           time this work alone. Each rung removes or hides some of this work. `pinned` alone takes
           a third less time than `on_gpu`. The product of the rungs' speedups is close to the
           speedup of the last test.
Use when   Inputs are images or other small integers. Convert them on the GPU. Pin and overlap if
           the GPU still waits. A DataLoader pins with `pin_memory=True`, and copies overlap if the
           loop copies with `non_blocking=True` (`dataloader` in chapter 13). If decoding images
           takes longer than copying and computing, use more workers instead.
"""

import functools

import torch

from pytest_aisp import Cost, Variant, Work, compare

IMAGES, CHANNELS, HIDDEN, CLASSES = 256, 3, 256, 10
# Means are integers and deviations a power of two, so a CPU and a GPU get the same exact values.
MEAN, DEVIATION = (128.0, 112.0, 96.0), (64.0, 64.0, 64.0)


def state(device, batches, side):
    pixels = CHANNELS * side * side
    return {
        "up": torch.randn(pixels, HIDDEN, device=device) / pixels**0.5,
        "down": torch.randn(HIDDEN, CLASSES, device=device) / HIDDEN**0.5,
    }


def inputs(device, batches, side):
    # All sides get them in pageable host memory.
    return (torch.randint(256, (batches, IMAGES, CHANNELS, side, side), dtype=torch.uint8),)


def reference(weights, images):
    up, down = (weights[name].double() for name in ("up", "down"))
    mean, deviation = (torch.tensor(t).double()[:, None, None] for t in (MEAN, DEVIATION))
    x = ((images.double() - mean) / deviation).flatten(2).to(up.device)
    return (x @ up).relu() @ down


def normalized(images):
    mean, deviation = constants(images.device)
    return (images.float() - mean) / deviation


@functools.cache
def constants(device):
    return tuple(torch.tensor(t, device=device)[:, None, None] for t in (MEAN, DEVIATION))


def scores(weights, x):
    return (x.flatten(1) @ weights["up"]).relu_() @ weights["down"]


def on_host(weights, images):
    device = weights["up"].device
    return torch.stack([scores(weights, normalized(batch).to(device)) for batch in images])


def on_gpu(weights, images):
    device = weights["up"].device
    return torch.stack([scores(weights, normalized(batch.to(device))) for batch in images])


def buffers_of(weights, images, count):
    pin = weights["up"].is_cuda
    return [torch.empty_like(images[0], pin_memory=pin) for _ in range(count)]


def pinned(weights, images):
    (buffer,), device = buffers_of(weights, images, 1), weights["up"].device

    def call():
        results = []
        for batch in images:
            buffer.copy_(batch)
            results.append(scores(weights, normalized(buffer.to(device))))
        return torch.stack(results)

    yield call


def overlapped(weights, images):
    buffers, device = buffers_of(weights, images, 2), weights["up"].device
    copied = [torch.Event(device.type) for _ in buffers] if device.type == "cuda" else []

    def call():
        results = []
        for number, batch in enumerate(images):
            turn = number % 2
            if copied:  # wait until the GPU has read the buffer, perhaps in the previous call
                copied[turn].synchronize()
            buffers[turn].copy_(batch)
            there = buffers[turn].to(device, non_blocking=True)
            if copied:
                copied[turn].record()
            results.append(scores(weights, normalized(there)))
        return torch.stack(results)

    yield call


# The costs leave out the CPU's work on pixels, because no rate was measured for it.
def computed(side):
    """Return the cost of the MLP of a batch, whose second product is small."""
    pixels = CHANNELS * side * side
    return Cost(
        read=4 * (IMAGES + HIDDEN) * pixels,
        ops={"fp32": 2 * IMAGES * pixels * HIDDEN},
        launches=3,
    )


def floats_copied(batches, side):
    values = IMAGES * CHANNELS * side * side
    return batches * (Cost(h2d=4 * values, launches=1) + computed(side)) + Cost(launches=1)


def bytes_copied(batches, side):
    """Return the cost of copies, of three kernels that normalize, and of the MLP."""
    values = IMAGES * CHANNELS * side * side
    moved = Cost(h2d=values, launches=1) + Cost(read=values, write=4 * values, launches=1)
    moved += 2 * Cost(read=4 * values, write=4 * values, launches=1)
    return batches * (moved + computed(side)) + Cost(launches=1)


def work(batches, side):
    pixels = CHANNELS * side * side
    return Work(
        read=batches * IMAGES * pixels + 4 * pixels * HIDDEN,
        wire=batches * IMAGES * pixels,
        flops={"fp32": 2 * batches * IMAGES * pixels * HIDDEN},
        roundings=8,
    )


rung = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"batches": 8, "side": 64}],
    check_sizes=[{"batches": 3, "side": 2}, {"batches": 1, "side": 1}],
    work=work,
    bound="host",
)


@rung(
    baseline=on_host,
    optimized=[on_gpu],
    costs={on_host: floats_copied, on_gpu: bytes_copied},
)
def test_input_ladder_on_gpu(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=on_gpu,
    optimized=[Variant(pinned, at_least="yardstick")],
    costs={on_gpu: bytes_copied, pinned: bytes_copied},
)
def test_input_ladder_pinned(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=pinned,
    optimized=[overlapped],
    costs={pinned: bytes_copied, overlapped: bytes_copied},
)
def test_input_ladder_overlapped(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=on_host,
    optimized=[overlapped],
    costs={on_host: floats_copied, overlapped: bytes_copied},
)
def test_input_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
