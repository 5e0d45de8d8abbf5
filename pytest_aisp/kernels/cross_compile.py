"""Assemble the kernels that a case launches, and search them for promised instructions.

Both sides run on a fake GPU of each arch at the case's real size. Every launched kernel must
assemble and stay within the arch's limits. If a side promises an instruction, one of its kernels
must contain it. Every kernel of the page must be launched by one of the page's sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..page import sources
from ..page.gpu_specs import INSTRUCTIONS, LIMITS, REGISTER_UNIT, RESERVED_SHARED
from ..page.pair import PageError, Pair, Side, Size, Variant, as_tuple, side_name, size_words
from . import cuda_cpp, nvrtc, sass
from .capture_launches import CapturedLaunch, CapturedLaunches, Kernel, capture_launches
from .cuda_cpp import DIM_LIMITS
from .fake_gpu import interpreting

PARTITIONS = 4
"""Number of partitions of an SM. Each partition has its own registers and warps."""
NOT_CHECKED = "NOT CHECKED"
"""The start of a note that every run shows, even without -v."""
ARCHS = "\0archs\0"
"""Placeholder for the archs in the text of an error."""
ERROR_LINES = 12
"""The largest number of lines of an assembler error in a message."""


class AssemblyError(PageError):
    """Kernels do not assemble, cannot be launched or break a promise."""


@dataclass(frozen=True)
class AssembledKernel:
    """One kernel assembled for one arch, and the resources that it uses."""

    arch: str
    side: str
    launch: CapturedLaunch
    registers: int
    stack: int
    spilled: int
    shared: int
    cubin: bytes

    @property
    def warps(self) -> int:
        return max(1, -(-self.launch.threads // 32))

    @property
    def resident(self) -> int:
        """Number of blocks that fit on one SM, limited by warps, registers and shared memory."""
        limits = LIMITS[self.arch]
        registers = max(REGISTER_UNIT, _allocated(self.registers)) * 32
        return min(
            limits.resident_blocks,
            limits.resident_threads // 32 // self.warps,
            limits.registers // PARTITIONS // registers * PARTITIONS // self.warps,
            (limits.shared + RESERVED_SHARED) // (self.shared + RESERVED_SHARED),
        )

    @property
    def occupancy(self) -> float:
        """The share of an SM's warps that `resident` blocks occupy."""
        return self.resident * self.warps * 32 / LIMITS[self.arch].resident_threads

    def __str__(self) -> str:
        return (
            f"{self.arch} {self.launch.name} ({self.launch.config}): {self.registers} registers,"
            f" {self.spilled} B spilled, {self.shared} B shared, {self.resident} blocks a processor"
            f" ({self.occupancy:.0%} of its warps)"
        )

    def to_json(self) -> dict[str, object]:
        """Return the kernel as JSON types, to be written to the artifacts."""
        launch = self.launch
        return {
            "arch": self.arch,
            "side": self.side,
            "kernel": launch.name,
            "how": launch.config,
            "grid": list(launch.grid),
            "threads": launch.threads,
            "registers": self.registers,
            "stack": self.stack,
            "spilled": self.spilled,
            "shared": self.shared,
            "resident": self.resident,
            "occupancy": self.occupancy,
        }


