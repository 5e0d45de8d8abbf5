"""DataLoader: decode the next batches while this one is trained on.

Problem    One epoch of SGD on images that lie in memory as 8 x 8 blocks of DCT coefficients, as a
           JPEG does once its entropy code is undone. An item: dequantize, invert the DCT, YCbCr to
           RGB, crop, flip, resize with antialiasing, some 12 torch operations on the CPU. The
           sampler says which item comes when, and how it is cropped: the same on all sides. Every
           item's logits are returned, and the weights after the epoch are compared.
Baseline   in_process: `num_workers=0`; the process that trains also decodes, item by item.
Optimized  workers: that many processes decode; they start and end with the epoch.
           persistent: the same, `persistent_workers=True`; they start once, before the epochs that
           are timed: the cost of preparing, which every epoch after the first saves.
           pinned: as persistent, `pin_memory=True` and a copy with `non_blocking=True`.
           prefetched: as pinned, `prefetch_factor=4`: four batches a worker are under way, not 2.
Bound      The host. An item takes some 0.33 ms of one core, 256 of them 85 ms; a step's launches
           and optimizer take 0.4 ms, 16 of them 6 ms: 91 ms. Eight workers decode in 11 ms. A
           batch of 0.75 MiB comes through shared memory, 0.2 ms each to receive, and the last
           steps follow the last batches: persistent 15 ms, 6 times. To fork and join 8 workers
           takes some 100 ms (50 for 2 where this was written): workers lose here as
           much as they gain, 0.8 times, and would gain 6 times too in an epoch of minutes. Pinning
           costs a thread and a copy, out of sight, and saves 0.1 ms a batch of staging, which is
           all but lost in 15 ms. prefetched is as persistent, since no item takes longer than
           another; it is for data that come in bursts. The GPU's share is small: 4 MFLOP an item.
Seen       An H200 in a virtual machine of 16 cores: in_process 98 to 150 ms, workers 0.41x to
           0.58x; persistent 2.2x to 2.4x, pinned 2.6x to 3.1x, prefetched 2.6x to 3.1x. Starting
           and ending 8 workers takes 200 ms and more from a process that holds a GPU (0.35x where
           they pinned, too); what lasts wins less than predicted, 47 ms an epoch: a batch costs 3
           ms to receive, not 0.2.

A page about workers cannot hand them values that change in place: theirs are as they were when they
started. So the images are part of the state, which nobody changes, and the order is the input.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pytest_aisp import Conditions, Variant, Work, compare

BATCH, CLASSES, HIDDEN, RATE = 16, 10, 64, 0.01
QUANTIZED = torch.arange(1, 65).view(8, 8) / 64  # steps of the 64 frequencies
TO_RGB = torch.tensor([[1.0, 0.0, 1.402], [1.0, -0.344, -0.714], [1.0, 1.772, 0.0]])


def cosines(dtype):
    """Return the orthonormal DCT of 8 points: row k is frequency k."""
    points = torch.arange(8, dtype=torch.float64)
    rows = torch.cos((2 * points + 1) * points[:, None] * torch.pi / 16) / 2
    rows[0] /= 2**0.5
    return rows.to(dtype)


DCT = cosines(torch.float32)


def state(device, items, side, workers):
    blocks, pixels = side // 8, 3 * (side // 2) ** 2
    model = torch.nn.Sequential(
        torch.nn.Linear(pixels, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, CLASSES)
    ).to(device)
    return SimpleNamespace(
        coefficients=torch.randint(-8, 9, (items, 3, blocks, blocks, 8, 8), dtype=torch.int8),
        labels=torch.randint(CLASSES, (items,)),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), RATE),
        workers=workers,
    )


def inputs(device, items, side, workers):
    """Return what the sampler says: item, top, left, flip, a row for each place in the epoch."""
    corners = torch.randint(side // 4 + 1, (2, items))
    return (torch.stack([torch.randperm(items), *corners, torch.randint(2, (items,))], dim=1),)


class Rows:
    """The rows of a tensor as a sampler's keys, read anew for each epoch."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows.tolist())


