"""Turn a problem and a candidate into a page. This module runs in worker processes.

A problem in KernelBench's form has a module class `Model`, `get_inputs()` and `get_init_inputs()`.
The parameters and buffers of the model are inputs of the page, so every draw of the inputs has
different weights. Constant weights, such as the all-ones weights of a norm, get random values, so a
candidate that ignores them fails. A problem in the plain form has functions `baseline` and
`inputs`. The reference is the problem's function `reference`, or the baseline in float64.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..checking.page_values import seeded
from ..kernels.fake_gpu import drive_interpreter
from ..page.declare import compare
from ..page.pair import Precision, Side, Variant, Work
from ..results.messages import Json
from ..util import pytree
from .files import (
    Misfit,
    Names,
    PackageMissing,
    ProblemError,
    constants,
    run_candidate,
    run_problem,
)

if TYPE_CHECKING:
    import torch

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
BASELINE, CANDIDATE = "baseline", "candidate"
"""The names of both sides in messages."""
INIT_SEED = 0
"""The seed for constructors, which gives the model and the candidate the same random numbers."""
KINDS = {"Model": "get_inputs", "baseline": "inputs", "reference": "inputs"}
"""The name of the function that draws the inputs, keyed by the name of the problem's baseline."""


class Problem(Protocol):
    """A problem in one of its forms."""

    def inputs(self, device: str) -> tuple[object, ...]:
        """Return the arguments of both sides and of the reference."""

    def baseline(self, device: str) -> Side: ...

    def reference(self, device: str) -> Side: ...

    def candidate(self, names: Names, device: str) -> Side: ...


def page_of(
    problem: str,
    candidate: str,
    *,
    sizes: Mapping[str, Json],
    seeds: Sequence[int],
    device: str,
    precision: Precision | None = None,
) -> Side:
    """Return the test function of a page that compares `candidate` with the baseline of `problem`.

    Args:
        sizes: constants of the problem to replace, by name.
        seeds: seeds of weights and inputs. The page is timed with the first seed.
        precision: the lower precision that the candidate may use. With ``tf32``, the model uses
            TF32 too.
    """
    import torch

    tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    given: tuple[str, tuple[tuple[str, Json], ...], str] = problem, tuple(sizes.items()), device
    file = Path(candidate)

    def inputs(device: str, seed: int) -> tuple[object, ...]:
        torch.manual_seed(torch.initial_seed() ^ seed)  # the plugin has set a seed for each draw
        with torch.device(device):
            made = load(*given).inputs(device)
        return pytree.map_tensors(lambda tensor: tensor.to(device), made)

    def build_candidate() -> Side:
        with seeded(INIT_SEED):
            names = run_candidate(file, sizes)
            drive_interpreter()  # for the Triton kernels that the file defines
            return load(*given).candidate(names, device)

    def test_judged(pair: Any) -> None:
        pair.assert_equivalent()
        pair.assert_speedup()

    baseline = _side(BASELINE, lambda: load(*given).baseline(device))
    return compare(
        baseline=Variant(baseline, precision="tf32" if tf32 else None),
        optimized=[Variant(_side(CANDIDATE, build_candidate), precision=precision)],
        inputs=inputs,
        reference=_side("reference", lambda: load(*given).reference(device)),
        sizes=[{"seed": seeds[0]}],
        check_sizes=[{"seed": seed} for seed in seeds[1:]],
        cpu_sizes=[{"seed": seeds[0]}],
        work=lambda seed: Work(),
        bound="dram",
        at_least="yardstick",
    )(test_judged)


def _side(name: str, build: Callable[[], Side]) -> Side:
    """Return a side whose first call also calls `build`. The output must consist of tensors."""
    import torch

    built: list[Side] = []

    def run(*arguments: object) -> object:
        if built:
            return built[0](*arguments)
        try:
            side = build()
            output = side(*arguments)
        except ModuleNotFoundError as error:
            raise PackageMissing.of(name, error) from error
        for path, leaf in pytree.leaves(output):
            if not isinstance(leaf, torch.Tensor):
                where = path if path == "output" else f"output{path}"
                raise Misfit(f"{name} returned {leaf!r:.40} as {where}; return tensors")
        built.append(side)
        return output

    run.__name__ = name
    return run


