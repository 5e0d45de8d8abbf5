"""Which modules an import loads. (`lint-imports` checks which module may import which.)"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_aisp

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "triton", "numpy", "cuda", "pynvml", "hypothesis"}
TERMINALS = {"typer", "click", "rich"}
PROFILERS = {
    "pytest_aisp.worker.nvidia_tools",
    "pytest_aisp.worker.torch_profiler",
}


def loaded(statement: str) -> set[str]:
    """Return the modules that `statement` loads in a Python that has loaded pytest."""
    before = "before = {*sys.modules}"
    code = f"import pytest, sys; {before}; {statement}; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_plugin_loads_only_its_options():
    modules = loaded("import pytest_aisp.plugin")
    ours = {name for name in modules if name.partition(".")[0] == "pytest_aisp"}
    assert ours == {
        "pytest_aisp",
        "pytest_aisp.plugin",
        "pytest_aisp.session",
        "pytest_aisp.session.options",
        "pytest_aisp.session.config",
    }
    assert {name.partition(".")[0] for name in modules - ours} <= sys.stdlib_module_names


def test_a_session_loads_profilers_only_on_request():
    modules = loaded("from pytest_aisp.session import collect, pair_fixture, recorder, startup")
    assert modules & PROFILERS == set()


def test_every_profiler_exists():
    for name in PROFILERS:
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


def test_the_command_line_loads_no_framework():
    code = "from pytest_aisp.cli import app; from pytest_aisp.distributed import nccl, topology"
    assert loaded(f"{code}; app.build()") & FRAMEWORKS == set()


@pytest.mark.parametrize("name", pytest_aisp.__all__)
def test_public_names_load_no_framework(name):
    assert loaded(f"from pytest_aisp import {name}") & (FRAMEWORKS | TERMINALS) == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pytest_aisp' has no attribute 'Benchmark'"):
        pytest_aisp.Benchmark  # noqa: B018


def test_the_architecture_document_lists_every_package_in_the_order_of_its_layer():
    text = (ROOT / "docs/architecture.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    packages = (path.parent.name for path in (ROOT / "pytest_aisp").glob("*/__init__.py"))
    assert sorted(rows) == sorted(packages)
    settings = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"^layers = \[(.*?)^\]", settings, re.MULTILINE | re.DOTALL)[1]
    order = {
        name: k for k, line in enumerate(layers.split(",")) for name in re.findall(r"\w+", line)
    }
    assert [order[row] for row in rows] == sorted(order[row] for row in rows)


def test_no_module_is_long_and_no_small_module_has_only_one_importer():
    graph = pytest.importorskip("grimp").build_graph("pytest_aisp")
    for path in (ROOT / "pytest_aisp").rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= 350, path
        if path.name != "__init__.py" and lines < 60:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            importers = graph.find_modules_that_directly_import(module)
            assert len(importers) != 1, f"merge {path} into the only module that imports it"
