"""A page cannot replace a function of this package unnoticed, in any module on disk."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

import pytest_aisp
from pytest_aisp.checking import compare, numerics
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.isolation import monkeypatches
from pytest_aisp.page.pair import SideError
from pytest_aisp.util import gpu_lease
from pytest_aisp.worker import client
from pytest_aisp.worker.loader import Cache

ROOT = Path(pytest_aisp.__file__).parent
WATCHED = ("checking", "isolation", "judging", "results", "timing", "util", "worker")
MODULES = sorted(
    f"pytest_aisp.{package}.{path.stem}"
    for package in WATCHED
    for path in (ROOT / package).rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)


@pytest.fixture(autouse=True)
def remembered():
    monkeypatches.remember()
    yield
    monkeypatches.put_back()


@pytest.mark.parametrize(
    ("owner", "original"),
    [
        (Cache, Cache.reference),
        (InputPool, InputPool.value_set),
        (gpu_lease, gpu_lease.lease),
        (monkeypatches, monkeypatches.replaced),
        (client.WorkerProcess, client.WorkerProcess.ask),
    ],
)
def test_replacing_a_function_of_ours_is_refused_by_name(owner, original):
    def replacement(*args, **kwargs):
        return original(*args, **kwargs)

    name = f"{original.__module__}.{original.__qualname__}"
    with (
        pytest.raises(SideError, match=rf"^doubled replaced {re.escape(name)}; its times"),
        monkeypatches.watching("doubled"),
    ):
        setattr(owner, original.__name__, replacement)
    monkeypatches.put_back()
    assert getattr(owner, original.__name__) is original


def no_error(self):
    return 0.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: setattr(compare, "RMS", 1e30), "compare.RMS"),
        (lambda: numerics.UNIT.update(float32=1.0), "numerics.UNIT"),
        (lambda: setattr(compare.Comparison, "score", property(no_error)), "Comparison.score"),
        (lambda: setattr(compare.scatter, "__code__", no_error.__code__), "the code of"),
        (lambda: setattr(compare.compare, "__defaults__", (None,)), "the code of"),
    ],
)
def test_a_changed_constant_property_or_code_of_ours_is_refused_and_undone(change, name):
    def now():
        functions = compare.scatter.__code__, compare.compare.__defaults__
        return compare.RMS, dict(numerics.UNIT), compare.Comparison.score, functions

    before = now()
    with (
        pytest.raises(SideError, match=f"^doubled replaced .*{name}"),
        monkeypatches.watching("doubled"),
    ):
        change()
    monkeypatches.put_back()
    assert now() == before


@pytest.mark.parametrize(
    ("module", "name"),
    [(torch, "matmul"), (torch.nn.functional, "softmax"), (torch.linalg, "cholesky")],
)
def test_replacing_a_function_of_torch_is_refused_and_undone(module, name):
    original = getattr(module, name)
    message = f"^doubled replaced {module.__name__}.{name}; its times"
    with pytest.raises(SideError, match=message), monkeypatches.watching("doubled"):
        setattr(module, name, lambda *args: original(*args))
    assert getattr(module, name) is original


def test_a_library_may_replace_functions_of_torch_when_a_page_is_imported(monkeypatch):
    monkeypatch.setattr(torch, "matmul", torch.mm)
    with monkeypatches.watching("doubled"):
        pass


def test_a_side_is_not_blamed_for_what_was_replaced_before():
    torch.equal = lambda a, b: True
    with (
        pytest.raises(SideError, match=r"^torch\.equal was replaced before doubled ran; times"),
        monkeypatches.watching("doubled"),
    ):
        raise AssertionError("the side ran")


def test_what_torch_replaces_itself_is_accepted():
    with monkeypatches.watching("doubled"):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def test_a_side_that_replaces_nothing_passes():
    with monkeypatches.watching("doubled"):
        pass


def test_every_module_of_the_watched_packages_is_watched():
    assert sorted(monkeypatches.watched_modules()) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_every_function_of_a_watched_module_is_remembered(module):
    functions = {
        f"{module}.{name}"
        for name, value in vars(importlib.import_module(module)).items()
        if callable(value) and getattr(value, "__module__", None) == module
    }
    assert functions <= monkeypatches._originals.keys()


def slow_softmax(*args, **kwargs):
    return torch.nn.functional.log_softmax(*args, **kwargs).exp()


@pytest.mark.parametrize(
    ("owner", "function", "name"),
    [
        (torch.nn.functional, "softmax", "torch.nn.functional.softmax"),
        (torch, "softmax", "torch.softmax"),
        (torch.nn.Linear, "forward", "torch.nn.Linear.forward"),
    ],
)
def test_a_function_of_torch_that_the_import_of_a_page_replaced_is_refused(
    owner, function, name, monkeypatch
):
    monkeypatch.setattr(owner, function, slow_softmax)
    expected = rf"^{name} was replaced before doubled ran(.|\n)* must not replace it$"
    with pytest.raises(SideError, match=expected), monkeypatches.watching("doubled"):
        pass
    monkeypatch.undo()
    with monkeypatches.watching("doubled"):
        pass


def test_a_function_of_torch_that_a_library_replaced_is_accepted(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "softmax", functools.partial(torch.softmax))
    with monkeypatches.watching("doubled"):
        pass
    monkeypatch.setattr(torch.nn.functional, "softmax", re.escape)  # its code is in a library
    with monkeypatches.watching("doubled"):
        pass


def test_a_page_may_add_a_function_to_torch(monkeypatch):
    monkeypatch.setattr(torch, "slow_softmax", slow_softmax, raising=False)
    with monkeypatches.watching("doubled"):
        pass


def test_a_page_that_replaces_a_function_of_torch_at_its_import_fails_alone(
    page, gpu, pytester, read_junit
):
    gpu(added=2e-5, doubled=1e-5)
    defs = """
        original = torch.mul

        def slow(*args, **kwargs):
            return original(*args, **kwargs)

        torch.mul = slow
    """
    page(defs=defs)
    page(name="other_test.py")
    result = pytester.runpytest_subprocess("--junitxml=junit.xml")
    assert result.ret == 1
    cases = read_junit(pytester.path / "junit.xml")
    assert "torch.mul was replaced before added ran" in cases["doubling"].failure
    assert cases["other"].verdict == "new"
