"""`--aisp-compile` assembles the kernels of pages and explains every failure."""

from __future__ import annotations

import dataclasses
import textwrap
import xml.etree.ElementTree as ElementTree
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor.codecache import CacheBase

from pytest_aisp import capture
from pytest_aisp.kernels import cross_compile, cuda_cpp, sass
from pytest_aisp.kernels.capture_launches import CapturedLaunch, CapturedLaunches, capture_launches
from pytest_aisp.kernels.cross_compile import AssembledKernel, Assembly, AssemblyError
from pytest_aisp.kernels.cuda_cpp import LaunchError
from pytest_aisp.page.gpu_specs import GPU_ARCHS, LIMITS
from pytest_aisp.page.pair import Pair, Variant, Work
from pytest_aisp.results import run_reader
from pytest_aisp.results.row import Row
from pytest_aisp.session import terminal

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings", reason="needs NVRTC: pip install cuda-core cuda-bindings")
pytestmark = pytest.mark.usefixtures("compiler_zygote")

DEFS = """
import triton
import triton.language as tl

from pytest_aisp import cuda_module


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def doubling_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    {kernel}
    tl.store(out + at, twice(tl.load(x + at, mask=at < n)), mask=at < n)


{defs}


def doubled(x):
    out = torch.empty_like(x)
    {side}
    return out
"""
LAUNCH = "doubling_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)"
PARTS = {"kernel": "", "defs": "", "side": LAUNCH}
CUDA = """
extern "C" __global__ void doubling(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2 * x[i];
}
"""
CUDA_LAUNCH = "kernels.doubling[4096, 256](x, out, x.numel())"
TUNED = """
@triton.autotune(
    [triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 2048}, num_warps=8)], key=["n"]
)
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)
"""
PRUNED = """
def fits(configs, named, **kwargs):
    arch = triton.runtime.driver.active.get_current_target().arch
    return [c for c in configs if arch != 121 or c.kwargs["M"] < 128]


@triton.autotune(
    [triton.Config({"M": 128}), triton.Config({"M": 64})],
    key=[],
    prune_configs_by={"early_config_prune": fits},
)
"""
BIG = """
@triton.jit
def big_kernel(a, c, M: tl.constexpr):
    i, k = tl.arange(0, M), tl.arange(0, 128)
    total = tl.zeros((M, M), tl.float32)
    for step in range(0, 1 << 20, 128):
        x = tl.load(a + i[:, None] * 128 + k[None, :] + step).to(tl.float16)
        total = tl.dot(x, tl.trans(x), total)
    tl.store(c + i[:, None] * M + i[None, :], total)
"""


@pytest.fixture
def write(page):
    """Write a page called `name` and, beside it, its CUDA C++ kernels."""

    def write(name, cuda="", **parts):
        if cuda:
            parts["defs"] = f'kernels = cuda_module("{name}.cu")'
        filled = {part: parts.pop(part, text) for part, text in PARTS.items()}
        for inside in ("side", "kernel"):
            filled[inside] = textwrap.indent(filled[inside], "    ").strip()
        path = page(name=f"{name}_test.py", defs=DEFS.format(**filled), **parts)
        if cuda:
            path.with_name(f"{name}.cu").write_text(cuda)

    return write


def also(line, launch=LAUNCH):
    """Return the lines of a side that launches the page's kernel and does something else."""
    return {"side": f"{launch}\n{line}"}


def compiled(pytester, *options):
    return pytester.runpytest_subprocess(*options, "--junitxml=junit.xml")


