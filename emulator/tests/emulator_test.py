"""The emulator computes the results of a GPU and reports illegal accesses."""

from __future__ import annotations

import re

import pytest
import torch
from pytest_aisp_emulator import CannotEmulate, Fault, emulated, unsupported
from pytest_aisp_emulator.compiler import COMPILER

from pytest_aisp import cuda_module
from pytest_aisp.kernels.arguments import LaunchError

SEEDS = (1, 2)
NAN = float("nan")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture
def kernel(tmp_path):
    """Return the kernel ``k`` of a body: ``kernel("float* x, int n", "x[threadIdx.x] = n;")``."""

    def kernel(params, body, *, above="", **kwargs):
        path = tmp_path / "page.cu"
        path.write_text(f'{above}\nextern "C" __global__ void k({params}) {{\n{body}\n}}\n')
        return cuda_module(path, **kwargs).k

    return kernel


NEIGHBOUR = """
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  {barrier}
  out[threadIdx.x] = tile[63 - threadIdx.x];
"""


def test_a_barrier_makes_writes_visible(kernel):
    reverse = kernel("const float* x, float* out", NEIGHBOUR.format(barrier="__syncthreads();"))
    x, out = torch.randn(64), torch.full((64,), NAN)
    with emulated():
        reverse[1, 64](x, out)
    assert torch.equal(out, x.flip(0))


def test_a_missing_barrier_is_a_race(kernel):
    reverse = kernel("const float* x, float* out", NEIGHBOUR.format(barrier=""))
    words = (
        r"k: block \(0, 0, 0\), thread .* a race: it (reads|writes) element \d+ of the shared mem"
    )
    with emulated(), pytest.raises(Fault, match=rf"{words}.* \(page\.cu:\d+\)"):
        reverse[1, 64](torch.randn(64), torch.empty(64))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_gives_a_wrong_result_in_any_order(kernel, seed):
    reverse = kernel("const float* x, float* out", NEIGHBOUR.format(barrier=""))
    x, out = torch.randn(64), torch.empty(64)
    with emulated(seed, races=False):
        reverse[1, 64](x, out)
    assert 0 < (out != x.flip(0)).sum() < 64  # who comes second of two is right
    assert out.isnan().any()


def test_a_barrier_that_some_threads_skip_is_a_deadlock(kernel):
    body = "if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();\nx[0] = 1;"
    words = (
        r"k: block .* a deadlock: .* waits in __syncthreads of line 3 .* __syncthreads of line 4 "
    )
    with emulated(), pytest.raises(Fault, match=words):
        kernel("int* x", body)[1, 64](torch.zeros(1, dtype=torch.int32))


def test_a_barrier_does_not_wait_for_ended_threads(kernel):
    body = (
        "if (threadIdx.x >= 40) return; __syncthreads(); x[threadIdx.x] = __syncthreads_count(1);"
    )
    x = torch.zeros(64, dtype=torch.int32)
    with emulated():
        kernel("int* x", body)[1, 64](x)
    assert x.tolist() == [40] * 40 + [0] * 24


def test_a_shuffle_with_disagreeing_lanes_is_a_deadlock(kernel):
    body = """
      x[threadIdx.x] = __shfl_xor_sync(threadIdx.x < 16 ? 0xffffffff : 0xffff0000, 1, 1);
      __syncwarp();
    """
    words = "a deadlock: .* in __shfl_xor_sync of line 4 .*, .* in __syncwarp of line 5 "
    with emulated(), pytest.raises(Fault, match=words):
        kernel("int* x", body)[1, 32](torch.zeros(32, dtype=torch.int32))


def test_a_lane_outside_its_mask_is_a_fault(kernel):
    body = "__syncwarp(0x0000ffff); x[0] = 1;"
    words = r"thread \((1[6-9]|[23]\d), 0, 0\) calls __syncwarp of line 3, but mask 0000ffff lacks"
    with emulated(), pytest.raises(Fault, match=words):
        kernel("int* x", body)[1, 32](torch.zeros(1, dtype=torch.int32))


