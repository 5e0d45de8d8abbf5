"""If a side's compiled kernels are unchanged, it is not timed against its old version."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import two_versions
from msgspec.structs import replace

from pytest_aisp.kernels import sass
from pytest_aisp.kernels.machine_code import MOST_LINES
from pytest_aisp.results import run_reader, store
from pytest_aisp.results.messages import Reply
from pytest_aisp.results.models import Stored
from pytest_aisp.session import code_gate

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings", reason="needs NVRTC: pip install cuda-core cuda-bindings")

DEFS = """
from pytest_aisp import Conditions, cuda_module, fresh_process
from .helper import blocks

kernels = cuda_module("scale.cu"{options})
{defs}

{decorator}
def added(x):
    return x if x.is_cuda else x + x  # on a fake GPU, an addition imports torch._dynamo for 1 s


{decorator}
def doubled(x):
    if not x.is_cuda:
        return 2 * x
    out = torch.empty_like(x)
    half = torch.empty_like(x)
    {body}
    return out
"""
CUDA = """
#include "factor.cuh"

__constant__ float table[2] = {0.5f, 0.25f};

extern "C" __global__ void halve(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * table[i & 1];
}

extern "C" __global__ void scale(const float* x, float* out, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) out[i] = FACTOR * tile[threadIdx.x];
}
"""
HALVE = "kernels.halve[blocks(x), 256](x, half, x.numel())"
SCALE = "kernels.scale[blocks(x), 256](half, out, x.numel())"
FILES = {
    "scale.cu": CUDA,
    "factor.cuh": "#define FACTOR 4.0f\n",
    "helper.py": "def blocks(x):\n    return -(-x.numel() // 256)\n",
}
PARTS = {"body": f"{HALVE}\n    {SCALE}", "options": "", "defs": "", "decorator": ""}
VERSIONS = Path(__file__).parent / "data" / "triton_versions.py"


@pytest.fixture
def write_page(page):
    """Write a page whose variant launches kernels, with its other files; return its path."""

    def write(files=FILES, **parts):
        defs = DEFS.format(**{name: parts.pop(name, part) for name, part in PARTS.items()})
        path = page(defs=defs, **parts)
        two_versions.write_files(path.parent, files)
        return path

    return write


@pytest.fixture
def why_timed(write_page, tmp_path, fresh_imports):
    """Write a page and a changed version of it; return why each changed side must be timed.

    The text is empty for a side that launches the same code, and None if more than kernels differ.
    With `sass`, return the difference of the variant's SASS instead.
    """

    def run(old="", new="", *, files=FILES, changed=None, sass=False, **parts):
        path = write_page(files, **parts)
        both = {f"ch99/{name}": text for name, text in files.items()}
        both["ch99/doubling_test.py"] = path.read_text()
        then = two_versions.write_files(tmp_path / "then", both)
        both |= {f"ch99/{name}": text for name, text in (changed or {}).items()}
        if old:
            [file] = [name for name, text in both.items() if old in text]
            both[file] = both[file].replace(old, new)
        now = two_versions.write_files(tmp_path / "now", both)
        sys.path.insert(0, now)
        fields = {"size": {"n": 4096}, "arch": "sm90", "sass": "optimized" if sass else ""}
        result = two_versions.compare_versions(then, now, "ch99/doubling_test.py", **fields)
        if sass:
            return result.sass
        assert list(result.why_timed) == result.kernels_alone
        return {role: result.why_timed.get(role) for role in result.roles()}

    return run


UNCHANGED = {"baseline": "", "optimized": ""}


def test_another_version_of_the_plugin_is_no_change(why_timed):
    """As in a clone of this repository: both versions of a side run with the current plugin."""
    plugin = "../pytest_aisp/__init__.py"
    files = {**FILES, plugin: "OLD = 1\n"}
    assert why_timed(files=files, changed={plugin: "NEW = 1\n"}) == {}


def test_a_comment_is_no_change(why_timed):
    assert why_timed("if (i < n) out[i] = F", "// the last block\nif (i < n) out[i] = F") == {}


@pytest.mark.parametrize("options", [', options={"lineinfo": True}'])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "const int i = blockIdx.x * blockDim.x + threadIdx.x;\n  tile",
            "int row = blockIdx.x * blockDim.x + threadIdx.x, i = row;\n  tile",
        ),
        ("tile", "cached"),
        ("table", "weights"),
        ("FACTOR 4.0f", "FACTOR (8.0f / 2)"),
        ("__shared__ float tile[256];\n", "\n\n__shared__ float tile[512 / 2];\n"),
    ],
    ids=["a local variable", "a shared array", "a constant's name", "a header", "lines"],
)
def test_equal_machine_code_is_unchanged(why_timed, old, new, options):
    assert why_timed(old, new, options=options) == UNCHANGED


BIAS = "__device__ float bias[2] = {1.0f, 2.0f};\n"
CODE = "the machine code of scale.cu differs"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR 4.0f", "FACTOR 5.0f"),
        ("0.25f", "0.125f"),
        ("{1.0f, 2.0f}", "{1.0f, 3.0f}"),
        ("void scale", "void __launch_bounds__(256) scale"),
        ("tile[256]", "tile[300]"),
        ("scale(const float* x, float* out", "scale(float* out, const float* x"),
    ],
    ids=["instructions", "constants", "globals", "launch bounds", "shared memory", "parameters"],
)
def test_other_machine_code_is_timed(why_timed, old, new):
    cuda = CUDA.replace("out[i] = x[i] *", "out[i] = bias[i & 1] + x[i] *")
    files = {**FILES, "scale.cu": BIAS + cuda}
    assert why_timed(old, new, files=files) == {"baseline": "", "optimized": CODE}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kernels.scale[blocks(x), 256]", "kernels.scale[blocks(x) + 1, 256]"),
        ("kernels.scale[blocks(x), 256]", "kernels.scale[blocks(x), 256, 1024]"),
        ("kernels.scale[blocks(x), 256]", "kernels.scale.launch(blocks(x), 256, cluster=2)"),
        (f"{HALVE}\n    {SCALE}", f"{SCALE}\n    {HALVE}"),
        ("    return out\n", "    torch.mul(out, 1.0)\n    return out\n"),
        ("return -(-x.numel() // 256)", "return (x.numel() + 255) // 256"),
        ('scale.cu"', "scale.cu\", options={'use_fast_math': True}"),
        ("kernels = cuda", "torch.set_num_threads(2)\nkernels = cuda"),
    ],
    ids=[
        *("the grid", "shared memory", "a cluster", "the order", "another operator", "a helper"),
        *("options", "the page's other code"),
    ],
)
def test_other_host_code_is_timed(why_timed, old, new):
    found = why_timed(old, new)
    assert "optimized" in found
    assert set(found.values()) == {None}


READ = """import re
    from pathlib import Path

    text = (Path(__file__).parent / "scale.cu").read_text()
    for name in re.search(r"ORDER (.*)", text)[1].split():
        block = int(re.search(r"BLOCK (.*)", text)[1])
        getattr(kernels, name)[blocks(x), block](x, out, x.numel())"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("BLOCK 256", "BLOCK 128", "1 of its launches, halve, has other arguments or geometry"),
        ("halve scale", "scale halve", "1 of its launches is scale instead of halve"),
        ("halve scale", "halve", "2 of its launches is halve instead of scale"),
    ],
    ids=["geometry", "order", "number"],
)
def test_launches_that_depend_on_the_kernel_file_are_compared(why_timed, old, new, why):
    cuda = CUDA + "\n#define UNUSED 1\n// BLOCK 256\n// ORDER halve scale\n"
    changed = {"scale.cu": cuda.replace(old, new).replace("UNUSED", "OTHER")}
    found = why_timed(files={**FILES, "scale.cu": cuda}, body=READ, changed=changed)
    assert found == {"baseline": "", "optimized": f"number {why}"}