@dataclass
class Assembly:
    """The kernels of one case.

    Attributes:
        pairs: all pairs of the page. The case is `variant` of `pair`.
        root: the folder of the page's own code.
        progress: a function that is called with the name of each step.
        assembled: the kernels that assembled.
        refused: the archs of each assembler error, keyed by the error message and then the kernel.
        faults: the archs of all other errors, keyed by the text, which may contain `ARCHS`.
        notes: messages about promises that could not be checked.
        launched: the kernels that the sides of the case launch.
    """

    pairs: Sequence[Pair]
    pair: Pair
    variant: Variant
    size: Size
    root: str
    progress: Callable[[str], None] = lambda text: None
    assembled: list[AssembledKernel] = field(default_factory=list)
    refused: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    launched: set[Kernel] = field(default_factory=set)

    def run(self, archs: Sequence[str]) -> None:
        """Assemble for each of `archs`. Raise an `AssemblyError` that lists all errors, if any."""
        if interpreting():
            raise AssemblyError(
                "Triton's interpreter is on in this process, so nothing can be assembled\n"
                "Unset TRITON_INTERPRET"
            )
        for arch in archs:
            for side in (self.pair.baseline, self.variant.side):
                self._assemble(side, arch)
            self._check_promises(arch)
        reached = self._reached()
        if not self.assembled and not self.faults and not self.refused:
            if reached:  # sides of other cases launch the page's kernels
                self.notes.append("neither side launches a kernel of the page")
            else:
                self._add("no kernel was launched, so nothing was assembled")
        errors = [*self._refusals()]
        errors += [fault.replace(ARCHS, ", ".join(names)) for fault, names in self.faults.items()]
        if errors:
            raise AssemblyError("\n".join(errors))

    def _refusals(self) -> Iterator[str]:
        """Yield each assembler error once, with the names of all kernels that have it."""
        for message, kernels in self.refused.items():
            by_archs: dict[str, list[str]] = {}
            for kernel, archs in kernels.items():
                by_archs.setdefault(", ".join(archs), []).append(kernel)
            for where, names in by_archs.items():
                do = "does" if len(names) == 1 else "do"
                yield f"{', '.join(names)} on {where} {do} not assemble: {message}"

    def _add(self, fault: str, *archs: str) -> None:
        known = self.faults.setdefault(fault, [])
        known += [arch for arch in archs if arch not in known]

    def _assemble(self, side: Side, arch: str) -> None:
        name = side_name(side)
        self.progress(f"assemble {name} for {arch}")
        launches = capture_launches(self.pair, side, self.size, arch, assemble=True)
        self.launched |= launches.kernels
        if launches.error is not None:
            self._add(f"{name} on {ARCHS} at {size_words(self.size)}: {_ended(launches)}", arch)
        for launch in launches.unique.values():
            kernel = f"{launch.name} ({launch.config})"
            try:
                assembled = _assembled(arch, name, launch)
            except (AssemblyError, nvrtc.CompileError) as error:
                message = _first_lines(getattr(error, "any_target", str(error)))
                archs = self.refused.setdefault(message, {}).setdefault(kernel, [])
                archs += [arch] * (arch not in archs)
                continue
            self.assembled.append(assembled)
            for fault in _limit_faults(assembled):
                self._add(f"{kernel} on {ARCHS} {fault}", arch)

    def _check_promises(self, arch: str) -> None:
        """Search the machine code for the instructions that `needs` and `sass` promise."""
        common, own = (
            [(feature, INSTRUCTIONS[feature]) for feature in needs if feature in INSTRUCTIONS]
            for needs in (self.pair.needs, as_tuple(self.variant.needs))
        )
        own += [(instruction, (instruction,)) for instruction in as_tuple(self.variant.sass)]
        sides = {side_name(self.pair.baseline): common, self.variant.name: common + own}
        for side, promises in sides.items():
            for promise, any_of in promises:
                self._check_promise(arch, side, promise, any_of)

    def _check_promise(self, arch: str, side: str, promise: str, any_of: Sequence[str]) -> None:
        by_kernel: dict[Kernel, list[bool]] = {}
        for kernel in self.assembled:
            if (kernel.arch, kernel.side) != (arch, side):
                continue
            try:
                instructions = sass.instructions(kernel.cubin).get(kernel.launch.name, frozenset())
            except sass.NoDisassembler as error:
                note = f"{NOT_CHECKED}: {promise}: {error}"
                self.notes += [note] * (note not in self.notes)
                return
            has = any(sass.contains(instructions, instruction) for instruction in any_of)
            by_kernel.setdefault(kernel.launch.kernel, []).append(has)
        if by_kernel and not any(all(configurations) for configurations in by_kernel.values()):
            names = sorted(map(_kernel_name, by_kernel))
            self._add(
                f"{side} promises {promise}, but on {ARCHS} no kernel holds {' or '.join(any_of)}"
                f" in every configuration; it launches {', '.join(names)}",
                arch,
            )

    def _reached(self) -> set[Kernel]:
        """Return the kernels that some side of the page launches at a real size.

        A kernel of the page that no side launches is an error. But if sides of other cases raised
        exceptions, these exceptions are the likely cause, and the unlaunched kernel causes only a
        note.
        """
        kernels = list(self._page_kernels())
        if kernels and self.launched.issuperset(kernel for _, kernel in kernels):
            return self.launched
        reached, failed = _launches_of_page(self.pairs, {kernel for _, kernel in kernels})
        errors = dict.fromkeys(message for _, message in failed)
        own = any(side in (self.pair.baseline, self.variant.side) for side, _ in failed)
        because = f" ({'; '.join(errors)})" if errors else ""
        for name, kernel in kernels:
            if kernel not in reached:
                fault = f"{name} was not reached: no side of the page launches it{because}"
                if own or not errors:
                    self._add(fault)
                else:
                    self.notes.append(fault)
        return reached

    def _page_kernels(self) -> Iterator[tuple[str, Kernel]]:
        sides = [s for p in self.pairs for s in (p.baseline, *(v.side for v in p.variants))]
        for module in sources.kernel_files(sides, self.root):
            for name in module.kernels:
                yield f"{module.path.name}: {name}", getattr(module, name)
        for kernel in sources.triton_kernels(sides, self.root):
            yield kernel.__name__, kernel