LANES = torch.arange(64, dtype=torch.int32)
SHUFFLES = {
    "__shfl_sync(~0u, x, 5)": LANES // 32 * 32 + 5,
    "__shfl_sync(~0u, x, 1, 8)": LANES // 8 * 8 + 1,
    "__shfl_up_sync(~0u, x, 3)": torch.where(LANES % 32 < 3, LANES, LANES - 3),
    "__shfl_down_sync(~0u, x, 3)": torch.where(LANES % 32 > 28, LANES, LANES + 3),
    "__shfl_down_sync(~0u, x, 2, 4)": torch.where(LANES % 4 > 1, LANES, LANES + 2),
    "__shfl_xor_sync(~0u, x, 16)": LANES ^ 16,
    "__reduce_add_sync(~0u, x)": torch.where(LANES < 32, 496, 1520),
    "__ballot_sync(~0u, x % 32 == 4)": LANES * 0 + 16,
    "__any_sync(~0u, x == 40)": (LANES >= 32).int(),
    "__all_sync(~0u, x < 32)": (LANES < 32).int(),
    "__popc(__match_any_sync(~0u, x / 4))": LANES * 0 + 4,
    "__syncthreads_or(x == 63)": LANES * 0 + 1,
    "__syncthreads_and(x != 63)": LANES * 0,
    "int(__shfl_xor_sync(~0u, double(x), 1))": LANES ^ 1,
}


@pytest.mark.parametrize("call", SHUFFLES)
def test_warp_functions_exchange_values_as_on_a_gpu(kernel, call):
    out = torch.empty(64, dtype=torch.int32)
    with emulated():
        kernel("int* out", f"const int x = threadIdx.x; out[x] = {call};")[1, 64](out)
    assert torch.equal(out, SHUFFLES[call].int())


ATOMICS = {
    "atomicAdd(x, 2)": 2 * 96 + 7,
    "atomicSub(x, 1)": 7 - 96,
    "atomicMax(x, int(blockIdx.x * 32 + threadIdx.x))": 95,
    "atomicMin(x, -int(threadIdx.x))": -31,
    "atomicOr(x, 1 << threadIdx.x % 30)": 2**30 - 1,
    "atomicInc(reinterpret_cast<unsigned*>(x), 9)": (7 + 96) % 10,
    "if (atomicCAS(x, 7, 8) == 7) atomicExch(x, 9)": 9,
}


@pytest.mark.parametrize("call", ATOMICS)
def test_atomics_of_all_blocks_count_and_do_not_race(kernel, call):
    x = torch.tensor([7], dtype=torch.int32)
    with emulated():
        kernel("int* x", f"{call};")[3, 32](x)
    assert x.item() == ATOMICS[call]


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_atomic_add_of_floats(kernel, dtype):
    x = torch.zeros(2, dtype=getattr(torch, dtype))
    with emulated():
        kernel(f"{dtype}* x", "atomicAdd(x + threadIdx.x % 2, 0.5f);")[4, 32](x)
    assert x.tolist() == [32, 32]


FAULTS = {
    "x[0] += 1;": "a race: it reads element 0 of x, which .* wrote",
    "x[threadIdx.x + 1] = blockIdx.x;": "a race: it writes element",
    "if (threadIdx.x) atomicAdd(x, 1.0f); else x[0] = 1;": "a race: it writes element 0 of x",
    "x[(blockIdx.x + 1) * blockDim.x + threadIdx.x] = 1;": r"writes element [6-9]\d of x, ",
    "x[1] = x[int(threadIdx.x) - 32];": r"reads element -\d+ of x, which has 64",
    "*(float4*)(x + 1) = {};": "writes 16 bytes at 0x[0-9a-f]+4: misaligned",
    "extern __shared__ float tile[]; tile[0] = 1;": "writes element 0 of the dynamic shared memory",
    "while (atomicAdd(x, 0.0f) == 0) {}": "spins",
    "__trap();": r"__trap\(\)",
}


@pytest.mark.parametrize("body", FAULTS)
def test_illegal_accesses_are_faults(kernel, body):
    with emulated(), pytest.raises(Fault, match=FAULTS[body]):
        kernel("float* x", body)[2, 32](torch.zeros(64))


def test_writes_of_the_same_value_do_not_race(kernel):
    x = torch.zeros(1)
    with emulated():
        kernel("float* x", "if (threadIdx.x > 3) x[0] = 5;")[1, 32](x)
    assert x.item() == 5


