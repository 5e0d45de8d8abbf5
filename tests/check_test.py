"""Sides that break the rules of comparison, and sides that keep them.

One run checks all pages in one worker process. Each test reads its page's part.
"""

from __future__ import annotations

import pytest
import torch

from pytest_aisp.util import pytree

LINEAR = {"work": "lambda n: Work(read=4 * 64 * n, terms=64)"}
SUMS = """
    def inputs(device, n):
        return (torch.randn(n, 64, device=device),)


    def reference(x):
        return x.double().sum(1)


    def added(x):
        return x.sum(1)


    def doubled(x):
        return {side}
"""
COUNTS = """
    def inputs(device, n):
        return (torch.randint(-9, 9, (n,), device=device),)


    def reference(x):
        return x.clamp_min(0).cumsum(0)


    def added(x):
        return x.clamp_min(0).cumsum(0)


    def doubled(x):
        return {side}.cumsum(0)
"""
NESTED = """
    def reference(x):
        x = x.double()
        return {{"twice": 2 * x, "more": [x + 1, {{"thrice": 3 * x}}]}}


    def added(x):
        return {{"twice": x + x, "more": [x + 1, {{"thrice": x + x + x}}]}}


    def doubled(x):
        return {{"twice": 2 * x, "more": [1 + x, {{"thrice": {side}}}]}}
"""
TRAINING = """
    def state(device, n):
        model = torch.nn.Linear(n, 3, device=device)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


    def inputs(device, n):
        return torch.randn(8, n, device=device), torch.randn(8, 3, device=device)


    def reference(state, x, y):
        state[0].double()
        return added(state, x.double(), y.double())


    def added(state, x, y):
        model, optimizer = state
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()


    def skip_momentum(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad


    def doubled(state, x, y):
        model, optimizer = state
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        {side}
        return loss.detach()
"""
STEP = {"more": "state=state,", "work": "lambda n: Work(read=4 * n, terms=33, roundings=6)"}
SEARCH = {
    "defs": "from hypothesis import strategies as st",
    "check_sizes": "[{'n': 9}, {'n': st.integers(1, 40)}]",
}
LOWER = {"variants": "[Variant(doubled, precision='bf16')]"}
ROUNDED = """

    def rounded(x):
        return x.bfloat16().sum(1).float()


    def truncated(x):
        return (x.view(torch.int32) >> 16 << 16).view(torch.float32)


    added = Variant(rounded, precision="bf16")
"""
EXACT = {
    "check_sizes": "[{'n': 4001}]",
    "defs": SUMS.format(side="truncated(x).sum(1).bfloat16().float()")
    + ROUNDED
    + """
    added = Variant(lambda x: x.sum(1), precision="bf16")
""",
}
OUTPUT = "is wrong at n=33: output[[]*] is"
CHECK = "pair.assert_equivalent({})\npair.assert_speedup()"

