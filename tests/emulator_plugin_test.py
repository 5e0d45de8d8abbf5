"""``pytest -p pytest_aisp_emulator --aisp-check`` checks pages with CUDA C++ kernels on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from pytest_aisp_emulator.compiler import COMPILER

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is emulated"),
]

PAGE = """
import torch
from pytest_aisp import Work, compare, cuda_module

kernels = cuda_module("reverse.cu")


def flipped(x):
    return x.flip(0)


def reversed_in_shared_memory(x):
    out = torch.empty_like(x)
    kernels.reverse[1, len(x)](x, out)
    return out


@compare(
    baseline=flipped,
    optimized=[reversed_in_shared_memory],
    inputs=lambda device, n: (torch.randn(n, device=device),),
    reference=lambda x: x.double().flip(0),
    sizes=[{"n": 1024}],
    check_sizes=[{"n": 33}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="latency",
)
def test_reverse(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
"""
KERNEL = """
extern "C" __global__ void reverse(const float* x, float* out) {
  __shared__ float tile[1024];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.fixture
def check(pytester, monkeypatch):
    """Write the page with a kernel, and return the run of pytest that checks it."""
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parents[1] / "emulator"), prepend=os.pathsep
    )

    def check(kernel, *options):
        pytester.makeini("[pytest]\naddopts = --import-mode=importlib\naisp_pages = .")
        (pytester.path / "reverse.cu").write_text(kernel)
        pytester.makepyfile(reverse_test=PAGE)
        run = ("-p", "no:randomly", "-p", "pytest_aisp_emulator", "--aisp-check", "-v", *options)
        return pytester.runpytest_subprocess(*run)

    return check


def test_a_correct_kernel_is_checked(check):
    result = check(KERNEL)
    result.stdout.fnmatch_lines(
        [
            "CUDA C++ runs emulated; repeat its thread orders with PYTEST_AISP_EMULATOR_SEED=*",
            "*CHECKED at n=33; not timed: needs a GPU; *; its CUDA C++ kernels were emulated*",
            "*1 checked*",
        ]
    )
    assert result.ret == 0


def test_a_size_for_cpus_is_checked_only_in_the_emulator(check, pytester):
    page = PAGE.replace('sizes=[{"n": 1024}]', 'sizes=[{"n": 1024}],\n    cpu_sizes=[{"n": 64}]')
    with mock.patch(f"{__name__}.PAGE", page):
        result = check(KERNEL)
    result.stdout.fnmatch_lines(["*-cpu-n64] CHECKED at n=33; not timed: its CUDA C++ *"])
    result = pytester.runpytest_subprocess("-p", "no:randomly", "--aisp-check", "-v", "-rs")
    result.stdout.fnmatch_lines(["*its CUDA C++ kernels run on a CPU only emulated*"])
    assert result.ret == 0


def test_a_race_fails_and_names_the_line(check):
    result = check(KERNEL.replace("__syncthreads();", ""))
    result.stdout.fnmatch_lines(["*Fault: reverse: block (0, 0, 0), * a race: *(reverse.cu:*"])
    assert result.ret == 1


def test_a_wrong_result_fails(check):
    result = check(KERNEL.replace("blockDim.x - 1 - threadIdx.x", "threadIdx.x"))
    result.stdout.fnmatch_lines(["*reversed_in_shared_memory is wrong at n=33*"])
    assert result.ret == 1


def test_a_kernel_that_does_not_compile_fails_only_its_own_variant(check, pytester):
    broken = KERNEL.replace("reverse", "broken").replace("tile[block", "undeclared[block")
    with mock.patch(f"{__name__}.PAGE", with_second_variant(PAGE)):
        result = check(KERNEL + broken)
    result.stdout.fnmatch_lines(
        [
            "*reversed_in_shared_memory-n1024* CHECKED at n=33*",
            "*broken-n1024* FAILED *",
            "*reverse.cu:*error: 'undeclared' was not declared in this scope*",
            "*1 failed, 1 checked*",
        ]
    )


def with_second_variant(page):
    """Return the text of `page` with a variant `broken`, which launches the kernel `broken`."""
    start, end = page.index("def reversed_"), page.index("@compare")
    side = page[start:end].replace("reversed_in_shared_memory", "broken")
    return page.replace("@compare", side.replace(".reverse[", ".broken[") + "@compare").replace(
        "[reversed_in_shared_memory]", "[reversed_in_shared_memory, broken]"
    )


@pytest.mark.usefixtures("compiler_zygote")
def test_a_kernel_that_needs_a_gpu_is_still_assembled(check):
    pytest.importorskip("cuda.bindings", reason="needs NVRTC")
    result = check(KERNEL.replace("__syncthreads();", 'asm volatile("bar.sync 0;");'))
    result.stdout.fnmatch_lines(["*COMPILED needs a GPU; *", "*1 compiled*"])
    assert result.ret == 0


@pytest.mark.usefixtures("compiler_zygote")
def test_without_the_plugin_a_kernel_is_assembled(check):
    pytest.importorskip("cuda.bindings", reason="needs NVRTC")
    result = check(KERNEL, "-p", "no:pytest_aisp_emulator")
    result.stdout.fnmatch_lines(["*1 compiled*"])
    assert result.ret == 0
