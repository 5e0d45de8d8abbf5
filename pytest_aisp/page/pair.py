"""A pair: one baseline, its optimized variants, and everything a page says about them.

Plain data. Whether a page's declaration can be meant, `declared` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from .gpu_specs import FEATURES, GPU_ARCHS

__tracebackhide__ = True  # what a page's `when=` raises shows the page's lines, and none of these
MARK = "aisp_pair"
"""Name of the mark with which `compare` attaches a pair to its test function."""

Side: TypeAlias = Callable[..., Any]
Size: TypeAlias = Mapping[str, "int | float | bool | str"]
Claim: TypeAlias = "float | Literal['neutral', 'yardstick']"
Claims: TypeAlias = "Claim | Mapping[str, Claim]"
Bound = Literal["dram", "l2", "tensor", "issue", "latency", "launch", "nvlink", "pcie", "host"]
Precision = Literal["tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8", "int4", "w4a16"]
Owned = Literal["gc", "affinity", "allocator", "l2_persistence", "page_faults", "tf32", "threads"]

BOUNDS: tuple[str, ...] = get_args(Bound)
PRECISIONS: tuple[str, ...] = get_args(Precision)
ARITHMETIC = ("fp64", "fp32", *PRECISIONS)
"""Legal keys of ``Work(flops=)``; a type without a measured rate has no limit."""
OWNED: tuple[str, ...] = get_args(Owned)
HOST_BOUNDS = ("launch", "host")
"""Bounds whose sides are judged as called; all others are judged by GPU time alone."""


class PairError(ValueError):
    """A declaration that cannot be what its author meant."""


class SideError(Exception):
    """A side that broke the rules of being compared; the message says which and how."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the algorithm must move and compute, whoever implements it.

    Attributes:
        read, write: bytes that must come from and go to memory (DRAM on a GPU).
        flops: operations by arithmetic type, as in ``{"bf16": 2 * n**3}``.
        wire: bytes each rank must send, or bytes that must cross PCIe.
        terms: the longest sum in a result; with the types it gives the tolerance.
        roundings: how many results in a row are rounded to the storage type on the way
            to an output (1: only the output is).
    """

    read: float = 0
    write: float = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    wire: float = 0
    terms: int = 1
    roundings: int = 1

    def __post_init__(self) -> None:
        numbers = {"read": self.read, "write": self.write, "wire": self.wire}
        for name, value in {**numbers, **dict(self.flops)}.items():
            if not value >= 0:
                raise PairError(f"Work({name}={value!r}) must be a number >= 0")
        one_of("type in Work(flops=)", list(self.flops), ARITHMETIC)
        if self.terms < 1 or self.roundings < 1:
            raise PairError("Work(terms=, roundings=) must be at least 1")


WORDS = "neutral", "yardstick"
"""Claims without a number: nothing is gained; nothing is claimed, it is there to compare with."""


@dataclass(frozen=True)
class Variant:
    """One optimized side with what sets it apart from the page's other variants.

    Attributes:
        side: the callable to compare with the baseline.
        needs: features this variant needs besides the page's, as in ``needs="tma"``.
        when: sizes it exists for; called with the size's keys.
        at_least: its claim, where it is not the page's.
        precision: the lower arithmetic it uses on purpose; it widens the derived tolerance.
        sass: instructions that its machine code must hold besides those of `needs`, as in
            ``sass="LDG.128"``; looked for where its kernels are assembled.
        gpu_only: why no CPU can check it, as in ``gpu_only="symmetric memory"``; without the GPUs
            it needs its cases are then skipped, and not called checked.
        marks: pytest marks for its cases, as in ``pytest.param(marks=...)``.
    """

    side: Side
    _: KW_ONLY
    needs: str | Sequence[str] = ()
    when: Callable[..., bool] | None = None
    at_least: Claims | None = None
    precision: Precision | None = None
    sass: str | Sequence[str] = ()
    gpu_only: str = ""
    marks: Sequence[Any] = ()

    @property
    def name(self) -> str:
        return side_name(self.side)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that a page's sides run under; most pages need none of them.

    Attributes:
        needs: features without which no side runs, as in ``"tma"``.
        gpus: ranks that the sides run on; several counts make cases of each.
        l2: ``cold`` (the working set rotates through five L2 caches) or ``warm``.
        owns: what the page varies itself and the harness must leave alone.
        environment: variables with which the page's ranks start. Pages with the same variables
            share ranks. With `gpus` above 1 only.
    """

    needs: str | Sequence[str] = ()
    gpus: int | Sequence[int] = 1
    l2: Literal["cold", "warm"] = "cold"
    owns: Sequence[Owned] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Everything `compare` was told. See `pytest_aisp.compare` for the fields."""

    baseline: Side
    variants: tuple[Variant, ...]
    inputs: Callable[..., tuple[Any, ...]]
    reference: Callable[..., Any]
    sizes: tuple[Size, ...]
    check_sizes: tuple[Mapping[str, Any], ...]
    cpu_sizes: tuple[Size, ...]
    work: Callable[..., Work]
    bound: str
    state: Callable[..., Any] | None
    at_least: Claims
    needs: tuple[str, ...]
    gpus: tuple[int, ...]
    l2: Literal["cold", "warm"]
    owns: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def spread(self) -> bool:
        """Whether the sides run on several ranks: the reference then gets every rank's inputs."""
        return max(self.gpus) > 1

    def variant(self, name: str) -> Variant:
        """Return the variant called `name`."""
        return next(v for v in self.variants if v.name == name)

    def work_at(self, size: Size, world: int) -> Work:
        """Return the work at `size` of one of `world` ranks."""
        asked = inspect.signature(self.work).parameters
        return self.work(**size, **({"world": world} if "world" in asked else {}))

    def features(self, variant: Variant) -> tuple[str, ...]:
        """Return the features that `variant` needs, the page's first."""
        return tuple(dict.fromkeys((*self.needs, *as_words(variant.needs))))

    def archs(self, variant: Variant) -> tuple[str, ...]:
        """Return the GPU archs on which `variant` can run."""
        needed = [FEATURES[f] for f in self.features(variant)]
        return tuple(a for a in GPU_ARCHS if all(a in archs for archs in needed))

    def claim(self, variant: Variant, arch: str, gpus: int | None = None) -> Claim:
        """Return the speedup that `variant` promises on `arch`; 1.0 where the page is silent.

        On more GPUs than the page's first count nothing is promised but what is said of that count,
        as in ``{"sm90": 1.5, "sm90-x4": 1.2}``: what two show is no measurement of four.
        """
        claims, key = self._claims(variant, arch, gpus)
        if key != arch and key not in claims:
            return "yardstick"
        claim: Claim = claims.get(key, 1.0) if isinstance(claims, Mapping) else claims
        return claim

    def origin(self, variant: Variant, arch: str, gpus: int | None = None) -> str:
        """Return in words where `claim` is written."""
        claims, key = self._claims(variant, arch, gpus)
        where = "on the page" if variant.at_least is None else f"of {variant.name} on the page"
        if key == arch and not isinstance(claims, Mapping):
            return f"at_least {where}"
        said = f"at_least[{key!r}] {where}"
        if key in claims:
            return said
        return f"{'1.0' if key == arch else 'yardstick'}, for there is no {said}"

    def _claims(self, variant: Variant, arch: str, gpus: int | None) -> tuple[Any, str]:
        """Return the claims of `variant`, and under which key that for `gpus` GPUs stands."""
        claims = self.at_least if variant.at_least is None else variant.at_least
        if gpus in (None, self.gpus[0]):
            return claims, arch
        return claims if isinstance(claims, Mapping) else {}, f"{arch}-x{gpus}"

    @property
    def as_called(self) -> bool:
        """Whether the launch is the point, so that the harness must never capture a side."""
        return self.bound in HOST_BOUNDS

    def cases(self) -> Iterator[Case]:
        """Yield the cases, size by size, so that neighbours share baseline and reference."""
        for kind, sizes in (("gpu", self.sizes), ("cpu", self.cpu_sizes)):
            for size in sizes:
                for gpus in self.gpus:
                    for variant in self.variants:
                        if variant.when is None or variant.when(**size):
                            yield Case(self, variant.name, dict(size), kind, gpus)


