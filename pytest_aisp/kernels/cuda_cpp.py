"""CUDA C++ beside its page: compiled on first use by NVRTC, launched on torch's current stream.

A kernel is ``extern "C" __global__ void name(...)``. Its signature is read from the source when the
page is imported, and every launch is checked against it: what would be an illegal address on the
GPU is a `LaunchError` that names the parameter.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..page.gpu_specs import arch_of, target_of
from . import nvrtc
from .launch_config import (
    LaunchConfig,
    LaunchError,
    Param,
    check,
    cluster_of,
    launch_config_of,
    signatures,
)


def cuda_module(
    file: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    targets: Mapping[str, str] | None = None,
) -> CudaModule:
    """Return the kernels of `file`, a path relative to the calling page; nothing is compiled yet.

    Args:
        options: fields of `cuda.core.ProgramOptions`, as in ``{"use_fast_math": True}``.
        targets: what to compile for by arch, as in ``{"sm90": "sm_90a"}``; without it that is
            what the `needs` of the sides that use the file ask for, else ``sm_90`` and so on.

    Raises:
        FileNotFoundError: there is no such file.
        LaunchError: it has no kernel, or one with a parameter that cannot be passed.
    """
    __tracebackhide__ = True
    page = Path(sys._getframe(1).f_code.co_filename)
    path = (page.parent / file).resolve()
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.cu"))) or "none"
        raise FileNotFoundError(f"{page} asks for {path}, which does not exist; .cu there: {there}")
    return CudaModule(path, dict(options), dict(targets or {}))


class CudaModule:
    """The kernels of one .cu file, each an attribute: ``kernels.naive[grid, block](x, out, n)``."""

    def __init__(self, path: Path, options: dict[str, Any], targets: dict[str, str]) -> None:
        self.path, self.options, self.targets = path, {"std": "c++17", **options}, targets
        self.needs: set[str] = set()
        self.folders = [str(path.parent), *nvrtc.listed(options.get("include_path"))]
        self.sources = nvrtc.sources_of(path, self.folders)
        found = signatures(path.name, self.sources.values())
        self._kernels = {name: Kernel(self, name, params) for name, params in found}
        self._loaded: dict[str, Any] = {}
        if not self._kernels:
            form = 'extern "C" __global__ void name(const float* x, int n)'
            raise LaunchError(f"{path} has no kernel; one reads: {form}")
        if taken := self._kernels.keys() & {*dir(CudaModule), *vars(self)}:
            raise LaunchError(f"{path}: a kernel cannot be called {min(taken)!r}; rename it")
        vars(self).update(self._kernels)  # plain attributes: a launch looks its kernel up

    def __getattr__(self, name: str) -> Kernel:
        path, kernels = (self.__dict__.get(key) for key in ("path", "_kernels"))
        has = ", ".join(kernels or ())  # none yet while copy and pickle build one
        raise AttributeError(f"{path} has no kernel {name!r}; it has {has}")

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels."""
        return tuple(self._kernels)

    def assemble(self, arch: str) -> dict[str, dict[str, int]]:
        """Compile for `arch`, with no GPU or driver, and return what each kernel uses.

        That is ``registers`` per thread, static ``shared`` bytes and ``spilled`` bytes, or nothing
        where the assembler does not say.
        """
        usage = nvrtc.compiled(self, self.target(arch)).usage
        return {name: usage.get(name, {}) for name in self._kernels}

    def target(self, arch: str) -> str:
        """Return what is compiled for on `arch`: ``sm_90``, or what `targets` or `needs` say."""
        return self.targets.get(arch) or target_of(arch, self.needs)

    def load(self, name: str, device: int) -> Any:
        """Return the `cuda.core.Kernel` called `name` for the GPU of this index."""
        import torch

        target = self.target(arch_of(*torch.cuda.get_device_capability(device)))
        if target not in self._loaded:
            code = nvrtc.compiled(self, target).code
            self._loaded[target] = nvrtc.toolchain()[0].ObjectCode.from_cubin(code)
        return self._loaded[target].get_kernel(name)


def assemble(module: CudaModule, arch: str) -> dict[str, dict[str, int]]:
    """Compile `module` for `arch` with no GPU or driver; see `CudaModule.assemble`."""
    return module.assemble(arch)