def test_kernels_are_assembled_in_every_launched_configuration(write, pytester):
    write("triton", at_least="1.5")
    grid = "lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)"
    write("tuned", defs=TUNED, **also(f"tuned_kernel[{grid}](x, out, x.numel())"))
    write("both", CUDA, **also(CUDA_LAUNCH))
    write("pruned", defs=PRUNED + BIG.strip(), **also("big_kernel[(1,)](x, out)"))
    result = compiled(pytester, "--aisp-compile=sm90,sm121", "--aisp-artifacts=kept", "-vv", "-rs")
    output = result.stdout.str()
    for line in (
        "COMPILED --aisp-compile=sm90,sm121",
        "sm90 doubling (block 256): ",
        "sm121 doubling_kernel (BLOCK=1024): ",
        "sm90 tuned_kernel (BLOCK=512",
        "sm121 tuned_kernel (BLOCK=2048, num_warps=8",
        "sm90 big_kernel (M=128",
        "sm121 big_kernel (M=64",
        "4 compiled",
    ):
        assert line in output
    assert "sm121 big_kernel (M=128" not in output
    assert result.ret == 0
    rows = list(run_reader.load(pytester.path / "kept").rows())
    built = [b for row in rows for check in row.checks for b in check["assembled"]]
    assert {row.verdict for row in rows} == {"compiled"}
    assert {b["arch"] for b in built} == {"sm90", "sm121"}
    launched = {(b["kernel"], *b["grid"]) for b in built}
    assert launched == {
        *(("doubling", 4096), ("doubling_kernel", 1)),
        *(("tuned_kernel", 2), ("tuned_kernel", 1), ("big_kernel", 1)),
    }
    assert all(b["registers"] > 0 for b in built)


RED = {
    "unreached": (
        {"defs": TUNED, **also("if x.numel() < 9:\n    tuned_kernel[(1,)](x, out, 1)")},
        ["tuned_kernel was not reached: no side of the page launches it"],
    ),
    "unreached_cuda": (
        {"cuda": CUDA + CUDA.replace("doubling", "spare"), **also(CUDA_LAUNCH)},
        ["unreached_cuda.cu: spare was not reached: no side of the page launches it"],
    ),
    "needs_values": (
        also(LAUNCH, "out += x.sum().item()"),
        [
            "doubled on sm90, sm121 at n=1001: it raised RuntimeError: ",
            " (on a fake GPU, where tensors have no values)",
            "doubling_kernel was not reached: no side of the page launches it (doubled: it raised",
        ],
    ),
    "needs_more_lines": (
        also(LAUNCH, 'raise RuntimeError("raised:\\nno such name")'),
        ["doubled on sm90, sm121 at n=1001: it raised RuntimeError: raised: no such name"],
    ),
    "no_such_name": (
        {"kernel": "at = at + nothing"},
        [
            "doubling_kernel (BLOCK=1024) on sm90, sm121 does not assemble: ",
            "NameError('nothing is not defined')",
        ],
    ),
    "does_not_compile": (
        {"cuda": CUDA.replace("2 * x[i]", "undeclared"), **also(CUDA_LAUNCH)},
        [
            "doubling (block 256) on sm90, sm121 does not assemble: ",
            'does_not_compile.cu(4): error: identifier "undeclared" is undefined',
        ],
    ),
    "one_arch": (
        {
            "cuda": CUDA.replace("2 *", "\n#if __CUDA_ARCH__ > 1000\nno\n#endif\n2 *"),
            **also(CUDA_LAUNCH),
        },
        [
            "doubling (block 256) on sm121 does not assemble: ",
            'error: identifier "no" is undefined',
        ],
    ),
    "too_much_shared": (
        {"cuda": CUDA, **also(CUDA_LAUNCH.replace("256", "256, 300000"))},
        [
            "doubling (block 256, 300000 B dynamic) on sm90 needs 300000 bytes of shared memory;"
            " a block has 232448 there"
        ],
    ),
    "tile_too_large": (
        {"defs": BIG, **also("big_kernel[(1,)](x, out, M=128, num_stages=3)")},
        ["bytes of shared memory; a block has 101376 there"],
    ),
    "no_tma": (
        {"variants": "[Variant(doubled, needs='tma')]"},
        [
            "doubled promises tma, but on sm90, sm121 no kernel holds UTMALDG or UTMASTG or"
            " UTMAREDG in every configuration; it launches doubling_kernel"
        ],
    ),
    "not_promised": (
        {"cuda": CUDA, **also(CUDA_LAUNCH), "variants": "[Variant(doubled, sass='ATOMG')]"},
        ["doubled promises ATOMG, but on sm90, sm121 no kernel holds ATOMG in every configuration"],
    ),
    "nothing": (
        {"side": f"if x.numel() < 0:\n    {LAUNCH}"},
        ["doubling_kernel was not reached: no side of the page launches it"],
    ),
    "bad_grid": (
        {"side": "doubling_kernel[(1, 1 << 17)](x, out, x.numel(), BLOCK=1024)"},
        ["doubling_kernel (BLOCK=1024) on sm90, sm121 has a grid of (1, 131072); legal are 1 to"],
    ),
    "bad_argument": (
        {"cuda": CUDA, **also(CUDA_LAUNCH.replace("(x,", "(x.double(),"))},
        ["LaunchError: doubling: parameter 'x' was given a float64 tensor of shape"],
    ),
}


