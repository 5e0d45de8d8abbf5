"""Save a checkpoint: skip a checksum that nobody checks, and copy into pinned memory.

Problem    Write the bf16 weights (width, width) of several layers from the GPU to a new file. The
           weights are the input. Each side returns the tensors of the file, mapped into memory, so
           the check compares what was written. The file stays in the page cache, so no side waits
           for a disk.
Baseline   saved: `torch.save` to the file.
Optimized  unchecked: changes `saved`. `set_crc32_options(False)` leaves out the CRC-32 of each
           tensor. `torch.load` does not check the CRC-32, but zip programs do.
           staged: changes `unchecked`. The weights are first copied into pinned memory that is
           reused. On the other sides, `torch.save` copies each weight into new pageable memory.
Bound      The host, which copies all bytes into the page cache. In `saved`, the host also computes
           the CRC-32. In `saved` and `unchecked`, the driver also copies all bytes out of its own
           pinned memory. The costs count only the copies from the GPU, because no rate of the
           host's work was measured. So all sides take longer than predicted.
Seen       On an H200 machine, `unchecked` takes about a quarter less time than `saved`. `staged`
           takes less time than `unchecked`, but the confidence intervals of their speedups overlap,
           and `saved` itself took longer in the case of `unchecked`. So the page does not show that
           pinned memory helps. We did not time the rest: the new file, its pages in the page cache,
           and the mapping.
Use when   The training loop waits for the checkpoint. `staged` needs pinned memory of the
           checkpoint's size, and gains nothing for a model on a CPU. If the disk or the network is
           the limit, use `async_checkpoint_test.py`.
"""

import torch

from pytest_aisp import Cost, Work, compare

from .unnamed_files import new_file, path_of


def inputs(device, layers, width):
    return tuple(torch.randn(width, width, device=device).bfloat16() for _ in range(layers))


def reference(*weights):
    return [weight.double().cpu() for weight in weights]


def written(weights):
    """Save `weights` to a new file, and return the tensors of the file, mapped into memory."""
    with new_file(sum(weight.nbytes for weight in weights)) as file:
        torch.save({f"layers.{at}": weight for at, weight in enumerate(weights)}, path_of(file))
        return list(torch.load(path_of(file), map_location="cpu", mmap=True).values())


def written_unchecked(weights):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return written(weights)
    finally:
        torch.serialization.set_crc32_options(before)


def saved(*weights):
    return written(weights)


def unchecked(*weights):
    return written_unchecked(weights)


def staged(*weights):
    buffers = [torch.empty_like(w, device="cpu", pin_memory=w.is_cuda) for w in weights]

    def save():
        for buffer, weight in zip(buffers, weights, strict=True):
            buffer.copy_(weight, non_blocking=True)
        if weights[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        return written_unchecked(buffers)

    yield save


def copied(layers, width):
    return layers * Cost(d2h=2 * width**2, launches=1, syncs=1)


def staged_cost(layers, width):
    return Cost(d2h=2 * layers * width**2, launches=layers, syncs=1)


@compare(
    baseline=saved,
    optimized=[unchecked, staged],
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 32, "width": 1024}],
    check_sizes=[{"layers": 3, "width": 33}],
    cpu_sizes=[{"layers": 4, "width": 256}],
    work=lambda layers, width: Work(wire=2 * layers * width**2),
    bound="host",
    costs={saved: copied, unchecked: copied, staged: staged_cost},
    at_least={"cpu": "yardstick"},
)
def test_save_checkpoint(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
