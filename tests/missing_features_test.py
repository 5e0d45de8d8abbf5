"""Pages on machines that lack something: a skip by name, or an error that says what to change."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def load(monkeypatch):
    """Import a page of the suites. The test has patched the machine's features before."""
    monkeypatch.syspath_prepend(str(ROOT))
    loaded = []

    def loads(name):
        loaded.append(f"suites.{name}")
        sys.modules.pop(loaded[-1], None)
        return importlib.import_module(loaded[-1])

    yield loads
    for name in loaded:
        sys.modules.pop(name, None)


def refuse(code):
    def refused(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return refused


def test_a_full_folder_is_named_with_what_to_change(load, monkeypatch):
    files = load("ch05.unnamed_files")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=999))
    with pytest.raises(
        OSError, match=r"^\[Errno 28\] cannot write 1,000 bytes to /\S+: No space"
    ) as e:
        files.new_file(1000)
    assert str(e.value).endswith("Set TMPDIR to a folder that can be written and has room")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_named_with_what_to_change(load, monkeypatch, code):
    files = load("ch05.unnamed_files")
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse(code))
    words = rf"cannot write 4 bytes to /\S+: {os.strerror(code)}. Set TMPDIR to a folder that can"
    with pytest.raises(OSError, match=words) as e:
        files.unnamed(b"four")
    assert e.value.errno == code


def test_a_missing_folder_is_named_and_no_other_is_used(load, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nosuch"))
    files = load("ch05.unnamed_files")
    with pytest.raises(OSError, match=r"/nosuch: No such file or directory. Set TMPDIR"):
        files.new_file(1)


def test_a_disk_that_fills_up_leaves_no_file(load, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    files = load("ch05.unnamed_files")
    plain = tempfile.TemporaryFile

    def full(**options):
        file = plain(**options)
        return SimpleNamespace(file=file, write=refuse(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="No space left on device"):
        files.unnamed(b"four")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_skips_the_page(load, monkeypatch):
    page = load("ch05.direct_io_test")
    plain, asked = os.open, []

    def without(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            asked.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *arguments, **options)

    def from_a_disk(*arguments):
        raise BlockingIOError

    monkeypatch.setattr(os, "open", without)
    monkeypatch.setattr(os, "preadv", from_a_disk)  # nothing is in the page cache
    assert page.on_a_disk() is False
    assert len(asked) == 1
    assert page.NEEDS_DISK.startswith("needs a folder on a disk, with O_DIRECT")
    [skip] = skips(page.test_direct_io)
    assert (skip.args, skip.kwargs["reason"]) == (("not on_a_disk()",), page.NEEDS_DISK)


def test_a_folder_in_memory_skips_direct_io(load, monkeypatch):
    page = load("ch05.direct_io_test")
    monkeypatch.setattr(os, "preadv", lambda *arguments: page.PAGE)  # read without waiting
    assert page.on_a_disk() is False
    monkeypatch.setattr(os, "preadv", refuse(errno.EOPNOTSUPP))
    assert page.on_a_disk() is False


def skips(test):
    """Return the test's `skipif` marks."""
    return [mark for mark in test.pytestmark if mark.name == "skipif"]


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_a_kernel_without_huge_pages_skips_the_advice_by_name(load, monkeypatch, setting):
    plain = Path.read_text

    def read(path, *arguments, **options):
        if "transparent_hugepage" not in str(path):
            return plain(path, *arguments, **options)
        if setting is None:
            raise FileNotFoundError(path)
        return setting

    monkeypatch.setattr(Path, "read_text", read)
    page = load("ch03.huge_pages_test")
    [skip], reason = page.ADVISABLE.args, page.ADVISABLE.kwargs["reason"]
    assert skip is True
    name = "never" if setting else "missing"
    assert reason.startswith(f"transparent huge pages are '{name}' here")
    assert "echo madvise > /sys/kernel/mm" in reason


def test_one_numa_node_skips_the_page_by_name(load, monkeypatch, tmp_path):
    page = load("ch02.numa_test")
    plain = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or plain(path))
    monkeypatch.setattr(page, "SYSTEM", tmp_path)
    for name in ("has_cpu", "has_memory"):
        (tmp_path / name).write_text("0\n")
    assert page.why_not() == "needs two NUMA nodes; this process may use 1"
    (tmp_path / "has_cpu").unlink()
    assert page.why_not() == "needs two NUMA nodes; this process may use 0"


def test_memory_that_cannot_be_bound_skips_numa_by_name(load, monkeypatch):
    page = load("ch02.numa_test")
    plain = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or plain(path))
    monkeypatch.setattr(page, "host_nodes", lambda: {0, 1})
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([Path("gpu")]))
    monkeypatch.setattr(
        Path, "read_text", lambda path: "0x10de\n" if path.name == "vendor" else "0\n"
    )
    monkeypatch.setattr(page, "bind", refuse(errno.EPERM))
    assert page.why_not() == (
        "cannot bind memory to a node ([Errno 1] Operation not permitted);"
        " in Docker, add --cap-add=SYS_NICE"
    )


