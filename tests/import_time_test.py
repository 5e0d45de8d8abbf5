"""Rooms on top of each other, imports downwards only; loading the plugin loads nothing else."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_aisp"
ROOMS = (
    *("results", "pages", "common", "guard", "proof", "kernels", "bench", "ranks", "report"),
    *("loop", "tools", "commands", "session", ""),
)
"""From the ground up; the last is the package itself."""
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def room_of(module: str) -> str:
    return module.rpartition(".")[0]


def words(text: str) -> set[str]:
    return set(text.split())


PLAIN = {m for m in MODULES if room_of(m) in ("results", "report")} | words(
    "common.answers pages.declared pages.pair pages.signature pages.skus tools.curves tools.svg"
    " loop.advice loop.breakdown loop.stages loop.steps loop.stretch"
)
"""Modules of data and arithmetic."""
WITH_PYTEST = words(
    "plugin pages.marks session.fixtures session.under_test session.options session.combinations"
) | words("session.benchmarks session.catalogue session.reading session.sessions session.stash")
GLUE = {m for m in MODULES if room_of(m) in ("session", "commands", "tools", "loop", "")} | {
    "pages.marks"
}
FRAMEWORKS = {"torch", "triton", "numpy", "cuda", "pynvml", "hypothesis"}
TERMINALS = {"typer", "click", "rich"}
"""What the command line is made with: nothing below it needs them."""


class Import(NamedTuple):
    """One imported module: its full name, and whether importing its importer imports it."""

    name: str
    at_once: bool


def imports(module: str) -> set[Import]:
    """Return what a module of ours imports when it runs, names for type checkers left out."""
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    package = ".".join(filter(None, ("pytest_aisp", room_of(module))))
    return set(_imports(ast.parse(path.read_text()), package, at_once=True))


def _imports(node: ast.AST, package: str, *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (Import(name, at_once) for name in _names(child, package))
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, package, at_once=at_once and not inside)


def _names(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    if name.removeprefix("pytest_aisp").strip(".") in ROOMS:  # from ..results import store
        return [f"{name}.{alias.name}" for alias in node.names]
    return [name]


def ours(module: str, *, at_once: bool | None = None) -> set[str]:
    """Return the modules of ours that `module` imports, all or only those at (not at) once."""
    found = {i for i in imports(module) if at_once is None or i.at_once is at_once}
    names = {i.name.partition(".")[2] for i in found if i.name.startswith("pytest_aisp.")}
    return names & set(MODULES)


def roots(module: str, *, at_once: bool | None = None) -> set[str]:
    """Return the top-level names of everything that `module` imports."""
    found = {i for i in imports(module) if at_once is None or i.at_once is at_once}
    return {i.name.partition(".")[0] for i in found}


def test_every_module_is_in_a_room_and_every_room_says_what_it_is_for():
    assert {room_of(module) for module in MODULES} == set(ROOMS)
    for room in filter(None, ROOMS):
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards_only(module):
    mine = ROOMS.index(room_of(module))
    assert {name for name in ours(module) if ROOMS.index(room_of(name)) > mine} == set()


@pytest.mark.parametrize("module", sorted(PLAIN))
def test_data_imports_neither_a_framework_nor_pytest(module):
    assert roots(module) <= {*sys.stdlib_module_names, "pytest_aisp"}


@pytest.mark.parametrize("module", sorted({*MODULES} - WITH_PYTEST))
def test_core_does_not_import_pytest(module):
    assert roots(module) & {"pytest", "_pytest", "pluggy", "xdist"} == set()


@pytest.mark.parametrize("module", MODULES)
def test_frameworks_are_imported_inside_functions(module):
    assert roots(module, at_once=True) & FRAMEWORKS == set()


@pytest.mark.parametrize("module", sorted({*MODULES} - GLUE))
def test_the_machine_imports_only_the_standard_library_at_once(module):
    assert roots(module, at_once=True) <= {*sys.stdlib_module_names, "pytest_aisp"}


def test_imports_go_one_way():
    graph = {module: ours(module, at_once=True) for module in MODULES}
    assert set(TopologicalSorter(graph).static_order()) == set(MODULES)


def loaded(statement: str) -> set[str]:
    """Return the modules that a fresh Python has loaded after `statement`."""
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_loading_the_plugin_loads_nothing_else():
    modules = loaded("import pytest_aisp.plugin")
    assert {m for m in modules if m.startswith("pytest_aisp")} == {
        *("pytest_aisp", "pytest_aisp.plugin", "pytest_aisp.session"),
        *(
            f"pytest_aisp.session.{name}"
            for name in words("combinations options reading settings stash")
        ),
    }
    assert modules & (FRAMEWORKS | TERMINALS) == set()


def test_a_session_of_ours_loads_profilers_only_where_they_are_asked_for():
    code = "from pytest_aisp.session import fixtures, recorder, report, sessions"
    profilers = words("session.profiling bench.nsight bench.profiler results.profiles")
    assert loaded(code) & {f"pytest_aisp.{module}" for module in profilers} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m) != "commands"])
def test_the_command_line_alone_knows_what_it_is_made_with(module):
    assert roots(module) & TERMINALS == set()


def test_the_command_line_loads_a_framework_only_where_a_command_needs_it():
    code = "from pytest_aisp.commands import cli; from pytest_aisp.ranks import nccl_env, topology"
    assert loaded(f"{code}; cli.build()") & FRAMEWORKS == set()


@pytest.mark.parametrize(
    "name", ["compare", "Variant", "Work", "capture", "cuda_module", "bottleneck"]
)
def test_what_a_page_imports_loads_no_framework(name):
    assert loaded(f"from pytest_aisp import {name}") & FRAMEWORKS == set()


def test_an_unknown_name_is_an_attribute_error():
    import pytest_aisp

    with pytest.raises(AttributeError, match="module 'pytest_aisp' has no attribute 'Benchmark'"):
        pytest_aisp.Benchmark  # noqa: B018


def test_the_architecture_document_lists_every_package():
    text = (PACKAGE.parent / "docs/architecture.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted({room_of(module) for module in MODULES} - {""})