@pytest.fixture
def red(write, pytester, read_junit, module_cache):
    """The result of each page that must fail, all from one run."""
    if not module_cache:
        for name, (parts, _) in RED.items():
            write(name, **parts)
        module_cache["result"] = compiled(pytester, "--aisp-compile=sm90,sm121")
        module_cache["outcomes"] = read_junit(pytester.path / "junit.xml")
    return module_cache["outcomes"]


@pytest.mark.parametrize("name", RED)
def test_assembly_failures_are_explained(red, name):
    assert red[name].verdict == "fail"
    for message in RED[name][1]:
        assert message in red[name].failure


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("does_not_compile", 'error: identifier "undeclared" is undefined'),
        ("no_such_name", "NameError("),
        ("no_tma", "doubled promises tma"),
        ("needs_values", "doubled on "),
    ],
)
def test_a_fault_on_several_archs_is_reported_once(red, name, message):
    assert red[name].failure.count(message) == 1


def test_a_fault_names_only_the_archs_that_have_it(red):
    assert "on sm121 does not assemble: " in red["one_arch"].failure
    for name in ("one_arch", "tile_too_large"):
        assert "sm90" not in red[name].failure.split("reproduce:")[0]
    for arch, most in (("sm90", 232448), ("sm121", 101376)):
        line = f" on {arch} needs 300000 bytes of shared memory; a block has {most} there"
        assert line in red["too_much_shared"].failure


TWO_CUDA = CUDA + CUDA.replace("doubling", "other")
OTHER = """
kernels = cuda_module("{name}.cu")


def other(x):
    out = torch.empty_like(x)
    {launch}
    return out
"""
OTHER_LAUNCH = "kernels.other[4096, 256](x, out, x.numel())"
BAD_SIBLINGS = {
    "sibling_argument": (
        TWO_CUDA,
        OTHER_LAUNCH.replace("x.numel()", "'many'"),
        "LaunchError: other: parameter 'n' was given 'many' (str)",
    ),
    "sibling_name": (
        TWO_CUDA,
        OTHER_LAUNCH.replace("other", "otter"),
        "has no kernel 'otter'; it has doubling, other",
    ),
    "sibling_does_not_compile": (
        CUDA + CUDA.replace("doubling", "other").replace("2 * x[i]", "undeclared"),
        OTHER_LAUNCH,
        'sibling_does_not_compile.cu(9): error: identifier "undeclared" is undefined',
    ),
    "sibling_parameter": (
        CUDA
        + CUDA.replace("doubling", "other").replace("int n", "float4 n").replace("< n", "< n.x"),
        OTHER_LAUNCH,
        "`float4 n` needs a type that can be passed",
    ),
}