class Kernel:
    """One kernel; index it with ``[grid, block]`` or ``[grid, block, shared_bytes]``, then call it.

    Grid and block are an int or up to 3 ints, `shared_bytes` is the dynamic shared memory. What
    else a launch can say, `launch` takes.
    """

    def __init__(self, module: CudaModule, name: str, params: tuple[Param, ...]) -> None:
        self.module, self.name, self.params = module, name, params
        self._launches: dict[Any, Launch] = {}
        self._allowed: dict[int, int] = {}

    def __getitem__(self, where: Any) -> Launch:
        __tracebackhide__ = True
        try:
            return self._launches[where]
        except (KeyError, TypeError):  # a list cannot be looked up; `geometry_of` refuses it
            pass
        self._launches[where] = Launch(self, launch_config_of(self.name, where))
        return self._launches[where]

    def launch(
        self,
        grid: Any,
        block: Any,
        shared: int = 0,
        *,
        cluster: Any = None,
        cooperative: bool = False,
        dependent: bool = False,
    ) -> Launch:
        """Return a launch with attributes; without any it is ``[grid, block, shared]``.

        Args:
            grid: blocks, by dimension, with a cluster too.
            cluster: blocks that are scheduled together, an int or up to 3 ints, at most 8 in all;
                a kernel whose source says ``__cluster_dims__`` needs none.
            cooperative: all blocks run at once, so that they may wait for each other.
            dependent: may begin before the kernel ahead of it on the stream has ended
                (programmatic dependent launch); it waits with ``griddepcontrol.wait``.

        Raises:
            LaunchError: for a geometry that no GPU can launch.
        """
        __tracebackhide__ = True
        key = grid, block, shared, cluster, cooperative, dependent
        if key not in self._launches:
            geometry = launch_config_of(self.name, (grid, block, shared))
            clustered = cluster_of(self.name, geometry.grid, cluster)
            self._launches[key] = Launch(
                self,
                replace(geometry, cluster=clustered, cooperative=cooperative, dependent=dependent),
            )
        return self._launches[key]

    def clusters_at_once(self, block: Any, shared: int = 0, *, cluster: Any) -> int:
        """Return how many clusters torch's current GPU runs at once.

        That many are the grid of a kernel whose blocks stay and take tile after tile. It can be
        less than the GPU's processors allow: a cluster lies within one of their groups, and where
        a group has an odd number left, one idles.

        Args:
            block, shared, cluster: as for `launch`.

        Raises:
            LaunchError: for a geometry that no GPU can launch.
        """
        __tracebackhide__ = True
        from torch import cuda

        dims = cluster if isinstance(cluster, tuple) else (cluster,)
        clustered = cluster_of(self.name, dims, cluster)
        geometry = replace(launch_config_of(self.name, (dims, block, shared)), cluster=clustered)
        device = cuda.current_device()
        core = nvrtc.toolchain()[0]
        _make_current(device)
        handle = self.module.load(self.name, device)
        self.allow_shared(handle, shared, device)
        stream = _wrap(cuda.current_stream(device).cuda_stream)
        return int(handle.occupancy.max_active_clusters(geometry.config(core), stream=stream))

    def allow_shared(self, handle: Any, shared: int, device: int) -> None:
        """Raise the limit of dynamic shared memory, which is 48 KiB with the static by default."""
        if shared <= self._allowed.get(device, 0):
            return
        driver = import_module("cuda.bindings.driver")
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(most, shared, handle.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            limit = nvrtc.toolchain()[0].Device(device).properties.max_shared_memory_per_block_optin
            fault = f"{self.name}: {shared} bytes of dynamic shared memory: {status.name}"
            raise LaunchError(f"{fault}; this GPU has {limit} a block, the static included")
        self._allowed[device] = shared


class Launch:
    """A kernel with its geometry: ``kernels.naive[grid, block]``; call it with the arguments."""

    def __init__(self, kernel: Kernel, geometry: LaunchConfig) -> None:
        self.kernel, self.geometry = kernel, geometry
        self._ready: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(self, *args: Any) -> None:
        """Launch on the current stream of torch's current GPU; legal while it is captured.

        Raises:
            LaunchError: an argument is not what the kernel's signature asks for.
        """
        __tracebackhide__ = True
        from torch import cuda

        # Without a GPU nothing is initialized, and wrong arguments still deserve our error.
        initialized: Callable[[], bool] = cuda.is_initialized
        device = cuda.current_device() if initialized() else 0
        values = check(self.kernel.name, self.kernel.params, args, device)
        launch, config, handle = self._ready.get(device) or self._prepare(device)
        if not _thread.has_context:
            _make_current(device)
        stream = cuda.current_stream(device).cuda_stream
        launch(_streams.get(stream) or _wrap(stream), config, handle, *values)

    def _prepare(self, device: int) -> tuple[Any, Any, Any]:
        core = nvrtc.toolchain()[0]
        _make_current(device)
        handle = self.kernel.module.load(self.kernel.name, device)
        self.kernel.allow_shared(handle, self.geometry.shared, device)
        self._ready[device] = core.launch, self.geometry.config(core), handle
        return self._ready[device]


class _Thread(threading.local):
    has_context = False


_thread = _Thread()
_streams: dict[int, Any] = {}


def _make_current(device: int) -> None:
    # A thread that has not called CUDA yet has no context; torch's is the device's primary one.
    nvrtc.toolchain()[0].Device(device).set_current()
    _thread.has_context = True


def _wrap(stream: int) -> Any:
    return _streams.setdefault(stream, nvrtc.toolchain()[0].Stream.from_handle(stream))
