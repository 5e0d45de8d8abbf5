"""Negative controls: wrong answers that a page's own tolerance must refuse.

Each is made from the reference. A control applies if it moves the reference beyond `APPLIES` times
the derived bound; that is computed, never declared. One that applies and is accepted condemns the
tolerance. A page where no noise, no structure or no freshness control applies has inputs that
cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..page.pair import Precision
from .compare import compare_all, scatter
from .inputs import STEPS, VALUE_SETS, InputPool
from .numerics import Leaf, Rule
from .reference import Reference

if TYPE_CHECKING:
    import torch


APPLIES = 4.0
NOISE = 3.0
"""The noise control in allowed deviations, for an output of many elements."""
KINDS = {"noise": "noise", "zeros": "structure", "rolled": "structure", "swapped": "structure"}
KINDS |= {"reversed": "structure", "dropped": "structure", "stale": "freshness"}


class TooLoose(AssertionError):
    """A wrong answer passes the page's tolerance."""


class CannotTell(AssertionError):
    """The page's inputs give results among which right and wrong look alike."""


@dataclass(frozen=True)
class Control:
    """One control on one page: whether it applies, and whether the rule refused it."""

    name: str
    moves: float
    applies: bool
    refused: bool

    def __str__(self) -> str:
        if self.applies:
            return f"{self.name} {'refused' if self.refused else 'ACCEPTED'}"
        return f"{self.name} n/a: moves the reference by {self.moves:.2g} bounds"


def run_controls(
    expected: Sequence[Leaf],
    stale: Sequence[Leaf],
    dropped: Sequence[Leaf] | None,
    types: Sequence[torch.dtype],
    rule: Rule,
) -> list[Control]:
    """Apply every control and return what became of it.

    Args:
        expected: what the reference says for these inputs.
        stale: what it says for other inputs.
        dropped: what it says with a slice of one input zeroed, or None.
        types: the types in which the sides return each output.
        rule: the page's.

    Raises:
        TooLoose: when the rule accepts a control that applies.
        CannotTell: when no control of a kind applies.
    """
    wrong = dict(_wrong_answers(expected))
    wrong["stale"] = [leaf.value for leaf in stale]
    if dropped is not None:
        wrong["dropped"] = [leaf.value for leaf in dropped]
    controls = [_judge(name, made, expected, types, rule) for name, made in wrong.items()]
    for control in controls:
        if control.applies and not control.refused:
            raise TooLoose(
                f"the tolerance ({rule}) accepts a wrong answer: {control.name} moves the result"
                f" by {control.moves:.3g} derived bounds and passes"
            )
    for kind in ("noise", "structure", "freshness"):
        mine = [c for c in controls if KINDS[c.name] == kind]
        if not any(c.applies for c in mine):
            raise CannotTell(
                f"no {kind} control applies, so these inputs cannot tell right from wrong: "
                + "; ".join(map(str, mine))
            )
    return controls