def test_a_bad_launch_fails_only_its_own_variant(write, pytester):
    for name, (cuda, launch, _) in BAD_SIBLINGS.items():
        write(name, cuda, side=CUDA_LAUNCH, variants="[doubled, other]", kernel="")
        path = pytester.path / "ch99" / f"{name}_test.py"
        defs = OTHER.format(name=name, launch=launch)
        text = path.read_text().replace(f'kernels = cuda_module("{name}.cu")', defs)
        kernel = text[text.index("@triton.jit") : text.index("kernels = ")]
        path.write_text(text.replace(kernel, ""))
    result = compiled(pytester, "--aisp-compile=sm90", "-rf")
    cases = ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    failures = {
        case.attrib["classname"].rpartition(".")[2].removesuffix("_test")
        + case.attrib["name"].removeprefix("test_doubling"): failure
        for case in cases
        for failure in [None if case.find("failure") is None else case.find("failure").text]
    }
    assert len(failures) == 2 * len(BAD_SIBLINGS)
    for name, (_, _, message) in BAD_SIBLINGS.items():
        assert failures[f"{name}[doubled-n1001]"] is None
        assert message in failures[f"{name}[other-n1001]"]
    result.stdout.fnmatch_lines(["*4 failed, 4 compiled*"])


def test_a_side_may_launch_the_page_s_kernel_only_at_other_sizes(write, pytester):
    small = f"if x.numel() > 999:\n    return x + x\nout = x.clone()\n{LAUNCH}\nreturn out"
    defs = f"def small(x):\n{textwrap.indent(small, '    ')}"
    write("large", defs=defs, variants="[doubled, small]")
    result = compiled(pytester, "--aisp-compile=sm100", "-vv", "ch99")
    result.stdout.fnmatch_lines(["*2 compiled*"])
    assert result.stdout.str().count("neither side launches a kernel of the page") == 1


def test_cases_without_kernels_are_skipped_with_a_reason(page, write, pytester):
    page(more="cpu_sizes=[{'n': 99}],")
    write("hopper", more="conditions=Conditions(needs='wgmma'), cpu_sizes=[{'n': 99}],")
    result = compiled(pytester, "-rs", "--aisp-compile=sm100", "ch99")
    for why in (
        "launches no kernel of the page: nothing to assemble",
        "a size for CPUs: no kernel is launched",
        "needs wgmma (sm90); asked for sm100",
    ):
        assert why in result.stdout.str()
    assert "4 skipped" in result.stdout.str()


def test_the_option_without_a_value_means_every_arch(write, pytester):
    write("triton")
    result = compiled(pytester, "-n0", "--aisp-compile", "ch99/triton_test.py")
    result.stdout.fnmatch_lines(
        ["not timed: --aisp-compile=sm90,sm100,sm103,sm121", "*1 compiled*"]
    )
    assert compiled(pytester, "-n2", "--aisp-compile", "ch99").ret == 0


@pytest.mark.parametrize(("mode", "failed"), [(["--aisp-check"], 0), ([], 1)])
def test_a_check_assembles_for_the_first_arch_alone(write, pytester, mode, failed):
    later = CUDA.replace("2 *", "\n#if __CUDA_ARCH__ > 900\nno\n#endif\n2 *")
    write("later", cuda=later, **also(CUDA_LAUNCH))
    result = pytester.runpytest_subprocess("-q", *mode, "ch99/later_test.py")
    result.stdout.fnmatch_lines([f"*{'1 failed' if failed else '1 compiled'}*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--aisp-compile=sm90,sm99"],
            "=sm90,sm99: unknown arch 'sm99'; legal: sm90, sm100, sm103, sm121, or all",
        ),
        (["--aisp-compile=h200"], "    pytest --aisp-compile=sm90,sm100"),
        (
            ["--aisp-compile", "--aisp-check"],
            "--aisp-check cannot be combined with --aisp-compile: choose one mode",
        ),
        (
            ["--aisp-compile", "--aisp-untrusted"],
            "--aisp-untrusted cannot be combined with --aisp-compile: it runs nothing",
        ),
        (
            ["--aisp-compile", "--aisp-audit"],
            "--aisp-audit cannot be combined with --aisp-compile: it runs nothing, so",
        ),
        (
            ["--aisp-compile", "--aisp-against=HEAD"],
            "--aisp-against cannot be combined with --aisp-compile: it runs nothing, so",
        ),
    ],
)
def test_invalid_options_are_usage_errors(page, pytester, lines, options, message):
    page()
    result = pytester.runpytest_subprocess(*options)
    assert message in lines(result)
    assert result.ret == 4


