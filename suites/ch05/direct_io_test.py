"""Direct I/O: read a file that is not in the page cache, several blocks at a time.

Problem    Load blocks of a file into one tensor on the GPU. The input gives the blocks and their
           order. The file is not in the page cache, as with data larger than memory. So every call
           ends by dropping the file's pages. The time includes the drop, because the kernel would
           also have to drop pages if memory were full. All sides read into pinned memory that is
           reused from call to call.
Baseline   buffered: one read at a time, through the page cache.
Optimized  mapped: changes `buffered`. The file is mapped before the timed part. Page faults then
           read the file in pieces whose size the kernel chooses. Page faults may be slower than
           `buffered`, so the page claims no speedup for `mapped`. If torch copies a block with
           several threads, several page faults may occur at a time.
           advised: changes `buffered`. With `POSIX_FADV_RANDOM`, the kernel reads only the block.
           Without this advice, the kernel also reads the data after the block, which is rarely the
           next block of the order.
           threads: changes `advised`. Eight threads read, so the disk has several requests at a
           time.
           direct: changes `threads`. Files are opened with `O_DIRECT`: the disk writes to the
           pinned memory, and no byte passes through the page cache.
Bound      The disk. `buffered`, `mapped` and `advised` leave the disk idle between two requests.
           All sides except `direct` also copy all bytes on the CPU, and fill and drop pages of the
           page cache. The costs count only the copy to the GPU, because the disk's rate was not
           measured. So all sides take longer than predicted.
Seen       On an H200 machine, the gain of `advised` is smaller than its confidence interval.
           `threads` and `direct` clearly gain. Their confidence intervals overlap, so the page does
           not show how much `O_DIRECT` adds. We did not measure the disk's rate, or how long it
           takes to drop the pages. On an H100 machine, `mapped` takes about half again as long as
           `buffered`.
Use when   The data is larger than memory and each byte is read once. `direct` needs addresses,
           offsets and sizes that are multiples of the disk's block size. If data is read again soon
           and fits in memory, the page cache is faster than any disk.

The page needs a disk, and is skipped if the file system has no `O_DIRECT` or keeps its files in
memory (tmpfs).
"""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .unnamed_files import bytes_of, path_of, read_into, unnamed

PAGE, THREADS = 4096, 8
NEEDS_DISK = (
    "needs a folder on a disk, with O_DIRECT, whose pages the kernel drops when it is asked:"
    " set TMPDIR to such a folder"
)


def drop(file):
    """Take the pages of `file` out of the page cache."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def on_a_disk():
    """Return True if a new file can be read with `O_DIRECT` and its pages can be dropped."""
    with unnamed(bytes(PAGE)) as file, mmap.mmap(-1, PAGE) as page:
        os.fsync(file.fileno())
        drop(file)
        try:
            os.preadv(file.fileno(), [page], 0, os.RWF_NOWAIT)
            return False  # the page is still in memory
        except BlockingIOError:
            pass
        except OSError:  # this file system does not support RWF_NOWAIT
            return False
        try:
            descriptor = os.open(path_of(file), os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.preadv(descriptor, [page], 0) == PAGE
        except OSError:
            return False
        finally:
            os.close(descriptor)


def state(device, count, size):
    values = torch.randint(-(2**31), 2**31, (2 * count, size // 4), dtype=torch.int32)
    return SimpleNamespace(values=values, device=device)


def inputs(device, count, size):
    return (torch.randperm(2 * count)[:count],)


def reference(state, wanted):
    return state.values[wanted].to(state.device)


@contextmanager
def cold(state):
    """Yield an open file that contains all blocks and is not in the page cache."""
    with unnamed(bytes_of(state.values)) as file:
        os.fsync(file.fileno())  # the kernel does not drop dirty pages
        drop(file)
        yield file


def aligned(state, count):
    """Return pinned memory for `count` blocks. Its address is a multiple of the page size."""
    size = count * state.values.shape[1] * 4
    pin = torch.device(state.device).type == "cuda"
    room = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pin)
    begin = -room.data_ptr() % PAGE
    return room[begin : begin + size].view(torch.int32).view(count, -1)


def loader(state, wanted, file, descriptor, mapper):
    """Return a function that loads the blocks. `mapper` is `map` or the `map` of a pool."""
    read = aligned(state, len(wanted))

    def read_block(at, row):
        read_into(descriptor, bytes_of(read[at]), row * read[at].nbytes)

    def load():
        rows = wanted.tolist()
        list(mapper(read_block, range(len(rows)), rows))
        found = read.to(state.device, copy=True)
        drop(file)
        return found

    return load


def buffered(state, wanted):
    with cold(state) as file:
        yield loader(state, wanted, file, file.fileno(), map)


def advised(state, wanted):
    with cold(state) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        yield loader(state, wanted, file, file.fileno(), map)


def mapped(state, wanted):
    read = aligned(state, len(wanted))
    with cold(state) as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        table = torch.frombuffer(pages, dtype=torch.int32).view(state.values.shape)

        def load():
            for at, row in enumerate(wanted.tolist()):
                read[at].copy_(table[row])
            found = read.to(state.device, copy=True)
            pages.madvise(mmap.MADV_DONTNEED)  # the kernel does not drop mapped pages
            drop(file)
            return found

        yield load


def threads(state, wanted):
    with cold(state) as file, ThreadPoolExecutor(THREADS) as readers:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        yield loader(state, wanted, file, file.fileno(), readers.map)


def direct(state, wanted):
    with cold(state) as file, ThreadPoolExecutor(THREADS) as readers:
        descriptor = os.open(path_of(file), os.O_RDONLY | os.O_DIRECT)
        try:
            yield loader(state, wanted, file, descriptor, readers.map)
        finally:
            os.close(descriptor)


def copied(count, size):
    return Cost(h2d=count * size, launches=1, syncs=1)


@pytest.mark.skipif("not on_a_disk()", reason=NEEDS_DISK)
@compare(
    baseline=buffered,
    optimized=[
        Variant(mapped, at_least="yardstick"),
        Variant(advised, at_least={"sm90": "neutral", "cpu": "yardstick"}),
        threads,
        direct,
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 64, "size": 1 << 20}],
    check_sizes=[{"count": 9, "size": 3 * PAGE}],
    cpu_sizes=[{"count": 4, "size": 16 * PAGE}],
    work=lambda count, size: Work(wire=count * size),
    bound="host",
    costs=dict.fromkeys((buffered, mapped, advised, threads, direct), copied),
    # The reading threads stay alive between calls, and a mapping reads the disk by page faults.
    conditions=Conditions(owns=["threads", "page_faults"]),
    at_least={"cpu": "yardstick"},
)
def test_direct_io(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
