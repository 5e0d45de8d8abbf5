"""Refuse outputs that run code when they are read, and outputs that have the wrong form.

Code that runs while an output is read could do a side's work after the clock has stopped. So each
container's class is inspected before anything in the container is read. A class that overrides a
method used for reading is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import GetSetDescriptorType, MemberDescriptorType, NoneType, SimpleNamespace
from typing import TYPE_CHECKING

from ..isolation.protections import enabled
from ..page.pair import Side, SideError, side_name, size_words
from .numerics import Leaf, NamedTensors, Wrong, WrongForm

if TYPE_CHECKING:
    from .reference import Reference

READING = ("__iter__", "__len__", "__getattribute__", "__getattr__", "__class__", "__dict__")
"""The attributes that Python looks up when an output is read."""
MAPPING = ("items", "keys", "values")
"""The attributes that Python also looks up when a dict is read."""
PYTHON_CLASS = 1 << 9
"""The bit of `__flags__` that is set for classes defined in Python, but not for built-in ones."""
KEYS = (str, int, bool, float, type(None))


def check_containers(name: str, outputs: object, size: str) -> None:
    """Raise an error if reading the outputs of the side `name` would run the page's code."""
    if not enabled("plain-outputs"):
        return
    for path, reason in _refused(outputs, "output"):
        raise SideError(
            f"{name} returned {path} at {size}, {reason}, so it may compute after it was timed\n"
            "Return tensors in a list, a tuple, a dict, a NamedTuple or a dataclass"
        )


def _refused(tree: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each container that must not be read, with the reason."""
    import torch

    kind = type(tree)
    if issubclass(kind, torch.Tensor):
        return  # other protections check tensors
    if name := _replaced(kind):
        yield path, f"a {kind.__name__} whose class replaces {name}"
    elif isinstance(tree, (list, tuple)):
        for number, child in enumerate(tree):
            yield from _refused(child, f"{path}[{number}]")
    elif isinstance(tree, dict):
        for key, child in tree.items():
            if type(key) not in KEYS:
                yield path, f"a {kind.__name__} with a key of type {type(key).__name__}"
            else:
                yield from _refused(child, f"{path}[{key!r}]")
    elif kind is SimpleNamespace or _fields(kind):
        for name in _fields(kind) or vars(tree):
            yield from _refused(getattr(tree, name), f"{path}.{name}")


def _replaced(kind: type) -> str:
    """Return the name of an attribute of `kind` that runs code when an instance is read, or ""."""
    is_dict = issubclass(kind, dict)
    if issubclass(kind, Mapping) and not is_dict:
        return "dict"
    for base in (base for base in kind.__mro__ if base.__flags__ & PYTHON_CLASS):
        for name in READING + MAPPING * is_dict:
            if not isinstance(vars(base).get(name), (NoneType, GetSetDescriptorType)):
                return name
    if type(inspect.getattr_static(kind, "_fields", ())) is not tuple:
        return "_fields"
    if type(inspect.getattr_static(kind, "__dataclass_fields__", {})) is not dict:
        return "__dataclass_fields__"
    if not issubclass(kind, (list, tuple, dict)):
        return next((name for name in _fields(kind) if _computed(kind, name)), "")
    return ""


def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(inspect.getattr_static(kind, "__dataclass_fields__", ()))


def _computed(kind: type, field: str) -> bool:
    """Return whether a field is a property or another descriptor that runs code."""
    found = inspect.getattr_static(kind, field, None)
    stored = isinstance(found, MemberDescriptorType)  # a field in __slots__
    return not stored and hasattr(type(found), "__get__")


def outputs_in_both(
    reference: Reference, side: Side, leaves: Sequence[Leaf], outputs: NamedTensors
) -> tuple[list[Leaf], NamedTensors]:
    """Return the outputs that the side and the reference both have.

    A side may lack only state tensors that the reference's optimizer creates.
    """
    by_path = dict(outputs)
    for leaf in leaves:
        optional = leaf.path.startswith("state") and ".grad" not in leaf.path
        if leaf.path not in by_path and (leaf.path in reference.initial_state or not optional):
            raise Wrong(f"{side_name(side)} has no {leaf.path}, which the reference has")
    shared = [leaf for leaf in leaves if leaf.path in by_path]
    return shared, [(leaf.path, by_path[leaf.path]) for leaf in shared]


def check_form(
    reference: Reference, side: Side, outputs: NamedTensors, leaves: Sequence[Leaf]
) -> None:
    """Refuse outputs whose number, names, shapes, types or devices are not as expected."""
    if not enabled("form"):
        return
    name, size = side_name(side), size_words(reference.pool.size)
    if len(outputs) != len(leaves):
        raise WrongForm(
            f"{name} returned {len(outputs)} tensors at {size},"
            f" but the reference returned {len(leaves)}"
        )
    for (path, tensor), leaf in zip(outputs, leaves, strict=True):
        if tensor.shape != leaf.value.shape:
            raise WrongForm(
                f"{name} returned {path} of shape {tuple(tensor.shape)} at {size},"
                f" the reference returned {tuple(leaf.value.shape)}"
            )
        if path != leaf.path and "view_as_real(" in path + leaf.path:  # only one is complex
            raise WrongForm(
                f"{name} returned {path} at {size}, but the reference returned {leaf.path}"
            )
        dtype = reference.types.get(leaf.path)
        if dtype is not None and tensor.dtype != dtype:
            raise WrongForm(
                f"{name} returned {path} as {tensor.dtype} at {size}, the baseline as {dtype}"
            )
        if tensor.device.type != leaf.value.device.type:
            raise WrongForm(
                f"{name} returned {path} on {tensor.device} at {size},"
                f" the reference is on {leaf.value.device}"
            )
