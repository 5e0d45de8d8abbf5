"""Try pytest_aisp.build on a GPU: run from the repository root, `python3 /path/to/try_build.py`.

Prints one line per check, `ok` or `FAILED`, then the cost of a launch; exits 1 if one failed.
"""

import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, os.getcwd())
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()

import torch

from pytest_aisp import build
from pytest_aisp.build import LaunchError, cuda_module

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void saxpy(const float* __restrict__ x, const float* __restrict__ y,
                                 float* out, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}

// Reverses each block's segment of `length` floats through dynamic shared memory.
extern "C" __global__ void reverse(const float* x, float* out, int length) {
  extern __shared__ float tile[];
  size_t base = (size_t)blockIdx.x * length;
  for (int i = threadIdx.x; i < length; i += blockDim.x) tile[i] = x[base + i];
  __syncthreads();
  for (int i = threadIdx.x; i < length; i += blockDim.x) out[base + i] = tile[length - 1 - i];
}

extern "C" __global__ void wide(const float4* x, float4* out, size_t n) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i];
}

extern "C" __global__ void convert(const __half* x, __nv_bfloat16* out, double scale, bool negate,
                                   long long n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  float v = i < n ? __half2float(x[i]) * (float)scale : 0.0f;
  if (i < n) out[i] = __float2bfloat16(negate ? -v : v);
}

// Each block of a cluster of two writes its rank; needs no launch attribute.
extern "C" __global__ void __cluster_dims__(2, 1, 1) ranks(int* out) {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) out[blockIdx.x] = rank;
}