# By page: what differs from the doubling page, and a line of the failure.
REFUSED = {
    "none": (
        {"optimized": "None"},
        "E       AssertionError: doubled returned None at n=33; a side returns its outputs",
    ),
    "mutating": (
        {"optimized": "x.mul_(2)"},
        "E       AssertionError: doubled changed its input [[]0] at n=33; declare what a side may"
        " change with state=",
    ),
    "view": (
        {"optimized": "x[:]"},
        "E       AssertionError: doubled returned output as a view of its input at n=33",
    ),
    "text": (
        {"optimized": "'2 * x'"},
        "E       AssertionError: output is a str, not a tensor or a number",
    ),
    "yielding": (
        {"optimized": "(yield 5)"},
        "E       AssertionError: doubled must yield the callable to time, not 5",
    ),
    "raising": (
        {"optimized": "1 / 0"},
        "E       AssertionError: doubled at n=33: ZeroDivisionError: division by zero, during:"
        " check doubled",
    ),
    "single": (
        {"defs": "def inputs(device, n):\n    return torch.randn(n, device=device)"},
        "E       AssertionError: inputs returned a Tensor; return a tuple of arguments, as in"
        " `return (x,)`",
    ),
    "numpy": (
        {"defs": "def inputs(device, n):\n    return torch.randn(n, device=device).numpy(), 2"},
        "E       AssertionError: inputs holds a ndarray at [[]0], whose values cannot be watched;*",
    ),
    "module": (
        {"defs": "def inputs(device, n):\n    return (torch.nn.Linear(n, n), 2)"},
        "E       AssertionError: inputs holds a Linear at [[]0], whose values cannot be watched;*",
    ),
    "telling": (
        {"defs": "def inputs(device, n):\n    return (torch.zeros(n, device=device),)"},
        "E       AssertionError: the inputs cannot tell a right output from a wrong one, because"
        " these wrong answers are too close to it: * (0 error bounds)*",
    ),
    "loose": (
        {"body": CHECK.format("atol=100")},
        "E       AssertionError: the tolerance (rtol=0, atol=100) is too loose: it accepts a wrong"
        " answer, *, whose error is * times the derived bound (in 3 of 3 draws of the inputs)",
    ),
    "object": (
        {"defs": "def state(device, n):\n    return {'x': object()}", "more": "state=state,"},
        "E       AssertionError: state['x'] is a object; a state may hold tensors, modules,"
        " optimizers and containers of them",
    ),
    "early": (
        {"body": "pair.assert_speedup()"},
        "E       AssertionError: assert_speedup() before assert_equivalent(): nothing is timed"
        " before it is proved right",
    ),
    "negative": (
        {"work": "lambda n: Work(read=-n)"},
        "E       AssertionError: doubled at n=33: PairError: Work(read=-33) must be a number >="
        " 0, during: check added",
    ),
    "inputs_raise": (
        {"defs": "def inputs(device, n):\n    return (torch.zeros(3)[n],)"},
        "E       AssertionError: doubled at n=33: IndexError: index 33 is out of bounds for"
        " dimension 0 with size 3, during: check",
    ),
    "state_raises": (
        {"defs": "def state(device, n):\n    return {}[n]", "more": "state=state,"},
        "E       AssertionError: doubled at n=33: KeyError: 33, during: check",
    ),
    "reference_raises": (
        {"defs": "def reference(x):\n    return {}[len(x)]"},
        "E       AssertionError: doubled at n=33: KeyError: 33, during: check added",
    ),
    "searched_raises": (
        SEARCH | {"optimized": "2 * x if len(x) < 17 else 1 / 0"},
        "E       AssertionError: doubled at n=17: ZeroDivisionError: division by zero, during:"
        " check doubled",
    ),
    "unjudged": (
        {"body": "pair.assert_equivalent()"},
        "ch99/unjudged_test.py:*: this page never judged its pair",
    ),
    "empty_body": (
        {"body": "pass"},
        "ch99/empty_body_test.py:*: this page never judged its pair",
    ),
}
WRONG = {
    "printing": (
        {"optimized": "print('{{\"error\": null}}', flush=True) or 0 * x"},
        "is wrong at n=33: output[[]*] is *0, *",
    ),
    "zeros": ({"optimized": "torch.zeros_like(x)"}, "is wrong at n=33: output[[]*] is 0, *"),
    "garbage": ({"optimized": "torch.empty_like(x)"}, f"{OUTPUT} *"),
    "nan": ({"optimized": "x * float('nan')"}, "is wrong at n=33: output[[]0] is nan, *"),
    "stale": ({"optimized": "CALLS.append(2 * x) or CALLS[0]"}, f"{OUTPUT} *"),
    "cached": (
        {"defs": "KNOWN = {}", "optimized": "KNOWN.setdefault(x.data_ptr(), 2 * x)"},
        f"{OUTPUT} *",
    ),
    "shape": (
        {"optimized": "2 * x[1:]"},
        "returned output of shape (32,) at n=33, the reference returned (33,)",
    ),
    "dtype": (
        {"optimized": "(2 * x).double()"},
        "returned output as torch.float64 at n=33, the baseline as torch.float32",
    ),
    "count": (
        {"optimized": "[2 * x, x + x]"},
        "returned 2 tensors at n=33, but the reference returned 1",
    ),
    "nested_wrong": (
        {"defs": NESTED.format(side="2 * x")},
        "is wrong at n=33: [[]'more'][[]1][[]'thrice'][[]*] is *, expected *",
    ),
    "inexact": (
        {"optimized": "torch.nextafter(2 * x, x)", "body": CHECK.format("exact=True")},
        f"{OUTPUT} *, expected *; the rule is exact",
    ),
    "counts_wrong": ({"defs": COUNTS.format(side="x.abs()")}, f"{OUTPUT} *"),
    "dropping": (LINEAR | {"defs": SUMS.format(side="x[:, 1:].sum(1)")}, f"{OUTPUT} *"),
    "undeclared": (
        LINEAR | {"defs": SUMS.format(side="x.bfloat16().sum(1).float()")},
        f"{OUTPUT} *, expected *; off by * allowed deviations of *",
    ),
    "undeclared_beside_declared": (
        LINEAR | {"defs": SUMS.format(side="x.bfloat16().sum(1).float()") + ROUNDED},
        f"{OUTPUT} *, expected *; off by * allowed deviations of *",
    ),
    "less_exact": (
        LINEAR | LOWER | EXACT,
        "is less exact than its baseline at n=4001: output has an rms error of *, limit *",
    ),
    "momentum": (
        STEP | {"defs": TRAINING.format(side="skip_momentum(model)")},
        "is wrong at n=33: * is *, expected *",
    ),
    "searched": (
        SEARCH | {"optimized": "2 * x if len(x) < 17 else 2 * x + 1"},
        "is wrong at n=17: output[[]*] is *, expected *",
    ),
}
RIGHT = {
    "doubling": {},
    "exact": {"body": CHECK.format("exact=True")},
    "tight": {"body": CHECK.format("rtol=1e-8")},
    "nested": {"defs": NESTED.format(side="3 * x")},
    "counts": {"defs": COUNTS.format(side="torch.relu(x)")},
    "sums": LINEAR | {"defs": SUMS.format(side="x @ torch.ones(64, device=x.device)")},
    "declared": LINEAR | LOWER | {"defs": SUMS.format(side="x.bfloat16().sum(1).float()")},
    "baseline_declared": LINEAR | {"defs": SUMS.format(side="x.sum(1)") + ROUNDED},
    "both_declared": LINEAR | LOWER | {"defs": SUMS.format(side="rounded(x)") + ROUNDED},
    "prepared": {"optimized": "(yield lambda: 2 * x)"},
    "training": STEP | {"defs": TRAINING.format(side="optimizer.step()")},
    "search": SEARCH,
}


