"""File to GPU: read into pinned memory, and copy one block while the next is read.

Problem    Load blocks of a file into one tensor on the GPU. The input gives the blocks and their
           order. The file has just been written, so all sides read it from the page cache.
Baseline   pageable: read the blocks into a new tensor in ordinary memory, and copy the tensor to
           the GPU.
Optimized  mapped: changes `pageable`. The file is mapped before the timed part. Each block is
           copied to the GPU straight from the mapping. So there is one copy per block, and no
           tensor in host memory.
           kept: changes `pageable`. Every call reuses one tensor in host memory. The pages of this
           tensor exist already, so the kernel does not need to find and clear new ones.
           pinned: changes `kept`. The tensor is in pinned memory, which the copy engine reads
           directly.
           per_block: changes `pinned`. There is one copy per block. The copy of a block runs while
           the next block is read, and the host waits once, at the end.
           two_buffers: changes `per_block`. Pinned memory has room for only two blocks. Before the
           host reads into a buffer again, it waits for the last copy from that buffer.
Bound      The host's copy out of the page cache. In `per_block` and `two_buffers`, the transfer
           over PCIe overlaps with this copy. In `pageable` and `kept`, the driver copies all bytes
           on the CPU a second time. In `mapped`, the driver's copy is the only copy on the CPU. The
           costs count only PCIe, because no rate of copies on the CPU was measured. So all sides
           take longer than predicted.
Seen       On an H200 machine, `kept` takes less than half of `pageable`'s time. So `pageable`
           spends more than half of its time on new pages. `pinned` takes about a third less time
           than `kept`. `per_block` gains nothing over `pinned`, because the predicted transfer that
           it hides is less than a tenth of `pinned`'s time. `two_buffers` and `mapped` take the
           least time, but their confidence intervals overlap those of `pinned` and `per_block`.
           `two_buffers` fills the same two blocks of memory again and again, which may stay in the
           CPU's caches. We did not measure this. The time of `pageable` differs by almost a fifth
           between the cases. So compare the times of the sides, and not only their speedups.
Use when   Large files are copied to the GPU repeatedly. Use `two_buffers`, which needs little
           pinned memory, or mapped if all files fit in the page cache. If a process loads one file
           once, pinning memory takes longer than it saves. With GPUDirect Storage, a disk writes to
           the GPU without any copy on the CPU. GPUDirect Storage needs a driver and a file system
           that support it.
"""

from types import SimpleNamespace

import torch

from pytest_aisp import Cost, Work, compare

from .unnamed_files import bytes_of, path_of, read_into, unnamed


def state(device, blocks, block):
    return SimpleNamespace(values=torch.randn(2 * blocks, block), device=device)


def inputs(device, blocks, block):
    return (torch.randperm(2 * blocks)[:blocks],)


def reference(state, wanted):
    return state.values.double()[wanted].to(state.device)


def read_block(file, row, block):
    """Fill the tensor `block` with block number `row` of the file."""
    read_into(file.fileno(), bytes_of(block), row * block.nbytes)


def host_blocks(state, count):
    """Return pinned memory for `count` blocks."""
    pin = torch.device(state.device).type == "cuda"
    return torch.empty(count, state.values.shape[1], pin_memory=pin)


def pageable(state, wanted):
    with unnamed(bytes_of(state.values)) as file:

        def load():
            read = torch.empty(len(wanted), state.values.shape[1])
            for at, row in enumerate(wanted.tolist()):
                read_block(file, row, read[at])
            return read.to(state.device, copy=True)

        yield load


def mapped(state, wanted):
    with unnamed(bytes_of(state.values)) as file:
        size = state.values.numel()
        flat = torch.from_file(path_of(file), shared=False, size=size, dtype=torch.float32)
        table = flat.view(state.values.shape)

        def load():
            found = torch.empty(len(wanted), table.shape[1], device=state.device)
            for at, row in enumerate(wanted.tolist()):
                found[at].copy_(table[row])
            return found

        yield load


def kept(state, wanted):
    yield from one_copy(state, wanted, torch.empty(len(wanted), state.values.shape[1]))


def pinned(state, wanted):
    yield from one_copy(state, wanted, host_blocks(state, len(wanted)))


def one_copy(state, wanted, read):
    """Yield a function that reads all blocks into the tensor `read`, and then copies it to the
    GPU."""
    with unnamed(bytes_of(state.values)) as file:

        def load():
            for at, row in enumerate(wanted.tolist()):
                read_block(file, row, read[at])
            return read.to(state.device, copy=True)

        yield load


def per_block(state, wanted):
    read = host_blocks(state, len(wanted))
    with unnamed(bytes_of(state.values)) as file:

        def load():
            found = torch.empty(read.shape, device=state.device)
            for at, row in enumerate(wanted.tolist()):
                read_block(file, row, read[at])
                found[at].copy_(read[at], non_blocking=True)
            if found.is_cuda:
                torch.cuda.current_stream().synchronize()
            return found

        yield load


def two_buffers(state, wanted):
    read = host_blocks(state, 2)
    copied = [torch.cuda.Event() for _ in read] if read.is_pinned() else []
    with unnamed(bytes_of(state.values)) as file:

        def load():
            found = torch.empty(len(wanted), read.shape[1], device=state.device)
            for at, row in enumerate(wanted.tolist()):
                mine = at % 2
                if copied and at >= 2:
                    copied[mine].synchronize()
                read_block(file, row, read[mine])
                found[at].copy_(read[mine], non_blocking=True)
                if copied:
                    copied[mine].record()
            if found.is_cuda:
                torch.cuda.current_stream().synchronize()
            return found

        yield load


def at_once(blocks, block):
    return Cost(h2d=4 * blocks * block, launches=1, syncs=1)


def one_by_one(blocks, block):
    return blocks * Cost(h2d=4 * block, launches=1, host_steps=2, syncs=1)


def overlapped(blocks, block):
    return Cost(h2d=4 * blocks * block, launches=blocks, host_steps=2 * blocks, syncs=1)


@compare(
    baseline=pageable,
    optimized=[mapped, kept, pinned, per_block, two_buffers],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"blocks": 32, "block": 1 << 19}],
    check_sizes=[{"blocks": 5, "block": 1023}],
    cpu_sizes=[{"blocks": 8, "block": 1 << 14}],
    work=lambda blocks, block: Work(wire=4 * blocks * block),
    bound="host",
    costs={
        **dict.fromkeys((pageable, kept, pinned), at_once),
        mapped: one_by_one,
        per_block: overlapped,
        two_buffers: overlapped,
    },
    at_least={"cpu": "yardstick"},
)
def test_file_to_gpu(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