def test_syncwarp_orders_a_warp(kernel):
    body = "out[threadIdx.x] = threadIdx.x; {}\nx[threadIdx.x] = out[threadIdx.x ^ 1];"
    x, out = torch.zeros(64), torch.zeros(64)
    with emulated():
        kernel("float* x, float* out", body.format("__syncwarp();"))[1, 64](x, out)
    assert torch.equal(x, (LANES ^ 1).float())
    with emulated(), pytest.raises(Fault, match="a race"):
        kernel("float* x, float* out", body.format(""))[1, 64](x, out)


def test_the_last_block_reads_writes_before_a_fence(kernel):
    body = """
      sums[blockIdx.x] = blockIdx.x + 1;
      __threadfence();
      if (atomicAdd(done, 1) == gridDim.x - 1) {
        for (int i = 0; i < gridDim.x; ++i) out[0] += sums[i];
      }
    """
    done, sums, out = torch.zeros(1, dtype=torch.int32), torch.full((9,), NAN), torch.zeros(1)
    with emulated():
        kernel("int* done, float* sums, float* out", body)[9, 1](done, sums, out)
    assert out.item() == 45


def test_each_block_has_its_own_shared_memory(kernel):
    body = """
      __shared__ float parts[4];
      float sum = x[blockIdx.x * blockDim.x + threadIdx.x];
      for (int by = 16; by; by /= 2) sum += __shfl_down_sync(~0u, sum, by);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
      __syncthreads();
      if (threadIdx.x == 0) atomicAdd(out, parts[0] + parts[1] + parts[2] + parts[3]);
    """
    out = torch.zeros(1)
    with emulated():
        kernel("const float* x, float* out", body)[8, 128](torch.arange(1024.0), out)
    assert out.item() == 1023 * 512


SHARED = ["__shared__ float tile[32];", "extern __shared__ float tile[];"]
USES = "{} const int i = threadIdx.x; if (i % 2) tile[i] = 1; out[i] = tile[i];"


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("shared", SHARED)
def test_shared_memory_starts_as_garbage_in_each_block(kernel, shared, template):
    above, body = "", USES.format(shared)
    if template:  # which g++ puts elsewhere
        above, body = f"template <int n>\n__device__ void f(float* out) {{ {body} }}", "f<3>(out);"
    out = torch.zeros(32)
    with emulated():
        for _ in range(2):
            kernel("float* out", body, above=above)[1, 32, 128](out)
    assert out[::2].isnan().all()
    assert out[1::2].eq(1).all()


def test_an_asynchronous_copy_lands_at_its_wait(kernel):
    body = """
      __shared__ float4 tile[2];
      for (int stage = 0; stage < 2; ++stage) {
        __pipeline_memcpy_async(tile + stage, x + stage, 16, stage * 8);
        __pipeline_commit();
      }
      out[0] = tile[0];
      __pipeline_wait_prior(1);
      out[1] = tile[0];
      out[2] = tile[1];
      __pipeline_wait_prior(0);
      out[3] = tile[1];
    """
    x, out = torch.arange(8.0) + 1, torch.zeros(4, 4)
    with emulated():
        kernel("const float4* x, float4* out", body, above="#include <cuda_pipeline.h>")[1, 1](
            x, out
        )
    assert out[0::2].isnan().all()
    assert out[1::2].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]


def test_narrow_types_round_like_torch(kernel):
    x, out = torch.randn(64), torch.zeros(64, dtype=torch.bfloat16)
    half = torch.zeros(64, dtype=torch.half)
    body = """
      const int i = threadIdx.x;
      out[i] = __float2bfloat16(x[i]);
      half[i] = __hmul(__float2half(x[i]), __float2half(3.0f));
    """
    above = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>"
    with emulated():
        kernel("const float* x, __nv_bfloat16* out, __half* half", body, above=above)[1, 64](
            x, out, half
        )
    assert torch.equal(out, x.bfloat16())
    assert torch.equal(half, x.half() * 3)


def test_thread_and_block_indices_are_correct(kernel):
    body = """
      const int x = blockIdx.x * blockDim.x + threadIdx.x;
      const int y = blockIdx.y * blockDim.y + threadIdx.y;
      out[(blockIdx.z * gridDim.y * blockDim.y + y) * gridDim.x * blockDim.x + x] =
          x + 100 * y + 10000 * blockIdx.z;
    """
    out = torch.zeros(2, 12, 6, dtype=torch.int32)
    with emulated():
        kernel("int* out", body)[(2, 3, 2), (3, 4)](out)
    z, y, x = (torch.arange(n) for n in out.shape)
    assert torch.equal(out, (x + 100 * y[:, None] + 10000 * z[:, None, None]).int())