def test_one_core_still_has_a_team_of_one_thread(load, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    page = load("ch03.affinity_test")
    assert (page.CORES, page.TEAM) == (1, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("name", "package", "mark_of"),
    [
        ("ch05.load_checkpoint_test", "safetensors", lambda page: page.INSTALLED),
        ("ch05.jpeg_decode_test", "torchvision", lambda page: skips(page.test_jpeg_decode)[0]),
    ],
)
def test_a_missing_package_skips_its_variants_by_name(load, monkeypatch, name, package, mark_of):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *more: None if n == package else plain(n, *more)
    )
    skip = mark_of(load(name))
    assert skip.args == (True,)
    assert skip.kwargs["reason"] == f"needs {package}: pip install {package}"


def mark_of(test, name):
    """Return the only mark of the variant `name`."""
    [pair] = [mark.kwargs["pair"] for mark in test.pytestmark if mark.name == "aisp_pair"]
    [mark] = next(variant.marks for variant in pair.variants if variant.name == name)
    return mark


@pytest.mark.parametrize(
    ("page", "name", "oldest", "reason"),
    [
        ("while_loop", "while_node", 12040, "conditional nodes need a driver for CUDA 12.4"),
        ("branch", "conditional", 12080, "an else branch needs a driver for CUDA 12.8"),
    ],
)
@pytest.mark.parametrize("newer", [-1, 0])
def test_a_driver_without_conditional_nodes_skips_by_name(
    load, monkeypatch, page, name, oldest, reason, newer
):
    plain = ctypes.CDLL

    def version_into(pointer):
        pointer._obj.value = oldest + newer
        return 0

    def library(path, *arguments, **options):
        if path == "libcuda.so.1":
            return SimpleNamespace(cuDriverGetVersion=version_into)
        return plain(path, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", library)
    skip = mark_of(getattr(load(f"ch12.{page}_test"), f"test_{page}"), name)
    assert skip.args == (newer < 0,)
    assert skip.kwargs["reason"] == f"{reason} or newer"


@pytest.mark.parametrize("missing", ["cuda.pathfinder", "nvJitLink", "cudadevrt", None])
def test_a_missing_device_runtime_skips_device_launches_by_name(load, monkeypatch, missing):
    plain = importlib.import_module

    def loaded(name):
        if name == missing:
            raise RuntimeError(f"{name} was not found")

    def imported(name, *arguments):
        if name != "cuda.pathfinder":
            return plain(name, *arguments)
        if name == missing:
            raise ImportError(name)
        return SimpleNamespace(
            load_nvidia_dynamic_lib=loaded, find_static_lib=lambda name: name != missing
        )

    monkeypatch.setattr(importlib, "import_module", imported)
    skip = mark_of(load("ch12.segments_test").test_segments, "device_launches")
    assert skip.args == (missing is not None,)
    assert skip.kwargs["reason"] == (
        "needs CUDA's device runtime: pip install nvidia-nvjitlink nvidia-cuda-runtime"
    )


@pytest.mark.parametrize("status", [0, 910])
def test_a_graph_that_cannot_be_updated_is_named_with_the_reason(load, monkeypatch, status):
    page = load("ch12.new_addresses_test")
    recorder, replays = page.Recorder(lambda: None), []
    graph = SimpleNamespace(raw_cuda_graph=lambda: 2)
    recorder.first = SimpleNamespace(
        raw_cuda_graph_exec=lambda: 1, replay=lambda: replays.append(1)
    )
    monkeypatch.setattr(recorder, "record", lambda step: (graph, step()))
    name = "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"
    info = SimpleNamespace(result=SimpleNamespace(name="CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY"))
    driver = SimpleNamespace(
        CUgraph=int,
        CUgraphExec=int,
        cuGraphExecUpdate=lambda *graphs: (SimpleNamespace(value=status, name=name), info),
    )
    monkeypatch.setattr(page, "import_module", lambda name: driver)
    if status:
        with pytest.raises(RuntimeError, match=f"^cuGraphExecUpdate: {name}, CU_GRAPH_\\w+$"):
            recorder.replay_updated(lambda: "output")
        assert replays == []
    else:
        assert recorder.replay_updated(lambda: "output") == "output"
        assert replays == [1]
