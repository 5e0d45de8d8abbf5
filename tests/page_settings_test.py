"""What a page sets when it is imported applies to this page alone."""

from __future__ import annotations

import sys

import pytest

from pytest_aisp.isolation import global_state
from pytest_aisp.isolation.global_state import restore, snapshot
from pytest_aisp.results.messages import CheckTask
from pytest_aisp.worker.engine import Engine

HEADER = "import torch\nfrom exploits.common import against, honest\n"
PAGE = """

def expecting(x):
    assert torch.get_float32_matmul_precision() == {precision!r}
    return honest(x)


def expecting_too(x):
    return expecting(x)


test_page = against(expecting_too, baseline=expecting)
"""
SET = "torch.set_float32_matmul_precision('high')\n"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks a page with this text in the same process."""
    monkeypatch.setattr(global_state, "_before_imports", {})
    monkeypatch.setattr(global_state, "_changed_by_imports", {})
    before, modules, path = snapshot(), set(sys.modules), list(sys.path)
    (tmp_path / "setting.py").write_text(f"import torch\n{SET}\ndef helper():\n    pass\n")
    engine = Engine()

    def check(name, top, precision):
        page = tmp_path / f"{name}.py"
        page.write_text(HEADER + top + PAGE.format(precision=precision))
        task = {"function": "test_page", "variant": "expecting_too", "size": {"n": 33}}
        where = {"page": str(page), "root": str(tmp_path), "module": f"settings.{name}"}
        engine.check(CheckTask(at="check", device="cpu", **where, **task))

    yield check
    restore(before)
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name.startswith(("settings", "setting")):
            del sys.modules[name]


def test_a_page_does_not_change_the_settings_of_another(check):
    check("first", SET, "high")
    check("second", "", "highest")
    check("first", SET, "high")


def test_pages_that_share_a_module_share_its_settings(check):
    check("first", "from setting import helper\n", "high")
    check("second", "", "highest")
    check("third", "import setting\n", "high")
