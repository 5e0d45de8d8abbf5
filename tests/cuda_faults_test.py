"""CUDA faults: if a kernel breaks its process, other cases still get their verdicts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from worker_processes import alive_workers

from pytest_aisp import cuda_module

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; none is here")
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="needs NVRTC: pip install cuda-core cuda-bindings nvidia-cuda-nvrtc",
)

# `endless` ends after ten minutes, so that a machine recovers even if the test cannot kill it.
KERNELS = """\
// doubled: y = 2 x.
// strays: writes a terabyte beyond its output.
// endless: waits for ten minutes.

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

extern "C" __global__ void doubled(const float* x, float* y, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

extern "C" __global__ void strays(const float* x, float* y, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i + (1ll << 38)] = 2.0f * x[i];
}

extern "C" __global__ void endless(const float* x, float* y, long long n) {
  const unsigned long long start = nanoseconds();
  while (nanoseconds() - start < 600ull * 1000 * 1000 * 1000) {
  }
  if (n > 0) y[0] = x[0];
}
"""
LAUNCH = """
from pytest_aisp import cuda_module

kernels = cuda_module("faults.cu")


def launch(kernel, x):
    y = torch.empty_like(x)
    kernel[-(-x.numel() // 256), 256](x, y, x.numel())
    return y
"""
PAGES = {"first": "doubled", "second": "{}", "third": "doubled"}


@pytest.fixture
def written(page, pytester):
    """Write three pages that launch kernels; the second one launches `kernel`."""

    def write(kernel, more=""):
        for name, does in PAGES.items():
            side = f"launch(kernels.{does.format(kernel)}, x)"
            page(side, defs=LAUNCH, name=f"{name}_test.py")
        (pytester.path / "ch99" / "faults.cu").write_text(KERNELS + more)

    return write


@needs_nvrtc
def test_the_kernels_assemble_without_a_gpu(tmp_path):
    (tmp_path / "faults.cu").write_text(KERNELS)
    used = cuda_module(tmp_path / "faults.cu").assemble("sm90")
    assert sorted(used) == ["doubled", "endless", "strays"]


@needs_gpu
def test_an_illegal_access_fails_only_its_case(written, pytester):
    written("strays")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "E  *AssertionError: doubled at n=33: *illegal memory access*, during: *",
            "first *doubled *checked",
            "second *doubled *fail",
            "third *doubled *checked",
            "=* 1 failed, 2 checked in *",
        ]
    )
    assert alive_workers(pytester.path) == []


@needs_gpu
def test_a_kernel_that_does_not_compile_fails_only_its_case(written, pytester):
    written(
        "broken", 'extern "C" __global__ void broken(const float* x, float* y, long long n) { no; }'
    )
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "E  *AssertionError: doubled at n=33: CompileError: *, during: check doubled*",
            'E  *faults.cu(*): error: identifier "no" is undefined*',
            "first *doubled *checked",
            "second *doubled *fail",
            "third *doubled *checked",
            "=* 1 failed, 2 checked in *",
        ]
    )


@needs_gpu
def test_an_endless_kernel_fails_only_its_case(written, pytester):
    written("endless")
    result = pytester.runpytest_subprocess("--aisp-check", "-o", "aisp_timeout=30")
    result.stdout.fnmatch_lines(
        [
            "E  *AssertionError: doubled at n=33: no answer within 30 s during: check doubled*",
            "first *doubled *checked",
            "second *doubled *fail",
            "third *doubled *checked",
            "=* 1 failed, 2 checked in *",
        ]
    )
    assert alive_workers(pytester.path) == []


# torch's error after an illegal access, raised without a GPU

LOST = """
def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def stray(x):
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = lost
    lost()
"""


def test_a_process_that_lost_its_gpu_is_replaced(page, pytester):
    page(name="first_test.py")
    page("stray(x)", defs=LOST, name="second_test.py")
    page(name="third_test.py")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "E  *doubled at n=33: RuntimeError: CUDA error: an illegal memory access was *",
            "third *doubled *checked",
            "=* 1 failed, 2 checked in *",
        ]
    )


def test_the_case_after_a_side_that_raises_gets_a_new_process(page, pytester):
    note = "open('pids', 'a').write(str(os.getpid()) + ' ') and"
    page(f"{note} 1 / 0", defs="import os", name="first_test.py")
    page(f"{note} 2 * x", defs="import os", name="second_test.py")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(["=* 1 failed, 1 checked in *"])
    first, *others = (pytester.path / "pids").read_text().split()
    assert first not in others