def test_the_seed_determines_the_thread_orders(kernel):
    def orders(seed):
        found = torch.zeros(2, 128, dtype=torch.int32)
        count = torch.zeros(2, dtype=torch.int32)
        with emulated(seed):
            for n in range(2):
                k[4, 32](found[n], count[n : n + 1])
        return found

    k = kernel("int* out, int* n", "out[atomicAdd(n, 1)] = blockIdx.x * blockDim.x + threadIdx.x;")
    first, second = orders(1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(128))
    assert not torch.equal(first, second)
    assert torch.equal(orders(1)[0], first)
    assert not torch.equal(orders(2)[0], first)


def test_arguments_are_checked_as_on_a_gpu(kernel):
    k = kernel("float4* x, int n", "")
    with (
        emulated(),
        pytest.raises(LaunchError, match=r"float64 tensor .* tensor on the CPU at a mult"),
    ):
        k[1, 1](torch.zeros(3, dtype=torch.double), 4)
    with emulated(), pytest.raises(LaunchError, match="262144 bytes of dynamic shared memory"):
        k[1, 1, 2**18](torch.zeros(4), 4)


def test_a_kernel_may_copy_any_type_in_vectors(kernel):
    copy = kernel("const uint4* x, uint4* out", "out[threadIdx.x] = x[threadIdx.x];")
    x = torch.randn(64, dtype=torch.half)
    out = torch.empty_like(x)
    with emulated():
        copy[1, 8](x, out)
        assert torch.equal(x, out)
        with pytest.raises(Fault, match="writes element 64 of out, which has 64"):
            copy[1, 9](x, out)


GRID_SYNC = """
  __shared__ int mine;
  if (threadIdx.x == 0) mine = x[blockIdx.x];
  for (int k = 0; k < 3; ++k) {{
    if (threadIdx.x == 0) x[blockIdx.x] = mine + k;
    {barrier}
    const int next = x[(blockIdx.x + 1) % gridDim.x];
    {barrier}
    if (threadIdx.x == 0) mine = next;
    __syncthreads();
  }}
  if (threadIdx.x == 0) x[blockIdx.x] = mine;
"""
SYNC = "cooperative_groups::this_grid().sync();"
ABOVE = "#include <cooperative_groups.h>"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grid_barrier_makes_writes_of_all_blocks_visible(kernel, seed):
    ring = kernel("int* x", GRID_SYNC.format(barrier=SYNC), above=ABOVE)
    x = torch.arange(5, dtype=torch.int32)
    with emulated(seed):
        ring.launch(5, 64, cooperative=True)(x)
    assert x.tolist() == [(block + 3) % 5 + 3 for block in range(5)]


def test_a_missing_grid_barrier_is_a_race(kernel):
    ring = kernel("int* x", GRID_SYNC.format(barrier="__syncthreads();"))
    with emulated(), pytest.raises(Fault, match=r"a race: .* another block"):
        ring.launch(5, 64, cooperative=True)(torch.zeros(5, dtype=torch.int32))


GRID_FAULTS = {
    f"if (blockIdx.x > 0) {SYNC}": r"a deadlock: 2 of 3 blocks wait in grid\.sync, and the others",
    f"if (threadIdx.x > 3) {SYNC} else __syncthreads();": "a deadlock: thread .* waits in",
}


@pytest.mark.parametrize("body", GRID_FAULTS)
def test_a_grid_barrier_that_some_threads_skip_is_a_deadlock(kernel, body):
    with emulated(), pytest.raises(Fault, match=GRID_FAULTS[body]):
        kernel("int* x", body, above=ABOVE).launch(3, 32, cooperative=True)(torch.zeros(1).int())


def test_a_grid_barrier_needs_a_cooperative_launch_whose_blocks_fit(kernel):
    k = kernel("int* x", SYNC, above=ABOVE)
    with (
        emulated(),
        pytest.raises(Fault, match=r"calls grid\.sync of line 3, but the launch is not"),
    ):
        k[3, 32](torch.zeros(1).int())
    words = "k: a cooperative launch of 3072 threads; .* the emulated GPU runs 2048"
    with emulated(), pytest.raises(LaunchError, match=words):
        k.launch(3, 1024, cooperative=True)(torch.zeros(1).int())