class Images(torch.utils.data.Dataset):
    def __init__(self, state):
        self.coefficients, self.labels = state.coefficients, state.labels

    def __getitem__(self, key):
        item, top, left, flip = key
        blocks = DCT.t() @ (self.coefficients[item] * QUANTIZED) @ DCT
        side = 8 * blocks.shape[1]
        picture = (TO_RGB @ blocks.transpose(2, 3).reshape(3, -1)).view(3, side, side)
        crop = picture[:, top : top + side * 3 // 4, left : left + side * 3 // 4]
        crop = crop.flip(2) if flip else crop
        small = F.interpolate(crop[None], (side // 2,) * 2, mode="bilinear", antialias=True)
        return small.flatten(), self.labels[item]


def step(state, images, labels):
    logits = state.model(images)
    state.optimizer.zero_grad()
    F.cross_entropy(logits, labels).backward()
    state.optimizer.step()
    return logits.detach()


def reference(state, rows):
    state.model.double()
    device = state.model[0].weight.device
    item, top, left, flip = rows.to(device).t()
    coefficients = state.coefficients.to(device)
    count, _, blocks, *_ = coefficients.shape
    side, dct = 8 * blocks, cosines(torch.float64)
    waves = (QUANTIZED.double().view(64, 1) * torch.kron(dct, dct)).to(device)
    spots = coefficients.view(count, 3, blocks * blocks, 64).double() @ waves
    colours = torch.tensordot(spots, TO_RGB.to(device).double(), dims=([1], [1]))
    pictures = colours.view(count, blocks, blocks, 8, 8, 3).transpose(2, 3)
    along = torch.arange(side * 3 // 4, device=device)
    y = top[:, None] + along
    x = left[:, None] + torch.where(flip[:, None] == 1, len(along) - 1 - along, along)
    flat = pictures.reshape(count, side, side, 3)
    crops = flat[item[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)
    small = F.interpolate(crops, (side // 2,) * 2, mode="bilinear", antialias=True).flatten(1)
    batches = zip(small.split(BATCH), state.labels.to(device)[item].split(BATCH), strict=True)
    return torch.cat([step(state, images, labels) for images, labels in batches])


def loader(state, rows, **more):
    return DataLoader(Images(state), BATCH, sampler=Rows(rows), **more)


def forked(state, **more):
    # Forked workers share the dataset; those of other start methods are each sent a copy.
    return {"num_workers": state.workers, "multiprocessing_context": "fork", **more}


def epoch(state, batches, non_blocking=False):
    device = state.model[0].weight.device
    moved = ([t.to(device, non_blocking=non_blocking) for t in batch] for batch in batches)
    return torch.cat([step(state, images, labels) for images, labels in moved])


def in_process(state, rows):
    return epoch(state, loader(state, rows))


def workers(state, rows):
    return epoch(state, loader(state, rows, **forked(state)))


def persistent(state, rows):
    yield from lasting(state, rows)


def pinned(state, rows):
    yield from lasting(state, rows, pin_memory=state.model[0].weight.is_cuda)


def prefetched(state, rows):
    yield from lasting(state, rows, pin_memory=state.model[0].weight.is_cuda, prefetch_factor=4)


def lasting(state, rows, pin_memory=False, **more):
    """Yield an epoch whose workers were started before."""
    keeping = {"persistent_workers": True, "pin_memory": pin_memory}
    batches = loader(state, rows, **forked(state, **keeping, **more))
    iter(batches)
    yield lambda: epoch(state, batches, non_blocking=pin_memory)


LASTING = {"sm90": 2.0, "cpu": "yardstick"}  # on a CPU steps and workers share the cores


@compare(
    baseline=in_process,
    optimized=[
        Variant(workers, at_least="yardstick"),
        Variant(persistent, at_least=LASTING),
        Variant(pinned, at_least=LASTING),
        Variant(prefetched, at_least=LASTING),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"items": 256, "side": 128, "workers": 8}],
    check_sizes=[{"items": 3 * BATCH - 5, "side": 24, "workers": 2}],
    cpu_sizes=[{"items": 64, "side": 64, "workers": 1}],
    work=lambda items, side, workers: Work(
        wire=items * (3 * side**2 + 8),
        flops={"fp32": 6 * items * 3 * (side // 2) ** 2 * HIDDEN},
        terms=3 * side**2,
        roundings=16,
    ),
    bound="host",
    conditions=Conditions(owns=["threads"]),  # workers live on from epoch to epoch
)
def test_dataloader(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
