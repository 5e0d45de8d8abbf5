"""Assemble what a case launches for each arch, and hold the machine code against its promises.

The case's two sides are run where a GPU of the arch is pretended (`launches`), at the page's real
size. Every kernel that they launch must assemble, fit the arch, and hold the instructions that the
page promises; every kernel of the page must be launched by one of its sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..page import sources
from ..page.gpu_specs import GRAIN, INSTRUCTIONS, LIMITS, RESERVED
from ..page.pair import Pair, Side, Size, Variant, as_words, side_name, size_words
from . import cuda_cpp, launch_config, nvrtc, sass
from .capture_launches import Launch, Launches, recorded
from .fake_gpu import interpreting

GRID = launch_config.LIMITS["grid"]
"""Blocks by dimension that a launch may have, on every arch."""
PARTS = 4
"""Parts of a processor; each has its own registers, and a warp stays in one."""
UNSEEN = "NOT LOOKED FOR"
"""How a note begins that every run shows, whatever its verbosity."""
ON = "\0archs\0"
"""Stands in a fault where its archs go: what is said alike of several is said once."""
FIRST_LINES = 12
"""Lines of what an assembler says of one kernel that are shown."""


class AssemblyError(Exception):
    """Kernels that do not assemble, cannot be launched there or break a promise, one a line."""


@dataclass(frozen=True)
class Built:
    """One kernel assembled for one arch: a launch and what its code uses."""

    arch: str
    side: str
    launch: Launch
    registers: int
    stack: int
    spilled: int
    shared: int
    cubin: bytes

    @property
    def resident(self) -> int:
        """Blocks that fit on one processor at once, by warps, registers and shared memory."""
        limits, warps = LIMITS[self.arch], max(1, -(-self.launch.threads // 32))
        each = max(GRAIN, _whole(self.registers)) * 32
        return min(
            limits.resident_blocks,
            limits.resident_threads // 32 // warps,
            limits.registers // PARTS // each * PARTS // warps,
            (limits.shared + RESERVED) // (self.shared + RESERVED),
        )

    @property
    def occupancy(self) -> float:
        """Share of a processor's warps that `resident` blocks fill."""
        warps = -(-self.launch.threads // 32)
        return self.resident * warps * 32 / LIMITS[self.arch].resident_threads

    def __str__(self) -> str:
        return (
            f"{self.arch} {self.launch.name} ({self.launch.how}): {self.registers} registers,"
            f" {self.spilled} B spilled, {self.shared} B shared, {self.resident} blocks a processor"
            f" ({self.occupancy:.0%} of its warps)"
        )

    def plain(self) -> dict[str, Any]:
        """Return plain types for the artifacts."""
        return {
            "arch": self.arch,
            "side": self.side,
            "kernel": self.launch.name,
            "how": self.launch.how,
            "grid": list(self.launch.grid),
            "threads": self.launch.threads,
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
        pairs: every pair of the page; `pair` and `variant` are the case.
        root: folder under which the page's own code lies.
        tell: is told what is being assembled.
        built: what was assembled; notes: what could not be looked at.
        broken: what an assembler said, by kernel for which archs.
        faults: what else is wrong, with `ON` for the archs where it is, and these.
    """

    pairs: Sequence[Pair]
    pair: Pair
    variant: Variant
    size: Size
    root: str
    tell: Callable[[str], None] = lambda text: None
    built: list[Built] = field(default_factory=list)
    broken: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, archs: Sequence[str]) -> None:
        """Assemble for each of `archs`.

        Raises:
            AssemblyError: naming every kernel at fault.
        """
        if interpreting():
            raise AssemblyError(
                "Triton's interpreter is on in this process, where nothing is assembled\n"
                "Unset TRITON_INTERPRET"
            )
        for arch in archs:
            for side in (self.pair.baseline, self.variant.side):
                self._assemble(side, arch)
            self._keep_promises(arch)
        for unreached in self._unreached():
            self._add(unreached)
        if not self.built and not self.faults and not self.broken:
            self._add("no kernel was launched, so nothing was assembled")
        said = [*self._refusals()]
        said += [fault.replace(ON, ", ".join(found)) for fault, found in self.faults.items()]
        if said:
            raise AssemblyError("\n".join(said))

    def _refusals(self) -> Iterator[str]:
        """Say once what an assembler says alike of several kernels, as of those of one file."""
        for words, kernels in self.broken.items():
            alike: dict[str, list[str]] = {}
            for kernel, archs in kernels.items():
                alike.setdefault(", ".join(archs), []).append(kernel)
            for where, names in alike.items():
                do = "does" if len(names) == 1 else "do"
                yield f"{', '.join(names)} on {where} {do} not assemble: {words}"

    def _add(self, fault: str, *archs: str) -> None:
        found = self.faults.setdefault(fault, [])
        found += [arch for arch in archs if arch not in found]

    def _assemble(self, side: Side, arch: str) -> None:
        name = side_name(side)
        self.tell(f"assemble {name} for {arch}")
        launches = recorded(self.pair, side, self.size, arch, assemble=True)
        if launches.error is not None:
            self._add(f"{name} on {ON} at {size_words(self.size)}: {_ended(launches)}", arch)
        for launch in launches.made.values():
            kernel = f"{launch.name} ({launch.how})"
            try:
                built = _built(arch, name, launch)
            except (AssemblyError, nvrtc.CompileError) as error:
                said = _beginning(getattr(error, "anywhere", str(error)))
                found = self.broken.setdefault(said, {}).setdefault(kernel, [])
                found += [arch] * (arch not in found)
                continue
            self.built.append(built)
            for fault in _misfits(built):
                self._add(f"{kernel} on {ON} {fault}", arch)

    def _keep_promises(self, arch: str) -> None:
        """Look for what the page's features and the variant's own words are in machine code."""
        common = [
            (feature, INSTRUCTIONS[feature])
            for feature in self.pair.needs
            if feature in INSTRUCTIONS
        ]
        own = [(f, INSTRUCTIONS[f]) for f in as_words(self.variant.needs) if f in INSTRUCTIONS]
        own += [(word, (word,)) for word in as_words(self.variant.sass)]
        sides = {side_name(self.pair.baseline): common, self.variant.name: common + own}
        for side, promises in sides.items():
            for promise, any_of in promises:
                self._look_for(arch, side, promise, any_of)

    def _look_for(self, arch: str, side: str, promise: str, any_of: Sequence[str]) -> None:
        by_kernel: dict[Any, list[bool]] = {}
        for built in self.built:
            if (built.arch, built.side) == (arch, side):
                try:
                    held = sass.instructions(built.cubin).get(built.launch.name, frozenset())
                except sass.Undisassembled as error:
                    note = f"{UNSEEN}: {promise}: {error}"
                    self.notes += [note] * (note not in self.notes)
                    return
                has = any(sass.holds(held, instruction) for instruction in any_of)
                by_kernel.setdefault(built.launch.kernel, []).append(has)
        if by_kernel and not any(all(found) for found in by_kernel.values()):
            names = sorted({k.name if hasattr(k, "name") else k.__name__ for k in by_kernel})
            self._add(
                f"{side} promises {promise}, but on {ON} no kernel holds {' or '.join(any_of)} in"
                f" every configuration; it launches {', '.join(names)}",
                arch,
            )

    def _unreached(self) -> Iterator[str]:
        """Say which kernels of the page none of its sides launches, at any of its real sizes."""
        reached: set[Any] = set()
        ended: dict[str, None] = {}
        for pair, side, size, arch in self._everything():
            found = recorded(pair, side, size, arch, assemble=False)
            reached |= found.kernels
            if found.error is not None:
                ended[f"{side_name(side)}: {_ended(found)}"] = None
        because = f" ({'; '.join(ended)})" if ended else ""
        for name, kernel in self._page_kernels():
            if kernel not in reached:
                yield f"{name} was not reached: no side of the page launches it{because}"

    def _everything(self) -> Iterator[tuple[Pair, Side, Size, str]]:
        for pair in self.pairs:
            for variant in pair.variants:
                for size in pair.sizes or pair.cpu_sizes:
                    if variant.when is None or variant.when(**size):
                        for arch in pair.archs(variant):
                            yield pair, pair.baseline, size, arch
                            yield pair, variant.side, size, arch

    def _page_kernels(self) -> Iterator[tuple[str, Any]]:
        sides = [s for p in self.pairs for s in (p.baseline, *(v.side for v in p.variants))]
        for module in sources.kernel_files(sides, self.root):
            for name in module.kernels:
                yield f"{module.path.name}: {name}", getattr(module, name)
        for kernel in sources.triton_kernels(sides, self.root):
            yield kernel.__name__, kernel


def _beginning(said: str) -> str:
    """Return the first lines of what an assembler says: of one mistake it says the same often."""
    lines = said.strip().splitlines()
    more = len(lines) - FIRST_LINES
    return "\n".join(lines if more < 2 else [*lines[:FIRST_LINES], f"... {more} lines more"])


def _ended(launches: Launches) -> str:
    error, where = launches.error, "where tensors have no values"
    words = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{where} it raised {type(error).__name__}: {words}"


def _built(arch: str, side: str, launch: Launch) -> Built:
    """Return what the code of `launch` uses on `arch`."""
    if launch.fault:
        raise AssemblyError(launch.fault)
    cubin, spilled, static = launch.cubin, None, 0
    if isinstance(launch.kernel, cuda_cpp.Kernel):
        module = launch.kernel.module
        made = nvrtc.compiled(module, module.target(arch))
        told = made.usage.get(launch.name, {})
        cubin, spilled, static = made.code, told.get("spilled"), told.get("shared", 0)
    used = sass.usage(cubin)[launch.name]
    stack = used["stack"]
    return Built(
        arch=arch,
        side=side,
        launch=launch,
        registers=used["registers"],
        stack=stack,
        spilled=stack if spilled is None else spilled,
        shared=launch.shared + static,
        cubin=cubin,
    )


def _whole(registers: int) -> int:
    return -(-registers // GRAIN) * GRAIN


def _misfits(built: Built) -> Iterator[str]:
    """Say why `built` could not be launched on its arch."""
    limits, launch = LIMITS[built.arch], built.launch
    if built.shared > limits.shared:
        yield (
            f"needs {built.shared} bytes of shared memory; a block has {limits.shared} there: take"
            " smaller tiles or fewer stages, or prune the configuration there"
        )
    registers = _whole(built.registers) * launch.threads
    if registers > limits.registers:
        yield (
            f"needs {registers} registers, {built.registers} for each of {launch.threads} threads;"
            f" a block has {limits.registers} there"
        )
    if launch.threads > limits.threads:
        yield f"has {launch.threads} threads; a block has at most {limits.threads} there"
    if any(not 1 <= n <= most for n, most in zip(launch.grid, GRID, strict=False)):
        yield f"has a grid of {launch.grid}; legal are 1 to {GRID}"
