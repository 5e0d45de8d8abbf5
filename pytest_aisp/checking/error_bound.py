"""Compute the allowed errors of a reference's outputs from perturbed runs of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..page.pair import Precision, Work
from ..util import pytree
from ..util.process_group import current_group
from . import numerics
from .numerics import Expected
from .page_values import Inputs

if TYPE_CHECKING:
    import torch

    from .reference import Reference, Turns
    from .rounding import Model, Structure
    from .untraced import Outside


@dataclass
class Pass:
    """One run of a reference on several value sets, one after another.

    Attributes:
        turns: indices of the value sets, in the order of use. A turn is the run on one value set.
        expected: the outputs after a turn, keyed by the number of finished turns. Often only the
            outputs after the last turn are kept.
        structure: the operations of the reference.
    """

    turns: Turns
    expected: dict[int, list[Expected]] = field(default_factory=dict)
    structure: Structure | None = None


@dataclass
class Errors:
    """The errors of the outputs after some turns, caused by rounding of intermediate values.

    Attributes:
        totals: one tensor per output, or None for an output that is not floating point. Each
            element is the root of the sum of the squared differences from the expected value over
            all perturbed runs.
        draws: number of perturbed runs.
        traced: False if only the inputs were perturbed.
    """

    totals: list[torch.Tensor | None]
    draws: int = 0
    traced: bool = True


@dataclass
class ErrorBound:
    """The error bound of the outputs of `reference`.

    Attributes:
        remarks: remarks about the bound for the reader.
        first_draws: number of perturbed runs that are always made. If a side comes close to the
            bound, more runs follow.
        slow: True if the reference is so slow that `refine` makes only a few more runs.
    """

    reference: Reference
    remarks: list[str] = field(default_factory=list)
    first_draws: int = numerics.DRAWS
    slow: bool = False
    _errors: dict[tuple[Turns, Precision | None], Errors] = field(default_factory=dict)
    _refined: set[tuple[Turns, Precision | None]] = field(default_factory=set)

    def sigmas(
        self, run: Pass, count: int, precision: Precision | None
    ) -> list[torch.Tensor | None]:
        """Return the allowed deviations of the outputs after `count` turns of `run`."""
        key = (run.turns[:count], precision)
        if key not in self._errors:
            self._start(run, precision)
            self._perturb(run, precision, self.first_draws)
        errors = self._errors[key]
        both = zip(run.expected[count], errors.totals, strict=True)
        return [self._sigma(one, total, errors, precision, count) for one, total in both]

    def refine(self, run: Pass, count: int, precision: Precision | None) -> bool:
        """Make more perturbed runs of the reference, or return False for a repeated call."""
        key = (run.turns[:count], precision)
        if key in self._refined:
            return False
        self._refined.add(key)
        if key not in self._errors:
            self._start(run, precision)
        self._perturb(run, precision, numerics.DRAWS if self.slow else numerics.MORE_DRAWS)
        return True

    def forget(self, turns: Turns | None = None) -> None:
        """Free the errors after `turns`, or all errors if `turns` is None."""
        for key in [key for key in self._errors if turns in (None, key[0])]:
            del self._errors[key]

    def remark(self, text: str) -> None:
        """Add a remark, unless it was added before."""
        if text not in self.remarks:
            self.remarks.append(text)

    def _sigma(
        self,
        one: Expected,
        total: torch.Tensor | None,
        errors: Errors,
        precision: Precision | None,
        steps: int,
    ) -> torch.Tensor | None:
        import torch

        dtype = str(self.reference.types.get(one.path, one.value.dtype)).removeprefix("torch.")
        if total is None or dtype not in numerics.UNIT:
            return None
        # The variance from a few draws is too small for some elements by chance. The worst of 10^8
        # correct elements must pass, so each element gets at least half of the mean variance.
        square = float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2
        least = 0.5 * square / max(1, total.numel()) / errors.draws
        # float32 is exact enough for an error, and needs half the memory.
        kept = torch.float64 if dtype == "float64" else torch.float32
        sigma = torch.empty_like(one.value, dtype=kept)
        for at in pytree.pieces(sigma.shape):
            variance = (total[at].double().square_() / errors.draws).clamp_min_(least)
            if not errors.traced:
                terms, roundings = self._outside([one])
                variance = numerics.untraced(
                    one.value[at],
                    variance,
                    dtype=dtype,
                    precision=precision,
                    terms=steps * terms,
                    roundings=steps * roundings,
                )
            sigma[at] = numerics.allowed(one.value[at], variance, dtype=dtype, precision=precision)
        return sigma

    @property
    def _work(self) -> Work:
        pool = self.reference.pool
        return pool.pair.work_at(pool.size, current_group().world)

    def _outside(self, outputs: Sequence[Expected]) -> Outside:
        """Return what is assumed of a reference that cannot be traced.

        A sum has as many terms as the inputs have elements for each element of an output.
        """
        from .untraced import Outside

        given = sum(t.numel() for t in floating(self.reference.pool.all_ranks(0)))
        shares = [given // max(1, one.value.numel()) for one in outputs]
        terms = self._work.terms or max(numerics.UNTRACED_TERMS, *shares, 0)
        return Outside(terms, self._work.roundings or numerics.UNTRACED_ROUNDINGS)

    def _start(self, run: Pass, precision: Precision | None) -> None:
        # Free the old errors first, because they may be large.
        for count in run.expected:
            self._errors.pop((run.turns[:count], precision), None)
        for count, expected in run.expected.items():
            totals = [self._zeros_like(one) for one in expected]
            self._errors[run.turns[:count], precision] = Errors(totals)

    def _zeros_like(self, one: Expected) -> torch.Tensor | None:
        import torch

        if not one.value.is_floating_point():
            return None
        double = self.reference.types.get(one.path) is torch.float64
        return torch.zeros_like(one.value, dtype=torch.float64 if double else torch.float32)

    def _perturb(self, run: Pass, precision: Precision | None, draws: int) -> None:
        """Add `draws` perturbed runs to the errors of all outputs of `run`."""
        structure = run.structure
        assert structure is not None
        for _ in range(draws):
            failure = self._try_to_perturb(run, structure, precision)
            if failure:
                self._start(run, precision)
                if structure.untraced:
                    self._use_relative_errors(run, precision, failure)
                else:
                    structure.untraced = f"the reference raises {failure} on perturbed values"
                    self._perturb(run, precision, numerics.DRAWS)
                return

    def _try_to_perturb(self, run: Pass, structure: Structure, precision: Precision | None) -> str:
        """Add one perturbed run. Return the name of the exception that the run raises, or ""."""
        try:
            self._perturb_once(run, structure, precision)
        except Exception as error:
            return type(error).__name__
        return ""

    def _perturb_once(self, run: Pass, structure: Structure, precision: Precision | None) -> None:
        from .rounding import Rounding

        seed = next(iter(self._errors_of(run, precision).values())).draws
        rounding = None
        if structure.untraced:
            expected = next(iter(run.expected.values()))
            self.remark(
                f"the error bound comes from the inputs alone: {structure.untraced}; it"
                f" {self._outside(expected).assumption}"
            )
            results = self.reference.run(run.turns, None, perturb=seed)
        else:
            model = self._model(structure, precision, len(run.turns))
            rounding = Rounding(model, structure, seed)
            results = self.reference.run(run.turns, rounding)
        for count, named in enumerate(results, start=1):
            if count in run.expected:
                errors = self._errors[run.turns[:count], precision]
                errors.traced = rounding is not None
                errors.draws += 1
                step = numerics.STEP if rounding is None else rounding.scale
                numerics.add_differences(errors.totals, named, run.expected[count], step)

    def _errors_of(self, run: Pass, precision: Precision | None) -> dict[int, Errors]:
        return {count: self._errors[run.turns[:count], precision] for count in run.expected}

    def _use_relative_errors(self, run: Pass, precision: Precision | None, error: str) -> None:
        self.remark(
            f"the error bound is relative to each element: the reference raises {error} on"
            " perturbed inputs"
        )
        for count, expected in run.expected.items():
            values = [one.value for one in expected]
            totals = [v.abs() if v.is_floating_point() else None for v in values]
            self._errors[run.turns[:count], precision] = Errors(totals, draws=1, traced=False)

    def _model(self, structure: Structure, precision: Precision | None, steps: int) -> Model:
        """Return a model of the sides' rounding."""
        from .rounding import Model
        from .untraced import Outside, contradictions

        types = self.reference.types
        units: dict[int, float] = {}
        for path, origin in structure.origins.items():
            unit = numerics.UNIT.get(str(types.get(path)).removeprefix("torch."))
            if unit is not None:
                units[origin] = max(unit, units.get(origin, 0.0))
        work = self._work
        names = [str(dtype).removeprefix("torch.") for dtype in types.values()]
        for text in contradictions(work, structure, names, precision, steps):
            self.remark(text)
        outside = Outside(
            work.terms or max(1, structure.read), work.roundings or numerics.UNTRACED_ROUNDINGS
        )
        if structure.read > numerics.UNTRACED_ROUNDINGS:
            self.remark(
                f"the reference reads {structure.read} values one by one (.item()): the error bound"
                f" {outside.assumption}"
            )
        return Model(
            precision,
            units,
            coarsest=max((numerics.UNIT.get(str(t)[6:], 0.0) for t in types.values()), default=1.0),
            continues=self.reference.pool.pair.state is not None,
            more_terms=max(1.0, (work.terms or 1) / structure.longest),
            more_roundings=max(1.0, (work.roundings or 1) * steps / max(1, structure.depth)),
            outside=outside,
        )