@dataclass(frozen=True)
class Case:
    """One pytest item: a variant at a size, for a GPU or for a CPU."""

    pair: Pair
    variant_name: str
    size: Size
    kind: str
    gpus: int = 1

    @property
    def variant(self) -> Variant:
        return self.pair.variant(self.variant_name)

    @property
    def id(self) -> str:
        """The id between brackets, the same on every machine: ``tiled-cpu-n256``."""
        parts = [self.variant_name, *(["cpu"] if self.kind == "cpu" else [])]
        parts += [f"x{self.gpus}"] if len(self.pair.gpus) > 1 else []
        return "-".join(parts + [f"{k}{_short(v)}" for k, v in self.size.items()])


def side_name(side: Side) -> str:
    """Return the name a side goes by: the name of its function."""
    return getattr(side, "__name__", type(side).__name__)


def size_words(size: Mapping[str, Any]) -> str:
    """Return ``n=4096, m=33``: a size as messages show it."""
    return ", ".join(f"{k}={v}" for k, v in size.items()) or "its only size"


def is_plain(size: Mapping[str, Any]) -> bool:
    """Return whether `size` holds values only, no Hypothesis strategy."""
    return all(isinstance(value, (int, float, bool, str)) for value in size.values())


def as_words(words: str | Sequence[str]) -> tuple[str, ...]:
    """Return `words` as a tuple, a single word as a tuple of one."""
    return (words,) if isinstance(words, str) else tuple(words)


def _short(value: object) -> str:
    return str(value).replace(" ", "").replace("[", "(").replace("]", ")")


def one_of(what: str, words: Sequence[str], legal: Sequence[str]) -> None:
    """Raise `PairError` for a word that is not `legal`."""
    for word in words:
        if word not in legal:
            raise PairError(f"unknown {what} {word!r}; legal: {', '.join(legal)}")
