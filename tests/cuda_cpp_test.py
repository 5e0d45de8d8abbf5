"""CUDA C++ modules: signatures, argument checks, assembling for every arch, the cache on disk."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import math
import multiprocessing
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytest_aisp.kernels import cuda_cpp, nvrtc
from pytest_aisp.kernels.arguments import TensorMap, check_arguments
from pytest_aisp.kernels.cuda_cpp import CudaModule, LaunchError, cuda_module
from pytest_aisp.kernels.nvrtc import CompileError, NoCompiler
from pytest_aisp.page.gpu_specs import GPU_ARCHS

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="needs NVRTC: pip install cuda-core cuda-bindings nvidia-cuda-nvrtc",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pytest-aisp"


@pytest.fixture
def module_of(tmp_path):
    def module_of(source, **kwargs):
        (tmp_path / "page.cu").write_text(source)
        return cuda_module(tmp_path / "page.cu", **kwargs)

    return module_of


@pytest.fixture
def params_of(module_of):
    def params_of(declared):
        return module_of(f'extern "C" __global__ void k({declared}) {{}}').k.params

    return params_of


@dataclass
class OnGpu:
    """What `check_arguments` reads of a CUDA tensor."""

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (4, 4)
    device: int = 0
    contiguous: bool = True
    address: int = 0x1000
    more_bytes: int = 0

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize + self.more_bytes

    def get_device(self):
        return self.device

    def is_contiguous(self):
        return self.contiguous

    def data_ptr(self):
        return self.address


# Declarations.


def test_importing_and_declaring_load_no_framework():
    code = (
        "import sys; from pytest_aisp.kernels.cuda_cpp import cuda_module;"
        f"cuda_module({str(Path(__file__).parent / 'data' / 'build.cu')!r});"
        "assert not {'torch', 'triton', 'numpy', 'cuda.core', 'cuda.bindings'} & set(sys.modules)"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_the_path_is_relative_to_the_page():
    module = cuda_module("data/build.cu")
    assert isinstance(module, CudaModule)
    assert module.path == Path(__file__).parent / "data" / "build.cu"
    assert module.kernels == ("saxpy", "rows", "wide", "pair")
    assert {Path(path).name for path in module.sources} == {"build.cu", "build_common.cuh"}


def test_a_missing_file_error_names_page_and_existing_files():
    with pytest.raises(FileNotFoundError) as error:
        cuda_module("data/nothing.cu")
    assert str(Path(__file__).parent / "data" / "nothing.cu") in str(error.value)
    assert str(error.value).startswith(f"{__file__} asks for ")
    assert "build.cu, build_blackwell.cu" in str(error.value)


def test_an_unknown_kernel_error_lists_the_kernels():
    with pytest.raises(AttributeError, match=r"no kernel 'sxapy'; it has saxpy, rows, wide, pair"):
        cuda_module("data/build.cu").sxapy  # noqa: B018


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "__global__ void k(int n) {}",
            'has no kernel; a kernel looks like: extern "C" __global__ void',
        ),
        ('extern "C" __global__ void NAME(k)(int n) {}', "cannot read the signature of `void NAME"),
        ('extern "C" __global__ void path(int n) {}', "a kernel cannot be called 'path'; rename"),
    ],
)
def test_unsupported_kernels_are_refused_at_declaration(module_of, source, message):
    with pytest.raises(LaunchError) as error:
        module_of(source)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "parameter", ["Shape s", "__half s", "float4 s", "Shape* s", "long double s"]
)
def test_an_unsupported_parameter_is_refused_at_the_launch_of_its_kernel(module_of, parameter):
    module = module_of(
        f'extern "C" __global__ void k({parameter}) {{}}\nextern "C" __global__ void good() {{}}'
    )
    assert module.kernels == ("k", "good")
    with pytest.raises(LaunchError) as error:
        module.k[1, 32](1.5)
    message = (
        f"k: parameter 's' was given 1.5 (float); `{parameter}` needs a type that can be passed;"
        " legal are pointers to integers, float, double"
    )
    assert str(error.value).startswith(message)


def test_comments_strings_and_attributes_do_not_confuse_the_parser(module_of):
    module = module_of(
        """
        // extern "C" __global__ void no(int n) {}
        /* extern "C" __global__ void never(int n) {} */
        __device__ const char* text = "/* // ";
        extern "C" __global__ void forward(const float*, int);
        extern "C" __global__ void __launch_bounds__(32 * (1 + 1), 2)
        bounded(const float* __restrict__ x /* in */, // the input
                float *out, unsigned n) { if (n) out[0] = x[0]; }
        extern "C"
        __global__ __cluster_dims__(2, 1, 1) void
        nothing(void) {}
        extern "C" __global__ void forward(const float* x, int n) {}
        """
    )
    assert module.kernels == ("forward", "bounded", "nothing")
    assert [p.name for p in module.forward.params] == ["x", "n"]
    assert [p.text for p in module.bounded.params] == [
        "const float* __restrict__ x",
        "float *out",
        "unsigned n",
    ]
    assert module.nothing.params == ()


def test_a_module_can_be_copied():
    assert copy.copy(cuda_module("data/build.cu")).kernels == ("saxpy", "rows", "wide", "pair")


# Arguments.


@pytest.mark.parametrize(
    ("c_type", "dtypes", "align"),
    [
        ("float", "float32", 4),
        ("double", "float64", 8),
        ("__half", "float16", 2),
        ("half2", "float16", 4),
        ("__nv_bfloat16", "bfloat16", 2),
        ("__nv_fp8_e4m3", "float8_e4m3fn", 1),
        ("bool", "bool", 1),
        ("char", "int8", 1),
        ("uint8_t", "uint8", 1),
        ("uchar4", "uint8", 4),
        ("short", "int16", 2),
        ("std::int32_t", "int32", 4),
        ("int4", "int32", 16),
        ("unsigned", "uint32 int32", 4),
        ("long", "int64", 8),
        ("long long int", "int64", 8),
        ("long unsigned", "uint64 int64", 8),
        ("unsigned long long", "uint64 int64", 8),
        ("ulonglong2", "uint64 int64", 16),
        ("size_t", "uint64 int64", 8),
        ("float3", "float32", 4),
        ("float4", "float32", 16),
        ("double4", "float64", 16),
        ("__nv_bfloat162", "bfloat16", 4),
        ("float*", "uint64 int64", 8),
    ],
)
def test_pointers_take_tensors_of_their_element_type(params_of, c_type, dtypes, align):
    (param,) = params_of(f"const {c_type}* __restrict__ x")
    every = {str(d).removeprefix("torch."): d for d in vars(torch).values() if is_dtype(d)}
    fits = {name: param.convert(OnGpu(d, more_bytes=1), 0) for name, d in every.items()}
    taken = {name for name, address in fits.items() if address is not None}
    assert taken == set(dtypes.split())
    good = every[dtypes.split()[0]]
    steps = [n for n in (1, 2, 4, 8, 16) if param.convert(OnGpu(good, address=0x1000 + n), 0)]
    assert steps[0] == align


@pytest.mark.parametrize("c_type", ["uint4", "const int4", "float4", "double2", "longlong2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float32])
def test_pointers_to_vectors_take_whole_vectors_of_any_type(params_of, c_type, dtype):
    (param,) = params_of(f"{c_type}* x")
    per_vector = 16 // dtype.itemsize
    assert check_arguments("k", [param], [OnGpu(dtype, (3, per_vector))], 0) == [0x1000]
    own = dtype == torch.float32 and c_type == "float4"
    for odd in (OnGpu(dtype, (3, per_vector + 1)), OnGpu(dtype, (16,), address=0x1008)):
        if own and odd.address == 0x1000:  # the kernel may handle the rest
            assert param.convert(odd, 0)
            continue
        with pytest.raises(LaunchError, match="or one of another type whose size is"):
            check_arguments("k", [param], [odd], 0)


@pytest.mark.parametrize("c_type", ["float", "half2", "__nv_bfloat162", "__half", "int"])
def test_a_tensor_of_another_type_is_refused_where_kernels_calculate(params_of, c_type):
    (param,) = params_of(f"{c_type}* x")
    for dtype in (torch.float64, torch.uint8):
        with pytest.raises(LaunchError, match=r"'x' was given a \w+ tensor"):
            check_arguments("k", [param], [OnGpu(dtype)], 0)


def is_dtype(value):
    return isinstance(value, torch.dtype)


def test_void_pointers_take_any_tensor(params_of):
    (param,) = params_of("const void* x")
    assert param.convert(OnGpu(torch.bfloat16, address=0x1001), 0) == 0x1001
    assert param.convert(7, 0) is None
    assert param.needs == "a contiguous tensor on cuda:{device}"


def test_an_empty_tensor_is_a_null_pointer(params_of):
    assert check_arguments("k", params_of("float* x"), [OnGpu(shape=(0,), address=0)], 0) == [0]


@pytest.mark.parametrize(
    ("c_type", "ctype", "good", "bad"),
    [
        ("bool", ctypes.c_bool, [True, False, 1], [2, -1, 0.0, "x"]),
        ("char", ctypes.c_int8, [-128, 127], [128, -129]),
        ("uint8_t", ctypes.c_uint8, [0, 255], [256, -1]),
        ("int", ctypes.c_int32, [-(2**31), 2**31 - 1, np.int64(5)], [2**31, 3.0, None]),
        ("unsigned", ctypes.c_uint32, [0, 2**32 - 1], [2**32, -1]),
        ("long long", ctypes.c_int64, [-(2**63), 2**63 - 1], [2**63, np.float32(1)]),
        ("size_t", ctypes.c_uint64, [0, 2**64 - 1], [2**64, -1]),
        ("float", ctypes.c_float, [1, 0.5, np.float32(2), -3.4e38, np.inf], [1e39, 10**400, "1"]),
        ("double", ctypes.c_double, [1, 1e308, np.float64(2), -np.inf], [10**400, 1j, True]),
    ],
)
def test_scalars_are_converted_to_the_parameters_type(params_of, c_type, ctype, good, bad):
    (param,) = params_of(f"{c_type} n")
    for value in good:
        (converted,) = check_arguments("k", [param], [value], 0)
        assert type(converted) is ctype
        assert converted.value == pytest.approx(value)
    for value in bad:
        with pytest.raises(LaunchError, match=f"`{c_type} n` needs a number that"):
            check_arguments("k", [param], [value], 0)


def test_tensor_maps_are_passed_as_descriptors(params_of):
    (param,) = params_of("const __grid_constant__ CUtensorMap map")
    descriptor = type("TensorMapDescriptor", (), {})()
    assert check_arguments("k", [param], [descriptor], 0) == [descriptor]
    assert check_arguments("k", [param], [TensorMap(OnGpu(), (8,), descriptor)], 0) == [descriptor]
    with pytest.raises(LaunchError, match=r"needs a tensor_map"):
        check_arguments("k", [param], [OnGpu()], 0)


FAULTS = {
    "CPU": (OnGpu(device=-1), "a float32 tensor of shape (4, 4) on the CPU"),
    "other GPU": (OnGpu(device=1), "a float32 tensor of shape (4, 4) on cuda:1"),
    "dtype": (OnGpu(torch.float64, (3,)), "a float64 tensor of shape (3,) on cuda:0"),
    "strides": (OnGpu(contiguous=False), "on cuda:0, not contiguous"),
    "alignment": (OnGpu(address=0x1004), "on cuda:0, not 16-byte aligned"),
    "number": (3, "3 (int)"),
    "None": (None, "None (NoneType)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tensor_error_names_parameter_value_and_need(fault):
    wide, (given, message) = cuda_module("data/build.cu").wide, FAULTS[fault]
    with pytest.raises(LaunchError) as error:
        check_arguments(wide.name, wide.params, [OnGpu(), given, 4], 0)
    start, end = str(error.value).split("; ")
    assert start.startswith("wide: parameter 'out' was given ")
    assert start.endswith(message)
    needs = "a contiguous float32 tensor on cuda:0 at a multiple of 16 bytes, or one of another"
    needs += " type whose size is a multiple of 16 bytes"
    assert end == f"`float4 *out` needs {needs}"


def test_a_tensor_for_a_number_is_refused():
    rows = cuda_module("data/build.cu").rows
    with pytest.raises(LaunchError, match=r"'n' was given a int64 tensor of shape \(\) on the CPU"):
        check_arguments(rows.name, rows.params, [OnGpu(), OnGpu(), torch.tensor(4)], 0)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_argument_count_shows_the_signature(count):
    rows = cuda_module("data/build.cu").rows
    message = rf"rows\(const float\* x, .*int n\) needs 3 arguments; {count} were given"
    with pytest.raises(LaunchError, match=message):
        check_arguments(rows.name, rows.params, [OnGpu()] * count, 0)


def test_arguments_are_checked_before_a_gpu_is_needed():
    x = torch.ones(4)
    with pytest.raises(LaunchError, match=r"'x' was given a float32 tensor .* on the CPU"):
        cuda_module("data/build.cu").rows[1, 256](x, x, 4)


# Geometry.


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (4, "rows[4]: needs [grid, block] or [grid, block, shared_bytes]"),
        ((1, 2, 3, 4), "needs [grid, block]"),
        ((0, 32), "rows: grid is (0,); needs 1 to 3 ints from 1"),
        ((1.5, 32), "grid is (1.5,)"),
        (([1, 2], 32), "grid is ([1, 2],)"),
        (((1, 2, 3, 4), 32), "grid is (1, 2, 3, 4)"),
        (((1, 65536), 32), "at most (2147483647, 65535, 65535)"),
        ((1, ()), "block is ()"),
        ((1, 1025), "block is (1025,); needs 1 to 3 ints from 1 to at most (1024, 1024, 64)"),
        ((1, (1, 1, 65)), "block is (1, 1, 65)"),
        ((1, (64, 32)), "block (64, 32) has 2048 threads; needs at most 1024"),
        ((1, 32, -1), "shared_bytes is -1; needs an int of at least 0"),
        ((1, 32, 1e3), "shared_bytes is 1000.0"),
    ],
)
def test_an_invalid_launch_config_is_refused(where, message):
    with pytest.raises(LaunchError) as error:
        cuda_module("data/build.cu").rows[where]
    assert message in str(error.value)


def test_launches_are_cached():
    rows = cuda_module("data/build.cu").rows
    assert rows[(2, 3), 256, 1024] is rows[(2, 3), 256, 1024]
    assert rows[(2, 3), 256, 1024].config == cuda_cpp.LaunchConfig((2, 3), (256,), 1024)
    launch = rows.launch((2, 3), 256, cluster=2)
    assert launch is rows.launch((2, 3), 256, cluster=2)
    assert launch is not rows.launch((2, 3), 256, cooperative=True)
    assert str(launch.config) == "block 256, cluster 2x1"


@pytest.mark.parametrize(
    ("grid", "cluster", "message"),
    [
        (7, 2, "a grid of (7,) is not a multiple of its cluster 2"),
        (8, (2, 2), "a grid of (8,) is not a multiple of its cluster (2, 2)"),
        (32, 16, "cluster is 16; needs 1 to 3 ints from 1, together at most 8"),
        (8, 0, "cluster is 0"),
        (8, 1.5, "cluster is 1.5"),
    ],
)
def test_an_invalid_cluster_is_refused(grid, cluster, message):
    with pytest.raises(LaunchError) as error:
        cuda_module("data/build.cu").rows.launch(grid, 32, cluster=cluster)
    assert message in str(error.value)


# Launches, on a simulated GPU.


class Gpu:
    """Stands in for `cuda.core`, its driver bindings and `torch.cuda`; records what happens."""

    def __init__(self, monkeypatch):
        self.launched, self.current, self.made, self.shared = [], [], [], []
        self.stream, self.refuses = 7, False
        core = SimpleNamespace(
            launch=lambda *args: self.launched.append(args),
            LaunchConfig=lambda **geometry: self.made.append("config") or geometry,
            Stream=SimpleNamespace(from_handle=self.wrap),
            Device=self.device,
        )
        monkeypatch.setattr(nvrtc, "toolchain", lambda: nvrtc.Toolchain(core, "13.0", 1))
        monkeypatch.setattr(cuda_cpp, "_streams", {})
        monkeypatch.setattr(cuda_cpp, "_thread", cuda_cpp._Thread())
        monkeypatch.setattr(cuda_cpp, "import_module", {"cuda.bindings.driver": self.driver()}.get)
        monkeypatch.setattr(CudaModule, "load", lambda _, name, __: SimpleNamespace(handle=name))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=self.stream)
        )

    def wrap(self, handle):
        self.made.append("stream")
        return f"stream {handle}"

    def device(self, index):
        properties = SimpleNamespace(max_shared_memory_per_block_optin=232448)
        return SimpleNamespace(
            set_current=lambda: self.current.append(index), properties=properties
        )

    def driver(self):
        attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most")
        results = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
        refusal = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")

        def set_attribute(_, value, *__):
            self.shared.append(value)
            return (refusal if self.refuses else results.CUDA_SUCCESS,)

        return SimpleNamespace(
            CUfunction_attribute=attribute, CUresult=results, cuKernelSetAttribute=set_attribute
        )


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_a_launch_uses_the_current_stream_and_c_values(gpu):
    x, out = OnGpu(address=0x2000), OnGpu(address=0x3000)
    launch = cuda_module("data/build.cu").saxpy[2, (16, 16)]
    for gpu.stream in (7, 7, 8, 0):
        launch(x, x, out, 2, 16)
    streams = [args[0] for args in gpu.launched]
    assert streams == ["stream 7", "stream 7", "stream 8", "stream 0"]
    _, config, handle, *values, a, n = gpu.launched[0]
    assert config == {"grid": (2,), "block": (16, 16), "shmem_size": 0}
    assert handle.handle == "saxpy"
    assert values == [0x2000, 0x2000, 0x3000]
    assert (type(a), a.value) == (ctypes.c_float, 2.0)
    assert (type(n), n.value) == (ctypes.c_int, 16)


def test_launch_attributes_are_passed_to_cuda_core(gpu):
    rows = cuda_module("data/build.cu").rows
    rows.launch((8, 6), 256, 512, cluster=(2, 3), dependent=True)(OnGpu(), OnGpu(), 4)
    rows.launch(8, 256, cooperative=True)(OnGpu(), OnGpu(), 4)
    first, second = (args[1] for args in gpu.launched)
    assert first == {
        **{"grid": (4, 2), "block": (256,), "shmem_size": 512, "cluster": (2, 3)},
        "programmatic_stream_serialization": True,
    }
    assert second == {"grid": (8,), "block": (256,), "shmem_size": 0, "is_cooperative": True}


def test_clusters_at_once_asks_the_driver(gpu, monkeypatch):
    calls = []

    def most(config, *, stream):
        calls.append((config, stream))
        return 62

    occupancy = SimpleNamespace(max_active_clusters=most)
    loaded = SimpleNamespace(handle="rows", occupancy=occupancy)
    monkeypatch.setattr(CudaModule, "load", lambda *_: loaded)
    rows = cuda_module("data/build.cu").rows
    assert rows.clusters_at_once(256, 65536, cluster=2) == 62
    config = {"grid": (1,), "block": (256,), "shmem_size": 65536, "cluster": (2,)}
    assert calls == [(config, "stream 7")]
    assert gpu.shared == [65536]


@pytest.mark.parametrize("cluster", [0, 16, 1.5, (3, 3)])
def test_clusters_at_once_refuses_an_invalid_cluster(gpu, cluster):
    with pytest.raises(LaunchError, match="together at most 8"):
        cuda_module("data/build.cu").rows.clusters_at_once(256, cluster=cluster)


def test_cuda_core_has_these_launch_attributes():
    core = pytest.importorskip("cuda.core")
    assert {"cluster", "is_cooperative", "programmatic_stream_serialization"} <= set(
        dir(core.LaunchConfig)
    )


def test_a_launch_prepares_once(gpu):
    launch = cuda_module("data/build.cu").rows[1, 256]
    for _ in range(3):
        launch(OnGpu(), OnGpu(), 4)
    assert gpu.made == ["config", "stream"]
    assert gpu.current == [0]
    assert gpu.shared == []


def test_every_thread_gets_a_context(gpu):
    launch = cuda_module("data/build.cu").rows[1, 256]
    launch(OnGpu(), OnGpu(), 4)
    thread = threading.Thread(target=launch, args=(OnGpu(), OnGpu(), 4))
    thread.start()
    thread.join()
    assert gpu.current == [0, 0]


def test_the_shared_memory_limit_is_only_raised(gpu):
    wide = cuda_module("data/build.cu").wide
    for shared in (60_000, 40_000, 200_000, 60_000):
        wide[1, 256, shared](OnGpu(), OnGpu(), 4)
    assert gpu.shared == [60_000, 200_000]


def test_too_much_shared_memory_names_the_limit(gpu):
    gpu.refuses = True
    with pytest.raises(LaunchError, match=r"300000 bytes .*INVALID_VALUE; this GPU allows 232448"):
        cuda_module("data/build.cu").wide[1, 256, 300_000](OnGpu(), OnGpu(), 4)


# Compiling.


@needs_nvrtc
@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_real_kernels_assemble_for_every_arch(arch):
    used = cuda_module("data/build.cu").assemble(arch)
    assert list(used) == ["saxpy", "rows", "wide", "pair"]
    assert all(0 < u["registers"] <= 64 and u["spilled"] == 0 for u in used.values())
    assert [u["shared"] for u in used.values()] == [0, 1024, 0, 0]


@needs_nvrtc
def test_a_compile_error_shows_file_and_line():
    with pytest.raises(CompileError) as error:
        cuda_module("data/build_error.cu").assemble("sm90")
    first, *rest = str(error.value).splitlines()
    assert first.startswith(
        f"{Path(__file__).parent}/data/build_error.cu does not compile for sm_90"
    )
    assert 'build_error.cu(4): error: identifier "undeclared" is undefined' in rest
    assert "\0" not in str(error.value)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm90", "sm121"])
def test_unsupported_instructions_show_the_assemblers_error(arch):
    module = cuda_module("data/build_blackwell.cu", targets={"sm100": "sm_100a"})
    assert module.assemble("sm100")["tensor_memory"]["registers"] > 0
    with pytest.raises(CompileError, match=r"tcgen05.wait' not supported on .target 'sm_"):
        module.assemble(arch)


@needs_nvrtc
def test_an_unknown_arch_is_named():
    with pytest.raises(CompileError, match=r"for sm_999 \(NVRTC [\d.]+\):\n.*\n*.*invalid value"):
        cuda_module("data/build.cu").assemble("sm999")


@needs_nvrtc
def test_a_kernel_removed_by_an_if_is_an_error(module_of):
    module = module_of(
        '#if __CUDA_ARCH__ >= 1000\nextern "C" __global__ void late(int n) {}\n#endif\n'
        'extern "C" __global__ void early(int n) {}\n'
    )
    assert list(module.assemble("sm100")) == ["late", "early"]
    with pytest.raises(CompileError, match="no code for late; is it inside an #if"):
        module.assemble("sm90")


@needs_nvrtc
def test_a_kernel_compiles_if_another_one_does_not(module_of):
    module = module_of(
        "__device__ int shift = 1;\n"
        'extern "C" __global__ void __launch_bounds__(64) bad(int* x) {\n'
        "  if (x[0]) { x[0] = '}' + undeclared; }\n}\n"
        'extern "C" __global__ void good(int* x) { x[0] = shift; }\n'
        'extern "C" __global__ void worse(int* x) { x[0] = unknown; }\n'
    )
    assert nvrtc.compile_module(module, "sm_90", "good").usage.keys() >= {"good"}
    for kernel, line, own, other in (
        ("bad", 3, "undeclared", "unknown"),
        ("worse", 6, "unknown", "undeclared"),
    ):
        with pytest.raises(CompileError) as error:
            nvrtc.compile_module(module, "sm_90", kernel)
        assert f'page.cu({line}): error: identifier "{own}" is undefined' in str(error.value)
        assert other not in str(error.value)


@needs_nvrtc
def test_an_error_in_shared_code_concerns_every_kernel(module_of):
    shared = "__device__ int shift = undeclared;\n"
    kernels = "".join(f'extern "C" __global__ void {k}(int* x) {{ *x = shift; }}\n' for k in "ab")
    for kernel in "ab":
        with pytest.raises(CompileError, match='"undeclared" is undefined'):
            nvrtc.compile_module(module_of(shared + kernels), "sm_90", kernel)


@needs_nvrtc
def test_a_kernel_without_code_for_a_target_does_not_concern_the_others(module_of):
    module = module_of(
        '#if __CUDA_ARCH__ >= 1000\nextern "C" __global__ void late(int n) {}\n#endif\n'
        'extern "C" __global__ void early(int n) {}\n'
    )
    assert nvrtc.compile_module(module, "sm_90", "early")
    with pytest.raises(CompileError, match="no code for late; is it inside an #if"):
        nvrtc.compile_module(module, "sm_90", "late")


@needs_nvrtc
def test_options_reach_the_compiler(module_of):
    source = 'extern "C" __global__ void k(float* x) { x[0] = TILE; }'
    assert module_of(source, options={"define_macro": ("TILE", "4")}).assemble("sm90")
    with pytest.raises(CompileError, match='identifier "TILE" is undefined'):
        module_of(source).assemble("sm90")
    with pytest.raises(CompileError, match="unexpected keyword argument 'tile'"):
        module_of(source, options={"tile": 4}).assemble("sm90")


@needs_nvrtc
def test_missing_cuda_headers_are_explained(module_of, monkeypatch):
    monkeypatch.setattr(nvrtc, "_toolkit", list)
    with pytest.raises(CompileError, match=r"cuda_fp16.h(.|\n)*pip install nvidia-cuda-runtime"):
        module_of('#include <cuda_fp16.h>\nextern "C" __global__ void k(int n) {}').assemble("sm90")


@pytest.mark.parametrize("error", [ImportError("cannot import name 'bindings'"), RuntimeError()])
def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, error):
    def missing(name):
        raise error

    monkeypatch.setattr(nvrtc, "import_module", missing)
    nvrtc.toolchain.cache_clear()
    with pytest.raises(NoCompiler, match="pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"):
        cuda_module("data/build.cu").assemble("sm90")


# Kernels that launch kernels.

PARENT = """
__global__ void child(float* x) { x[0] = 1; }
extern "C" __global__ void parent(float* x) { child<<<1, 1>>>(x); }
"""


def linkable():
    try:
        return bool(nvrtc._linked({"relocatable_device_code": True}))
    except (ImportError, CompileError):
        return False


@needs_nvrtc
@pytest.mark.skipif(not linkable(), reason="needs nvidia-nvjitlink and nvidia-cuda-runtime")
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_a_kernel_that_launches_a_kernel_is_linked(module_of, arch):
    module = module_of(PARENT, device_runtime=True)
    assert module.assemble(arch)["parent"]["registers"] > 0
    with pytest.raises(CompileError, match=r"(?s)page\.cu does not compile for sm_.*no_such"):
        module_of(
            f"extern __device__ void no_such(float* x); {PARENT.replace('x[0] = 1', 'no_such(x)')}",
            device_runtime=True,
        ).assemble(arch)


@needs_nvrtc
def test_a_kernel_cannot_launch_a_kernel_without_the_device_runtime(module_of):
    with pytest.raises(CompileError, match="the required runtime APIs are not declared"):
        module_of(PARENT).assemble("sm90")


@needs_nvrtc
@pytest.mark.parametrize("missing", ["load_nvidia_dynamic_lib", "find_static_lib"])
def test_without_the_device_runtime_the_error_says_what_to_install(module_of, monkeypatch, missing):
    nvrtc.toolchain()  # finds NVRTC by the same function

    def absent(name):
        raise RuntimeError(f"no {name}")

    finder = SimpleNamespace(
        load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path="lib.so"),
        find_static_lib=lambda name: "lib.a",
    )
    setattr(finder, missing, absent)
    monkeypatch.setattr(nvrtc, "import_module", lambda name: finder)
    with pytest.raises(
        CompileError, match="pip install nvidia-nvjitlink nvidia-cuda-runtime\n"
    ) as e:
        module_of(PARENT, device_runtime=True).assemble("sm90")
    assert f"(no {'nvJitLink' if missing.startswith('load') else 'cudadevrt'})" in str(e.value)


# The cache.


@pytest.fixture
def compilations(monkeypatch):
    """Count what really is compiled."""
    real, seen = nvrtc.compile_source, []

    def counted(core, source, options, libraries):
        seen.append(options["arch"])
        return real(core, source, options, libraries)

    monkeypatch.setattr(nvrtc, "compile_source", counted)
    return seen


@needs_nvrtc
def test_compiled_code_is_cached(cache, compilations):
    first = nvrtc.compile_module(cuda_module("data/build.cu"), "sm_90")
    assert nvrtc.compile_module(cuda_module("data/build.cu"), "sm_90") == first
    nvrtc.compile_module(cuda_module("data/build.cu"), "sm_100")
    assert compilations == ["sm_90", "sm_100"]
    assert len(list(cache.iterdir())) == 2


@needs_nvrtc
@pytest.mark.skipif(not linkable(), reason="needs nvidia-nvjitlink and nvidia-cuda-runtime")
def test_the_cache_key_covers_the_linker(module_of, compilations, monkeypatch, tmp_path):
    module = module_of(PARENT, device_runtime=True)
    cubin = nvrtc.compile_module(module, "sm_90")
    library = nvrtc._linked(module.options)[-1]
    (tmp_path / "linker.so").write_bytes(b"another version")
    monkeypatch.setattr(nvrtc, "_linked", lambda _: [str(tmp_path / "linker.so"), library])
    assert nvrtc.compile_module(module, "sm_90") == cubin
    assert compilations == ["sm_90", "sm_90"]


@needs_nvrtc
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_corrupt_entry_is_compiled_again(cache, compilations, damage):
    module = cuda_module("data/build.cu")
    good = nvrtc.compile_module(module, "sm_90")
    (entry,) = cache.iterdir()
    stored = entry.read_bytes()
    flipped = stored[:-9] + bytes([stored[-9] ^ 1]) + stored[-8:]
    entry.write_bytes({"truncate": stored[:-1], "flip": flipped, "empty": b""}[damage])
    assert nvrtc.compile_module(module, "sm_90") == good
    assert compilations == ["sm_90", "sm_90"]
    assert entry.read_bytes()[:32] == stored[:32]


@needs_nvrtc
def test_the_cache_key_covers_source_headers_options_and_compiler(
    module_of, tmp_path, compilations, monkeypatch
):
    source = '#include "deep.cuh"\nextern "C" __global__ void k(int* x) { x[0] = N; }'
    (tmp_path / "deep.cuh").write_text('#include "deeper.cuh"\n')
    (tmp_path / "deeper.cuh").write_text("#define N 1\n")
    cubins = [nvrtc.compile_module(module_of(source), "sm_90")]
    (tmp_path / "deeper.cuh").write_text("#define N 2\n")
    cubins += [nvrtc.compile_module(module_of(source), "sm_90")]
    cubins += [nvrtc.compile_module(module_of(source + " "), "sm_90")]
    cubins += [nvrtc.compile_module(module_of(source, options={"lineinfo": True}), "sm_90")]
    toolchain = nvrtc.toolchain()._replace(version="99.0")
    monkeypatch.setattr(nvrtc, "toolchain", lambda: toolchain)
    nvrtc.compile_module(module_of(source), "sm_90")
    assert len(compilations) == 5
    assert cubins[0] != cubins[1]


@needs_nvrtc
def test_a_header_edited_after_the_import_is_not_cached(module_of, tmp_path, cache):
    (tmp_path / "n.cuh").write_text("#define N 1\n")
    module = module_of('#include "n.cuh"\nextern "C" __global__ void k(int* x) { x[0] = N; }')
    (tmp_path / "n.cuh").write_text("#define N 2\n")
    module.assemble("sm90")
    assert not cache.exists()


@needs_nvrtc
def test_processes_can_compile_at_once(cache):
    module = cuda_module("data/build.cu")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        used = pool.starmap(CudaModule.assemble, [(module, "sm90")] * 8, chunksize=1)
    assert all(u == used[0] for u in used)
    assert [entry.suffix for entry in cache.iterdir()] == [".cubin"]
    assert module.assemble("sm90") == used[0]


@needs_nvrtc
def test_an_unwritable_cache_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cuda_module("data/build.cu").assemble("sm90")["saxpy"]


PACKAGE = Path(cuda_cpp.__file__).parents[1]


def own_kernels():
    """Yield each .cu file that the package compiles, and the kernels that it launches."""
    for module in sorted(PACKAGE.rglob("*.py")):
        text = module.read_text()
        found = re.findall(r'cuda_module\("(.+?\.cu)"\)\.(\w+)', text)
        for name in re.findall(r'kernels = cuda_module\("(.+?\.cu)"\)$', text, re.MULTILINE):
            found += [(name, kernel) for kernel in re.findall(r"\bkernels\.(\w+)\[", text)]
        for name, kernel in found:
            yield pytest.param(module.parent / name, kernel, id=f"{name}-{kernel}")


@needs_nvrtc
@pytest.mark.parametrize(("path", "kernel"), own_kernels())
def test_kernels_of_the_package_itself_compile(path, kernel):
    """Only a GPU launches them, so nothing else here would notice a missing file."""
    assert getattr(cuda_module(path), kernel).name == kernel
    for arch in ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121"):
        assert kernel in nvrtc.compile_module(cuda_module(path), arch).usage


def test_every_kernel_source_is_package_data():
    tomllib = pytest.importorskip("tomllib")
    configured = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    data = configured["tool"]["setuptools"]["package-data"]
    shipped = {
        path
        for package, patterns in data.items()
        if package != "*"
        for pattern in patterns
        for path in (PACKAGE.parent / package.replace(".", "/")).glob(pattern)
    }
    assert set(PACKAGE.rglob("*.cu")) <= shipped
