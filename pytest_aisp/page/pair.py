"""A pair: one baseline, its optimized variants, and everything a page declares about them.

The classes only store data. The module `declare` rejects invalid declarations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args

from .gpu_specs import FEATURES, GPU_ARCHS

if TYPE_CHECKING:
    import pytest

    from .cost import Costs

__tracebackhide__ = True  # an error in a page's `when=` shows only the page's lines
MARK = "aisp_pair"
"""Name of the pytest mark that attaches a pair to its test function."""

Side: TypeAlias = Callable[..., Any]
Size: TypeAlias = Mapping[str, "int | float | bool | str"]
CheckSize: TypeAlias = Mapping[str, object]
"""A size whose values may also be Hypothesis strategies."""
Claim: TypeAlias = "float | Literal['neutral', 'yardstick']"
Claims: TypeAlias = "Claim | Mapping[str, Claim]"
Bound = Literal["dram", "l2", "tensor", "issue", "latency", "launch", "nvlink", "pcie", "host"]
Precision = Literal["tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8", "int4", "w4a16"]
Versus = Literal["library"]
Owned = Literal[
    "gc", "affinity", "allocator", "l2_persistence", "onednn", "page_faults", "tf32", "threads"
]

ROLES = ("baseline", "optimized")
"""Names of the two sides of a pair in messages and results."""
BOUNDS: tuple[str, ...] = get_args(Bound)
PRECISIONS: tuple[str, ...] = get_args(Precision)
ARITHMETIC = ("fp64", "fp32", *PRECISIONS)
"""Legal keys of ``Work(flops=)``. A type whose peak was not measured has no roofline limit."""
OWNED: tuple[str, ...] = get_args(Owned)
HOST_BOUNDS = ("launch", "host")
"""Bounds for which ordinary calls are judged. For all other bounds, only GPU time is judged."""
VERSUS: tuple[str, ...] = get_args(Versus)
UNJUDGED = "none, because sweep= of the page does not judge this point"
CLAIM_WORDS = ("neutral", "yardstick")
"""Claims without a number. `neutral` promises no slowdown, and `yardstick` promises nothing."""


class PairError(ValueError):
    """An invalid declaration."""


class PageError(Exception):
    """A page broke a rule. The message says what to change."""


class SideError(PageError):
    """A side broke a rule of the comparison. The message names the rule."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The bytes and operations that any implementation of the algorithm needs.

    Attributes:
        read, write: bytes that must be read from and written to memory (on a GPU, DRAM).
        flops: operations by arithmetic type, as in ``{"bf16": 2 * n**3}``.
        wire: bytes that each rank must send, or bytes that must cross PCIe. PCIe carries both
            directions at once, so count only the direction with more bytes.
        terms: the terms in the longest sum, if a side adds up more terms than the reference.
        roundings: the number of times in a row that a side rounds a value to the storage type, if
            the side rounds more often than the reference.
    """

    read: float = 0
    write: float = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    wire: float = 0
    terms: int | None = None
    roundings: int | None = None

    def __post_init__(self) -> None:
        numbers = {"read": self.read, "write": self.write, "wire": self.wire}
        for name, value in {**numbers, **dict(self.flops)}.items():
            if not value >= 0:
                raise PairError(f"Work({name}={value!r}) must be a number >= 0")
        require_known("type in Work(flops=)", list(self.flops), ARITHMETIC)
        if any(count is not None and count < 1 for count in (self.terms, self.roundings)):
            raise PairError("Work(terms=, roundings=) must be at least 1")

    def declared(self) -> dict[str, float | dict[str, float]]:
        """Return the attributes that the page gives, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Variant:
    """One side, with settings that differ from the page's.

    A baseline may be a `Variant` too, but then takes only `precision`.

    Attributes:
        side: the callable to compare with the baseline, or the baseline itself.
        needs: features this variant needs in addition to the page's, as in ``needs="tma"``.
        when: a function that takes a size's keys and returns whether the variant has a case there.
        at_least: the variant's claim, if it differs from the page's.
        precision: the lower precision that the side uses on purpose, which enlarges the tolerance.
        sass: instructions that the machine code must contain in addition to the instructions of
            `needs`, as in ``sass="LDG.128"``. The check takes place when the kernels are assembled.
        gpu_only: the reason why the side cannot be checked on a CPU, as in
            ``gpu_only="symmetric memory"``. Without enough GPUs, the variant's cases are skipped.
        marks: pytest marks for the variant's cases, as in ``pytest.param(marks=...)``.
    """

    side: Side
    _: KW_ONLY
    needs: str | Sequence[str] = ()
    when: Callable[..., bool] | None = None
    at_least: Claims | None = None
    precision: Precision | None = None
    sass: str | Sequence[str] = ()
    gpu_only: str = ""
    marks: Sequence[pytest.Mark | pytest.MarkDecorator] = ()

    @property
    def name(self) -> str:
        return side_name(self.side)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that a page's sides run under. Most pages do not need to set any.

    Attributes:
        needs: features that every side needs, as in ``"tma"``.
        gpus: number of GPUs that the sides run on, with one rank per GPU. If several counts are
            given, each count gets its own cases.
        l2: ``warm``, or ``cold`` (calls take turns on copies of the inputs, five times the L2).
        owns: settings that the page changes on purpose. The harness allows these changes.
        environment: environment variables that the page's ranks start with. `gpus` must be above 1.
            Pages with the same variables share their rank processes.
    """

    needs: str | Sequence[str] = ()
    gpus: int | Sequence[int] = 1
    l2: Literal["cold", "warm"] = "cold"
    owns: Sequence[Owned] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A key of the sizes that varies along a curve, as in ``Sweep("block", judged=[256])``.

    Each point is a case. A run prints the best point and the knee of each curve. The report draws
    the curve.

    Attributes:
        key: the key, such as ``block``.
        judged: the values at which claims and stored results are judged, or None for all values.
            The other points are timed and stored, but cannot fail.
    """

    key: str
    _: KW_ONLY
    judged: Sequence[int | float | bool | str] | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Everything that a page declares. See `pytest_aisp.compare` for the fields."""

    baseline: Side
    baseline_precision: Precision | None = None
    variants: tuple[Variant, ...]
    inputs: Callable[..., tuple[Any, ...]]
    reference: Callable[..., Any]
    sizes: tuple[Size, ...]
    check_sizes: tuple[CheckSize, ...]
    cpu_sizes: tuple[Size, ...]
    work: Callable[..., Work]
    bound: str
    state: Callable[..., Any] | None
    at_least: Claims
    versus: Versus | None = None
    needs: tuple[str, ...]
    gpus: tuple[int, ...]
    l2: Literal["cold", "warm"]
    owns: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    costs: Costs = field(default_factory=dict)
    sweep: Sweep | None = None

    @property
    def multi_rank(self) -> bool:
        """True if the sides run on several ranks, so the reference gets every rank's inputs."""
        return max(self.gpus) > 1

    @property
    def as_called(self) -> bool:
        """True if ordinary calls are timed, without a CUDA graph."""
        return self.bound in HOST_BOUNDS

    def variant(self, name: str) -> Variant:
        """Return the variant called `name`."""
        return next(v for v in self.variants if v.name == name)

    def work_at(self, size: Size, world: int) -> Work:
        """Return the work of each of `world` ranks at `size`."""
        if "world" in inspect.signature(self.work).parameters:
            return self.work(**size, world=world)
        return self.work(**size)

    def features(self, variant: Variant) -> tuple[str, ...]:
        """Return the features that `variant` needs. The features of the page come first."""
        return tuple(dict.fromkeys((*self.needs, *as_tuple(variant.needs))))

    def archs(self, variant: Variant) -> tuple[str, ...]:
        """Return the GPU archs on which `variant` can run."""
        needed = [FEATURES[f] for f in self.features(variant)]
        return tuple(a for a in GPU_ARCHS if all(a in archs for archs in needed))

    def claim(self, variant: Variant, arch: str, gpus: int | None = None) -> Claim:
        """Return the claim of `variant` on `arch`. The default is 1.0.

        A claim without a number of GPUs applies only to the page's first GPU count. Other counts
        need their own claims, as in ``{"sm90": 1.5, "sm90-x4": 1.2}``, and otherwise get
        ``"yardstick"``. If the baseline is a library, so does an arch without a claim.
        """
        claims, first = self._claims(variant), self._is_first_count(gpus)
        if not isinstance(claims, Mapping):
            return claims if first else "yardstick"
        return claims.get(arch if first else f"{arch}-x{gpus}", self._default_claim(first))

    def _default_claim(self, first_count: bool) -> Claim:
        return 1.0 if first_count and self.versus is None else "yardstick"

    def origin(self, variant: Variant, arch: str, gpus: int | None = None) -> str:
        """Return a phrase that says where the page declares the claim of `variant` on `arch`."""
        claims, first = self._claims(variant), self._is_first_count(gpus)
        place = "on the page" if variant.at_least is None else f"of {variant.name} on the page"
        if first and not isinstance(claims, Mapping):
            return f"at_least {place}"
        key = arch if first else f"{arch}-x{gpus}"
        entry = f"at_least[{key!r}] {place}"
        if isinstance(claims, Mapping) and key in claims:
            return entry
        return f"{self._default_claim(first)}, because there is no {entry}"

    def _claims(self, variant: Variant) -> Claims:
        return self.at_least if variant.at_least is None else variant.at_least

    def _is_first_count(self, gpus: int | None) -> bool:
        return gpus in (None, self.gpus[0])

    def cases(self) -> Iterator[Case]:
        """Yield the cases size by size, so successive cases can share the baseline's results."""
        for kind, sizes in (("gpu", self.sizes), ("cpu", self.cpu_sizes)):
            for size in sizes:
                for gpus in self.gpus:
                    for variant in self.variants:
                        if variant.when is None or variant.when(**size):
                            yield Case(self, variant.name, dict(size), kind, gpus)


