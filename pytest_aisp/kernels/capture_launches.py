"""Record the kernels that a side launches, and the configurations that Triton's autotuner chose.

`capture_launches` runs a side on a fake GPU, where tensors have no values. Every launch is recorded
with its meta-parameters. An autotuned kernel is recorded in every configuration. Triton also
compiles its kernels for the fake GPU's arch.

`record_choices` records the configurations that the autotuner chooses on a real device. The
autotuner chooses by measured times, so another process may choose other configurations. Each result
is therefore stored with its configurations.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

from ..checking.page_values import make_inputs, make_state
from ..page.pair import Pair, Side, Size, side_name
from ..util.process_group import SingleProcess, current_group, set_current_group
from . import arguments, cuda_cpp
from .cuda_cpp import Dims
from .fake_gpu import fake_gpu

if TYPE_CHECKING:
    import torch
    from triton.runtime.autotuner import Autotuner, Config
    from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Triton's meta-parameters that are not parameters of the kernel."""
COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
    *("P2POp", "batch_isend_irecv", "new_group"),
)
"""Functions of torch.distributed that are replaced on fake ranks, where they do nothing."""
Kernel: TypeAlias = "cuda_cpp.Kernel | FunctionType"
"""A CUDA C++ kernel, or the function inside a Triton kernel."""
Choices: TypeAlias = Mapping[str, list[str]]
"""Each kernel's configurations, in the format of Triton: ``BLOCK: 128, num_warps: 4``."""