def test_the_sass_of_both_versions_is_compared(why_timed):
    lines = why_timed("FACTOR 4.0f", "FACTOR 5.0f", sass=True)
    assert lines[:2] == ["--- a/scale", "+++ b/scale"]
    assert [line[0] for line in lines].count("+") == 2  # and the name of the file
    assert any(re.match(r"-    FMUL \w+, \w+, 4 *$", line) for line in lines)


def test_new_names_and_lines_do_not_change_the_sass(why_timed):
    lines = why_timed("tile", "cached", options=', options={"lineinfo": True}', sass=True)
    assert lines == ["the same in both versions"]


def test_a_kernel_that_is_not_launched_any_more_is_in_the_difference(why_timed):
    lines = why_timed(HALVE, "pass", sass=True)
    assert lines[:2] == ["--- a/halve", "+++ b/halve"]
    assert {line[0] for line in lines[3:]} == {"-"}


def test_a_long_difference_of_the_sass_is_cut(why_timed):
    lines = why_timed("FACTOR * t", "sinf(tile[0]) * cosf(tile[1]) * FACTOR * t", sass=True)
    assert len(lines) == MOST_LINES + 1
    assert re.fullmatch(r"\.\.\. and \d+ more lines", lines[-1])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("pass", "the side launches no kernel of CUDA C++ or Triton"),
        ("out[0].item()", "on a fake GPU it raises RuntimeError"),
    ],
)
def test_the_sass_of_unknown_launches_is_not_known(why_timed, body, why):
    assert why_timed(body=body, sass=True) == [f"not known: {why}"]


