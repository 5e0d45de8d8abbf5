"""CUDA C++ kernels in a file next to the page. NVRTC compiles the kernels on first use.

Kernels run on torch's current stream. A kernel is declared as
``extern "C" __global__ void name(...)``. The signature is read from the source when the page is
imported, and every launch is checked against the signature. A wrong argument raises a `LaunchError`
before it can cause an illegal memory access on the GPU.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from ..page.gpu_specs import arch_of, target_of
from . import nvrtc
from .arguments import LaunchError, Param, check_arguments, signatures

if TYPE_CHECKING:
    import cuda.core

Dims: TypeAlias = "int | tuple[int, ...]"
"""A grid, a block or a cluster: an int or up to 3 ints."""
DIM_LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}
MAX_CLUSTER = 8
"""The largest cluster size, in blocks, that every GPU with clusters supports."""


def cuda_module(
    file: str | os.PathLike[str],
    *,
    options: Mapping[str, object] | Iterable[tuple[str, object]] = (),
    targets: Mapping[str, str] | None = None,
    device_runtime: bool = False,
) -> CudaModule:
    """Return the kernels of a .cu file as attributes of an object. Nothing is compiled yet.

    Args:
        file: the path of the .cu file, relative to the calling page.
        options: fields of `cuda.core.ProgramOptions`, as in ``{"use_fast_math": True}``.
        targets: the compilation targets keyed by arch, as in ``{"sm90": "sm_90a"}``. The default
            depends on the `needs` of the sides that use the file.
        device_runtime: True if kernels of the file launch kernels (dynamic parallelism). The file
            is then linked with CUDA's device runtime.

    Raises:
        FileNotFoundError: the file does not exist.
        LaunchError: the file has no kernel, or a kernel whose signature cannot be read.
    """
    __tracebackhide__ = True
    page = Path(sys._getframe(1).f_code.co_filename)
    path = (page.parent / file).resolve()
    if not path.is_file():
        files = ", ".join(sorted(p.name for p in path.parent.glob("*.cu"))) or "none"
        raise FileNotFoundError(f"{page} asks for {path}, which does not exist; .cu there: {files}")
    linked = {"relocatable_device_code": True} if device_runtime else {}
    return CudaModule(path, {**dict(options), **linked}, dict(targets or {}))


class CudaModule:
    """The kernels of one .cu file as attributes: ``kernels.naive[grid, block](x, out, n)``."""

    def __init__(self, path: Path, options: dict[str, object], targets: dict[str, str]) -> None:
        self.path, self.options, self.targets = path, {"std": "c++17", **options}, targets
        self.needs: set[str] = set()
        self.folders = [str(path.parent), *nvrtc.as_list(options.get("include_path"))]
        self.sources = nvrtc.sources_of(path, self.folders)
        declared = signatures(path.name, self.sources.values())
        self._kernels = {name: Kernel(self, name, params) for name, params in declared}
        self._cubins: dict[tuple[str, str], bytes] = {}
        self._loaded: dict[bytes, cuda.core.ObjectCode] = {}
        if not self._kernels:
            form = 'extern "C" __global__ void name(const float* x, int n)'
            raise LaunchError(f"{path} has no kernel; a kernel looks like: {form}")
        if taken := self._kernels.keys() & {*dir(CudaModule), *vars(self)}:
            raise LaunchError(f"{path}: a kernel cannot be called {min(taken)!r}; rename it")
        vars(self).update(self._kernels)  # plain attributes, because they are fast

    def __getattr__(self, name: str) -> Kernel:
        path, kernels = (self.__dict__.get(key) for key in ("path", "_kernels"))
        has = ", ".join(kernels or ())  # copy and pickle may call this before `__init__`
        raise AttributeError(f"{path} has no kernel {name!r}; it has {has}")

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels."""
        return tuple(self._kernels)

    def assemble(self, arch: str) -> dict[str, dict[str, int]]:
        """Compile for `arch` without a GPU or driver, and return the resources of each kernel.

        The resources are ``registers`` per thread, static ``shared`` bytes and ``spilled`` bytes.
        """
        usage = nvrtc.compile_module(self, self.target(arch)).usage
        return {name: usage.get(name, {}) for name in self._kernels}

    def target(self, arch: str) -> str:
        """Return the compilation target for `arch`."""
        return self.targets.get(arch) or target_of(arch, self.needs)

    def load(self, name: str, device: int) -> cuda.core.Kernel:
        """Return the `cuda.core.Kernel` called `name` for the GPU with this index."""
        import torch

        target = self.target(arch_of(*torch.cuda.get_device_capability(device)))
        if (target, name) not in self._cubins:
            self._cubins[target, name] = nvrtc.compile_module(self, target, name).code
        cubin = self._cubins[target, name]
        if cubin not in self._loaded:  # loaded once, so that kernels share `__device__` variables
            self._loaded[cubin] = nvrtc.toolchain().core.ObjectCode.from_cubin(cubin)
        return self._loaded[cubin].get_kernel(name)


