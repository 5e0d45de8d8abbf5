"""What stands in for a GPU where there is none: Triton's driver, and tensors without values.

Under Triton's interpreter the driver answers the autotuner, which asks for a stopwatch. For
assembling, a whole GPU of some arch is stood in for: code that makes CUDA tensors and launches
kernels runs, tensors have shapes and types only, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from ..page.gpu_specs import GPU_ARCHS, LIMITS, capability_of

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode

ADDRESS = 1 << 32
"""Where every tensor of a pretended GPU begins: aligned, as torch's allocator does it."""


class FakeDriver:
    """Triton's driver of a GPU of `arch` that is not here: it compiles for it, it runs nothing."""

    def __init__(self, arch: str = GPU_ARCHS[0]) -> None:
        self.major, self.minor = capability_of(arch)
        properties = {
            "multiprocessor_count": LIMITS[arch].processors,
            "max_shared_mem": LIMITS[arch].shared,
            "max_num_regs": LIMITS[arch].registers,
            "warpSize": 32,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_device(self) -> int:
        """Return a number of its own for each arch: Triton keeps what it compiled by device."""
        return 10 * self.major + self.minor

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self.major, self.minor

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.major + self.minor, 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a stopwatch that runs nothing: the autotuner takes its first configuration."""
        return lambda call, quantiles: [0.0 for _ in quantiles]


def interpreting() -> bool:
    """Return whether Triton was imported under its interpreter."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def drive_interpreter() -> None:
    """Give Triton's interpreter a driver where there is no GPU; a page that tunes asks for one."""
    import torch

    if interpreting() and not torch.cuda.is_available():
        from triton.runtime import driver

        driver.set_active(FakeDriver())


@contextlib.contextmanager
def fake_gpu(arch: str) -> Iterator[None]:
    """Make this process seem to have a GPU of `arch`, for what shapes and types can answer.

    `torch.cuda.is_available` keeps saying that there is none: nothing can be captured or timed.
    """
    import torch

    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch.multiple(torch.cuda, **_answers(arch)))
        if "triton" in sys.modules:
            driver = sys.modules["triton"].runtime.driver
            held.callback(driver.set_active, driver._active)
            driver.set_active(FakeDriver(arch))
        held.enter_context(_without_values())
        yield


def _answers(arch: str) -> Mapping[str, Any]:
    """Return what torch.cuda answers; streams and events order nothing where nothing runs."""
    major, minor = capability_of(arch)
    limits = LIMITS[arch]
    properties = SimpleNamespace(
        name=f"a GPU of {arch}",
        major=major,
        minor=minor,
        multi_processor_count=limits.processors,
        shared_memory_per_block_optin=limits.shared,
        regs_per_multiprocessor=limits.registers,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    ordering = {name: mock.MagicMock() for name in ("current_stream", "stream", "Stream", "Event")}
    return {
        **ordering,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
    }


def _without_values() -> TorchFunctionMode:
    """Return the mode in which tensors on ``cuda`` are meta tensors that say they are on it."""
    import torch
    from torch.overrides import TorchFunctionMode

    cuda = torch.device("cuda", 0)
    tensor: Any = torch.Tensor
    said: dict[Any, Callable[[Any], Any]] = {
        tensor.device.__get__: lambda t: cuda,
        tensor.is_cuda.__get__: lambda t: True,
        tensor.is_meta.__get__: lambda t: False,
        tensor.get_device: lambda t: 0,
        tensor.data_ptr: lambda t: ADDRESS + t.storage_offset() * t.element_size(),
        tensor.cuda: lambda t: t.to("meta"),
        tensor.pin_memory: lambda t: t,
    }

    def moved(value: Any) -> Any:
        on_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("meta") if on_gpu else value

    class OnGpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.device:
                return func(*args, **(kwargs or {}))
            kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
            if func in said and (func is torch.Tensor.cuda or self._is_meta(args[0])):
                return said[func](args[0])
            return func(*map(moved, args), **kwargs)

        @staticmethod
        def _is_meta(tensor: torch.Tensor) -> bool:
            with torch._C.DisableTorchFunction():
                return tensor.is_meta

    return OnGpu()