@functools.cache
def load(file: str, sizes: tuple[tuple[str, Json], ...], device: str) -> Problem:
    """Return the problem in `file`. Each process runs the file only once.

    Raises:
        ProblemError: if the file is not a problem, or lacks a constant that `sizes` replaces.
    """
    path, replaced = Path(file), dict(sizes)
    names = run_problem(path, replaced, device)
    kind = next((kind for kind in KINDS if kind in names), "")
    if not kind or not callable(names.get(KINDS[kind])):
        raise ProblemError(
            f"{path.name} is not a problem: it defines neither Model and get_inputs(), nor"
            " baseline() and inputs(device)"
        )
    own = constants(path)
    keywords = {} if kind == "Model" else _keywords(names[KINDS[kind]])
    if unknown := sorted(replaced.keys() - own - keywords.keys()):
        known = ", ".join(sorted(own | keywords.keys())) or "none"
        raise ProblemError(f"{path.name} has no constant {unknown[0]!r}; it has: {known}")
    if kind == "Model":
        return ModelProblem(path, names)
    others = {name: value for name, value in replaced.items() if name in keywords}
    return FunctionProblem(path, names, kind, others)


def _keywords(function: Any) -> dict[str, object]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


class FunctionProblem:
    """A problem in the plain form: functions `baseline`, `inputs`, and optionally `reference`."""

    def __init__(self, file: Path, names: Names, kind: str, sizes: Mapping[str, Json]) -> None:
        self.file, self.names, self.kind, self.sizes = file, names, kind, sizes

    def inputs(self, device: str) -> tuple[object, ...]:
        draw: Any = self.names["inputs"]
        return _arguments(draw(device, **self.sizes), f"inputs() of {self.file.name}")

    def baseline(self, device: str) -> Side:
        return _function(self.names[self.kind])

    def reference(self, device: str) -> Side:
        exact = _function(self.names.get("reference", self.names[self.kind]))
        return lambda *arguments: exact(*_in_float64(arguments))

    def candidate(self, names: Names, device: str) -> Side:
        return _function(_find(names, ("optimized", self.kind), callable))


class ModelProblem:
    """A problem in KernelBench's form."""

    def __init__(self, file: Path, names: Names) -> None:
        self.file, self.names = file, names

    def inputs(self, device: str) -> tuple[object, ...]:
        draw: Any = self.names["get_inputs"]
        arguments = _arguments(draw(), f"get_inputs() of {self.file.name}")
        model = self._new(self.names["Model"], device)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: _varied(tensor.detach()) for name, tensor in named.items()}, *arguments

    def baseline(self, device: str) -> Side:
        return self._bound(self.names["Model"], device)

    def reference(self, device: str) -> Side:
        with seeded(INIT_SEED):
            bound = Bound(self._new(self.names["Model"], device).double())
        return lambda *given: bound(*_in_float64(given))

    def candidate(self, names: Names, device: str) -> Side:
        found = _find(names, ("ModelNew", "Model"), inspect.isclass)
        with seeded(INIT_SEED):
            model = self._new(self.names["Model"], device)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        del model
        bound = self._bound(found, device)
        bound.bind(_shapes(parameters), _shapes(buffers))
        return bound

    def _bound(self, kind: Any, device: str) -> Bound:
        with seeded(INIT_SEED):
            return Bound(self._new(kind, device))

    def _new(self, kind: Any, device: str) -> torch.nn.Module:
        import torch

        init: Any = self.names.get("get_init_inputs", list)
        with torch.device(device):
            made = init()
            # In some problems, `get_init_inputs` returns keyword arguments.
            model = kind(**made) if isinstance(made, dict) else kind(*made)
        if not isinstance(model, torch.nn.Module):
            raise Misfit(f"{kind.__name__} is not a torch.nn.Module")
        return model.to(device).requires_grad_(False)