def test_without_a_disassembler_the_sass_is_not_known(why_timed, monkeypatch):
    monkeypatch.setattr(sass, "disassemblers", tuple)
    why = "not known: nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
    assert why_timed("0.25f", "0.75f", options=", options={}", sass=True) == [why]


RENAMED = "tile", "cached"
SEVERAL = "it runs in several processes"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"{SCALE}\n    out.mul_(1.0)", "it calls aten::mul_, whose kernels are not seen"),
        (f"{SCALE}\n    out[0].item()", "on a fake GPU it raises RuntimeError"),
    ],
    ids=["a library", "an error"],
)
def test_a_side_whose_launches_are_not_known_is_timed(why_timed, body, why):
    found = why_timed(*RENAMED, body=body)
    assert found["optimized"] == why


def test_a_grid_that_depends_on_the_gpu_is_unchanged(why_timed):
    """The host's code is unchanged, so on each GPU the grid is unchanged."""
    count = "torch.cuda.get_device_properties(x.device).multi_processor_count"
    body = f"kernels.scale[{count}, 256](x, out, x.numel())"
    assert why_timed(*RENAMED, body=body) == UNCHANGED


def test_a_kernel_file_that_cannot_be_compiled_is_timed(why_timed):
    found = why_timed("FACTOR *", "MISSING *")
    assert found == {"baseline": "", "optimized": "scale.cu cannot be compiled"}


def test_a_side_on_several_gpus_is_timed(why_timed):
    more = "conditions=Conditions(gpus=2)"
    assert why_timed(*RENAMED, more=more)["optimized"] == SEVERAL


def test_a_side_in_fresh_processes_is_timed(why_timed):
    found = why_timed(*RENAMED, decorator="@fresh_process", bound='"host"')
    assert found["optimized"] == SEVERAL


def test_a_side_that_may_launch_a_kernel_by_its_name_is_timed(why_timed):
    """Another page's GPU may get another kernel of the table, which is not launched here."""
    defs = """others = cuda_module("other.cu")
TABLE = {"scale": others.scale}

def other(x):
    return others.scale[blocks(x), 256](x, x, x.numel())
"""
    body = "name = 'scale' if torch.cuda.is_available() else 'scale'\n"
    body += "    TABLE[name][blocks(x), 256](x, out, x.numel())"
    files = {**FILES, "other.cu": CUDA}
    changed = {"other.cu": CUDA.replace(*RENAMED)}
    given = {"body": body, "defs": defs, "files": files, "variants": "[doubled, other]"}
    found = why_timed(changed=changed, **given)
    assert found["optimized"] == "its launches may depend on torch.cuda.is_available"


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    """Why sides with changed Triton kernels must be timed, by the name of the change."""
    done = subprocess.run(
        [sys.executable, str(VERSIONS), str(tmp_path_factory.mktemp("versions"))],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "change",
    [
        *("a local variable", "a kernel on the page", "a line", "a tuned kernel"),
        "a function that a kernel calls",
    ],
)
def test_equal_machine_code_of_triton_is_unchanged(triton, change):
    assert set(triton[change].values()) == {""}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("a constant", "the machine code of doubling_kernel differs"),
        ("a configuration", None),
        ("warps", None),
        ("a parameter", None),
        ("a helper of kernels", None),
        ("an error", "doubling_kernel cannot be compiled"),
        ("a kernel that is not launched", "a kernel that it did not launch differs"),
        ("another GPU", "its launches may depend on torch.cuda.get_device_properties"),
        ("torch.compile", "its kernels may be launched by torch.compile"),
    ],
)
def test_other_code_of_triton_is_timed(triton, change, why):
    assert triton[change]["optimized"] == why


def test_the_sass_of_triton_is_compared(triton):
    same, other = (
        triton[f"the SASS after {what}"]["optimized"] for what in ("a line", "a configuration")
    )
    assert same == ["the same in both versions"]
    assert other[:2] == ["--- a/tuned_kernel (2)", "+++ b/tuned_kernel (2)"]


STORED = "baselines/simulated-gpu/ch99.json"
SAME = "unchanged, because it launches the same machine code"