# Units.


def test_nothing_is_assembled_under_the_interpreter(monkeypatch):
    monkeypatch.setattr(cross_compile, "interpreting", lambda: True)
    with pytest.raises(AssemblyError, match=r"nothing can be assembled\nUnset TRITON_INTERPRET"):
        assembly_of().run(["sm90"])


def test_no_more_sides_run_once_all_kernels_of_the_page_are_launched(monkeypatch):
    assembly, ran = assembly_of(), []
    pair = assembly.pair
    kernel, launched = pair.baseline, CapturedLaunches()
    launched.arguments.add(kernel)

    def capture(pair, side, *args, assemble):
        ran.append(side)
        return launched

    monkeypatch.setattr(cross_compile, "capture_launches", capture)
    monkeypatch.setattr(cross_compile, "_latest", None)
    cross_compile._launches_of_page([pair], {kernel, len})
    assert len(ran) > 1
    ran.clear()
    monkeypatch.setattr(cross_compile, "_latest", None)
    assert cross_compile._launches_of_page([pair], {kernel})[0] == {kernel}
    assert len(ran) == 1


def test_promises_are_unchecked_without_a_disassembler(monkeypatch):
    monkeypatch.setattr(sass, "disassemblers", tuple)
    assembly = assembly_of(needs="tma")
    for arch in ("sm90", "sm100"):
        assembly.assembled.append(AssembledKernel(arch, "other", launch(), 16, 0, 0, 0, b""))
        assembly._check_promises(arch)
    assert assembly.notes == [
        "NOT CHECKED: tma: nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
    ]
    assert not assembly.faults


