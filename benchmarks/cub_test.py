"""Histogram, scan and sums of rows compared with CUB's, which torch does not expose directly.

    pytest benchmarks/cub_test.py -vv

Needs a GPU and nvcc with CUB's headers (the CUDA toolkit): CUB's device-wide algorithms are host
code, which NVRTC does not compile. Everywhere else it is skipped.

Problem    2^28 int32. The histogram counts 256 values, evenly distributed or with every second
           value the same. The scan computes prefix sums. The sums are over rows of 256 and of 1024.
Baseline   privatized: of suites/ch07/histogram_test.py.
           look_back: of suites/ch07/scan_test.py.
           warp_per_row: of suites/ch06/shuffle_reduction_test.py.
Optimized  cub_histogram: `cub::DeviceHistogram::HistogramEven`, a yardstick.
           cub_scan: `cub::DeviceScan::InclusiveSum`, a yardstick.
           cub_rows: `cub::DeviceSegmentedReduce::Sum`, a yardstick.
Bound      DRAM. The histogram and the sums read 1 GiB. The scan reads 1 GiB and writes 1 GiB.
Seen       On an H200 (CUDA 13.0), CUB's histogram takes 2.4 times as long as privatized, for even
           and for skewed values. But CUB tests each value's range and computes its bin, while
           privatized uses the value as the bin. CUB's scan is 1.045 times as fast as look_back.
           CUB's sums of rows take 3.5 times as long as warp_per_row for rows of 256, and 1.9 times
           as long for rows of 1024. CUB launches one kernel. We did not look at how that kernel
           assigns rows to threads.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from pytest_aisp import Variant, Work, compare
from pytest_aisp.worker.loader import load_page

HERE = Path(__file__).parent


def page(chapter, name):
    """Return the page `name` of `chapter`."""
    root = HERE.parent
    path = root / "suites" / chapter / f"{name}_test.py"
    return load_page(str(path), str(root), f"cub.{name}_test")


histograms, scans = page("ch07", "histogram"), page("ch07", "scan")
rows = page("ch06", "shuffle_reduction")


@functools.cache
def library():
    """Compile cub.cu for this machine's GPU."""
    major, minor = torch.cuda.get_device_capability()
    to = Path(tempfile.mkdtemp()) / "cub.so"
    options = ["-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *options, "-o", to, HERE / "cub.cu"], check=True)
    return ctypes.CDLL(str(to))


def run(function, x, out, *counts):
    """Call CUB on torch's current stream, with temporary memory from torch.

    `counts` are the numbers of elements that the CUB function takes.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, out)]
    needed = ctypes.c_size_t(0)
    status = function(None, ctypes.byref(needed), *pointers, *counts, stream)
    temporary = torch.empty(needed.value, dtype=torch.uint8, device=x.device)
    at = ctypes.c_void_p(temporary.data_ptr())
    status = status or function(at, ctypes.byref(needed), *pointers, *counts, stream)
    if status:
        raise RuntimeError(f"CUB failed with cudaError_t {status}")
    return out


def cub_histogram(x):
    counts = torch.empty(256, dtype=torch.int32, device=x.device)
    return run(library().histogram, x, counts, x.numel())


def cub_scan(x):
    return run(library().inclusive_sum, x, torch.empty_like(x), x.numel())


def cub_rows(x):
    return run(library().row_sums, x, x.new_empty(len(x)), *x.shape)


pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]


@compare(
    baseline=histograms.privatized,
    optimized=[Variant(cub_histogram, at_least="yardstick")],
    inputs=histograms.inputs,
    reference=histograms.reference,
    sizes=[{"n": 2**28, "skew": 0}, {"n": 2**28, "skew": 50}],
    check_sizes=[{"n": 1023, "skew": 0}, {"n": 5001, "skew": 50}],
    work=lambda n, skew: Work(read=4 * n, write=1024),
    bound="dram",
)
def test_histogram(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


@compare(
    baseline=scans.look_back,
    optimized=[Variant(cub_scan, at_least="yardstick")],
    inputs=scans.inputs,
    reference=scans.reference,
    sizes=[{"n": 2**28}],
    check_sizes=[{"n": 1023}, {"n": 33 * 8192 + 5}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
)
def test_scan(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


@compare(
    baseline=rows.warp_per_row,
    optimized=[Variant(cub_rows, at_least="yardstick")],
    inputs=rows.inputs,
    reference=rows.reference,
    sizes=[{"rows": 2**20, "n": 256}, {"rows": 2**18, "n": 1024}],
    check_sizes=[{"rows": 9, "n": 255}, {"rows": 13, "n": 1025}],
    work=lambda rows, n: Work(read=4 * rows * n, write=4 * rows),
    bound="dram",
)
def test_row_sums(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
