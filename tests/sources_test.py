"""The digest of a side covers its source and the page code it uses, not libraries."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aisp.page import sources
from pytest_aisp.worker.loader import load_page

SIDE = """
import json

from {package} import twice

FACTOR = 2


def side(x):
    return twice(json.loads(x)) * FACTOR


def other(x):
    return x
"""


@pytest.fixture
def digest_of(tmp_path, monkeypatch):
    """Return a function that digests `side`, with `twice` defined in the module `package`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within one second

    def digest(twice="return 2 * x", package="ours", page=SIDE, constants=False):
        for name in (package, "sources_test_page"):
            sys.modules.pop(name, None)
        (tmp_path / f"{package}.py").write_text(f"def twice(x):\n    {twice}\n")
        path = tmp_path / "page.py"
        path.write_text(page.format(package=package))
        importlib.invalidate_caches()
        module = load_page(str(path), str(tmp_path), "sources_test_page")
        return sources.digest(module.side, str(tmp_path), constants=constants)

    return digest


def test_equal_sources_have_equal_digests(digest_of):
    assert digest_of() == digest_of()


def test_changed_helper_changes_the_digest(digest_of):
    assert digest_of() != digest_of("return x + x")


def test_unused_function_does_not_change_the_digest(digest_of):
    assert digest_of() == digest_of(page=SIDE.replace("return x\n", "return -x\n"))


def test_library_under_the_root_does_not_change_the_digest(digest_of, tmp_path, monkeypatch):
    installed = (f"{tmp_path / 'installed'}", *sources.libraries())
    monkeypatch.setattr(sources, "libraries", lambda: installed)
    before = digest_of(package="installed")
    assert before == digest_of("return x + x", package="installed")
    assert digest_of() != digest_of("return x + x")


@pytest.mark.parametrize("kind", ["stdlib", "purelib", "torch", "pytest_aisp"])
def test_python_installed_packages_and_this_package_are_libraries(kind):
    import pytest_aisp

    files = {
        "stdlib": sysconfig.__file__,
        "purelib": pytest.__file__,
        "torch": sys.modules["torch"].__file__,
        "pytest_aisp": pytest_aisp.__file__,
    }
    assert str(Path(files[kind])).startswith(sources.libraries())


@pytest.mark.parametrize(
    ("before", "after"),
    [("2", "3"), ("(1, 'x')", "(1, 'y')"), ("{'BLOCK': [64]}", "{'BLOCK': [128]}"), ("None", "0")],
)
def test_used_constant_changes_only_the_digest_with_constants(digest_of, before, after):
    pages = [SIDE.replace("FACTOR = 2", f"FACTOR = {value}") for value in (before, after)]
    pages = [page.replace("{'", "{{'").replace("]}", "]}}") for page in pages]
    one, other = (digest_of(page=page, constants=True) for page in pages)
    assert one != other
    assert digest_of(page=pages[0]) == digest_of(page=pages[1])


def test_unused_constant_does_not_change_the_digest(digest_of):
    more = SIDE.replace("FACTOR = 2", "FACTOR = 2\nOTHER = 3")
    assert digest_of(constants=True) == digest_of(page=more, constants=True)


def test_options_of_a_kernel_file_change_the_digest(tmp_path):
    from pytest_aisp.kernels.cuda_cpp import CudaModule

    file = tmp_path / "k.cu"
    file.write_text('extern "C" __global__ void k(float* x) {}')
    fast, plain = (CudaModule(file, {"use_fast_math": on}, {}) for on in (True, False))
    found = [sources.digest(m, str(tmp_path), constants=True) for m in (fast, plain)]
    assert found[0] != found[1]


def test_triton_config_has_the_same_text_in_every_version():
    options = {"num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}
    older = SimpleNamespace(kwargs={"BLOCK": 64}, **options)
    newer = SimpleNamespace(kwargs={"BLOCK": 64}, **options, ir_override=None)
    text = "\nBLOCK: 64, num_warps: 4, num_ctas: 1, num_stages: 3, maxnreg: None"
    assert sources._config_text(older) == sources._config_text(newer) == text
    newer.ir_override = "kernel.ttir"
    assert sources._config_text(newer) == f"{text}, ir_override: kernel.ttir"
