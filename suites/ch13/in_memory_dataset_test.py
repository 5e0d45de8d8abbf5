"""A small data set in memory: read each file once, not once per epoch.

Problem    Train for one epoch of SGD on images of 3 x 32 x 32 bytes, in batches of 128. Each image
           has its own file. The order of the images is an input. Each side returns the logits of
           every image. The check also compares the weights after the epoch.
Baseline   files: the training process opens and reads the files of a batch one by one. The files
           were just written, so they are in the page cache, and the baseline only spends time on
           system calls and Python. Reading from a disk or a network would be slower.
Optimized  in_memory: changes `files`. All files are read once, before the timed part, into one
           tensor in host memory. A batch is selected from the tensor by index.
           on_gpu: changes `in_memory`. The tensor and the epoch's order are on the GPU.
Bound      The host. `files` opens one file per image. All sides launch the same kernels in each
           training step. Running these kernels takes less time than launching them.
Seen       We did not measure how long it takes to open a file, so the prediction for files leaves
           out that time. `in_memory` and `on_gpu` take several times as long as their launches and
           their waits for the GPU. Part of the extra time is Python time in autograd, modules and
           optimizer: on a CPU, a training step on tiny tensors takes as long as 340 to 410 calls of
           `Tensor.view`. 340 to 410 calls take about a third of the measured step. We cannot
           explain the rest. All sides spend this Python time, so the speedup of `in_memory` is
           lower than the time for the files suggests.
Use when   The whole data set fits in host memory. Put the data on the GPU only if the GPU has
           memory to spare, because `on_gpu` only saves the small copies of the batches.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

BATCH, PIXELS, HIDDEN, CLASSES, RATE = 128, 3 * 32 * 32, 32, 10, 0.01


def state(device, items):
    model = torch.nn.Sequential(
        torch.nn.Linear(PIXELS, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, CLASSES)
    ).to(device)
    return SimpleNamespace(
        images=torch.randint(256, (items, PIXELS), dtype=torch.uint8),
        labels=torch.randint(CLASSES, (items,), device=device),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), RATE),
    )


def inputs(device, items):
    """Return the order of the items as indices, as a sampler would draw it."""
    return (torch.randperm(items),)


def step(state, images, labels):
    logits = state.model(images)
    state.optimizer.zero_grad()
    F.cross_entropy(logits, labels).backward()
    state.optimizer.step()
    return logits.detach()


def trained(state, images, order):
    """Train on a batch of bytes, which is on the model's device. Return the logits."""
    return step(state, (images.float() - 127.5) / 64, state.labels[order])


def reference(state, order):
    state.model.double()
    order = order.to(state.labels.device)
    images = (state.images.to(order.device)[order].double() - 127.5) / 64
    batches = zip(images.split(BATCH), state.labels[order].split(BATCH), strict=True)
    return torch.cat([step(state, x, y) for x, y in batches])


def written(state, folder):
    """Write each image to a file in `folder`, and return the paths."""
    paths = [f"{folder}/{item}" for item in range(len(state.images))]
    for path, image in zip(paths, state.images, strict=True):
        Path(path).write_bytes(image.numpy().tobytes())
    return paths


def read(paths):
    """Return a tensor with one row per image in `paths`."""
    joined = bytearray()
    for path in paths:
        with open(path, "rb") as file:
            joined += file.read()
    return torch.frombuffer(joined, dtype=torch.uint8).view(len(paths), PIXELS)


def files(state, order):
    with tempfile.TemporaryDirectory() as folder:
        paths = written(state, folder)

        def epoch():
            device, found = state.labels.device, []
            for batch in order.split(BATCH):
                images = read([paths[item] for item in batch.tolist()])
                found.append(trained(state, images.to(device), batch.to(device)))
            return torch.cat(found)

        yield epoch


def in_memory(state, order):
    with tempfile.TemporaryDirectory() as folder:
        images = read(written(state, folder))

    def epoch():
        device, found = state.labels.device, []
        for batch in order.split(BATCH):
            found.append(trained(state, images[batch].to(device), batch.to(device)))
        return torch.cat(found)

    yield epoch


def on_gpu(state, order):
    device = state.labels.device
    with tempfile.TemporaryDirectory() as folder:
        images = read(written(state, folder)).to(device)

    def epoch():
        batches = order.to(device).split(BATCH)
        return torch.cat([trained(state, images[batch], batch) for batch in batches])

    yield epoch


def epoch_of(items, launches, host_steps=0, copies=None):
    """Return the cost of an epoch.

    Args:
        items: number of images.
        launches, host_steps, copies: what each step costs in addition to training.
    """
    training = Cost(
        # There is no gradient with respect to the images.
        ops={"fp32": 4 * BATCH * PIXELS * HIDDEN + 6 * BATCH * HIDDEN * CLASSES},
        launches=20 + launches,
        host_steps=19 + host_steps,
    )
    step = training if copies is None else copies + training
    return -(-items // BATCH) * step + Cost(launches=1)  # cat


# A copy from pageable memory is synchronous, so the host waits for the GPU.
COPIES = Cost(h2d=BATCH * PIXELS, launches=1, syncs=1) + Cost(h2d=8 * BATCH, launches=1, syncs=1)


def on_gpu_cost(items):
    order = Cost(h2d=8 * items, launches=1, syncs=1)
    return order + epoch_of(items, launches=1)


@compare(
    baseline=files,
    optimized=[in_memory, on_gpu],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"items": 1024}],
    check_sizes=[{"items": BATCH + 33}],
    cpu_sizes=[{"items": 256}],
    work=lambda items: Work(
        wire=8 * items,  # only the order, because on_gpu does not copy images
        flops={"fp32": 4 * items * PIXELS * HIDDEN},
        terms=PIXELS,
        roundings=16,
    ),
    bound="host",
    costs={
        files: lambda items: epoch_of(items, launches=0, copies=COPIES),
        in_memory: lambda items: epoch_of(items, launches=0, host_steps=1, copies=COPIES),
        on_gpu: on_gpu_cost,
    },
    at_least={"cpu": 1.2, "sm90": 1.6},
)
def test_in_memory_dataset(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
