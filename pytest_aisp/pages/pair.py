"""A pair: one baseline, its optimized variants, and everything a page says about them.

Plain data, checked when it is built, so that every mistake in a declaration is an error at
collection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from .skus import ARCHS, FEATURES, GPU_ARCHS

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
        _one_of("type in Work(flops=)", list(self.flops), ARITHMETIC)
        if self.terms < 1 or self.roundings < 1:
            raise PairError("Work(terms=, roundings=) must be at least 1")


OWNERS = {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"}
"""Variables of NVLink multicast, which can put a host's GPUs out of service where it is off."""
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
class Pair:
    """Everything `compare` was told, validated. See `pytest_aisp.compare` for the fields."""

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

    def __post_init__(self) -> None:
        _check_words(self)
        _check_variants(self)
        _check_sizes(self)
        _check_claims(self)

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


def as_words(words: str | Sequence[str]) -> tuple[str, ...]:
    """Return `words` as a tuple, a single word as a tuple of one."""
    return (words,) if isinstance(words, str) else tuple(words)


def _short(value: object) -> str:
    return str(value).replace(" ", "").replace("[", "(").replace("]", ")")


def _one_of(what: str, words: Sequence[str], legal: Sequence[str]) -> None:
    for word in words:
        if word not in legal:
            raise PairError(f"unknown {what} {word!r}; legal: {', '.join(legal)}")


def _check_words(pair: Pair) -> None:
    _one_of("bound", [pair.bound], BOUNDS)
    _one_of("l2", [pair.l2], ("cold", "warm"))
    _one_of("owns", pair.owns, OWNED)
    for variant in pair.variants:
        _one_of("feature in needs", pair.features(variant), tuple(FEATURES))
        _one_of("precision", [variant.precision] if variant.precision else [], PRECISIONS)
    if not pair.gpus or any(not isinstance(n, int) or n < 1 for n in pair.gpus):
        raise PairError(f"gpus={pair.gpus!r} must be a count of GPUs or several counts")


def _check_variants(pair: Pair) -> None:
    if not pair.variants:
        raise PairError("optimized=[] is empty: a pair needs at least one variant")
    fresh = [hasattr(s, "environment") for s in (pair.baseline, *(v.side for v in pair.variants))]
    if any(fresh) and not all(fresh):
        raise PairError("fresh_process on some sides only: put it on every side or on none")
    if any(fresh) and pair.spread:
        raise PairError("fresh_process with gpus= above 1: ranks are started once, not a sample")
    names = [side_name(pair.baseline), *(v.name for v in pair.variants)]
    for name in names:
        if names.count(name) > 1:
            raise PairError(f"two sides are called {name!r}; name each by its idea")
    if pair.environment and not pair.spread:
        raise PairError(
            "environment= is for the ranks of a page on several GPUs; a page on one has"
            " fresh_process(environment=...)"
        )
    if pair.spread:
        _check_reference(pair)
    if owners := sorted(pair.environment.keys() & OWNERS):
        raise PairError(f"environment= sets {owners[0]}, which is the machine's owner's to set")
    for variant in pair.variants:
        if not pair.archs(variant):
            needs = ", ".join(pair.features(variant))
            raise PairError(f"{variant.name!r}: no known GPU has all of {needs}")


def _check_reference(pair: Pair) -> None:
    given = ("ranks",) if pair.state is None else ("states", "ranks")
    try:
        inspect.signature(pair.reference).bind(*given)
    except TypeError:
        raise PairError(
            f"with gpus= above 1 the reference takes {' and '.join(given)}: what each rank has, as"
            f" lists with one entry a rank; it is\n    reference({', '.join(given)})"
        ) from None


def _check_sizes(pair: Pair) -> None:
    if not pair.sizes and not pair.cpu_sizes:
        raise PairError("sizes=[] and cpu_sizes=[] are both empty: nothing would run")
    for which in ("sizes", "check_sizes", "cpu_sizes"):
        for size in getattr(pair, which):
            _check_size(pair, which, size)
    if not pair.cpu_sizes and not any(map(is_plain, pair.check_sizes)):
        raise PairError(
            "check_sizes= is missing: give a small odd size that a laptop can check,"
            ' as in check_sizes=[{"n": 33}]'
        )
    if len({tuple(s) for s in (*pair.sizes, *pair.cpu_sizes)}) > 1:
        raise PairError("sizes and cpu_sizes must all have the same keys, in the same order")
    cases = [case.id for case in pair.cases()]
    if len(set(cases)) < len(cases):
        raise PairError(f"two cases have the id {max(cases, key=cases.count)!r}")


def is_plain(size: Mapping[str, Any]) -> bool:
    """Return whether `size` holds values only, no Hypothesis strategy."""
    return all(isinstance(value, (int, float, bool, str)) for value in size.values())


def _check_size(pair: Pair, which: str, size: object) -> None:
    if not isinstance(size, Mapping):
        raise PairError(f"{which}: {size!r} is not a mapping such as {{'n': 4096}}")
    if which != "check_sizes" and not is_plain(size):
        raise PairError(f"{which}: {dict(size)!r} holds something else than numbers and words")
    callables = {"inputs": pair.inputs, "work": pair.work, "state": pair.state}
    whens = {f"when of {v.name!r}": v.when for v in pair.variants}
    for name, function in {**callables, **whens}.items():
        if function is not None:
            made = name in ("inputs", "state")
            given = {"device", "rank", "world"} if made else {"world"} if name == "work" else set()
            if made and next(iter(inspect.signature(function).parameters), "") != "device":
                raise PairError(f"{name} takes the device first, as in def {name}(device, n)")
            _check_keys(which, name, function, set(size), given)


def _check_keys(
    which: str, name: str, function: Callable[..., Any], keys: set[str], given: set[str]
) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(keys - set(parameters))
    if unknown:
        takes = ", ".join(p for p in parameters if p not in given)
        raise PairError(f"{which} has the key {unknown[0]!r}, which {name} does not take ({takes})")
    required = {n for n, p in parameters.items() if p.default is p.empty} - given
    if required - keys:
        raise PairError(f"{which} lacks the key {min(required - keys)!r}, which {name} needs")


def _check_claims(pair: Pair) -> None:
    for claims in (pair.at_least, *(v.at_least for v in pair.variants)):
        table = claims if isinstance(claims, Mapping) else {"sm90": claims}
        counts = [f"{arch}-x{gpus}" for arch in ARCHS for gpus in pair.gpus[1:]]
        _one_of("arch in at_least", list(table), [*ARCHS, *counts])
        for claim in table.values():
            if claim is not None and claim not in WORDS:
                _check_claim(claim)


def _check_claim(claim: object) -> None:
    if not isinstance(claim, (int, float)) or isinstance(claim, bool):
        raise PairError(f"at_least={claim!r} is neither a number nor 'neutral' or 'yardstick'")
    if not claim >= 1:
        raise PairError(
            f"at_least={claim} claims a slowdown; where nothing is gained say at_least='neutral',"
            " of a library that is there to compare with at_least='yardstick'"
        )
