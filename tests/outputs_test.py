"""Outputs of every form are compared: of one element, of none, and complex ones."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Generic, NamedTuple, TypeVar

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking.check import check_sides
from pytest_aisp.checking.compare import check_outputs
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.page.pair import SideError
from pytest_aisp.worker.loader import pair_of

SIZE = {"n": 330}


def checked(side, rule=Rule(), *, baseline, reference):  # noqa: B008 - frozen
    """Return the result of checking `side`."""

    def base(x):
        return baseline(x)

    @compare(
        baseline=base,
        optimized=[side],
        inputs=lambda device, n: (torch.randn(n, device=device),),
        reference=lambda x: reference(x.double()),
        sizes=[SIZE],
        check_sizes=[SIZE],
        work=lambda n: Work(read=4 * n, write=4 * n, terms=n),
        bound="dram",
    )
    def test_it(pair):
        """Only the declaration is used."""

    pool = InputPool(pair_of(test_it), SIZE, "cpu", 1, 2)
    return check_sides(Reference(pool), [(base, None), (side, None)], rule)


FORMS = {
    "one": (torch.sum, lambda x: x.reshape(-1, 11).sum(1).sum()),
    "two": (lambda x: x.reshape(2, -1).sum(1), lambda x: x.reshape(2, -1, 11).sum(2).sum(1)),
    "none": (lambda x: (x + x, x[:0].clone()), lambda x: (2 * x, x[:0].clone())),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_output_of_few_elements_passes(form):
    baseline, side = FORMS[form]
    result = checked(side, baseline=baseline, reference=baseline)
    assert "noise refused" in result.controls
    assert result.exact == "bit for bit"


@pytest.mark.parametrize("form", ["one", "two"])
def test_a_wrong_output_of_few_elements_is_refused(form):
    baseline, side = FORMS[form]

    def wrong(x):
        return side(x) * (1 + 1e-4)

    with pytest.raises(Wrong, match=r"wrong is wrong at n=330: output.* the rule is derived bound"):
        checked(wrong, baseline=baseline, reference=baseline)


def transformed(x):
    return torch.fft.rfft(x)


def in_double(x):
    return torch.fft.rfft(x.double()).to(torch.complex64)


def also_in_double(x):
    return torch.fft.rfft(x.double()).to(torch.complex64)


@pytest.mark.parametrize("rule", [Rule(), Rule(rtol=0.0, atol=3e-6)])
def test_the_bound_applies_to_both_parts_of_a_complex_output(rule):
    def reference(x):
        return torch.fft.rfft(x.double())

    result = checked(in_double, rule, baseline=also_in_double, reference=reference)
    assert "noise refused" in result.controls


def test_the_wrong_part_of_a_complex_output_is_named():
    def shifted(x):
        out = torch.fft.rfft(x)
        out[7] += 0.5j
        return out

    with pytest.raises(
        Wrong, match=r"shifted is wrong at n=330: view_as_real\(output\)\[7, 1\] is"
    ):
        checked(shifted, baseline=transformed, reference=transformed)


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (
            lambda x: torch.fft.rfft(x.double()),
            r"as torch.float64 at n=330, the baseline as torch.f",
        ),
        (
            lambda x: torch.view_as_real(torch.fft.rfft(x)),
            r"returned output at n=330, but the reference returned view_as_real\(output\)",
        ),
    ],
)
def test_another_type_than_complex_is_wrong(side, message):
    with pytest.raises(Wrong, match=message):
        checked(side, baseline=transformed, reference=transformed)


class Pair(NamedTuple):
    values: torch.Tensor
    items: object = None

    @property
    def first(self):
        return self.values


@dataclass(frozen=True)
class Record:
    values: torch.Tensor
    more: object = None

    def __iter__(self):
        return iter((self.values, self.more))

    @property
    def total(self):
        return self.values.sum()


@dataclass
class Slotted:
    __slots__ = ("values",)
    values: torch.Tensor


T = TypeVar("T")


@dataclass
class Result(Generic[T]):
    values: T


@dataclass
class ModelOutput(OrderedDict):
    """Has its values as fields and as items, like the outputs of models in transformers."""

    values: torch.Tensor | None = None

    def __post_init__(self):
        self["values"] = self.values

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self):
        return tuple(self[key] for key in self)


X = torch.ones(2, 3)
PLAIN = [
    X,
    (X, [X, {"values": X, 0: X, None: 1.0}]),
    Pair(X, (X, X)),
    Slotted(X),
    Result(Pair(X)),
    ModelOutput(X),
    OrderedDict(values=X),
    SimpleNamespace(values=X, items=[X]),
    X.sort(),
    torch.nn.utils.rnn.pack_sequence([X]),
    torch.Size([2]),
    3.0,
]


@pytest.mark.parametrize("output", PLAIN, ids=lambda output: type(output).__name__)
def test_plain_containers_of_tensors_pass(output):
    check_outputs("side", output, [], "n=3")


class Fields(tuple):
    @property
    def _fields(self):
        raise AssertionError


class Attributes(tuple):
    def __getattr__(self, name):
        raise AssertionError


class Pretender:
    @property
    def __class__(self):
        raise AssertionError


class Key:
    def __repr__(self):
        raise AssertionError


REFUSED = {
    r"\[0\] at n=3, a Fields whose class replaces _fields": [Fields()],
    r"\[0\] at n=3, a Attributes whose class replaces __getattr__": [Attributes()],
    r"\.values at n=3, a Pretender whose class replaces __class__": SimpleNamespace(
        values=Pretender()
    ),
    " at n=3, a Record whose class replaces __iter__": Record(X),
    " at n=3, a UserDict whose class replaces dict": UserDict(values=X),
    " at n=3, a dict with a key of type Key": {Key(): X},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_container_that_runs_code_when_it_is_read_is_refused(message):
    remedy = r"so it may compute after it was timed\nReturn tensors in a list, a tuple, a dict"
    with pytest.raises(SideError, match=rf"side returned output{message}, {remedy}"):
        check_outputs("side", REFUSED[message], [], "n=3")
