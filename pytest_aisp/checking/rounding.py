"""Perturb every intermediate value of a reference, as rounding would.

`Rounding` is a dispatch mode: while it is active, it intercepts each operation that PyTorch runs in
this process, including operations of autograd, `torch.func` and optimizers. `Rounding` changes each
result about as much as rounding in a side may change it. The differences between perturbed runs and
the unperturbed run show how much each output element may deviate.

docs/explanation/checking.md describes the modeled errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch  # noqa: TID253
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils._pytree import tree_map  # noqa: TID253

from ..page.pair import Precision
from .numerics import (
    EIGHT_BITS,
    ONE_OPERAND,
    OPERANDS_ONLY,
    UNIT,
    NamedTensors,
    accumulation_error,
    random_walk,
)
from .operations import (
    ARITHMETIC,
    EXACT,
    PRODUCTS,
    SCATTERED,
    Operation,
    decompositions,
    has_error,
    mutated,
    name_of,
    promoted,
    tensors_of,
    terms_of,
    unit_of,
    widened,
)
from .perturbation import Perturbation
from .untraced import Outside

LARGEST_STEP = 2.0**-14
"""Smaller perturbations are scaled up to this relative size, which float64 can represent."""
FUNCTION_ERROR = 2.0
"""Error of functions like exp and sin on a GPU, in units of the rounding error."""
FACTORIZATION, EIGENVALUES = 4.0, 16.0
"""Backward errors of linear algebra on n x n matrices, as multiples of the rounding error of the
matrix's norm, divided by sqrt(n).
"""


class Entry(NamedTuple):
    """Facts about the values in one memory allocation (a torch storage).

    Attributes:
        dtype: the type in which PyTorch would store the values, or None for constants.
        depth: length of the longest chain of roundings that led to the values.
        origin: number of the operation that rounded the values last, or -1.
    """

    dtype: torch.dtype | None
    depth: int
    origin: int


NOTHING = Entry(None, 0, -1)


@dataclass
class Structure:
    """The operations of a reference, as an unperturbed run shows them.

    Attributes:
        lengths: number of terms of each sum, keyed by the index of its operation.
        depth: length of the longest chain of roundings.
        products: True if the reference has matrix products or convolutions.
        unit: the largest unit roundoff of the inputs and the state.
        untraced: the reason why the operations are not known, or an empty string.
        random: the name of an operation that draws random numbers, or an empty string.
        read: number of values that leave PyTorch one by one (`.item()`), without integral values.
        origins: the index of the operation that last rounded each output.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    depth: int = 0
    products: bool = False
    unit: float = 0.0
    untraced: str = ""
    random: str = ""
    read: int = 0
    origins: dict[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Number of terms of the longest sum."""
        return max(self.lengths.values(), default=1)


@dataclass(frozen=True)
class Model:
    """A model of the sides' rounding.

    Attributes:
        precision: the lower precision that a side declares, or None.
        units: unit roundoff of each output, keyed by the index of the operation that makes it.
        coarsest: the largest unit roundoff of the outputs. Intermediate values get no larger
            roundoff, because a page whose outputs are all fp32 promises fp32 arithmetic.
        continues: True if outputs are inputs of a later step, so their rounding affects that step.
        more_terms: the length of a side's longest sum divided by the reference's.
        more_roundings: the number of a side's roundings in a row divided by the reference's.
        outside: what is assumed of arithmetic on values that leave PyTorch.
    """

    precision: Precision | None = None
    units: Mapping[int, float] = field(default_factory=dict)
    coarsest: float = math.inf
    continues: bool = False
    more_terms: float = 1.0
    more_roundings: float = 1.0
    outside: Outside = field(default_factory=Outside)


class Rounding(TorchDispatchMode):
    """A mode that perturbs the results of operations, or only records them if `seed` is None.

    Args:
        model: the model of the sides' rounding.
        structure: the recorded operations. A run without perturbation records them.
        seed: seed of the signs of the perturbations.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. True would make the first operation import torch._dynamo (1.5 s)."""
        return False

    def __init__(self, model: Model, structure: Structure, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.structure = model, structure
        self._entries: dict[int, Entry] = {}
        self._number = -1
        precision = model.precision
        self._low = UNIT[precision] if precision else 0.0
        # If there are matrix products, only their operands have 8 bits. Else any value may.
        only_operands = precision in EIGHT_BITS and structure.products
        self._stored = 0.0 if precision in OPERANDS_ONLY or only_operands else self._low
        stored = min(structure.unit or UNIT["float32"], model.coarsest)
        self.scale = max(1.0, LARGEST_STEP / max(stored, self._low))
        self.perturbation = None if seed is None else Perturbation(seed, self.scale)

    def start(self, tensors: Iterable[torch.Tensor], types: Iterable[torch.dtype]) -> None:
        """Register inputs or a state, and their dtypes. Perturb tensors that a side rounds."""
        for tensor, dtype in zip(tensors, types, strict=True):
            self._entries[_storage(tensor)] = Entry(widened(dtype), 0, -1)
            self.structure.unit = max(self.structure.unit, unit_of(widened(dtype)))
            if self.perturbation is not None and self._low > unit_of(dtype):
                with torch.no_grad():
                    self.perturbation.in_place(tensor, self._operand_error())

    def entry(self, tensor: torch.Tensor) -> Entry:
        """Return the entry for the storage of `tensor`."""
        return self._entries.get(_storage(tensor), NOTHING)

    def record_origins(self, named: NamedTensors) -> None:
        """Store, for each output in `named`, the index of the operation that rounded it last."""
        for path, tensor in named:
            if has_error(tensor):
                self.structure.origins[path] = self.entry(tensor).origin

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in decompositions():
            with self:
                return decompositions()[func](*args, **kwargs)
        name = name_of(func)
        floating = [t for t in tensors_of((args, kwargs)) if has_error(t)]
        if not floating:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.structure.random = str(func)
            return func(*args, **kwargs)
        known = [self.entry(t) for t in floating]
        dtype = functools.reduce(promoted, (entry.dtype for entry in known))
        depth = max(entry.depth for entry in known)
        if name == "_local_scalar_dense":
            return self._read(func(*args, **kwargs), dtype)
        accumulate = name == "index_put" and (True in args or kwargs.get("accumulate"))
        if func.is_view or (name in EXACT and not accumulate):
            out = func(*args, **kwargs)
            source = known[-1] if name == "copy" else known[0]
            self._remember(out, Entry(dtype, depth, source.origin))
            return out
        self._number += 1
        out = self._rounded(func, name, dtype, args, kwargs)
        written = mutated(func, args, kwargs)
        self.structure.depth = max(self.structure.depth, depth + 1)
        self._remember(written or out, Entry(dtype, depth + 1, self._number))
        return out

    def _remember(self, outputs: object, entry: Entry) -> None:
        for tensor in tensors_of(outputs):
            if has_error(tensor):
                lower = tensor.dtype if unit_of(tensor.dtype) > UNIT["float32"] else None
                dtype = lower if entry.dtype is None else entry.dtype
                self._entries[_storage(tensor)] = entry._replace(dtype=dtype)

    def _read(self, value: object, dtype: torch.dtype | None) -> object:
        """Return a value that leaves PyTorch, perturbed as arithmetic outside may change it."""
        if not isinstance(value, float) or value.is_integer() or dtype is None:
            return value
        if self.perturbation is None:
            self.structure.read += 1
            return value
        model, stored = self.model, max(min(unit_of(dtype), self.model.coarsest), self._stored)
        operand = self._operand_error() if self._low > unit_of(dtype) else 0.0
        arithmetic = model.precision or str(dtype).removeprefix("torch.")
        errors = model.outside.errors(arithmetic, math.hypot(operand, stored / math.sqrt(3)))
        return self.perturbation.read(value, *errors)

    def _rounded(
        self,
        func: Operation,
        name: str,
        dtype: torch.dtype | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Run one operation. Perturb its operands, its sum and its result as rounding would."""
        stored = max(min(unit_of(dtype), self.model.coarsest), self._stored)
        unit = self.model.units.get(self._number, stored)
        number = self._number
        pointwise = torch.Tag.pointwise in func.tags
        noise = self.perturbation
        if noise is None:
            self.structure.products |= name in PRODUCTS
            out = func(*args, **kwargs)
            if not pointwise:
                self.structure.lengths[number] = terms_of(name, args, out)
            return out
        rounding = unit / math.sqrt(3) * math.sqrt(self.model.more_roundings)
        result_error = rounding
        if pointwise:
            result_error *= 1.0 if name in ARITHMETIC else FUNCTION_ERROR
            args = tuple(noise.constant(value, rounding) for value in args)
        elif name in PRODUCTS or name in SCATTERED or not func._schema.is_mutable:
            partial = rounding * max(1.0, stored / unit) if unit else rounding
            args, result_error = self._sum(noise, name, dtype, unit, rounding, partial, args)
        # `numerics.allowed` adds the rounding of outputs, so it is subtracted here.
        if number in self.model.units and not self.model.continues:
            result_error = math.sqrt(max(0.0, result_error**2 - unit**2 / 3))
        before = [t.clone() for t in tensors_of(args[:1])] if name in SCATTERED else []
        out = func(*args, **kwargs)
        changed = mutated(func, args, kwargs) or tensors_of(out)
        for tensor in changed:
            if has_error(tensor):
                if before and before[0].shape == tensor.shape:  # only these elements are rounded
                    rest = tensor.clone()
                    noise.in_place(tensor, result_error)
                    tensor.copy_(torch.where(before[0] == rest, rest, tensor))
                else:
                    noise.in_place(tensor, result_error)
        return out

    def _sum(
        self,
        noise: Perturbation,
        name: str,
        dtype: torch.dtype | None,
        unit: float,
        rounding: float,
        partial: float,
        args: tuple[object, ...],
    ) -> tuple[tuple[object, ...], float]:
        """Return the perturbed operands of a sum, and the relative error of its result.

        `rounding` is the relative rounding error of the result, and `partial` of the partial sums.
        """

        def copied(value: object, error: float) -> object:
            return noise.copied(value, error) if has_error(value) else value

        length = self.structure.lengths.get(self._number, 1) * self.model.more_terms
        if name in PRODUCTS:
            arithmetic = self.model.precision or str(dtype).removeprefix("torch.")
            of_terms, of_result = accumulation_error(arithmetic, length)
            positions = [i for i in PRODUCTS[name] if has_error(args[i])]
            smallest = min(positions, key=lambda i: args[i].numel())  # type: ignore[attr-defined]
            replaced = list(args)
            for i in positions:
                operand = args[i]
                assert isinstance(operand, torch.Tensor)
                stored = self.entry(operand).dtype
                error = self._operand_error() if self._low > unit_of(stored) else 0.0
                if i == smallest:  # partial sums may also be rounded to the stored format
                    error = math.hypot(error, of_terms, partial)
                replaced[i] = noise.copied(operand, error)
            return tuple(replaced), math.hypot(rounding, of_result)
        if name.startswith("_fft"):
            error = 2 * rounding * math.sqrt(math.log2(max(2, length)))
            return tuple(copied(a, error) for a in args), rounding
        if "linalg" in name or name in ("cholesky", "lu", "geqrf", "ormqr", "cholesky_inverse"):
            iterates = "eig" in name or "svd" in name
            error = rounding * (EIGENVALUES if iterates else FACTORIZATION)
            return noise.factorization(args, error), rounding
        in_memory = name in SCATTERED
        accumulator = unit if in_memory else min(unit, UNIT["float32"])
        of_terms, of_result = random_walk(accumulator, length)
        of_terms, of_result = math.hypot(partial, of_terms), math.hypot(rounding, of_result)
        if name in ("cumsum", "logcumsumexp"):
            of_term = math.hypot(rounding, accumulator / math.sqrt(6))
            return noise.prefix_sum(args, of_term), of_result
        if name == "cumprod":
            of_terms = of_result = rounding
        perturbed = tree_map(lambda a: copied(a, of_terms), list(args))
        if in_memory:  # the first operand is the accumulator
            perturbed[0] = args[0]
        return tuple(perturbed), of_result

    def _operand_error(self) -> float:
        """Return the relative error of rounding one operand to the lower precision."""
        shared = 2 if self.model.precision in ONE_OPERAND else 1
        return self._low * math.sqrt(self.model.more_roundings / (3 * shared))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
