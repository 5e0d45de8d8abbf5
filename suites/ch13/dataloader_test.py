"""DataLoader: decode the next batches while the model trains on the current one.

Problem    Train for one epoch of SGD on images. The images are stored in memory as 8 x 8 blocks of
           DCT coefficients, like a JPEG after entropy decoding. About 12 torch operations on the
           CPU prepare each image: dequantize, invert the DCT, convert YCbCr to RGB, crop, flip,
           resize with antialiasing. The images come in shards of 64. One shard in 4 holds grainy
           images, which are also smoothed 8 times, so 4 slow batches come in a row. The sampler
           shuffles within a shard, in the same order on all sides. Each side returns the logits of
           every image. The check also compares the weights after the epoch.
Baseline   in_process: `num_workers=0`. The training process also decodes the images.
Optimized  workers: changes `in_process`. Worker processes, which start and end with the epoch,
           decode the images.
           persistent: changes `workers`. With `persistent_workers=True`, the workers start once,
           before the timed part.
           pinned: changes `persistent`. Batches are in pinned memory (`pin_memory=True`), and are
           copied with `non_blocking=True`.
           prefetched: changes `pinned`. With `prefetch_factor=4`, each worker prepares up to four
           batches ahead instead of two, so more batches are ready when the slow ones come.
Bound      The host. Without workers, decoding is the limit. With workers, the training process
           receives batches, launches kernels, and waits for the slow batches. In a short epoch,
           starting and ending the workers takes longer than decoding.
Seen       On an H200 with 16 CPU cores, `workers` takes almost a fifth longer than `in_process`,
           although 8 processes share the decoding. So starting and ending the workers probably
           takes most of that epoch. We did not time the start alone. `persistent`, `pinned` and
           `prefetched` are not recorded. `in_process` and `workers` take about a hundred times as
           long as predicted. The cost counts only the launches and copies of the training process.
           There is no measured rate for decoding on the CPU or for passing batches between
           processes, so the prediction leaves these times out.
Use when   Decoding takes longer than a step: use persistent workers, with pinned memory. If workers
           end with the epoch, they pay off only in long epochs, because they have to start again
           each time. A larger prefetch factor helps only if loading times vary.

If a tensor changes after the workers have started, the workers still have the old values. So the
images are stored in the state and never change. Only their order is an input.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pytest_aisp import Conditions, Cost, Variant, Work, compare

BATCH, CLASSES, HIDDEN, RATE = 16, 10, 64, 0.01
SHARD, GRAINY, SMOOTHINGS = 64, 4, 8  # items per shard; one shard in 4 is grainy
QUANTIZED = torch.arange(1, 65).view(8, 8) / 64  # quantization steps of the 64 frequencies
TO_RGB = torch.tensor([[1.0, 0.0, 1.402], [1.0, -0.344, -0.714], [1.0, 1.772, 0.0]])


def cosines(dtype):
    """Return the (8, 8) matrix of the orthonormal 8-point DCT: row k is frequency k."""
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
    """Return an (items, 4) tensor in the epoch's order: item, top and left of the crop, flip."""
    order = torch.cat([s[torch.randperm(len(s))] for s in torch.arange(items).split(SHARD)])
    corners = torch.randint(side // 4 + 1, (2, items))
    return (torch.stack([order, *corners, torch.randint(2, (items,))], dim=1),)


def is_grainy(item):
    return item // SHARD % GRAINY == 0


def smoothed(pictures):
    for _ in range(SMOOTHINGS):
        pictures = F.avg_pool2d(pictures, 3, stride=1, padding=1)
    return pictures


class Rows:
    """A sampler that yields the rows of a tensor. It reads the tensor again in each epoch."""

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
        picture = smoothed(picture) if is_grainy(item) else picture
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
    flat = pictures.reshape(count, side, side, 3).permute(0, 3, 1, 2)
    grainy = is_grainy(torch.arange(count, device=device))
    flat = torch.where(grainy[:, None, None, None], smoothed(flat), flat).permute(0, 2, 3, 1)
    crops = flat[item[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)
    small = F.interpolate(crops, (side // 2,) * 2, mode="bilinear", antialias=True).flatten(1)
    batches = zip(small.split(BATCH), state.labels.to(device)[item].split(BATCH), strict=True)
    return torch.cat([step(state, images, labels) for images, labels in batches])


def loader(state, rows, **more):
    return DataLoader(Images(state), BATCH, sampler=Rows(rows), **more)


def forked(state, **more):
    # Forked workers share the data set. With other start methods, each worker gets a copy.
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
    """Yield a function that runs an epoch with workers that are already running."""
    keeping = {"persistent_workers": True, "pin_memory": pin_memory}
    batches = loader(state, rows, **forked(state, **keeping, **more))
    iter(batches)
    yield lambda: epoch(state, batches, non_blocking=pin_memory)


def epoch_cost(items, side, workers):
    """Return the cost of an epoch's copies to the GPU and SGD steps, without decoding."""
    pixels = 3 * (side // 2) ** 2
    step = Cost(
        h2d=BATCH * (4 * pixels + 8),
        ops={"fp32": 6 * BATCH * pixels * HIDDEN},
        launches=2 + 5 + 9 + 1,  # copies, forward and loss, backward, update
    )
    return -(-items // BATCH) * step + Cost(launches=1)


LASTING = {"sm90": 2.0, "cpu": "yardstick"}  # on a CPU, training and workers share the cores


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
    sizes=[{"items": 1024, "side": 128, "workers": 8}],
    check_sizes=[{"items": SHARD + BATCH - 5, "side": 24, "workers": 2}],
    cpu_sizes=[{"items": 128, "side": 64, "workers": 1}],
    work=lambda items, side, workers: Work(
        wire=items * (3 * side**2 + 8),
        flops={"fp32": 6 * items * 3 * (side // 2) ** 2 * HIDDEN},
        roundings=16 + SMOOTHINGS,
    ),
    bound="host",
    costs=dict.fromkeys((in_process, workers, persistent, pinned, prefetched), epoch_cost),
    conditions=Conditions(owns=["threads"]),  # workers keep running between epochs
)
def test_dataloader(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
