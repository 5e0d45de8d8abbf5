"""The derived error bound: correct arithmetic passes, lower precision and damage do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pytest_aisp import Work
from pytest_aisp import compare as compare_sides
from pytest_aisp.checking import compare, numerics
from pytest_aisp.checking.controls import CannotTell, TooLoose, run_controls
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Leaf, Rule
from pytest_aisp.checking.reference import Reference
from pytest_aisp.worker.loader import pair_of


def leaf_of(function, *inputs, dtype="float32", precision=None, **work):
    """Return the expected output of `function`, with the error bound of a page."""

    def side(*values):
        return function(*values)

    @compare_sides(
        baseline=side,
        optimized=[lambda *values: function(*values)],
        inputs=lambda device, n: inputs,
        reference=lambda *values: function(*(value.double() for value in values)),
        sizes=[{"n": 1}],
        check_sizes=[{"n": 1}],
        work=lambda n: Work(read=1, **work),
        bound="dram",
    )
    def test(pair): ...

    reference = Reference(InputPool(pair_of(test), {"n": 1}, "cpu", 1, 2))
    reference.learn_types([("output", getattr(torch, dtype))])
    [leaf] = reference.leaves((0,), precision)
    return leaf


def gemm_leaf(a, b, dtype="float32", precision=None):
    return leaf_of(torch.matmul, a, b, dtype=dtype, precision=precision)


def operands(k, dtype=torch.float32, m=64, n=48):
    torch.manual_seed(k)
    return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)


def tf32(x):
    """Return `x` rounded to the 10 explicit mantissa bits of TF32."""
    bits = x.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_fp32_passes(k):
    a, b = operands(k)
    assert compare.compare(a @ b, gemm_leaf(a, b), Rule()).ok


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_tf32_inside_fp32_fails_unless_declared(k):
    a, b = operands(k)
    product = tf32(a) @ tf32(b)
    assert not compare.compare(product, gemm_leaf(a, b), Rule()).ok
    assert compare.compare(product, gemm_leaf(a, b, precision="tf32"), Rule()).ok


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_bf16_output_passes_and_one_bit_fewer_fails(k):
    a, b = operands(k, torch.bfloat16)
    leaf = gemm_leaf(a, b, "bfloat16")
    exact = (a.double() @ b.double()).to(torch.bfloat16)
    assert compare.compare(exact, leaf, Rule()).ok
    coarse = (exact.view(torch.int16) & ~1).view(torch.bfloat16)
    coarse = torch.where(torch.rand(coarse.shape) < 0.5, coarse, coarse * (1 + 2**-7))
    assert not compare.compare(coarse, leaf, Rule()).ok


def in_blocks(x, largest, block=32):
    """Return `x` rounded in blocks: the largest element of each becomes `largest` steps."""
    rows = x.view(-1, block)
    step = rows.abs().amax(1, keepdim=True) / largest
    return ((rows / step).round() * step).view_as(x)


ROUNDING = {
    "bf16": (lambda x: x.bfloat16().float(), lambda x: (x.view(torch.int32) >> 18) << 18),
    "int8": (lambda x: in_blocks(x, 127), lambda x: in_blocks(x, 31)),
    "int4": (lambda x: in_blocks(x, 7), lambda x: in_blocks(x, 1)),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ROUNDING)
def test_sums_of_rounded_terms_pass_and_two_bits_fewer_fail(precision, world):
    """The terms may cancel in all three probes: the measured sensitivity is then near zero."""
    torch.manual_seed(world)
    terms = [torch.randn(1 << 20) for _ in range(world)]
    leaf = leaf_of(lambda *terms: sum(terms), *terms, precision=precision)
    correct, coarse = ROUNDING[precision]
    for rounds, right in ((correct, True), (lambda x: coarse(x).view(torch.float32), False)):
        total = rounds(sum(rounds(t) for t in terms))
        assert compare.compare(total, leaf, Rule()).ok is right


def test_formats_with_shared_scales_allow_a_larger_worst_element():
    value = torch.linspace(-3, 3, 999, dtype=torch.float64)
    off = value.clone()
    off[7] += 0.1
    leaf = Leaf("output", value, torch.full_like(value, 0.01))
    assert not compare.compare(off, leaf, Rule()).ok
    assert compare.compare(off, replace(leaf, worst_limit=numerics.WORST_BLOCK), Rule()).ok
    off[7] += 0.1
    result = compare.compare(off, replace(leaf, worst_limit=numerics.WORST_BLOCK), Rule())
    assert compare.explain("int8", {"n": 999}, result, Rule()).endswith(
        "the rule is derived bound (rms 1.25, worst 16)"
    )


@pytest.mark.parametrize("k", [1024, 8192])
def test_a_bf16_accumulator_fails(k):
    a, b = operands(k, torch.bfloat16)
    total = torch.zeros(64, 48, dtype=torch.bfloat16)
    for start in range(0, k, 64):
        total = total + (a[:, start : start + 64] @ b[start : start + 64])
    assert not compare.compare(total, gemm_leaf(a, b, "bfloat16"), Rule()).ok


@pytest.mark.parametrize("damage", ["tile", "element", "nan", "inf"])
def test_local_damage_fails_and_is_located(damage):
    a, b = operands(256)
    out = a @ b
    if damage == "tile":
        out[32:40, 16:24] = 0
    else:
        out[7, 9] = {"element": float(out[7, 9]) + 0.01, "nan": math.nan, "inf": math.inf}[damage]
    result = compare.compare(out, gemm_leaf(a, b), Rule())
    assert not result.ok
    if damage != "tile":
        assert result.index == (7, 9)
        assert "output[7, 9]" in compare.explain("fast", {"n": 48}, result, Rule())


def test_nan_is_right_only_where_the_reference_has_it():
    value = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    leaf = Leaf("output", value, torch.full((3,), 1e-7, dtype=torch.float64))
    assert compare.compare(torch.tensor([1.0, math.nan, math.inf]), leaf, Rule()).ok
    for wrong in ([math.nan, math.nan, math.inf], [1.0, 2.0, math.inf], [1.0, math.nan, -math.inf]):
        assert not compare.compare(torch.tensor(wrong), leaf, Rule()).ok


def test_exact_means_bit_for_bit():
    value = torch.randn(33, dtype=torch.float32).double()
    leaf = Leaf("output", value, torch.ones_like(value))
    assert compare.compare(value.float(), leaf, Rule(exact=True)).ok
    assert not compare.compare(value.float() * (1 + 2**-23), leaf, Rule(exact=True)).ok


@pytest.mark.parametrize(
    ("rtol", "atol", "ok"), [(1e-3, 0.0, True), (1e-6, 0.0, False), (None, 1e-2, True)]
)
def test_the_tolerance_of_a_page_replaces_the_bound(rtol, atol, ok):
    value = torch.linspace(1, 2, 33, dtype=torch.float64)
    leaf = Leaf("output", value, torch.full_like(value, 1e-9))
    got = (value * (1 + 1e-4)).float()
    assert compare.compare(got, leaf, Rule(rtol=rtol, atol=atol)).ok is ok


def controls(leaf, stale, rule=Rule()):  # noqa: B008 - frozen
    return run_controls([leaf], {"stale": lambda: [stale.value]}, [torch.float32], rule)


def test_the_derived_bound_refuses_every_control():
    a, b = operands(256)
    c, d = operands(257)
    names = {c.name for c in controls(gemm_leaf(a, b), gemm_leaf(c[:, :256], d[:256]))}
    assert names == {"noise", "zeros", "rolled", "swapped", "reversed", "stale"}


def test_a_tolerance_that_accepts_a_control_is_refused():
    a, b = operands(256)
    c, d = operands(257)
    with pytest.raises(TooLoose, match=r"\(rtol=0, atol=100\) is too loose: it accepts a wrong"):
        controls(gemm_leaf(a, b), gemm_leaf(c[:, :256], d[:256]), Rule(atol=100.0))


def test_inputs_that_cannot_tell_are_named():
    flat = Leaf("output", torch.ones(33, dtype=torch.float64), torch.full((33,), 1.0).double())
    with pytest.raises(
        CannotTell, match=r"other inputs \(0 error bounds\)\nChoose inputs that change"
    ):
        controls(flat, flat)
    other = Leaf("output", flat.value + 100, flat.sigma)
    with pytest.raises(CannotTell, match=r"zeros \(0.58 error bounds\); (.|\n)* and from zero"):
        controls(flat, other)


def test_a_loose_output_cannot_hide_behind_a_strict_one():
    value = torch.randn(33, dtype=torch.float64)
    strict = Leaf("a", value, value.abs() * 1e-7 + 1e-9)
    loose = Leaf("b", value * 1e-3, value.abs() * 1e-10 + 1e-12)
    with pytest.raises(TooLoose):
        run_controls([strict, loose], {}, [torch.float32] * 2, Rule(rtol=0, atol=1e-2))


@pytest.mark.parametrize("count", [1, 2, 3, 33, 4096])
def test_noise_moves_few_elements_as_many_bounds_as_many_elements(count):
    torch.manual_seed(count)
    value, other = torch.randn(2, count, dtype=torch.float64) + 3
    leaf = Leaf("output", value, torch.full_like(value, 1e-3))
    results = controls(leaf, Leaf("output", other, leaf.sigma))
    noise = next(c for c in results if c.name == "noise")
    assert (noise.applies, noise.refused) == (True, True)
    assert noise.moves == pytest.approx(2.4, rel=1e-3)


def test_a_small_output_gets_no_more_noise_than_a_large_one_beside_it():
    """A tolerance may refuse this noise in the large output and accept it in the small one."""
    torch.manual_seed(0)
    small, large = torch.ones(1, dtype=torch.float64), torch.randn(999, dtype=torch.float64)
    leaves = [Leaf("a", small, small * 1e-4), Leaf("b", large, large.abs() * 1e-2)]
    stale = {"stale": lambda: [leaf.value + 1 for leaf in leaves]}
    results = run_controls(leaves, stale, [torch.float32] * 2, Rule(rtol=1e-2))
    assert all(control.refused for control in results if control.applies)