@dataclass(frozen=True)
class LaunchConfig:
    """The grid, block and attributes of a launch. `shared` is bytes of dynamic shared memory."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    cluster: tuple[int, ...] = ()
    cooperative: bool = False
    dependent: bool = False

    def __str__(self) -> str:
        words = [f"block {_by(self.block)}"]
        words += [f"cluster {_by(self.cluster)}"] * bool(self.cluster)
        words += [f"{self.shared} B dynamic"] * bool(self.shared)
        words += ["cooperative"] * self.cooperative + ["dependent"] * self.dependent
        return ", ".join(words)

    def for_cuda_core(self, core: ModuleType) -> object:
        """Return a `cuda.core.LaunchConfig`. If there are clusters, the grid counts clusters."""
        grid = self.grid
        attributes: dict[str, object] = {}
        if self.cluster:
            grid = tuple(n // c for n, c in zip(grid, self.cluster, strict=True))
            attributes["cluster"] = self.cluster
        if self.cooperative:
            attributes["is_cooperative"] = True
        if self.dependent:
            attributes["programmatic_stream_serialization"] = True
        return core.LaunchConfig(grid=grid, block=self.block, shmem_size=self.shared, **attributes)


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def launch_config_of(name: str, index: object) -> LaunchConfig:
    """Return the launch config of ``kernel[index]``."""
    if not isinstance(index, tuple) or len(index) not in (2, 3):
        raise LaunchError(f"{name}[{index!r}]: needs [grid, block] or [grid, block, shared_bytes]")
    grid, block = (dims if isinstance(dims, tuple) else (dims,) for dims in index[:2])
    for what, dims in (("grid", grid), ("block", block)):
        ints = 1 <= len(dims) <= 3 and all(isinstance(d, int) for d in dims)
        if not ints or not all(1 <= d <= m for d, m in zip(dims, DIM_LIMITS[what], strict=False)):
            needs = f"1 to 3 ints from 1 to at most {DIM_LIMITS[what]}"
            raise LaunchError(f"{name}: {what} is {dims!r}; needs {needs}")
    threads, shared = math.prod(block), (*index, 0)[2]
    if threads > 1024:
        raise LaunchError(f"{name}: block {block} has {threads} threads; needs at most 1024")
    if not isinstance(shared, int) or shared < 0:
        raise LaunchError(f"{name}: shared_bytes is {shared!r}; needs an int of at least 0")
    return LaunchConfig(grid, block, shared)


def cluster_of(name: str, grid: tuple[int, ...], cluster: Dims | None) -> tuple[int, ...]:
    """Return `cluster` with as many dimensions as `grid`. None becomes an empty tuple."""
    if cluster is None:
        return ()
    dims = cluster if isinstance(cluster, tuple) else (cluster,)
    dims += (1,) * (len(grid) - len(dims))
    if not all(isinstance(d, int) and d >= 1 for d in dims) or math.prod(dims) > MAX_CLUSTER:
        needs = f"1 to 3 ints from 1, together at most {MAX_CLUSTER}"
        raise LaunchError(f"{name}: cluster is {cluster!r}; needs {needs}")
    if len(dims) != len(grid) or any(n % c for n, c in zip(grid, dims, strict=True)):
        raise LaunchError(f"{name}: a grid of {grid} is not a multiple of its cluster {cluster!r}")
    return dims


class Kernel:
    """One kernel. Index it with ``[grid, block]`` or ``[grid, block, shared_bytes]``, then call it.

    Grid and block are an int or up to 3 ints. `shared_bytes` is the dynamic shared memory. For
    clusters and other launch attributes, use `launch`.
    """

    def __init__(self, module: CudaModule, name: str, params: tuple[Param, ...]) -> None:
        self.module, self.name, self.params = module, name, params
        self._launches: dict[object, Launch] = {}
        self._allowed: dict[int, int] = {}

    def __getitem__(self, index: object) -> Launch:
        __tracebackhide__ = True
        try:
            return self._launches[index]
        except (KeyError, TypeError):  # a list is not hashable: `launch_config_of` raises an error
            pass
        self._launches[index] = Launch(self, launch_config_of(self.name, index))
        return self._launches[index]

    def launch(
        self,
        grid: Dims,
        block: Dims,
        shared: int = 0,
        *,
        cluster: Dims | None = None,
        cooperative: bool = False,
        dependent: bool = False,
    ) -> Launch:
        """Return a launch with attributes, or a plain ``[grid, block, shared]`` without attributes.

        Args:
            grid: the number of blocks in each dimension, even if there are clusters.
            cluster: the number of blocks that are scheduled together, an int or up to 3 ints, at
                most 8 blocks in total. Leave out `cluster` if the kernel's source has
                ``__cluster_dims__``.
            cooperative: whether all blocks run at once, so that they can wait for each other.
            dependent: whether the kernel may start before the previous kernel on the stream has
                ended (programmatic dependent launch). The kernel must wait with
                ``griddepcontrol.wait`` before it reads the previous kernel's results.

        Raises:
            LaunchError: no GPU supports such a launch.
        """
        __tracebackhide__ = True
        key = grid, block, shared, cluster, cooperative, dependent
        if key not in self._launches:
            config = launch_config_of(self.name, (grid, block, shared))
            dims = cluster_of(self.name, config.grid, cluster)
            config = replace(config, cluster=dims, cooperative=cooperative, dependent=dependent)
            self._launches[key] = Launch(self, config)
        return self._launches[key]

    def clusters_at_once(self, block: Dims, shared: int = 0, *, cluster: Dims) -> int:
        """Return the number of clusters that torch's current GPU can run at once.

        Use this number for the grid of a persistent kernel. The number can be less than the number
        of SMs divided by the cluster's size. A cluster must fit into one GPC (a group of SMs), so
        leftover SMs of a GPC are idle.

        Raises:
            LaunchError: no GPU supports such a launch.
        """
        __tracebackhide__ = True
        import torch

        dims = cluster if isinstance(cluster, tuple) else (cluster,)
        dims = cluster_of(self.name, dims, cluster)
        config = replace(launch_config_of(self.name, (dims, block, shared)), cluster=dims)
        device = torch.cuda.current_device()
        core = nvrtc.toolchain().core
        _make_current(device)
        kernel = self.module.load(self.name, device)
        self.allow_shared(kernel, shared, device)
        stream = _stream(torch.cuda.current_stream(device).cuda_stream)
        return int(kernel.occupancy.max_active_clusters(config.for_cuda_core(core), stream=stream))

    def allow_shared(self, kernel: cuda.core.Kernel, shared: int, device: int) -> None:
        """Raise the kernel's limit of dynamic shared memory to at least `shared` bytes.

        By default, dynamic and static shared memory together are limited to 48 KiB.
        """
        if shared <= self._allowed.get(device, 0):
            return
        driver = import_module("cuda.bindings.driver")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(limit, shared, kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            properties = nvrtc.toolchain().core.Device(device).properties
            raise LaunchError(
                f"{self.name}: {shared} bytes of dynamic shared memory: {status.name}; this GPU"
                f" allows {properties.max_shared_memory_per_block_optin} per block, including"
                " static shared memory"
            )
        self._allowed[device] = shared


class Launch:
    """A kernel and its launch config, such as ``kernels.naive[grid, block]``. Calls launch it."""

    def __init__(self, kernel: Kernel, config: LaunchConfig) -> None:
        self.kernel, self.config = kernel, config
        self._ready: dict[int, tuple[Callable[..., None], object, cuda.core.Kernel]] = {}

    def __call__(self, *args: object) -> None:
        """Launch on the current stream of torch's current GPU, which may be in graph capture.

        Raises:
            LaunchError: an argument does not match the kernel's signature.
        """
        __tracebackhide__ = True
        from torch import cuda

        # Wrong arguments raise a LaunchError even without a GPU.
        initialized: Callable[[], bool] = cuda.is_initialized
        device = cuda.current_device() if initialized() else 0
        values = check_arguments(self.kernel.name, self.kernel.params, args, device)
        launch, config, kernel = self._ready.get(device) or self._prepare(device)
        if not _thread.has_context:
            _make_current(device)
        stream = cuda.current_stream(device).cuda_stream
        launch(_streams.get(stream) or _stream(stream), config, kernel, *values)

    def _prepare(self, device: int) -> tuple[Callable[..., None], object, cuda.core.Kernel]:
        core = nvrtc.toolchain().core
        _make_current(device)
        kernel = self.kernel.module.load(self.kernel.name, device)
        self.kernel.allow_shared(kernel, self.config.shared, device)
        self._ready[device] = core.launch, self.config.for_cuda_core(core), kernel
        return self._ready[device]


class _Thread(threading.local):
    has_context = False


_thread = _Thread()
_streams: dict[int, cuda.core.Stream] = {}


def _make_current(device: int) -> None:
    # A thread that has not called CUDA yet has no context. Use the primary context, as torch does.
    nvrtc.toolchain().core.Device(device).set_current()
    _thread.has_context = True


def _stream(handle: int) -> cuda.core.Stream:
    return _streams.setdefault(handle, nvrtc.toolchain().core.Stream.from_handle(handle))