@pytest.fixture
def cases(page, pytester, read_junit, module_cache):
    """Return the results of the one run, by page."""
    if not module_cache:
        for name, (parts, _) in {**REFUSED, **WRONG}.items():
            page(name=f"{name}_test.py", **parts)
        for name, parts in RIGHT.items():
            page(name=f"{name}_test.py", **parts)
        module_cache["run"] = pytester.runpytest_subprocess("--aisp-check", "--junitxml=junit.xml")
        module_cache.update(read_junit(pytester.path / "junit.xml"))
    return module_cache


def assert_line(case, line):
    pytest.LineMatcher(case.failure.splitlines()).fnmatch_lines([line])


@pytest.mark.parametrize("name", REFUSED)
def test_a_page_that_breaks_a_rule_is_refused(cases, name):
    assert_line(cases[name], REFUSED[name][1])
    assert cases[name].verdict == "fail"


@pytest.mark.parametrize("name", WRONG)
def test_the_message_names_the_wrong_side_and_its_size(cases, name):
    assert_line(cases[name], f"E       AssertionError: doubled {WRONG[name][1]}")
    assert cases[name].verdict == "wrong"


@pytest.mark.parametrize("name", RIGHT)
def test_a_side_that_keeps_the_rules_passes(cases, name):
    assert cases[name] == ("checked", "")


def test_a_failure_shows_the_line_of_the_page(cases):
    line = ">       pair.assert_equivalent()"
    assert line in cases["raising"].failure.splitlines()


def test_an_exception_shows_the_line_of_the_side(cases):
    pytest.LineMatcher(cases["raising"].failure.splitlines()).fnmatch_lines(
        ['E         File "*ch99/raising_test.py", line *, in doubled', "E           return 1 / 0"]
    )


@pytest.mark.parametrize("name", [*REFUSED, *WRONG])
def test_a_failure_shows_no_line_of_the_plugin(cases, name):
    failure = cases[name].failure
    assert "pytest_aisp/" not in failure
    assert "site-packages" not in failure
    assert "contextlib" not in failure


def test_the_short_summary_has_verdict_and_id_of_red_cases(cases):
    case = "ch99/{}_test.py::test_doubling[[]doubled-n1001[]]*"
    lines = [f"FAILED {case.format('view')}", f"WRONG {case.format('zeros')}"]
    cases["run"].stdout.fnmatch_lines(lines)


@pytest.mark.parametrize("name", ["raising", "zeros", "loose", "searched"])
def test_a_failure_ends_with_the_command_that_reproduces_it(cases, name):
    *words, seed = cases[name].failure.split("reproduce:")[1].splitlines()[1].split()
    case = f"'ch99/{name}_test.py::test_doubling[doubled-n1001]'"
    assert words == ["E", "pytest", case, "--aisp-check"]
    assert seed.startswith("--aisp-seed=")


def test_tensors_of_an_optimizer_are_named_by_their_parameter():
    """Moments of different parameters must not be compared."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([first, second])
    second.grad = torch.ones(2)
    optimizer.step()
    assert list(pytree.state_tensors(optimizer)) == [
        "state[1].step",
        "state[1].exp_avg",
        "state[1].exp_avg_sq",
    ]
    first.grad = torch.ones(2)
    optimizer.step()
    assert [name for name in pytree.state_tensors(optimizer) if "avg_sq" in name] == [
        "state[0].exp_avg_sq",
        "state[1].exp_avg_sq",
    ]