class Bound:
    """A module as a function whose first argument is the module's weights.

    A call replaces the storage of each parameter and keeps the parameter object, because modules
    such as `LSTM` also have lists of their parameters. A call may update buffers, as a batch norm
    does in training, so each call works on copies of the buffers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.bind(_shapes(dict(model.named_parameters())), _shapes(dict(model.named_buffers())))

    def bind(self, parameters: Shapes, buffers: Shapes) -> None:
        """Find the weight for each tensor of the module, by name or by position.

        A buffer without a weight keeps its own values, because it may be a workspace.

        Args:
            parameters, buffers: the shapes of the weights that calls will pass, by name.

        Raises:
            Misfit: if a parameter has no weight.
        """
        own = dict(self.model.named_parameters())
        names = _match(_shapes(own), parameters)
        if names is None:
            raise Misfit(_misfit(_shapes(own), parameters))
        self._parameters: list[tuple[torch.Tensor, str]]
        self._parameters = [(own[name], given) for name, given in names.items()]
        others = dict(self.model.named_buffers())
        known = _match(_shapes(others), buffers)
        if known is None:
            shared = {n: s for n, s in _shapes(others).items() if buffers.get(n) == s}
            known = dict(zip(shared, shared, strict=True))
        self._buffers = [(others[name], given) for name, given in known.items()]

    def __call__(self, weights: Mapping[str, torch.Tensor], *arguments: object) -> object:
        for own, name in self._parameters:
            given = weights[name]
            own.data = given if own.dtype == given.dtype else given.to(own.dtype)
        for buffer, name in self._buffers:
            buffer.data = weights[name].clone()
        return self.model(*arguments)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _match(own: Shapes, given: Shapes) -> dict[str, str] | None:
    """Map names in `own` to names in `given`, by name or by position, or return None."""
    if all(given.get(name) == shape for name, shape in own.items()):
        return dict(zip(own, own, strict=True))
    if list(own.values()) == list(given.values()):
        return dict(zip(own, given, strict=True))
    return None


def _misfit(own: Shapes, given: Shapes) -> str:
    name = next(name for name, shape in own.items() if given.get(name) != shape)
    listed = ", ".join(f"{n} {shape}" for n, shape in given.items()) or "it has none"
    return (
        f"parameter {name} {own[name]} of the candidate belongs to none of Model's: {listed}\n"
        "Give parameters Model's names and shapes, and combine them in forward"
    )


def _varied(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or random values of the same sign if all its elements are equal."""
    import torch

    if not tensor.is_floating_point() or (tensor != tensor.flatten()[:1]).any():
        return tensor
    drawn = torch.rand_like(tensor)
    return torch.where(tensor == 0, drawn - 0.5, tensor * (drawn + 0.5))


def _arguments(made: object, source: str) -> tuple[object, ...]:
    """Return the drawn arguments as a tuple. Refuse arguments without a nonempty tensor."""
    import torch

    if isinstance(made, torch.Tensor):
        made = (made,)
    if not isinstance(made, (list, tuple)):
        raise ProblemError(f"{source} returned a {type(made).__name__}; return a list of tensors")
    if not any(tensor.numel() for _, tensor in pytree.tensors(made)):
        raise ProblemError(f"{source} returned no tensor with elements: nothing can be compared")
    return tuple(made)


def _in_float64(tree: Any) -> Any:
    """Return `tree` with its floating-point tensors in float64."""
    return pytree.map_tensors(lambda t: t.double() if t.is_floating_point() else t, tree)


def _find(names: Names, wanted: Sequence[str], fits: Callable[[object], bool]) -> Any:
    """Return the object with the first of the `wanted` names that the candidate defines."""
    for name in wanted:
        if fits(names.get(name)):
            return names[name]
    raise Misfit(f"the candidate defines neither {wanted[0]} nor {wanted[1]}")


def _function(function: Any) -> Side:
    """Wrap `function` in a plain function, to hide its attributes from the plugin."""
    import torch

    def run(*arguments: object) -> object:
        with torch.no_grad():
            return function(*arguments)

    return run
