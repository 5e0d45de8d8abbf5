"""JPEG decoding: send the files to the GPU, and decode there.

Problem    Decode JPEG files of pictures (3, side, side) into one fp32 tensor on the GPU. All sides
           convert the decoded bytes to fp32 on the GPU. The files are in host memory, and the order
           of the files is the input. The JPEG files are valid and contain synthetic pictures, with
           about as many nonzero coefficients as a photo. The colors have full resolution, because
           decoders differ in how they enlarge colors of lower resolution.
Baseline   one_thread: torchvision's `decode_jpeg` on the CPU, one file after another. Then the
           pictures are copied to the GPU.
Optimized  threads: changes `one_thread`. There is a thread per core. The decoder releases Python's
           GIL.
           on_gpu: changes `one_thread`. One call gets all files and `device="cuda"`. torchvision
           then calls nvJPEG, which uses the GPU's JPEG engines, if any.
Bound      The CPU limits `one_thread` and `threads`. The GPU's JPEG engines limit `on_gpu`. A GPU
           without JPEG engines decodes with its SMs and the CPU together. With `on_gpu`, the files
           cross PCIe instead of the decoded pictures. The costs leave out the decoding, because its
           rate was not measured.
Seen       On an H200 machine, `threads` is two and a half times as fast as `one_thread`, and
           `on_gpu` is more than twenty times as fast. The costs leave out the decoding, so all
           sides take longer than predicted: `one_thread` takes more than a hundred times as long,
           `threads` about fifty times, and `on_gpu` nearly nine times. `threads` keeps nearly 14
           cores busy, but gains far less than 14 times. We did not measure why. In `one_thread`,
           one thread decodes, but the process uses five or six cores. We do not know which threads
           use the other cores. With `on_gpu`, the profiler shows copies of the files, and kernels
           that convert RGBA to RGB, but no kernel that decodes. So the JPEG engines decode.
Use when   The GPU waits for data because the CPU decodes too slowly. Try threads or worker
           processes first: they cost nothing if cores are idle. Use `on_gpu` if the cores are not
           enough. If the GPU has no JPEG engines, its SMs decode, and the training step gets fewer
           SMs.

Decoders round the colors to bytes before and after the conversion to RGB. So a value may differ
from the exact one by one or two of 255 levels, and all sides declare int8. Without torchvision, the
page is skipped.
"""

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .jpeg_files import exact_pictures, jpeg, random_coefficients

ABSENT = importlib.util.find_spec("torchvision") is None
BYTES = "int8"  # decoders keep colours as bytes
BITS = 1.4  # per pixel, in the files that `jpeg` writes of these pictures


def state(device, pictures, side):
    coefficients = random_coefficients(pictures, side)
    return SimpleNamespace(coefficients=coefficients, side=side, device=device)


def inputs(device, pictures, side):
    return (torch.randperm(pictures),)


def reference(state, order):
    return exact_pictures(state.coefficients.to(state.device), state.side)[order.to(state.device)]


def in_memory(state):
    """Return the JPEG files as a list of uint8 tensors."""
    files = (jpeg(coefficients, state.side) for coefficients in state.coefficients)
    return [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]


def one_thread(state, order):
    yield from on_cpu(state, order, map)


def threads(state, order):
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from on_cpu(state, order, pool.map)


def on_cpu(state, order, mapper):
    """Yield a function that decodes on the CPU. `mapper` calls the decoder for each file."""
    from torchvision.io import ImageReadMode, decode_jpeg

    files = in_memory(state)

    def decode(item):
        return decode_jpeg(files[item], ImageReadMode.RGB)

    yield lambda: torch.stack(list(mapper(decode, order.tolist()))).to(state.device).float()


def on_gpu(state, order):
    from torchvision.io import ImageReadMode, decode_jpeg

    files = in_memory(state)

    def decode():
        wanted = [files[item] for item in order.tolist()]
        return torch.stack(decode_jpeg(wanted, ImageReadMode.RGB, device=state.device)).float()

    yield decode


def packed(pictures, side):
    return pictures * side**2 * BITS / 8


def to_fp32(pictures, side):
    pixels = 3 * pictures * side**2
    return Cost(read=pixels, write=4 * pixels, launches=1)


def sends_pictures(pictures, side):
    return Cost(h2d=3 * pictures * side**2, launches=1, syncs=1) + to_fp32(pictures, side)


def sends_files(pictures, side):
    pixels = 3 * pictures * side**2
    decoded = Cost(h2d=packed(pictures, side), write=pixels, launches=pictures)
    return decoded + Cost(read=pixels, write=pixels, launches=1) + to_fp32(pictures, side)


@pytest.mark.skipif(ABSENT, reason="needs torchvision: pip install torchvision")
@compare(
    baseline=Variant(one_thread, precision=BYTES),
    optimized=[Variant(threads, precision=BYTES), Variant(on_gpu, precision=BYTES)],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"pictures": 32, "side": 512}],
    check_sizes=[{"pictures": 7, "side": 40}],
    work=lambda pictures, side: Work(wire=packed(pictures, side), write=12 * pictures * side**2),
    bound="host",
    costs={one_thread: sends_pictures, threads: sends_pictures, on_gpu: sends_files},
    conditions=Conditions(owns=["threads"]),  # the thread pool stays alive
)
def test_jpeg_decode(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