def _wrong_answers(expected: Sequence[Leaf]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    import torch

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [change(leaf.value) for leaf in expected]

    most = max((leaf.value.numel() for leaf in expected), default=0)
    yield "noise", [_noisy(leaf, most) for leaf in expected]
    yield "zeros", each(torch.zeros_like)
    yield "rolled", each(lambda v: v.roll(1, _longest(v)) if v.dim() else v)
    yield "swapped", each(_swap_halves)
    yield "reversed", each(lambda v: v.flip(_longest(v)) if v.dim() else v)


def _noisy(leaf: Leaf, most: int) -> torch.Tensor:
    """Return the expected values with noise: 2.4 bounds in outputs of `most` elements.

    An rms of few elements may scatter, so it takes more to break its bound. Beside larger outputs
    a smaller one gets no more: a page's own tolerance for all of them would seem too loose by it.
    """
    import torch

    if leaf.sigma is None:  # integers and decisions: one off
        return ~leaf.value if leaf.value.dtype == torch.bool else leaf.value + 1
    generator = torch.Generator(device=leaf.value.device).manual_seed(7)
    draws = torch.empty_like(leaf.value).uniform_(-1, 1, generator=generator)
    few = scatter(most) if draws.numel() == most else 0.0
    return leaf.value + NOISE * (1 + few) * leaf.sigma * draws.sign()


def _longest(value: torch.Tensor) -> int:
    return max(range(value.dim()), key=lambda d: value.shape[d])


def _swap_halves(value: torch.Tensor) -> torch.Tensor:
    if not value.dim():
        return value
    longest = _longest(value)
    return value.roll(value.shape[longest] // 2, longest)


def _judge(
    name: str,
    made: Sequence[torch.Tensor],
    expected: Sequence[Leaf],
    types: Sequence[torch.dtype],
    rule: Rule,
) -> Control:
    # Leaf by leaf: a tolerance that is too loose for one output must not hide behind another.
    least = 1.0 if name == "noise" else APPLIES  # noise is 2.4 bounds by construction
    candidates = [value.to(dtype) for value, dtype in zip(made, types, strict=True)]
    derived = compare_all(candidates, expected, Rule())
    mine = compare_all(candidates, expected, rule) if rule.given or rule.exact else derived
    applying = [fit for moved, fit in zip(derived, mine, strict=True) if moved.score > least]
    moves = max(fit.score for fit in derived)
    return Control(name, moves, bool(applying), not any(fit.ok for fit in applying))


DRAWS = 5
"""Draws of a page's values of which most decide whether it can tell right from wrong."""
APART = 0x10001
"""How far apart the seeds of two draws lie."""


def check_tolerance(
    oracle: Reference, precisions: Iterable[Precision | None], rule: Rule
) -> list[Control]:
    """Apply the controls at each precision that a side declares; return those at the last.

    Raises:
        TooLoose, CannotTell: what the first draw of the inputs says, when most complain: the rule
            accepts a control that applies, or no control of a kind applies.
    """
    seen: list[Control] = []
    for precision in dict.fromkeys(precisions):
        key = (precision, rule, tuple(oracle.types.items()))
        if key not in oracle.controls:
            oracle.controls[key] = _by_most_draws(oracle, precision, rule)
        seen = oracle.controls[key]
    return seen


def _by_most_draws(oracle: Reference, precision: Precision | None, rule: Rule) -> list[Control]:
    """Apply the controls to the values at hand; where those complain, most draws decide."""
    first: CannotTell | TooLoose
    try:
        return _apply(oracle, precision, rule)
    except (CannotTell, TooLoose) as error:
        first = error
    told: list[list[Control]] = []
    short = 1
    for draw in range(1, DRAWS):
        try:
            told.append(_apply(_drawn(oracle, draw), precision, rule))
        except (CannotTell, TooLoose):
            short += 1
        if len(told) > DRAWS // 2:
            return told[0]
        if short > DRAWS // 2:
            break
    raise type(first)(f"{first} ({short} of {short + len(told)} draws of the values say so)")


def _drawn(oracle: Reference, draw: int) -> Reference:
    """Return what is expected of other values of the same page and size."""
    bench = oracle.bench
    seed = bench.seed + draw * APART
    other = InputPool(bench.pair, bench.size, bench.device, seed, bench.unseen_seed)
    return Reference(other, oracle.watch, oracle.exact, dict(oracle.types))


def _apply(oracle: Reference, precision: Precision | None, rule: Rule) -> list[Control]:
    has_state = oracle.bench.pair.state is not None
    turns = (0, 1, 0)[:STEPS] if has_state else (0,)
    other = (1, 0, 1)[:STEPS] if has_state else (1 % VALUE_SETS,)
    leaves = oracle.leaves(turns, precision)
    expected = [leaf for leaf in leaves if leaf.path in oracle.types] or leaves
    stale_by_path = {leaf.path: leaf for leaf in oracle.leaves(other, precision)}
    stale = [stale_by_path[leaf.path] for leaf in expected]
    types = [oracle.types.get(leaf.path, leaf.value.dtype) for leaf in expected]
    return run_controls(expected, stale, oracle.dropped(0, precision), types, rule)