BEYOND = {
    "inline assembly": 'asm volatile("membar.gl;");',
    "clusters": "cooperative_groups::this_cluster().sync();",
    "cooperative groups": "cooperative_groups::thread_block b;",
    "libcu++": "cuda::barrier<cuda::thread_scope_block>* b;",
    "tensor cores": "nvcuda::wmma::fill_fragment(a, 0.0f);",
}


@pytest.mark.parametrize("what", BEYOND)
def test_unsupported_features_are_named(kernel, what):
    k = kernel("float* x", BEYOND[what])
    assert what in unsupported(k.module)
    with emulated(), pytest.raises(CannotEmulate, match=rf"^page\.cu: .*{re.escape(what)}"):
        k[1, 1](torch.zeros(1))


@pytest.mark.parametrize(
    "prefetch",
    [
        'asm volatile("prefetch.global.L2 [%0];" ::"l"(x + 99));',
        'asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x + 96), "r"(16));',
    ],
    ids=["line", "bulk"],
)
def test_a_prefetch_is_left_out(kernel, prefetch):
    body = f"if (threadIdx.x == 0) {prefetch} x[threadIdx.x] = 1;"
    k, x = kernel("float* x", body), torch.zeros(32)
    assert not unsupported(k.module)
    with emulated():
        k[1, 32](x)
    assert x.all()
    twice = kernel("float* x", f'{body} asm volatile("membar.gl;");')
    assert "inline assembly" in unsupported(twice.module)


def test_a_compile_error_is_shown(kernel):
    with (
        emulated(),
        pytest.raises(CannotEmulate, match=r"page\.cu:3:.*'undeclared' was not declared"),
    ):
        kernel("float* x", "x[0] = undeclared;")[1, 1](torch.zeros(1))


def test_shared_memory_of_a_template_is_checked(kernel):
    body = "__shared__ float tile[n]; tile[threadIdx.x] = 1; out[threadIdx.x] = tile[0];"
    above = f"template <int n>\n__device__ void f(float* out) {{ {body} }}"
    with emulated(), pytest.raises(Fault, match=r"a race: it .* of the shared memory"):
        kernel("float* out", "f<64>(out);", above=above)[1, 64](torch.zeros(64))


def test_global_variables_persist_between_launches(kernel):
    above = """
      __device__ int count;
      __device__ int step = 2, more[2] = {0, 0};
      __constant__ int first[] = {40};
      __device__ const int second = 1;
      __device__ int twice(int x) { return 2 * x; }
    """
    k = kernel(
        "int* x", "x[0] = first[0] + twice(second) + (count += step) + more[1];", above=above
    )
    x = torch.zeros(1, dtype=torch.int32)
    with emulated():
        k[1, 1](x)
        k[1, 1](x)
    assert x.item() == 46


def test_kernels_can_use_macros_and_libc_names(kernel, tmp_path):
    (tmp_path / "page.cu").write_text(
        "__device__ int index(int i) { return i + SHIFT; }\n"
        'extern "C" __global__ void read(int* x) { x[threadIdx.x] = index(threadIdx.x); }\n'
    )
    x = torch.zeros(4, dtype=torch.int32)
    with emulated():
        cuda_module(tmp_path / "page.cu", options={"define_macro": ("SHIFT", "3")}).read[1, 4](x)
    assert x.tolist() == [3, 4, 5, 6]


def test_the_emulator_works_after_a_fault(kernel):
    k = kernel("float* x, int n", "__syncthreads(); x[threadIdx.x + n] = 1; __syncthreads();")
    x = torch.zeros(64)
    with emulated():
        with pytest.raises(Fault, match="writes element 64 of x"):
            k[1, 64](x, 1)
        k[1, 64](x, 0)
    assert x.eq(1).all()


def test_a_page_can_ask_for_the_emulated_gpu():
    with emulated():
        gpu = torch.cuda.get_device_properties("cpu")
        assert (gpu.multi_processor_count, gpu.max_threads_per_multi_processor) == (2, 1024)


def test_a_launch_without_the_emulator_needs_a_gpu(kernel):
    k = kernel("float* x", "")
    with emulated():
        k[1, 1](torch.zeros(1))
    with pytest.raises(LaunchError, match="on the CPU"):
        k[1, 1](torch.zeros(1))
