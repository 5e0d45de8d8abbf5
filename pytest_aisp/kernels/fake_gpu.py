"""A fake GPU. Code can create CUDA tensors and launch kernels on it.

Tensors have shapes and dtypes but no values, and nothing is computed. Triton's interpreter also
needs the fake driver, because the autotuner gets a benchmark function from the driver.
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
    import torch
    from torch.overrides import TorchFunctionMode
    from triton.backends.compiler import GPUTarget

ADDRESS = 1 << 32
"""The address of every tensor on a fake GPU, aligned like real allocations of torch."""


class FakeDriver:
    """Triton's driver for a fake GPU of `arch`: it compiles but runs nothing."""

    def __init__(self, arch: str = GPU_ARCHS[0]) -> None:
        self.major, self.minor = capability_of(arch)
        properties = {
            "multiprocessor_count": LIMITS[arch].sms,
            "max_shared_mem": LIMITS[arch].shared,
            "max_num_regs": LIMITS[arch].registers,
            "warpSize": 32,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_device(self) -> int:
        """Return a number that identifies the arch, because Triton caches kernels by device."""
        return 10 * self.major + self.minor

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self.major, self.minor

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.major + self.minor, 32)

    def get_active_torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a benchmark function that runs nothing, so the first configuration is chosen."""
        return lambda call, quantiles: [0.0 for _ in quantiles]


def interpreting() -> bool:
    """Return whether Triton's interpreter was on when Triton was imported."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def drive_interpreter() -> None:
    """Give Triton's interpreter a fake driver if there is no GPU. Autotuning needs a driver."""
    import torch

    if interpreting() and not torch.cuda.is_available():
        from triton.runtime import driver

        driver.set_active(FakeDriver())
        _prepare_language_once()


def _prepare_language_once() -> None:
    """Make Triton's interpreter prepare `triton.language` once per launch.

    Triton 3.9 prepares `triton.language` again at each call of a device function, such as
    `tl.cdiv`. These repeated preparations take up to a quarter of the interpreter's time.
    """
    from triton import language
    from triton.runtime import interpreter

    always = getattr(interpreter, "_patch_lang", None)
    if always is None or hasattr(always, "always") or not hasattr(interpreter, "_LangPatchScope"):
        return

    def patch(function: Any) -> object:
        named = [m for m in function.__globals__.values() if m is language or m is language.core]
        if named and not any(language.core.is_builtin(module.load) for module in named):
            return interpreter._LangPatchScope()
        return always(function)

    patch.always = always  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


@contextlib.contextmanager
def fake_gpu(arch: str) -> Iterator[None]:
    """Make this process appear to have a GPU of `arch`. Only shapes and dtypes are computed.

    `torch.cuda.is_available` still returns False, because nothing can be captured or timed.
    """
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda_functions(arch)))
        # shape functions of some operators, such as `_weight_int4pack_mm`, read this attribute
        cuda = torch.device("cuda", 0)
        stack.enter_context(mock.patch.object(torch.Tensor, "fake_device", cuda, create=True))
        if "triton" in sys.modules:
            driver = sys.modules["triton"].runtime.driver
            stack.callback(driver.set_active, driver._active)
            driver.set_active(FakeDriver(arch))
        stack.enter_context(_tensors_without_values())
        yield


def cuda_functions(arch: str) -> dict[str, Any]:
    """Return replacements for functions of torch.cuda. Fake streams and events do nothing."""
    capability, limits = capability_of(arch), LIMITS[arch]
    properties = SimpleNamespace(
        name=f"a GPU of {arch}",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=limits.sms,
        shared_memory_per_block_optin=limits.shared,
        regs_per_multiprocessor=limits.registers,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        gcnArchName=arch,  # torch.compile reads this if torch is built without CUDA
    )
    return {
        **{name: mock.MagicMock() for name in ("current_stream", "stream", "Stream", "Event")},
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
    }


def _tensors_without_values() -> TorchFunctionMode:
    """Return a mode in which CUDA tensors are meta tensors that appear to be on the GPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    cuda = torch.device("cuda", 0)
    device_type: object = torch.device
    tensor: Any = torch.Tensor
    replaced: dict[object, Callable[[torch.Tensor], object]] = {
        tensor.device.__get__: lambda t: cuda,
        tensor.is_cuda.__get__: lambda t: True,
        tensor.is_meta.__get__: lambda t: False,
        tensor.get_device: lambda t: 0,
        tensor.data_ptr: lambda t: ADDRESS + t.storage_offset() * t.element_size(),
        tensor.cuda: lambda t: t.to("meta"),
        tensor.pin_memory: lambda t: t,
    }

    def to_meta(value: object) -> object:
        on_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("meta") if on_gpu else value

    def is_meta(value: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return value.is_meta

    class OnGpu(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            kwargs = kwargs or {}
            if func is device_type:
                return func(*args, **kwargs)
            kwargs = {name: to_meta(value) for name, value in kwargs.items()}
            if func in replaced and (func is tensor.cuda or is_meta(args[0])):
                return replaced[func](args[0])
            return func(*map(to_meta, args), **kwargs)

    return OnGpu()
