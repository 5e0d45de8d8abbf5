"""Large tensors: the memory that a case needs, and the same verdict as for small ones."""

from __future__ import annotations

import dataclasses
import math

import memory_cost
import pytest
import torch

from pytest_aisp.checking import compare, inputs
from pytest_aisp.checking.inputs import UNSEEN
from pytest_aisp.checking.numerics import Leaf, Rule
from pytest_aisp.util import pytree


@pytest.fixture
def one_thread():
    """Use one thread, because other processes compute too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "most"),
    [("both", 7.6), ("reduction", 10.1), ("expansion", 9.2)],
)
def test_a_case_needs_a_few_times_its_inputs_and_outputs(one_thread, page, most):
    """One timed call of each side is kept. The reference's temporary tensors are not included."""
    found = memory_cost.peaks(page, "cpu", mib=8)
    peaks = {**found["check"], **found["time"]}
    peaks["reference"] = max(found[task]["reference"] for task in ("check", "time"))
    own = found["reference alone"]["temporary"]
    assert max(peaks.values()) <= most + own


@pytest.mark.parametrize(
    "shape", [(), (7,), (1, 7), (7, 1), (3, 5), (2, 3, 4), (5, 1, 5), (0, 3), (1, 1, 9)]
)
@pytest.mark.parametrize("most", [1, 2, 4, 100])
def test_pieces_cover_each_element_once(shape, most):
    count = torch.zeros(shape)
    for at in pytree.pieces(shape, most):
        assert count[at].numel() <= most
        count[at] += 1
    assert bool((count == 1).all())


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", [None, "element", "nan", "inf", "noise"])
@pytest.mark.parametrize("rule", [Rule(), Rule(rtol=1e-5), Rule(exact=True)])
def test_pieces_are_compared_like_the_whole(monkeypatch, layout, damage, rule):
    torch.manual_seed(1)
    value = LAYOUTS[layout](torch.randn(6, 5, 7))
    leaf = Leaf("output", value.double(), value.double().abs() * 1e-7)
    got = value.clone()
    if damage == "noise":
        got += 1e-5
    elif damage is not None:
        got[4, 2, 6] = {"element": 9.0, "nan": math.nan, "inf": math.inf}[damage]
    whole = compare.compare(got, leaf, rule)
    monkeypatch.setattr(pytree, "PIECE", 4)
    pieces = compare.compare(got, dataclasses.replace(leaf), rule)
    assert pieces.ok == whole.ok == (damage is None)
    for field in ("rms", "worst"):
        assert getattr(pieces, field) == pytest.approx(getattr(whole, field), rel=1e-12)
    if damage not in (None, "noise"):
        assert pieces.index == whole.index == (4, 2, 6)


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_an_expected_nan_hides_no_wrong_element(off):
    value = torch.randn(10_000, dtype=torch.float64)
    value[3] = math.nan
    got = value.clone()
    got[7] += off
    leaf = Leaf("output", value, 1e-5 * torch.ones_like(value) * value / value)
    assert math.isnan(leaf.sigma[3])
    assert compare.compare(got, leaf, Rule()).ok is (off == 0)
    together = compare.compare_all([got, got], [leaf, leaf], Rule())
    assert [result.ok for result in together] == [off == 0] * 2


def pool_of(draw, monkeypatch):
    monkeypatch.setattr(inputs, "KEPT_SHARE", 0.0)
    pair = dataclasses.replace(
        memory_cost.both.pytestmark[0].kwargs["pair"], inputs=lambda device, n: (draw(n),)
    )
    return inputs.InputPool(pair, {"n": 33}, "cpu", 1, 2)


def test_one_large_value_set_is_kept_and_the_others_are_drawn_again(monkeypatch):
    pool = pool_of(torch.randn, monkeypatch)
    first = [pool.value_set(k)[0].clone() for k in (0, 1, UNSEEN)]
    again = [pool.value_set(k)[0].clone() for k in (0, 1, UNSEEN)]
    assert all(map(torch.equal, first, again))
    assert len(pool.values) == 1


def test_large_values_that_cannot_be_drawn_again_are_kept(monkeypatch):
    generator = torch.Generator()  # not seeded again
    pool = pool_of(lambda n: torch.randn(n, generator=generator), monkeypatch)
    first = [pool.value_set(k)[0] for k in (0, 1, UNSEEN)]
    assert all(pool.value_set(k)[0] is first[k] for k in (0, 1, UNSEEN))


def test_a_large_slot_is_one_because_it_fills_the_l2_alone(monkeypatch):
    pool = pool_of(torch.randn, monkeypatch)
    footprint = 2 * 33 * 4
    assert pool.slots_for(33 * 4, l2_bytes=footprint // 5, free_bytes=1 << 40) == 1
    assert pool.slots_for(33 * 4, l2_bytes=footprint, free_bytes=1 << 40) == 5