def test_promises_are_unchecked_with_an_old_disassembler(tmp_path, monkeypatch):
    old = tmp_path / "nvdisasm"
    old.write_text("#!/bin/sh\necho \"Cannot decode architecture 'SM103'\" >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setattr(sass, "disassemblers", lambda: (str(old),))
    assembly = assembly_of(needs="tma")
    assembly.assembled.append(AssembledKernel("sm103", "other", launch(), 16, 0, 0, 0, b"newer"))
    assembly._check_promises("sm103")
    assert assembly.notes == [
        f"NOT CHECKED: tma: {old} cannot read it: Cannot decode architecture 'SM103':"
        " pip install -U nvidia-cuda-nvdisasm"
    ]
    assert not assembly.faults


def test_unchecked_promises_are_shown_without_v():
    why = "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
    notes = [f"NOT CHECKED: {promise}: {why}" for promise in ("tma", "LDG.128")]
    notes += ["NOT CHECKED: tma: it knows no SM103: too old", "other"]
    row = Row("id", "f", "k", "p", "t", "v", {}, "dram", verdict="compiled", notes=notes)
    assert terminal._unchecked_promises([row, row]) == [
        "NOT CHECKED: tma: it knows no SM103: too old",
        f"NOT CHECKED: LDG.128, tma: {why}",
    ]


def test_a_page_without_launches_fails(monkeypatch):
    monkeypatch.setattr(cross_compile, "interpreting", lambda: False)
    with pytest.raises(AssemblyError, match="no kernel was launched, so nothing was assembled"):
        assembly_of().run([])


kernels = cuda_cpp.cuda_module("data/build.cu")


def side(x):
    return x


def other(x):
    return x


def rows(x):
    out = torch.empty(x.shape[0], device=x.device)
    kernels.rows[x.shape[0], 256, 4 * x.shape[1]](x, out, x.shape[1])
    return out


def prepared(x):
    yield capture(lambda: rows(x))


def yields_nothing(x):
    yield rows(x)


def misaligned(x):
    kernels.wide[1, 256](x.flatten()[1:], torch.empty_like(x), 4)


def asks_torch(x):
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert (x.device, x.is_cuda, x.get_device()) == (torch.device("cuda", 0), True, 0)
        assert torch.ones(2).to("cuda").cuda().pin_memory().device == x.device
        assert torch.ones(2).device.type == "cpu"
        assert not torch.cuda.is_available()
        processors = torch.cuda.get_device_properties(0).multi_processor_count
    kernels.rows[processors, torch.cuda.get_device_capability()[0]](x, torch.empty_like(x), 4)


def launched(side, arch="sm90"):
    captured = capture_launches(assembly_of().pair, side, {"n": 7}, arch, assemble=False)
    if captured.error is not None:
        raise captured.error
    return [(launch.name, launch.config, launch.grid) for launch in captured.unique.values()]


def test_plain_and_prepared_sides_run_without_values():
    expected = [("rows", "block 256, 28 B dynamic", (5,))]
    assert launched(rows) == launched(prepared) == expected
    assert launched(side) == []


@pytest.mark.parametrize(("arch", "grid", "block"), [("sm90", 132, 9), ("sm121", 48, 12)])
def test_the_fake_gpu_has_the_properties_of_its_arch(arch, grid, block):
    assert launched(asks_torch, arch) == [("rows", f"block {block}", (grid,))]
    assert torch.ones(2).device.type == "cpu"
    assert not isinstance(torch.cuda.Stream, mock.MagicMock)


def spread(x):
    dist.all_reduce(x, async_op=True).wait()
    everyone = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
    dist.all_gather_into_tensor(everyone, x)
    return rows(everyone) if dist.get_rank() == 0 else x


def test_a_side_on_ranks_runs_as_rank_0_of_each_count(monkeypatch):
    grids = []
    monkeypatch.setattr(CapturedLaunches, "add", lambda self, launch: grids.append(launch.grid))
    pair = dataclasses.replace(assembly_of().pair, gpus=(2, 4))
    assert capture_launches(pair, spread, {"n": 7}, "sm90", assemble=False).error is None
    assert grids == [(10,), (20,)]
    assert not dist.is_initialized()


def test_the_first_side_of_a_process_may_be_compiled_by_torch(monkeypatch):
    system = CacheBase.get_system.__wrapped__  # torch asks the GPU for its name once per process
    monkeypatch.setattr(CacheBase, "get_system", staticmethod(system))
    assert launched(torch.compile(lambda x: x + 1, dynamic=False)) == []


def test_arguments_are_checked_on_the_fake_gpu():
    with pytest.raises(LaunchError, match=r"'x' was given a float32 tensor .* not 16-byte aligned"):
        launched(misaligned)


def test_a_prepared_side_must_yield_a_callable():
    with pytest.raises(TypeError, match="yields_nothing must yield the callable to time, not"):
        launched(yields_nothing)


def launch(grid=(1,), threads=128):
    return CapturedLaunch("k", "k", "", grid, threads)


def assembly_of(**variant):
    pair = Pair(
        baseline=side,
        variants=(Variant(other, **variant),),
        inputs=lambda device, n: (torch.randn(5, n, device=device),),
        reference=side,
        sizes=({"n": 1},),
        check_sizes=({"n": 1},),
        cpu_sizes=(),
        work=lambda n: Work(read=1),
        bound="dram",
        state=None,
        at_least=1.0,
        needs=(),
        gpus=(1,),
        l2="cold",
        owns=(),
    )
    return Assembly([pair], pair, pair.variants[0], {"n": 1}, root=__file__)


def test_kernels_with_the_same_error_share_a_line():
    assembly = assembly_of()
    assembly.refused = {
        "x.cu(4): error": {"a (block 1)": ["sm90", "sm100"], "b (block 1)": ["sm90", "sm100"]},
        "x.cu(9): error": {"c (block 1)": ["sm90"], "d (block 1)": ["sm100"]},
    }
    assert [*assembly._refusals()] == [
        "a (block 1), b (block 1) on sm90, sm100 do not assemble: x.cu(4): error",
        "c (block 1) on sm90 does not assemble: x.cu(9): error",
        "d (block 1) on sm100 does not assemble: x.cu(9): error",
    ]


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"shared": 227 * 1024}, []),
        ({"shared": 227 * 1024 + 1}, ["needs 232449 bytes of shared memory; a block has 232448"]),
        ({"registers": 64, "threads": 1024}, []),
        (
            {"registers": 65, "threads": 1024},
            ["needs 73728 registers, 65 for each of 1024 threads; a block has 65536 there"],
        ),
        ({"threads": 2048, "registers": 8}, ["has 2048 threads; a block has at most 1024 there"]),
        ({"grid": (1, 65536)}, ["has a grid of (1, 65536); legal are 1 to (2147483647, 65535"]),
        ({"grid": (0,)}, ["has a grid of (0,)"]),
    ],
)
def test_limits_of_the_arch_are_enforced(changes, messages):
    built = {"registers": 16, "shared": 0, "grid": (1,), "threads": 128, **changes}
    shape = launch(built["grid"], built["threads"])
    used = AssembledKernel("sm90", "s", shape, built["registers"], 0, 0, built["shared"], b"")
    faults = list(cross_compile._limit_faults(used))
    assert len(faults) == len(messages)
    assert all(message in fault for message, fault in zip(messages, faults, strict=True))


