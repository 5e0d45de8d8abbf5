"""Probes of a GPU: kernels of `unit_probes.cu` that use one unit and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

BLOCK, BLOCKS_PER_SM = 1024, 2
ROUNDS = 512
"""Loops of each thread. A launch takes 0.1 to 1 ms."""
ATOMIC_ROUNDS = 32
L2_SHARES = (64, 16, 4, 2)
"""The L2 is read with working sets of 1/64 to 1/2 of the L2's size."""
VECTOR = 16
"""Bytes of a load."""
EMPTY_BLOCKS, WARP = 1 << 20, 32
FEW, LOAD = 128, 4
"""Threads per SM, and bytes per load, in the probe that measures ``in_flight``."""


class Probe(NamedTuple):
    """One launch of a probe, and the bytes or operations of the launch."""

    run: Callable[[], object]
    amount: float


def l2_reads(size: int) -> dict[int, Probe]:
    """Return probes of an L2 of `size` bytes, one per working set, keyed by the set's bytes."""
    return {nbytes: read_past_l1(nbytes) for nbytes in l2_working_sets(size)}


def l2_working_sets(size: int) -> list[int]:
    """Return the working sets for an L2 of `size` bytes, as powers of two, the smallest first."""
    return [1 << (size // share).bit_length() - 1 for share in L2_SHARES]


def read_past_l1(nbytes: int) -> Probe:
    """Return a probe that reads `nbytes`, a power of two, bypassing the L1. Unit: bytes."""
    import torch

    from ..kernels.cuda_cpp import cuda_module

    kernel = cuda_module("unit_probes.cu").l2_read[grid(), BLOCK]
    vectors = nbytes // VECTOR
    table = torch.randint(1 << 30, (4 * vectors,), device="cuda", dtype=torch.int32)
    out = torch.zeros(1, device="cuda", dtype=torch.int32)
    amount = 4 * ROUNDS * VECTOR * grid() * BLOCK
    return Probe(partial(kernel, table, out, vectors, ROUNDS), amount)


def shared_read() -> Probe:
    """Return a probe that reads shared memory. Unit: bytes."""
    import torch

    from ..kernels.cuda_cpp import cuda_module

    kernel = cuda_module("unit_probes.cu").shared_read[grid(), BLOCK]
    out = torch.zeros(1, device="cuda", dtype=torch.int32)
    return Probe(partial(kernel, out, 4 * ROUNDS), 16 * ROUNDS * VECTOR * grid() * BLOCK)


def atomics() -> Probe:
    """Return a probe that adds to numbers in the L2 (1 MiB). Unit: additions."""
    import torch

    from ..kernels.cuda_cpp import cuda_module

    kernel = cuda_module("unit_probes.cu").atomic_add[grid(), BLOCK]
    table = torch.zeros(1 << 18, device="cuda", dtype=torch.int32)
    run = partial(kernel, table, table.numel(), ATOMIC_ROUNDS)
    return Probe(run, ATOMIC_ROUNDS * grid() * BLOCK)


def special_functions() -> Probe:
    """Return a probe of exponentials. Unit: operations."""
    import torch

    from ..kernels.cuda_cpp import cuda_module

    kernel = cuda_module("unit_probes.cu").exponentials[grid(), BLOCK]
    out = torch.zeros(1, device="cuda")
    return Probe(partial(kernel, out, 4 * ROUNDS), 16 * ROUNDS * grid() * BLOCK)


def multiply_adds() -> Probe:
    """Return a probe of fp32 multiply-adds in registers. Unit: FLOPs."""
    import torch

    from ..kernels.cuda_cpp import cuda_module

    kernel = cuda_module("unit_probes.cu").fused_multiply_adds[grid(), BLOCK]
    out = torch.zeros(2, device="cuda")
    return Probe(partial(kernel, out, 8 * ROUNDS), 128 * ROUNDS * grid() * BLOCK)


def empty_blocks() -> Probe:
    """Return a probe that starts blocks of one warp, which do nothing. Unit: blocks."""
    from ..kernels.cuda_cpp import cuda_module

    kernel = cuda_module("unit_probes.cu").nothing[EMPTY_BLOCKS, WARP]
    return Probe(kernel, EMPTY_BLOCKS)


def loads_in_flight(nbytes: int) -> Probe:
    """Return a probe that reads `nbytes` of DRAM with few loads in flight.

    The amount is `nbytes` divided by the bytes that each SM has in flight.
    """
    import torch

    from ..kernels.cuda_cpp import cuda_module

    sms = torch.cuda.get_device_properties().multi_processor_count
    x, out = torch.ones(2, nbytes // LOAD, device="cuda")
    kernel = cuda_module("unit_probes.cu").one_load_each[sms, FEW]
    return Probe(partial(kernel, x, out, x.numel()), x.nbytes / (FEW * LOAD))


def both_ways(nbytes: int) -> Probe:
    """Return a probe that copies `nbytes` to the GPU and `nbytes` from it at the same time."""
    import torch

    gpu = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
    other = torch.cuda.Stream()

    def run() -> None:
        here = torch.cuda.current_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            host[1].copy_(gpu[1], non_blocking=True)
        gpu[0].copy_(host[0], non_blocking=True)
        here.wait_stream(other)

    return Probe(run, 2 * nbytes)


def grid() -> int:
    import torch

    return BLOCKS_PER_SM * torch.cuda.get_device_properties().multi_processor_count