@pytest.fixture
def recorded(write_page, gpu, commit, pytester, module_cache):
    """Record a page with a kernel on a simulated GPU, and commit it; return the kernel's file."""
    gpu(**SECONDS)
    path = write_page()
    commit()
    stored = pytester.path / STORED
    if "stored" not in module_cache:
        options = ("--aisp-update-expectations", "--aisp-processes=1")
        assert pytester.runpytest_subprocess(*options).ret == 0
        module_cache["stored"] = stored.read_text()
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text(module_cache["stored"])
    commit()
    return path.with_name("scale.cu")


SECONDS = {"added": 2e-5, "doubled": 1e-5, "doubled@old": 0.98e-5}


def run(pytester, *options):
    """Run pytest, and return its result and the row of the case."""
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept", "-vv", *options)
    [row] = run_reader.load(pytester.path / "kept").rows()
    return result, row


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_a_new_name_in_a_kernel_costs_nothing(recorded, pytester):
    edit(recorded, *RENAMED)
    result, row = run(pytester)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*doubled against its version in {STORED}: {SAME}"])
    assert row.against == []
    assert row.unchanged == ["baseline", "optimized"]
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "-vv")
    again.stdout.fnmatch_lines([f"*doubled against its version in the replayed run: {SAME}"])


def test_other_machine_code_is_timed_and_named(recorded, pytester):
    edit(recorded, "FACTOR * tile", "FACTOR + tile")
    result, row = run(pytester, "--aisp-against=HEAD", "-o", "aisp_confirm_budget=0")
    assert row.verdict == "inconclusive"
    why = "timed, because the machine code of scale.cu differs"
    result.stdout.fnmatch_lines([f"*doubled against its version at *: {why}"])
    result.stdout.fnmatch_lines(["inconclusive: *doubled runs at 0.9*x of its version at *"])
    assert row.unchanged == ["baseline"]


def store_other_machine_code(path, digest):
    stored = store.load(path)
    [(key, result)] = stored.results.items()
    assert list(result.machine_code) == ["optimized"]
    other = replace(result, machine_code={"optimized": digest})
    path.write_text(store.dump(Stored(stored.product, stored.environments, {key: other})))


def test_another_compiler_explains_a_loss(recorded, pytester, gpu):
    store_other_machine_code(pytester.path / STORED, "0123456789abcdef")
    gpu(**{**SECONDS, "doubled": 1.5e-5})
    for options in ("--aisp-artifacts=kept",), ("--aisp-replay=kept",):
        result = pytester.runpytest_subprocess(*options)
        assert result.ret == 0
        why = "doubled has other machine code than when stored, from the same source"
        result.stdout.fnmatch_lines([f"stale: *{why}", "stale: *: cause: environment"])


@pytest.mark.parametrize(
    ("triton", "digest", "says"),
    [
        ("3.7.0", "0123456789abcdef", True),
        ("3.7.0", None, False),  # the new compiler makes the same machine code
        (None, "0123456789abcdef", False),  # nothing is compiled if no compiler is new
    ],
)
def test_other_machine_code_of_another_compiler_is_named_without_a_loss(
    recorded, pytester, gpu, triton, digest, says
):
    if digest is not None:
        store_other_machine_code(pytester.path / STORED, digest)
    gpu(**SECONDS, environment={"triton": triton} if triton else {})
    for options in ("--aisp-artifacts=kept",), ("--aisp-replay=kept",):
        result = pytester.runpytest_subprocess(*options)
        assert result.ret == 0
        assert result.parseoutcomes() == {"passed": 1}
        remark = "doubled has other machine code than when stored, from the same source"
        assert (remark in result.stdout.str()) is says


@pytest.mark.parametrize(
    ("fault", "notes"),
    [
        (Reply(error="page", message="no page\nmore"), ["its machine code is not known: no page"]),
        (Reply(error="timeout"), ["its machine code is not known: timeout"]),
        (None, []),
    ],
)
def test_without_an_answer_of_the_compiler_a_side_is_timed(fault, notes):
    """Inside pytest, no process can compile."""
    worker = SimpleNamespace(ask=lambda *_: fault)
    settings = SimpleNamespace(in_process="" if fault else "--pdb")
    run = SimpleNamespace(replay=None, settings=settings, progress=len, worker=lambda _: worker)
    machine = SimpleNamespace(arch="sm90")
    client = SimpleNamespace(
        run=run, machine=machine, task=lambda *_, **__: None, timeout=1, notes=[]
    )
    assert code_gate._launched(client, None).why_timed == {}
    assert client.notes == notes