extern "C" __global__ void empty() {}
"""

failed = []


def attempt(name):
    def run(function):
        try:
            note = function()
            torch.cuda.synchronize()
            print(f"ok      {name}{': ' + str(note) if note else ''}")
        except Exception:
            failed.append(name)
            print(f"FAILED  {name}\n{traceback.format_exc()}")

    return run


def refused(words, call):
    try:
        call()
    except LaunchError as error:
        assert words in str(error), error
        return str(error)
    raise AssertionError("not refused")


def same(a, b):
    torch.cuda.synchronize()
    assert torch.equal(a, b), (a - b).abs().max()


folder = Path(tempfile.mkdtemp())
path = folder / "try.cu"
path.write_text(SOURCE)
kernels = cuda_module(path)
device = torch.device("cuda")
n = 1 << 20
x, y = torch.randn(n, device=device), torch.randn(n, device=device)
out = torch.empty_like(x)
length = 40 * 1024  # 160 KiB


def saxpy():
    kernels.saxpy[n // 256, 256](x, y, out, 2.0, n)


@attempt("versions")
def _():
    import cuda.core

    core, version, size = build._toolchain()
    headers = build._toolkit()
    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, cuda.core {core.__version__}, NVRTC {version} ({size}), headers {headers}"


@attempt("assemble")
def _():
    arch = build.arch_of(*torch.cuda.get_device_capability())
    start = time.perf_counter()
    used = kernels.assemble(arch)
    cold = time.perf_counter() - start
    start = time.perf_counter()
    kernels.assemble(arch)
    return f"{cold:.3f} s, again {time.perf_counter() - start:.4f} s, {used}"


@attempt("saxpy on the default stream")
def _():
    saxpy()
    same(out, torch.add(y, x, alpha=2.0))


@attempt("saxpy on a side stream")
def _():
    stream = torch.cuda.Stream()
    assert torch.count_nonzero(out.zero_()[:10]).item() == 0  # also loads what is used below
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        saxpy()
    assert not stream.query(), "the launch did not queue on the side stream"
    assert torch.count_nonzero(out[:10]).item() == 0, "the launch ran elsewhere"
    stream.synchronize()
    same(out, torch.add(y, x, alpha=2.0))


@attempt("48 KiB and more of dynamic shared memory")
def _():
    used = x[: length * 16].contiguous()
    result = torch.empty_like(used)
    kernels.reverse[16, 512, 4 * length](used, result, length)
    same(result, used.view(16, length).flip(1).flatten())
    kernels.reverse[16, 512, 4 * 1024](used, result, 1024)
    kernels.reverse[16, 512, 4 * length](used, result, length)
    same(result, used.view(16, length).flip(1).flatten())


@attempt("too much dynamic shared memory")
def _():
    return refused("a block", lambda: kernels.reverse[1, 512, 400_000](x, out, 8))


@attempt("vectors, half, bfloat16, double, bool, long long")
def _():
    kernels.wide[n // 1024, 256](x, out, n // 4)
    same(out, x)
    half = x.half()
    result = torch.empty(n, dtype=torch.bfloat16, device=device)
    kernels.convert[n // 256, 256](half, result, 3.0, True, n)
    same(result, (-(half.float() * 3.0)).bfloat16())


@attempt("a cluster declared in the source")
def _():
    result = torch.full((8,), -1, dtype=torch.int32, device=device)
    kernels.ranks[8, 32](result)
    same(result, torch.tensor([0, 1] * 4, dtype=torch.int32, device=device))


@attempt("a kernel without parameters")
def _():
    kernels.empty[1, 32]()


@attempt("wrong arguments")
def _():
    refused("float64", lambda: kernels.saxpy[1, 256](x.double(), y, out, 2.0, n))
    refused("not contiguous", lambda: kernels.saxpy[1, 256](x[::2], y, out, 2.0, n))
    refused("not 16-byte aligned", lambda: kernels.wide[1, 256](x[1:], out, 4))
    refused("on the CPU", lambda: kernels.saxpy[1, 256](x.cpu(), y, out, 2.0, n))
    refused("int32", lambda: kernels.saxpy[1, 256](x, y, out, 2.0, 2**31))
    return refused("tensor", lambda: kernels.saxpy[1, 256](x, y, out, 2.0, out))


@attempt("capture in a CUDA graph")
def _():
    used = x[: length * 16].contiguous()
    result = torch.empty_like(used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            saxpy()
        kernels.reverse[16, 512, 4 * length](used, result, length)
    out.zero_(), result.zero_()
    torch.cuda.synchronize()
    x.mul_(0.5)
    graph.replay()
    same(out, torch.add(y, x, alpha=2.0))
    same(result, used.view(16, length).flip(1).flatten())


@attempt("first use inside a capture (the harness warms up first; for information)")
def _():
    fresh = cuda_module(path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fresh.saxpy[n // 256, 256](x, y, out, 2.0, n)
    out.zero_()
    graph.replay()
    same(out, torch.add(y, x, alpha=2.0))


@attempt("a fresh thread")
def _():
    out.zero_()
    torch.cuda.synchronize()
    errors = []

    def run():
        try:
            saxpy()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors
    same(out, torch.add(y, x, alpha=2.0))


@attempt("two modules of one file")
def _():
    other = cuda_module(path)
    out.zero_()
    other.saxpy[n // 256, 256](x, y, out, 2.0, n)
    same(out, torch.add(y, x, alpha=2.0))


def cost(call, count=2000, rounds=7):
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count // 10):
            call()
        best = min(best, (time.perf_counter() - start) / (count // 10))
    torch.cuda.synchronize()
    return best * 1e6


small = torch.ones(256, device=device)
ready = kernels.saxpy[1, 256]
launch, config, handle = (ready(small, small, small, 1.0, 256), ready._ready[0])[1]
stream = build._streams[torch.cuda.current_stream().cuda_stream]
args = build.check("saxpy", kernels.saxpy.params, (small, small, small, 1.0, 256), 0)
bare = kernels.empty[1, 32]
print("\nhost microseconds per call, best of 7 x 200, 256 elements, GPU not saturated")
for name, call in {
    "kernels.saxpy[1, 256](...)": lambda: kernels.saxpy[1, 256](small, small, small, 1.0, 256),
    "cuda.core.launch alone, same arguments": lambda: launch(stream, config, handle, *args),
    "check alone": lambda: build.check("saxpy", kernels.saxpy.params, (small,) * 3 + (1.0, 256), 0),
    "current_stream().cuda_stream": lambda: torch.cuda.current_stream(0).cuda_stream,
    "kernels.empty[1, 32]()": lambda: bare(),
    "torch.add(out=) for comparison": lambda: torch.add(small, small, out=small),
}.items():
    print(f"{cost(call):8.2f}  {name}")

print(f"\n{len(failed)} failed: {failed}" if failed else "\nall ok")
sys.exit(bool(failed))
