"""Small files: pack them into one file and read a whole shard at a time.

Problem    Load images of 3 x 32 x 32 bytes into one tensor on the GPU. The input is the order of
           the images: shards of 64 images come in random order, and so do the images within each
           shard. The files were written just before, so all sides read from the page cache. They
           have no names, so sides open them by `/proc/self/fd`, and not by a path in a folder with
           many files. Looking up such a path may take longer.
Baseline   files: one file per image, which Python's `open` and `read` load.
Optimized  unbuffered: changes `files`. `os.open` opens a file, and `os.preadv` reads straight into
           the image's row of the result. So Python creates no buffer and no `bytes` object.
           packed: changes `unbuffered`. All images are in one tar file. Before the timed part, the
           file is opened and the offset of each image is looked up. There is still one read per
           image.
           shards: changes `packed`. There is one read per shard. The images are then copied out of
           the shard in memory.
Bound      The host: each image costs system calls and Python code. `shards` makes few system calls.
           The costs count only the copy to the GPU, because no rate of the host's work was
           measured. So all sides take longer than predicted.
Seen       On an H100 machine, `unbuffered` takes less than half of `files`' time, and `packed` less
           than half of `unbuffered`'s. So Python's file and `bytes` objects take about half of the
           time, and opening and closing files takes most of the rest. `shards` gains no more than
           `packed`, although it makes 3 reads instead of 192. It also creates tensors and copies
           each image once more. We did not time these parts.
Use when   A data set has many small files. Use shards if shuffling within a shard is random enough.
           `packed` works with any order. The gain is larger on a disk or a network, where each file
           costs a round trip. The gain is smaller with larger images, because all sides copy the
           same bytes.

The files have no names, so no file can be left behind. The page opens the files through /proc. On
one machine, opening a file through /proc took 4 us. Opening a named file took 2 us, in a folder of
20,000 files whose names the kernel had cached. So `packed` and `shards` gain less if the files have
names.
"""

import io
import os
import tarfile
from contextlib import ExitStack
from types import SimpleNamespace

import torch

from pytest_aisp import Cost, Work, compare

from .unnamed_files import bytes_of, path_of, read_into, unnamed

BYTES, SHARD = 3 * 32 * 32, 64


def state(device, items):
    images = torch.randint(256, (items, BYTES), dtype=torch.uint8)
    return SimpleNamespace(images=images, device=device)


def inputs(device, items):
    shards = torch.arange(items).split(SHARD)
    chosen = [shards[shard] for shard in torch.randperm(len(shards)).tolist()]
    return (torch.cat([shard[torch.randperm(len(shard))] for shard in chosen]),)


def reference(state, order):
    return state.images[order].to(state.device)


def one_each(state, stack):
    """Return the paths of files with one image each. The files are open until `stack` closes
    them."""
    return [path_of(stack.enter_context(unnamed(bytes_of(image)))) for image in state.images]


def in_tar(state):
    """Return an open tar file of all images, and a list of each image's offset in it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for item, image in enumerate(state.images):
            member = tarfile.TarInfo(f"{item}.rgb")
            member.size = BYTES
            archive.addfile(member, io.BytesIO(bytes_of(image)))
    with tarfile.open(fileobj=io.BytesIO(packed.getvalue())) as archive:
        return unnamed(packed.getvalue()), [member.offset_data for member in archive]


def files(state, order):
    with ExitStack() as stack:
        paths = one_each(state, stack)

        def load():
            joined = bytearray()
            for item in order.tolist():
                with open(paths[item], "rb") as file:
                    joined += file.read()
            images = torch.frombuffer(joined, dtype=torch.uint8)
            return images.view(-1, BYTES).to(state.device)

        yield load


def unbuffered(state, order):
    with ExitStack() as stack:
        paths = one_each(state, stack)

        def load():
            images = torch.empty(len(order), BYTES, dtype=torch.uint8)
            rows = bytes_of(images)
            for row, item in enumerate(order.tolist()):
                descriptor = os.open(paths[item], os.O_RDONLY)
                try:
                    read_into(descriptor, rows[row * BYTES : (row + 1) * BYTES])
                finally:
                    os.close(descriptor)
            return images.to(state.device)

        yield load


def packed(state, order):
    file, begins = in_tar(state)
    with file:

        def load():
            images = torch.empty(len(order), BYTES, dtype=torch.uint8)
            rows, descriptor = bytes_of(images), file.fileno()
            for row, item in enumerate(order.tolist()):
                read_into(descriptor, rows[row * BYTES : (row + 1) * BYTES], begins[item])
            return images.to(state.device)

        yield load


def shards(state, order):
    file, begins = in_tar(state)
    stride = begins[1] - begins[0]
    with file:

        def load():
            images, row = torch.empty(len(order), BYTES, dtype=torch.uint8), 0
            while row < len(order):
                first = int(order[row]) // SHARD * SHARD
                count = min(SHARD, len(order) - first)
                shard = torch.empty(count * stride, dtype=torch.uint8)
                # The read begins at the first image, so each header follows the image before it.
                span = bytes_of(shard)[: (count - 1) * stride + BYTES]
                read_into(file.fileno(), span, begins[first])
                members = shard.view(count, stride)[:, :BYTES]
                rows = images[row : row + count]
                torch.index_select(members, 0, order[row : row + count] - first, out=rows)
                row += count
            return images.to(state.device)

        yield load


def copied(items):
    return Cost(h2d=BYTES * items, launches=1, syncs=1)


@compare(
    baseline=files,
    optimized=[unbuffered, packed, shards],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"items": 192}],
    check_sizes=[{"items": SHARD + 9}],
    cpu_sizes=[{"items": 128}],
    work=lambda items: Work(wire=BYTES * items),
    bound="host",
    costs=dict.fromkeys((files, unbuffered, packed, shards), copied),
    at_least={"cpu": "yardstick"},
)
def test_small_files(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
