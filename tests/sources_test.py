"""What a side is made of: its own source and what it uses of ours, libraries left out."""

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
    """Return the digest of `side` with `twice` as written, in `ours` or in an installed library."""
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


def test_the_same_source_has_the_same_digest(digest_of):
    assert digest_of() == digest_of()


def test_a_changed_helper_counts(digest_of):
    assert digest_of() != digest_of("return x + x")


def test_what_the_side_does_not_use_does_not_count(digest_of):
    assert digest_of() == digest_of(page=SIDE.replace("return x\n", "return -x\n"))


def test_a_library_under_the_root_does_not_count(digest_of, tmp_path, monkeypatch):
    installed = (f"{tmp_path / 'installed'}", *sources.libraries())
    monkeypatch.setattr(sources, "libraries", lambda: installed)
    before = digest_of(package="installed")
    assert before == digest_of("return x + x", package="installed")
    assert digest_of() != digest_of("return x + x")


@pytest.mark.parametrize("of", ["stdlib", "purelib", "torch", "pytest_aisp"])
def test_python_what_is_installed_and_this_package_are_libraries(of):
    import pytest_aisp

    files = {
        "stdlib": sysconfig.__file__,
        "purelib": pytest.__file__,
        "torch": sys.modules["torch"].__file__,
        "pytest_aisp": pytest_aisp.__file__,
    }
    assert str(Path(files[of])).startswith(sources.libraries())


@pytest.mark.parametrize(
    ("before", "after"),
    [("2", "3"), ("(1, 'x')", "(1, 'y')"), ("{'BLOCK': [64]}", "{'BLOCK': [128]}"), ("None", "0")],
)
def test_a_constant_that_the_code_names_counts_for_what_changed_and_not_for_what_is_stored(
    digest_of, before, after
):
    pages = [SIDE.replace("FACTOR = 2", f"FACTOR = {value}") for value in (before, after)]
    pages = [page.replace("{'", "{{'").replace("]}", "]}}") for page in pages]
    one, other = (digest_of(page=page, constants=True) for page in pages)
    assert one != other
    assert digest_of(page=pages[0]) == digest_of(page=pages[1])


def test_a_constant_that_the_code_does_not_name_does_not_count(digest_of):
    more = SIDE.replace("FACTOR = 2", "FACTOR = 2\nOTHER = 3")
    assert digest_of(constants=True) == digest_of(page=more, constants=True)


def test_the_options_of_a_kernel_file_count(tmp_path):
    from pytest_aisp.kernels.cuda_cpp import CudaModule

    file = tmp_path / "k.cu"
    file.write_text('extern "C" __global__ void k(float* x) {}')
    fast, plain = (CudaModule(file, {"use_fast_math": on}, {}) for on in (True, False))
    found = [sources.digest(m, str(tmp_path), constants=True) for m in (fast, plain)]
    assert found[0] != found[1]


def test_a_configuration_reads_alike_in_every_version_of_triton():
    said = {"num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}
    older = SimpleNamespace(kwargs={"BLOCK": 64}, **said)
    newer = SimpleNamespace(kwargs={"BLOCK": 64}, **said, ir_override=None)
    words = "\nBLOCK: 64, num_warps: 4, num_ctas: 1, num_stages: 3, maxnreg: None"
    assert sources._config(older) == sources._config(newer) == words
    newer.ir_override = "kernel.ttir"
    assert sources._config(newer) == f"{words}, ir_override: kernel.ttir"
