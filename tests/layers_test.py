"""Three layers, imports downwards only; loading the plugin loads nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_aisp"


def words(text: str) -> set[str]:
    return set(text.split())


LAYERS = {
    "data": words(
        "answers artifacts curves messages pair remarks row signature simulated skus stats store"
        " svg tables timing verdict"
    ),
    "machine": words(
        "apart assembly bandwidth bench build check client clocks cold collectives controls cuda"
        " device engine features fits graphs host housekeeping keep kernels launches leases"
        " leftovers libraries loader manners memory nccl nccl_env nodes numerics oracle originals"
        " peaks peers processes protections quiet rank ranks repeats replay sanitizer sass search"
        " sides sources standin stopwatch switches tma topology trees trial tuner windows witness"
        " workbench"
    ),
    "glue": words(
        "__init__ canary case_client cli fixtures history judge marks options place plugin"
        " recorder report run runner sessions stash untrusted"
    ),
}
ORDER = list(LAYERS)
LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}
LEADING = words("canary case_client cli history judge place recorder report run runner untrusted")
NO_PYTEST = sorted({*LAYERS["data"], *LAYERS["machine"], *LEADING})
FRAMEWORKS = {"torch", "triton", "numpy", "cuda", "pynvml", "hypothesis"}


class Import(NamedTuple):
    """One imported module: its full name, and whether importing its importer imports it."""

    name: str
    at_once: bool


def imports(module: str) -> set[Import]:
    """Return what a module of ours imports when it runs, names for type checkers left out."""
    return set(_imports(ast.parse((PACKAGE / f"{module}.py").read_text()), at_once=True))


def _imports(node: ast.AST, *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (Import(name, at_once) for name in _names(child))
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, at_once=at_once and not inside)


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level and node.module is None:  # from . import store
        return [f"pytest_aisp.{alias.name}" for alias in node.names]
    return [f"pytest_aisp.{node.module}" if node.level else str(node.module)]


def ours(module: str, *, at_once: bool | None = None) -> set[str]:
    """Return the modules of ours that `module` imports, all or only those at (not at) once."""
    found = {i for i in imports(module) if at_once is None or i.at_once is at_once}
    return {i.name.split(".")[1] for i in found if i.name.startswith("pytest_aisp.")}


def roots(module: str, *, at_once: bool | None = None) -> set[str]:
    """Return the top-level names of everything that `module` imports."""
    found = {i for i in imports(module) if at_once is None or i.at_once is at_once}
    return {i.name.partition(".")[0] for i in found}


def test_every_module_is_in_exactly_one_layer():
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(LAYER_OF)
    assert sum(map(len, LAYERS.values())) == len(LAYER_OF)


@pytest.mark.parametrize("module", sorted(LAYER_OF))
def test_imports_go_downwards_only(module):
    mine = ORDER.index(LAYER_OF[module])
    above = {name for name in ours(module) if ORDER.index(LAYER_OF[name]) > mine}
    assert above == set()


@pytest.mark.parametrize("module", sorted(LAYERS["data"]))
def test_data_imports_neither_a_framework_nor_pytest(module):
    assert roots(module) <= {*sys.stdlib_module_names, "pytest_aisp"}


@pytest.mark.parametrize("module", NO_PYTEST)
def test_core_does_not_import_pytest(module):
    assert roots(module) & {"pytest", "_pytest", "pluggy", "xdist"} == set()


@pytest.mark.parametrize("module", sorted(LAYER_OF))
def test_frameworks_are_imported_inside_functions(module):
    assert roots(module, at_once=True) & FRAMEWORKS == set()


@pytest.mark.parametrize("module", sorted(LAYERS["machine"]))
def test_the_machine_imports_only_the_standard_library_at_once(module):
    assert roots(module, at_once=True) <= {*sys.stdlib_module_names, "pytest_aisp"}


def test_imports_go_one_way():
    graph = {module: ours(module, at_once=True) for module in LAYER_OF}
    assert set(TopologicalSorter(graph).static_order()) == set(LAYER_OF)


def loaded(statement: str) -> set[str]:
    """Return the modules that a fresh Python has loaded after `statement`."""
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_loading_the_plugin_loads_nothing_else():
    modules = loaded("import pytest_aisp.plugin")
    assert {m for m in modules if m.startswith("pytest_aisp")} == {
        *("pytest_aisp", "pytest_aisp.options", "pytest_aisp.plugin", "pytest_aisp.stash")
    }
    assert modules & FRAMEWORKS == set()


def test_the_command_line_loads_a_framework_only_where_a_command_needs_it():
    assert loaded("from pytest_aisp import cli, nccl_env, topology; cli.parser()") & FRAMEWORKS == (
        set()
    )


@pytest.mark.parametrize("name", ["compare", "Variant", "Work", "capture", "cuda_module"])
def test_what_a_page_imports_loads_no_framework(name):
    assert loaded(f"from pytest_aisp import {name}") & FRAMEWORKS == set()


def test_an_unknown_name_is_an_attribute_error():
    import pytest_aisp

    with pytest.raises(AttributeError, match="module 'pytest_aisp' has no attribute 'Benchmark'"):
        pytest_aisp.Benchmark  # noqa: B018