@dataclass(frozen=True)
class CapturedLaunch:
    """One launched kernel with its meta-parameters.

    Attributes:
        config: the meta-parameters as text.
        threads: threads per block.
        shared: bytes of shared memory per block (for CUDA C++, of dynamic shared memory).
        cubin: the machine code of a Triton kernel, if it was compiled.
        fault: the reason why the kernel could not be compiled, or an empty string.
        arguments: the kernel's arguments.
        metadata: Triton's compile options for the kernel, and the resources that the kernel needs.
    """

    kernel: Kernel
    name: str
    config: str
    grid: tuple[int, ...]
    threads: int = 0
    shared: int = 0
    cubin: bytes = b""
    fault: str = ""
    arguments: tuple[object, ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass
class CapturedLaunches:
    """The kernels that one side launches.

    Attributes:
        order: all launches, in order.
        unique: the launches without repetitions, keyed by kernel and config.
        arguments: functions that were passed to kernels as arguments.
        error: the exception that the side raised, or None.
    """

    order: list[CapturedLaunch] = field(default_factory=list)
    unique: dict[tuple[Kernel, str], CapturedLaunch] = field(default_factory=dict)
    arguments: set[FunctionType] = field(default_factory=set)
    error: Exception | None = None

    def add(self, launch: CapturedLaunch) -> None:
        self.order.append(launch)
        self.unique.setdefault((launch.kernel, launch.config), launch)

    @property
    def kernels(self) -> set[Kernel]:
        """The kernels that were launched or were passed to a launched kernel."""
        return {launch.kernel for launch in self.unique.values()} | self.arguments


def capture_launches(
    pair: Pair,
    side: Side,
    size: Size,
    arch: str,
    *,
    assemble: bool,
    watch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> CapturedLaunches:
    """Return the kernels that `side` launches at `size` on a GPU of `arch`.

    A side on several ranks runs as rank 0, once for each number of ranks in `pair.gpus`.

    Args:
        assemble: whether Triton's kernels are compiled to cubins.
        watch: a function that returns a context in which the side is called.
    """
    captured = CapturedLaunches()
    for count in pair.gpus:
        with fake_gpu(arch), _fake_ranks(count), _capturing(captured, assemble):
            try:
                _run(pair, side, size, watch)
            except Exception as error:  # the side may need tensor values or a real GPU
                captured.error = error
    return captured


@contextlib.contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    """Make this process appear to be rank 0 of `count` ranks. Collectives do nothing.

    Ordinary tensors replace the symmetric memory of each rank.
    """
    if count == 1:
        yield
        return
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    def buffer(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    before, group = current_group(), SingleProcess()
    group.world = count
    functions: dict[str, Any] = {name: mock.MagicMock() for name in COLLECTIVES}
    functions["is_initialized"] = lambda: True
    functions["get_rank"] = lambda group=None: 0
    functions["get_world_size"] = lambda group=None: count
    handle = mock.MagicMock(get_buffer=buffer)
    try:
        set_current_group(group)
        with (
            mock.patch.multiple(dist, **functions),
            mock.patch.multiple(symmetric, empty=torch.empty, rendezvous=lambda *_: handle),
        ):
            yield
    finally:
        set_current_group(before)


def _run(
    pair: Pair, side: Side, size: Size, watch: Callable[[], AbstractContextManager[None]]
) -> None:
    state = make_state(pair, "cuda", size, 0)
    inputs = make_inputs(pair, "cuda", size, 0)
    side = getattr(side, "side", side)  # the function that a fresh_process side wraps
    with watch():
        result = side(*inputs) if state is None else side(state, *inputs)
        if inspect.isgenerator(result):
            run = next(result, None)
            if not callable(run):
                raise TypeError(f"{side_name(side)} must yield the callable to time, not {run!r}")
            run()


@contextlib.contextmanager
def _capturing(captured: CapturedLaunches, assemble: bool) -> Iterator[None]:
    def launch_cuda(self: cuda_cpp.Launch, *args: object) -> None:
        kernel, config = self.kernel, self.config
        arguments.check_arguments(kernel.name, kernel.params, args, 0)
        threads, text = math.prod(config.block), str(config)
        launch = CapturedLaunch(kernel, kernel.name, text, config.grid, threads, config.shared)
        captured.add(replace(launch, arguments=args))

    descriptor = type("TensorMapDescriptor", (), {})()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cuda_cpp.Launch, "__call__", launch_cuda))
        clusters = mock.patch.object(cuda_cpp.Kernel, "clusters_at_once", _clusters_at_once)
        stack.enter_context(clusters)
        encode = mock.patch.object(arguments, "_encode_tensor_map", return_value=descriptor)
        stack.enter_context(encode)
        if "triton" in sys.modules:
            from triton.runtime.autotuner import Autotuner
            from triton.runtime.jit import JITFunction

            run = _launch_triton(captured, JITFunction.run if assemble else None)
            stack.enter_context(mock.patch.object(JITFunction, "run", run))
            stack.enter_context(mock.patch.object(Autotuner, "run", _run_every_configuration))
        yield


def _clusters_at_once(self: cuda_cpp.Kernel, block: Dims, shared: int = 0, *, cluster: Dims) -> int:
    import torch

    processors = int(torch.cuda.get_device_properties(0).multi_processor_count)
    return processors // math.prod(cluster if isinstance(cluster, tuple) else (cluster,))


def _run_every_configuration(self: Autotuner, *args: object, **kwargs: object) -> None:
    """Launch a kernel in every configuration that the autotuner would try after pruning."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(kwargs):
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None


def _launch_triton(
    captured: CapturedLaunches, compile_kernel: Callable[..., Any] | None
) -> Callable[..., None]:
    """Return a replacement for `JITFunction.run` that records launches.

    The replacement also compiles each kernel with `compile_kernel`, if that is not None.
    """

    def run(
        self: JITFunction,
        *args: object,
        grid: tuple[int, ...] | Callable[[Mapping[str, object]], tuple[int, ...]],
        warmup: bool,
        **kwargs: object,
    ) -> None:
        values = {p.name: p.default for p in self.params if p.has_default}
        values |= {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        captured.arguments.update(value.fn for value in values.values() if hasattr(value, "fn"))
        blocks = tuple(grid(values) if callable(grid) else grid)
        launch = CapturedLaunch(self.fn, self.__name__, _meta_parameters(self, values), blocks)
        launch = replace(launch, arguments=tuple(values.values()))
        if compile_kernel is not None:
            try:
                compiled = compile_kernel(self, *args, grid=grid, warmup=True, **kwargs)
                metadata = compiled.metadata
                launch = replace(
                    launch,
                    threads=metadata.num_warps * metadata.warp_size,
                    shared=metadata.shared,
                    cubin=compiled.asm["cubin"],
                    metadata=metadata._asdict(),
                )
            except Exception as error:
                launch = replace(launch, fault=str(error).strip() or type(error).__name__)
        captured.add(launch)

    return run


def _meta_parameters(kernel: JITFunction, values: Mapping[str, object]) -> str:
    names = [p.name for p in kernel.params if p.is_constexpr] + list(OPTIONS)
    given = {name: values[name] for name in names if values.get(name) is not None}
    return ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in given.items())


@contextlib.contextmanager
def record_choices(found: dict[str, set[str]]) -> Iterator[None]:
    """Add to `found` the configurations of autotuned kernels that are launched in the block.

    Recording makes each launch some tenths of a microsecond slower, so the block must time nothing.
    """
    module = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        yield
        return
    run = module.Autotuner.run
    used: dict[tuple[int, int], tuple[Autotuner, Config]] = {}

    def recording_run(self: Autotuner, *args: object, **kwargs: object) -> object:
        result = run(self, *args, **kwargs)
        if len(self.configs) > 1:
            used[id(self), id(self.best_config)] = self, self.best_config
        return result

    module.Autotuner.run = recording_run
    try:
        yield
    finally:
        module.Autotuner.run = run
        for tuned, config in used.values():
            found.setdefault(tuned.base_fn.__name__, set()).add(str(config))


def merge_choices(parts: Iterable[Mapping[str, Iterable[str]]]) -> dict[str, list[str]]:
    """Merge the choices of several processes into one sorted mapping, keyed by kernel."""
    found: dict[str, set[str]] = {}
    for part in parts:
        for kernel, configs in part.items():
            found.setdefault(kernel, set()).update(configs)
    return {kernel: sorted(found[kernel]) for kernel in sorted(found)}


def choice_notes(choices: Choices) -> list[str]:
    """Return one line per autotuned kernel that names its chosen configurations."""
    return [f"tuned {kernel}: {' | '.join(configs)}" for kernel, configs in choices.items()]


def differing_choices(stored: Choices, now: Choices) -> list[str]:
    """Return one line per kernel that has a choice in `now` but not in `stored`."""
    return [
        f"{kernel} is tuned differently than in the stored result: {' | '.join(configs)},"
        f" stored {' | '.join(stored[kernel])}"
        for kernel, configs in now.items()
        if kernel in stored and not set(configs) <= set(stored[kernel])
    ]
