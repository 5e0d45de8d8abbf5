"""A page cannot replace a function of this package unnoticed, in any module on disk."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import pytest_aisp
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.isolation import monkeypatches
from pytest_aisp.page.pair import SideError
from pytest_aisp.util import gpu_lease
from pytest_aisp.worker.loader import Cache

ROOT = Path(pytest_aisp.__file__).parent
WATCHED = ("checking", "isolation", "results", "timing", "util", "worker")
MODULES = sorted(
    f"pytest_aisp.{package}.{path.stem}"
    for package in WATCHED
    for path in (ROOT / package).rglob("*.py")
    if path.stem not in ("__init__", "__main__")
    and (package, path.stem) != ("worker", "client")  # runs in pytest's process, beside no side
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
