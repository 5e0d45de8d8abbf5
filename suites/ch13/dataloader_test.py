"""DataLoader: decode the next batches while this one is trained on.

Problem    One epoch of SGD on images that lie in memory as 8 x 8 blocks of DCT coefficients, as a
           JPEG does after its entropy decoding. For each item: dequantize, invert the DCT, YCbCr to
           RGB, crop, flip, resize with antialiasing, some 12 torch operations on the CPU. The items
           come in shards of 64. One shard of 4 holds grainy images, which are smoothed 8 times
           first, so loading is slow in bursts of 4 batches. The sampler shuffles within a shard,
           and is the same on all sides. Every item's logits are returned, and the weights after the
           epoch are compared.
Baseline   in_process: `num_workers=0`. The process that trains also decodes.
Optimized  workers: the baseline with processes that decode. They start and end with the epoch.
           persistent: workers with `persistent_workers=True`. They start once, which is not timed.
           pinned: persistent with `pin_memory=True` and a copy with `non_blocking=True`.
           prefetched: pinned with `prefetch_factor=4`: each worker has four batches under way, not
           2, so more fast batches are ready when a slow burst comes.
Bound      The host: decoding without workers. With workers, the process that trains receives
           batches, launches kernels, and waits for bursts. Starting and ending workers takes longer
           than decoding a short epoch.
Seen       The cost counts what the training process launches and copies. The time of decoding on
           the CPU and of passing batches between processes has no rate, so these times are not
           explained.
Use when   Decoding takes longer than a step: use persistent workers, with pinned memory. Workers
           that end with the epoch only pay in long epochs. A larger prefetch factor helps only if
           loading times vary.

Workers do not see changes to a tensor after they start. So the images are part of the state, which
nobody changes, and the order is the input.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pytest_aisp import Conditions, Cost, Variant, Work, compare

BATCH, CLASSES, HIDDEN, RATE = 16, 10, 64, 0.01
SHARD, GRAINY, SMOOTHINGS = 64, 4, 8  # items of a shard; one shard in 4 is grainy
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
    """Return the sampler's rows: item, top, left and flip, for each place in the epoch."""
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
    """The rows of a tensor as a sampler's keys. Each epoch reads the tensor again."""

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
    # Forked workers share the dataset. With other start methods, each gets a copy.
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
    """Yield an epoch whose workers are already running."""
    keeping = {"persistent_workers": True, "pin_memory": pin_memory}
    batches = loader(state, rows, **forked(state, **keeping, **more))
    iter(batches)
    yield lambda: epoch(state, batches, non_blocking=pin_memory)


def epoch_cost(items, side, workers):
    """Return the cost of copies to the GPU and of SGD steps, without decoding."""
    pixels = 3 * (side // 2) ** 2
    step = Cost(
        h2d=BATCH * (4 * pixels + 8),
        ops={"fp32": 6 * BATCH * pixels * HIDDEN},
        launches=2 + 5 + 9 + 1,  # copies, forward and loss, backward, update
    )
    return -(-items // BATCH) * step + Cost(launches=1)


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
    sizes=[{"items": 1024, "side": 128, "workers": 8}],
    check_sizes=[{"items": SHARD + BATCH - 5, "side": 24, "workers": 2}],
    cpu_sizes=[{"items": 128, "side": 64, "workers": 1}],
    work=lambda items, side, workers: Work(
        wire=items * (3 * side**2 + 8),
        flops={"fp32": 6 * items * 3 * (side // 2) ** 2 * HIDDEN},
        terms=3 * side**2,
        roundings=16 + SMOOTHINGS,
    ),
    bound="host",
    costs=dict.fromkeys((in_process, workers, persistent, pinned, prefetched), epoch_cost),
    conditions=Conditions(owns=["threads"]),  # workers live on from epoch to epoch
)
def test_dataloader(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