@dataclass(frozen=True)
class Case:
    """One pytest item: one variant at one size, on a GPU or a CPU."""

    pair: Pair
    variant_name: str
    size: Size
    kind: str
    gpus: int = 1

    @property
    def variant(self) -> Variant:
        return self.pair.variant(self.variant_name)

    @property
    def judged(self) -> bool:
        """False for points of a sweep at which claims and stored results are not judged."""
        sweep = self.pair.sweep
        return sweep is None or sweep.judged is None or self.size[sweep.key] in sweep.judged

    def claim(self, arch: str) -> Claim:
        """Return the case's claim on `arch`."""
        return self.pair.claim(self.variant, arch, self.gpus) if self.judged else "yardstick"

    def claim_origin(self, arch: str) -> str:
        """Return a phrase that says where the page declares the claim."""
        return self.pair.origin(self.variant, arch, self.gpus) if self.judged else UNJUDGED

    @property
    def id(self) -> str:
        """The id in the brackets of a test's name: ``tiled-cpu-n256``, the same on all machines."""
        parts = [self.variant_name]
        if self.kind == "cpu":
            parts.append("cpu")
        if len(self.pair.gpus) > 1:
            parts.append(f"x{self.gpus}")
        parts += [f"{key}{_without_brackets(value)}" for key, value in self.size.items()]
        return "-".join(parts)