PageLaunches: TypeAlias = tuple[set[Kernel], list[tuple[Side, str]]]
"""The kernels that a page launches, and the error message of each side that raised an error."""
_latest: tuple[Sequence[Pair], PageLaunches] | None = None


def _launches_of_page(pairs: Sequence[Pair], kernels: set[Kernel]) -> PageLaunches:
    """Return the kernels that the sides of a page launch at real sizes, and the sides that fail.

    Once all `kernels` of the page are launched, no more sides run, because a side may take seconds.
    All cases of a page need this result, so the result for the latest page is cached.
    """
    global _latest
    if _latest is None or not _same(_latest[0], pairs):
        reached: set[Kernel] = set()
        failed: list[tuple[Side, str]] = []
        for pair, side, size, arch in _every_run(pairs):
            launches = capture_launches(pair, side, size, arch, assemble=False)
            reached |= launches.kernels
            if launches.error is not None:
                failed.append((side, f"{side_name(side)}: {_ended(launches)}"))
            if kernels and kernels <= reached:
                break
        _latest = pairs, (reached, failed)
    return _latest[1]


def _same(some: Sequence[Pair], others: Sequence[Pair]) -> bool:
    return list(map(id, some)) == list(map(id, others))


def _every_run(pairs: Sequence[Pair]) -> Iterable[tuple[Pair, Side, Size, str]]:
    """Return each combination of side, size and arch once."""
    runs = (
        (pair, side, size, arch)
        for pair in pairs
        for variant in pair.variants
        for size in pair.sizes or pair.cpu_sizes
        if variant.when is None or variant.when(**size)
        for arch in pair.archs(variant)
        for side in (pair.baseline, variant.side)
    )
    return {(id(run[0]), id(run[1]), size_words(run[2]), run[3]): run for run in runs}.values()


def _kernel_name(kernel: Kernel) -> str:
    return kernel.name if isinstance(kernel, cuda_cpp.Kernel) else kernel.__name__


def _first_lines(message: str) -> str:
    """Return the first lines of an assembler's error. Later lines often repeat the same error."""
    lines = message.strip().splitlines()
    more = len(lines) - ERROR_LINES
    return "\n".join(lines if more < 2 else [*lines[:ERROR_LINES], f"... {more} more lines"])


def _ended(launches: CapturedLaunches) -> str:
    error = launches.error
    first, *others = [*str(error).strip().splitlines(), "no message"][:2]
    message = f"{first} {others[0]}" if others and first.endswith(":") else first
    where = "on a fake GPU, where tensors have no values"
    return f"it raised {type(error).__name__}: {message} ({where})"


def _assembled(arch: str, side: str, launch: CapturedLaunch) -> AssembledKernel:
    """Return the kernel of `launch`, assembled for `arch`, with the resources that it uses."""
    if launch.fault:
        raise AssemblyError(launch.fault)
    cubin, usage = launch.cubin, dict[str, int]()
    if isinstance(launch.kernel, cuda_cpp.Kernel):
        module = launch.kernel.module
        compiled = nvrtc.compile_module(module, module.target(arch), launch.name)
        cubin, usage = compiled.code, compiled.usage.get(launch.name, {})
    used = sass.usage(cubin)[launch.name]
    stack, shared = used["stack"], launch.shared + usage.get("shared", 0)
    spilled = usage.get("spilled", stack)
    return AssembledKernel(arch, side, launch, used["registers"], stack, spilled, shared, cubin)


def _allocated(registers: int) -> int:
    return -(-registers // REGISTER_UNIT) * REGISTER_UNIT


def _limit_faults(kernel: AssembledKernel) -> Iterator[str]:
    """Yield each reason why `kernel` cannot be launched on its arch."""
    limits, launch = LIMITS[kernel.arch], kernel.launch
    if kernel.shared > limits.shared:
        yield (
            f"needs {kernel.shared} bytes of shared memory; a block has {limits.shared} there: take"
            " smaller tiles or fewer stages, prune the configuration there, or exclude the arch"
            ' with needs="shared_227k"'
        )
    registers = _allocated(kernel.registers) * launch.threads
    if registers > limits.registers:
        yield (
            f"needs {registers} registers, {kernel.registers} for each of {launch.threads} threads;"
            f" a block has {limits.registers} there"
        )
    if launch.threads > limits.threads:
        yield f"has {launch.threads} threads; a block has at most {limits.threads} there"
    grid = DIM_LIMITS["grid"]
    if any(not 1 <= n <= most for n, most in zip(launch.grid, grid, strict=False)):
        yield f"has a grid of {launch.grid}; legal are 1 to {grid}"
