"""Sides that break the rules, and sides that keep them: every page is checked in one run."""

from __future__ import annotations

import pytest

NESTED = """
    def reference(x):
        return {"twice": 2 * x.double(), "parts": [x.double() + 1, {"thrice": 3 * x.double()}]}

    def added(x):
        return {"twice": x + x, "parts": [x + 1, {"thrice": x + x + x}]}

    def doubled(x):
        return {"twice": 2 * x, "parts": [1 + x, {"thrice": 3 * x}]}
"""
COUNTED = """
    def inputs(device, n):
        return (torch.randint(-9, 9, (n,), device=device),)

    def reference(x):
        return x.clamp_min(0).cumsum(0)

    def added(x):
        return x.clamp_min(0).cumsum(0)

    def doubled(x):
        return torch.relu(x).cumsum(0)
"""
SUMMED = """
    def inputs(device, n):
        return (torch.randn(n, 64, device=device),)

    def reference(x):
        return x.double().sum(1)

    def added(x):
        return x.sum(1)

    def doubled(x):
        return {}
"""
TRAINED = """
    from types import SimpleNamespace

    def state(device, n):
        model = torch.nn.Linear(n, 3, device=device)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def inputs(device, n):
        return torch.randn(8, n, device=device), torch.randn(8, 3, device=device)

    def added(state, x, y):
        model, optimizer = state
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def reference(state, x, y):
        model, optimizer = state
        model.double()
        loss = added(state, x.double(), y.double())
        return loss

    def doubled(state, x, y):
        model, optimizer = state
        model.zero_grad(set_to_none=False)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        {}
        return loss.detach()
"""


def test_probe(page, pytester, told):
    page("None", name="none_test.py")
    page("x.mul_(2)", name="mutates_test.py")
    page("x[:]", name="view_test.py")
    page("torch.zeros_like(x)", name="zeros_test.py")
    page("torch.empty_like(x)", name="empty_test.py")
    page("CALLS.append(2 * x) or CALLS[0]", name="stale_test.py")
    page("BY.setdefault(x.data_ptr(), 2 * x).clone()", defs="BY = {}", name="pointer_test.py")
    page("2 * x[1:]", name="shape_test.py")
    page("(2 * x).double()", name="dtype_test.py")
    page("x * float('nan')", name="nan_test.py")
    page("1 / 0", name="raises_test.py")
    page("(yield 5)", name="noncallable_test.py")
    page("[2 * x, x + x]", name="two_test.py")
    page("'hello'", name="text_test.py")
    page("(2 * x).bfloat16().float()", name="undeclared_test.py")
    page("(2 * x).bfloat16().float()", variants="[Variant(doubled, precision='bf16')]", name="declared_test.py")
    page(body="pair.assert_equivalent(atol=100)\npair.assert_speedup()", name="loose_test.py")
    page(body="pair.assert_equivalent(exact=True)\npair.assert_speedup()", name="exact_test.py")
    page("2.0000001 * x",body="pair.assert_equivalent(exact=True)\npair.assert_speedup()", name="inexact_test.py")
    page(body="pair.assert_equivalent()", name="unjudged_test.py")
    page(body="pair.assert_speedup()", name="early_test.py")
    page(body="pass", name="pass_test.py")
    page(defs="def inputs(device, n):\n    return (torch.zeros(n, device=device),)", name="allzero_test.py")
    page(defs="def inputs(device, n):\n    return torch.randn(n, device=device)", name="notuple_test.py")
    page("2 * x if len(x) < 17 else x", check_sizes="[{'n': st.integers(1, 40)}]", defs="from hypothesis import strategies as st", name="search_test.py")
    page(check_sizes="[{'n': st.integers(1, 40)}]", defs="from hypothesis import strategies as st", name="searched_test.py")
    page(defs=NESTED, name="nested_test.py")
    page(defs=NESTED.replace("3 * x}]", "2 * x}]"), name="nestedwrong_test.py")
    page(defs=COUNTED, name="counted_test.py")
    page(defs=COUNTED.replace("torch.relu(x)", "x.abs()"), name="miscounted_test.py")
    page(defs=SUMMED.replace("{}", "x @ torch.ones(64, device=x.device)"), work="lambda n: Work(read=4*n, terms=64)", name="summed_test.py")
    page(defs=SUMMED.replace("{}", "x.bfloat16().sum(1).float()"), work="lambda n: Work(read=4*n, terms=64)", name="bf16_test.py")
    page(defs=SUMMED.replace("{}", "x.bfloat16().sum(1).float()"), work="lambda n: Work(read=4*n, terms=64)",variants="[Variant(doubled, precision='bf16')]", name="declaredbf16_test.py")
    page(defs=SUMMED.replace("{}", "x[:, :63].sum(1)"), work="lambda n: Work(read=4*n, terms=64)", name="dropped_test.py")
    page(defs=TRAINED.replace("{}", "optimizer.step()"), more="state=state,", work="lambda n: Work(read=4*n, terms=64, roundings=6)", name="trained_test.py")
    page(defs=TRAINED.replace("{}", "torch.no_grad()(lambda: [p.sub_(0.05 * p.grad) for p in model.parameters()])()"), more="state=state,", work="lambda n: Work(read=4*n, terms=64, roundings=6)", name="nomomentum_test.py")
    page(defs="def state(device, n):\n    return {'x': object()}", more="state=state,", name="badstate_test.py")
    page(work="lambda n: Work(read=-n)", name="negative_test.py")
    result = pytester.runpytest_subprocess("--aisp-check", "--junitxml=j.xml")
    for k, v in told(pytester.path / "j.xml").items():
        print("=====", k, v.verdict)
        print(v.failure)