def _without_brackets(value: object) -> str:
    return str(value).replace(" ", "").replace("[", "(").replace("]", ")")


def side_name(side: Side) -> str:
    """Return the name of a side: the name of its function."""
    return getattr(side, "__name__", type(side).__name__)


def size_words(size: CheckSize) -> str:
    """Return a size as text for messages: ``n=4096, m=33``."""
    return ", ".join(f"{k}={v}" for k, v in size.items()) or "its only size"


def is_plain(size: CheckSize) -> TypeGuard[Size]:
    """Return whether all values of `size` are numbers or strings, and not Hypothesis strategies."""
    return all(isinstance(value, (int, float, bool, str)) for value in size.values())


def as_tuple(words: str | Sequence[str]) -> tuple[str, ...]:
    """Return `words` as a tuple, even if it is only one string."""
    return (words,) if isinstance(words, str) else tuple(words)


def require_known(kind: str, words: Sequence[str], legal: Sequence[str]) -> None:
    """Raise `PairError` if a word is not one of `legal`."""
    for word in words:
        if word not in legal:
            raise PairError(f"unknown {kind} {word!r}; legal: {', '.join(legal)}")


def validate_sweep(sweep: object, sizes: Sequence[Size]) -> None:
    """Raise `PairError` if `sweep` is invalid for `sizes`. A sweep needs at least three values."""
    if not isinstance(sweep, Sweep):
        raise PairError(f"sweep={sweep!r} is not a Sweep, such as sweep=Sweep('block')")
    require_known("key in sweep", [sweep.key], list(sizes[0]))
    values = {str(size[sweep.key]) for size in sizes}
    if len(values) < 3:
        raise PairError(f"{sweep}: a curve needs at least three values of {sweep.key} in sizes")
    if sweep.judged is not None and not sweep.judged:
        raise PairError(f"{sweep}: judged= names no point, so the page could not fail")
    require_known(f"{sweep.key} in judged", [*map(str, sweep.judged or ())], sorted(values))
