"""Ragged batch: one kernel with a table of offsets, not one launch per segment.

Problem    Sum each segment of n fp32 elements. The segments have different lengths, and some may be
           empty. A table on the GPU says where the segments begin, as if a routing step or a
           tokenizer had run on the GPU.
Baseline   launch_each: one launch of one block per segment. The block reads the table, so the host
           does not have to wait for the table. A loop that slices tensors on the host would have to
           wait.
Optimized  captured: changes `launch_each`. A CUDA graph contains the same launches. The graph stays
           correct if the lengths change, because its kernels read the table. The number of segments
           is fixed.
           device_launches: changes `launch_each`. The host launches one kernel. In that kernel, one
           thread per segment launches the segment's block from the GPU (dynamic parallelism). These
           blocks may run at the same time. The blocks of `launch_each` and `captured` run one after
           another.
           block_per_segment: changes `launch_each`. One kernel has a block for each segment. A
           block runs the same code as in `launch_each`.
           warp_per_segment: changes `block_per_segment`. Each segment is summed by one warp, not by
           a whole block. A warp needs neither shared memory nor a barrier, but has an eighth of the
           threads of a block.
           library: `torch.segment_reduce`, which takes the same table as int64.
Bound      The host limits `launch_each`, which launches from Python. A loop in C++ should take the
           host less time, but its kernels would run one after another, as in `captured`. So compare
           `device_launches` with `captured`, too. The GPU limits `captured`: its kernels use one SM
           each, and run one after another. Launches limit `block_per_segment` and `library`,
           because reading the elements takes less time than a launch. The longest segment, several
           times as long as the average, decides when `warp_per_segment` ends, because a single warp
           has few loads in flight. The costs leave out this tail, and count only the bytes and the
           launch. We did not measure how long a launch from the GPU takes either, so the costs of
           `device_launches` count the children as blocks.
Seen       On an H100, `launch_each`, `block_per_segment` and `warp_per_segment` take about twice as
           long as predicted. A launch through `cuda_module` takes the host longer than the launch
           of a torch operator, which the costs assume. A kernel of `captured` takes longer to run
           than to start, because its only block waits for the table and then for the elements.
           `library` takes longer than its two launches. We did not measure which part of `library`
           takes the extra time. `block_per_segment` and `warp_per_segment` differ by less than the
           confidence interval. `device_launches` was recorded on an H200, and the other variants on
           an H100. On the H200, the GPU takes about a fifth as much time for `device_launches` as
           for `launch_each`. `captured` takes more than four times as long on the H100 as
           `device_launches` on the H200, so launches from the GPU beat a graph. But one kernel with
           a block for each segment is about ten times as fast as launches from the GPU.
           `device_launches` takes about thirty times as long as predicted, because the costs leave
           out the time of a launch from the GPU. The GPU is busy for most of the call, so the host
           is not the limit.
Use when   The number of pieces of work depends on data: segments, experts, requests. Put a table of
           the pieces on the GPU, and let each block find its piece. A graph of many small kernels
           removes the host's time, but it does not fill the GPU. Use one warp per piece if most
           pieces have a few hundred elements or fewer. If a few pieces are much longer than the
           rest, split these pieces, or let warps take pieces from a queue (`uneven_work_test.py`).
           Launch from the GPU if each piece needs a different grid size. By default, at most 2048
           such launches may be pending. Further launches fail, so the kernel must check for errors.
           The limit can be raised.
"""

from importlib import import_module

import pytest
import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, capture, compare, cuda_module

kernels = cuda_module("segments.cu")
launching = cuda_module("segments_launches.cu", device_runtime=True)
BLOCK, WARPS = 256, 8
NEEDED = "needs CUDA's device runtime: pip install nvidia-nvjitlink nvidia-cuda-runtime"


def no_device_runtime():
    """Return whether the library for launching kernels from kernels is missing."""
    try:
        finder = import_module("cuda.pathfinder")
        finder.load_nvidia_dynamic_lib("nvJitLink")
        return not finder.find_static_lib("cudadevrt")
    except (ImportError, RuntimeError):
        return True


def inputs(device, n, segments):
    cuts = torch.randint(0, n + 1, (segments + 1,), device=device, dtype=torch.int32)
    cuts[0], cuts[-1] = 0, n
    return torch.randn(n, device=device), cuts.sort().values


def reference(x, offsets):
    lengths = offsets.long().diff()
    owner = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
    total = torch.zeros(len(lengths), dtype=torch.float64, device=x.device)
    return total.index_add(0, owner, x.double())


def in_a_loop(x, offsets):
    segments = offsets.numel() - 1
    out = torch.empty(segments, device=x.device)
    for s in range(segments):
        kernels.one_segment[1, BLOCK](x, offsets, out, s)
    return out


def launch_each(x, offsets):
    return in_a_loop(x, offsets)


def captured(x, offsets):
    yield capture(lambda: in_a_loop(x, offsets))


def device_launches(x, offsets):
    segments = offsets.numel() - 1
    out = torch.empty(segments, device=x.device)
    launching.launch_segments[-(-segments // BLOCK), BLOCK](x, offsets, out, segments)
    return out


def block_per_segment(x, offsets):
    segments = offsets.numel() - 1
    out = torch.empty(segments, device=x.device)
    kernels.block_per_segment[segments, BLOCK](x, offsets, out)
    return out


def warp_per_segment(x, offsets):
    segments = offsets.numel() - 1
    out = torch.empty(segments, device=x.device)
    kernels.warp_per_segment[-(-segments // WARPS), BLOCK](x, offsets, out, segments)
    return out


def library(x, offsets):
    return torch.segment_reduce(x, "sum", offsets=offsets.long())


def summed(n, segments, **starts):
    table = 4 * (segments + 1)
    return Cost(read=4 * n + table, write=4 * segments, ops={"fp32": n}, **starts)


def by_one_kernel(n, segments):
    return summed(n, segments, launches=1)


@compare(
    baseline=launch_each,
    optimized=[
        Variant(captured, at_least={"sm90": 6.0}),
        Variant(
            device_launches,
            gpu_only="dynamic parallelism",
            marks=[pytest.mark.skipif(no_device_runtime(), reason=NEEDED)],
        ),
        Variant(block_per_segment, at_least={"sm90": 280}),
        Variant(warp_per_segment, sass="SHFL", at_least={"sm90": 220}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**20, "segments": 512}],
    check_sizes=[
        {"n": 1023, "segments": 7},
        {"n": 3, "segments": 9},
        {"n": st.integers(1, 900), "segments": st.integers(1, 20)},
    ],
    work=lambda n, segments: Work(
        read=4 * (n + segments + 1), write=4 * segments, flops={"fp32": n}, terms=n
    ),
    bound="launch",
    costs={
        launch_each: lambda n, segments: summed(n, segments, launches=segments),
        captured: lambda n, segments: summed(n, segments, launches=1, graph_nodes=segments),
        device_launches: lambda n, segments: summed(n, segments, launches=1, blocks=segments),
        **dict.fromkeys([block_per_segment, warp_per_segment], by_one_kernel),
        library: lambda n, segments: Cost(launches=1) + by_one_kernel(n, segments),
    },
)
def test_segments(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