def unfused_attention() -> AbstractContextManager[None]:
    """Return a context in which PyTorch computes attention as matrix products and a softmax."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    made: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return made


def has_error(tensor: torch.Tensor) -> bool:
    """Return whether rounding may change the elements of `tensor`."""
    return tensor.is_floating_point() or tensor.is_complex()


def floating(tree: object) -> list[torch.Tensor]:
    """Return the tensors of `tree` that rounding may change."""
    return [tensor for _, tensor in pytree.tensors(tree) if has_error(tensor)]


def promoted(ranks: list[Inputs]) -> list[Inputs]:
    """Return a copy of the inputs of all ranks, with floating-point numbers in float64."""
    import torch

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not has_error(tensor):
            return tensor.clone()
        dtype = torch.complex128 if tensor.is_complex() else torch.float64
        return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(copied, ranks)


def promote_in_place(tensors: Sequence[torch.Tensor]) -> None:
    """Convert a state's bf16 and fp16 tensors, which cannot store small perturbations, to float64.

    Tensors that share a storage are not converted.
    """
    import torch

    sharing = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    with torch.no_grad():
        for tensor in tensors:
            alone = sharing[tensor.untyped_storage().data_ptr()] == 1
            if torch.finfo(tensor.dtype).eps > numerics.STEP / 16 and alone:
                tensor.data = tensor.double()


def perturb_all(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Perturb inputs or a state in place, by the relative amount `numerics.STEP`."""
    import torch

    from .perturbation import Perturbation

    perturbation = Perturbation(seed)
    with torch.no_grad():
        for tensor in tensors:
            perturbation.in_place(tensor, numerics.STEP)