def test_every_arch_has_limits():
    assert list(LIMITS) == list(GPU_ARCHS)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "occupancy"),
    [
        ("sm90", 1024, 32, 0, 2, 1.0),
        ("sm90", 32, 32, 0, 32, 0.5),
        ("sm90", 256, 255, 0, 1, 0.125),
        ("sm90", 256, 128, 0, 2, 0.25),
        ("sm90", 256, 90, 98328, 2, 0.25),
        ("sm90", 384, 168, 200_000, 1, 0.1875),
        ("sm90", 128, 90, 0, 5, 0.3125),
        ("sm121", 1024, 32, 0, 1, 2 / 3),
    ],
)
def test_resident_blocks_and_occupancy(arch, threads, registers, shared, blocks, occupancy):
    built = AssembledKernel(arch, "side", launch(threads=threads), registers, 0, 0, shared, b"")
    assert built.resident == blocks
    assert built.occupancy == pytest.approx(occupancy)
    assert built.to_json()["resident"] == blocks
    assert f"{blocks} blocks a processor" in str(built)


def test_an_audit_shows_kernel_resources(write, gpu, pytester):
    write("doubling")
    gpu(added=2e-5, doubled=1e-5)
    out = pytester.path / "out"
    result = pytester.runpytest_subprocess("--aisp-audit", "-vv", f"--aisp-artifacts={out}")
    result.stdout.fnmatch_lines(["*sm90 doubling_kernel (BLOCK=1024*registers, 0 B spilled*"])
    [row] = run_reader.load(out).rows()
    [built] = row.timings[0]["assembled"]
    assert built["kernel"] == "doubling_kernel"
    assert "assembled" not in row.checks[0]
    again = pytester.runpytest_subprocess("--aisp-audit", f"--aisp-replay={out}")
    assert again.ret == 0


def test_an_audit_continues_without_kernel_resources(write, gpu, pytester):
    write("doubling", side=f"x[0].item()\n{LAUNCH}")
    gpu(added=2e-5, doubled=1e-5)
    result = pytester.runpytest_subprocess("--aisp-audit", "-vv")
    result.stdout.fnmatch_lines(
        ["*the resources of its kernels are unknown: doubled on sm90 at n=1001: *"]
    )
    assert result.ret == 0


def test_long_assembler_errors_are_shortened():
    lines = [f"line {number}" for number in range(40)]
    short = cross_compile._first_lines("\n".join(lines)).splitlines()
    assert short == [*lines[:12], "... 28 more lines"]
    assert cross_compile._first_lines("\n".join(lines[:13])).splitlines() == lines[:13]
    assert cross_compile._first_lines("one\n") == "one"
