"""The table of GPU features: derived by assembling probes, and used by pages."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import feature_probe
import pytest
from feature_probe import Attempt

from pytest_aisp.kernels import nvrtc
from pytest_aisp.page.gpu_specs import ASSEMBLED, target_of
from pytest_aisp.util.device import Machine
from pytest_aisp.worker import loader

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/reference/gpu-features.md"
H200 = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-1",))
RTX = Machine("sm120", "nvidia-rtx", "NVIDIA RTX", ("GPU-1",))
CPU = Machine("cpu", "cpu-few-2c", "few, 2 cores")

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="needs NVRTC: pip install cuda-core cuda-bindings nvidia-cuda-nvrtc",
)


# The table and the probes


@needs_nvrtc
@pytest.mark.parametrize("feature", ASSEMBLED)
def test_exactly_the_archs_in_the_table_assemble_a_feature(feature):
    by_arch = feature_probe.survey(feature)
    assert list(feature_probe.differences(feature, by_arch)) == []
    taken = [arch for arch, attempts in by_arch.items() if feature_probe.first_target(attempts)]
    assert taken == list(ASSEMBLED[feature])


def test_every_feature_has_one_probe_and_one_sentence():
    source = feature_probe.SOURCE.read_text()
    kernels = re.findall(r"^#ifdef PROBE_(\w+)$", source, re.MULTILINE)
    assert list(feature_probe.purposes()) == list(ASSEMBLED)
    assert sorted(kernels) == sorted(ASSEMBLED)
    assert set(feature_probe.NOT_LAUNCHED) < set(ASSEMBLED)


def test_an_arch_has_its_own_targets_and_its_family_target():
    assert feature_probe.targets("sm90") == ("sm_90", "sm_90a")
    assert feature_probe.targets("sm121") == ("sm_121", "sm_121f", "sm_121a")


def test_the_document_shows_the_table():
    text = DOCUMENT.read_text()
    shown = text.partition("<!-- features -->\n")[2].partition("<!-- end of features -->")[0]
    assert shown == feature_probe.table(), "python benchmarks/feature_probe.py --table"


@needs_nvrtc
def test_the_document_quotes_the_assembler():
    text = " ".join(DOCUMENT.read_text().split())
    quoted = set(re.findall(r"`((?:Feature|Instruction) '[^`]*? '(sm_\w+)')`", text))
    assert len(quoted) >= 6
    names = {"multicast::cluster::all": "clc_multicast", "tcgen05.alloc": "tcgen05"}
    names |= {"block scale": "mma_block_scale", "kind::i8": "tcgen05_int8"}
    names |= {"wgmma.fence": "wgmma", "setmaxnreg.dec": "setmaxnreg"}
    for words, target in quoted:
        feature = next(feature for key, feature in names.items() if key in words)
        assert words in feature_probe.attempt(feature, target).errors
    text = " ".join(re.sub(r"\n> ", " ", DOCUMENT.read_text()).split())
    advice = feature_probe.attempt("multicast", "sm_121a")
    assert advice.code
    assert advice.words.partition(" should be used on .target")[0] in text
    assert advice.words.partition("instead of ")[2] in text


# Errors for a missing feature, and others


REFUSED = "ptxas input, line 24; error   : Instruction 'elect' not supported on .target 'sm_90'"
OTHER_ERRORS = {
    "a misspelt instruction": "error   : Not a name of any known instruction: 'elekt'",
    "half refused": f"{REFUSED}\nptxas, line 25; error   : Unknown modifier '.alic'",
    "broken C++": 'features.cu(4): error: identifier "tile" is undefined',
    "an unknown target": "Command-line error: invalid or no value specified with --nv_arch flag",
    "no compiler": "NVRTC_ERROR_BUILTIN\nfailed to open libnvrtc-builtins.so.13.0.",
    "nothing": "",
}


@pytest.mark.parametrize("words", OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors_are_not_a_missing_feature(words):
    attempts = (Attempt("sm_90", words=words), Attempt("sm_90a", b"code"))
    assert not attempts[0].refused
    [first, *_] = feature_probe.differences("wgmma", {"sm90": attempts})
    assert first.startswith("wgmma for sm_90: the probe failed: ")


@pytest.mark.parametrize(
    "words",
    [
        REFUSED,
        "ptxas, line 9; error   : Feature '.x' requires .target sm_100 or higher",
        f"{REFUSED}\nline 24; error   : 'elect' cannot be compiled for architecture 'sm_90'\nfatal",
    ],
)
def test_assembler_errors_for_a_missing_feature_are_recognized(words):
    assert Attempt("sm_90", words=words).refused
    attempts = (Attempt("sm_90", words=words), Attempt("sm_90a", b"code"))
    assert list(feature_probe.differences("wgmma", {"sm90": attempts})) == []


@needs_nvrtc
def test_a_broken_probe_is_reported_as_such(tmp_path, monkeypatch):
    source = feature_probe.SOURCE.read_text().replace("elect.sync", "elekt.sync")
    (tmp_path / "features.cu").write_text(source)
    monkeypatch.setattr(feature_probe, "SOURCE", tmp_path / "features.cu")
    [first, *_] = feature_probe.differences("elect", feature_probe.survey("elect", ["sm90"]))
    assert re.match("elect for sm_90: the probe failed: .*elekt", first)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ((b"code", b"code"), "wgmma on sm90: the table says sm_90a, sm_90 takes it"),
        ((b"", b""), "wgmma on sm90: the table says sm_90a, nothing takes it"),
        ((b"code", b""), "wgmma on sm90: sm_90 takes it and sm_90a does not"),
    ],
)
def test_a_difference_from_the_table_is_reported(codes, message):
    targets = zip(("sm_90", "sm_90a"), codes, strict=True)
    attempts = tuple(Attempt(target, code, REFUSED) for target, code in targets)
    assert message in feature_probe.differences("wgmma", {"sm90": attempts})
    [line] = feature_probe.differences("f32x2", {"sm90": (Attempt("sm_90", b"code"),)})
    assert line == "f32x2 on sm90: the table says nothing, sm_90 takes it"


# The command


def by_the_table(feature, target):
    """Return what the assembler would return according to the table."""
    arch, suffix = re.fullmatch(r"(sm_\d+)([af]?)", target).groups()
    least = ASSEMBLED[feature].get(arch.replace("_", ""))
    if least is not None and (suffix == "a" or least in ("", suffix)):
        return Attempt(target, b"code", "mind the speed" if feature == "multicast" else "")
    return Attempt(target, words=REFUSED.replace("elect", feature).replace("sm_90", target))


@pytest.fixture
def command(monkeypatch, capsys):
    def command(
        *arguments, machine=CPU, attempt=by_the_table, known=(90, 100, 103, 121), faults=()
    ):
        monkeypatch.setattr(feature_probe, "attempt", attempt)
        toolchain = nvrtc.Toolchain(None, "13.5", 0)
        monkeypatch.setattr(feature_probe, "toolchain", lambda: toolchain)
        monkeypatch.setattr(feature_probe, "known", lambda: known)
        monkeypatch.setattr(Machine, "here", lambda: machine)
        launched = dict.fromkeys(ASSEMBLED, "") | dict(faults)
        monkeypatch.setattr(feature_probe, "_launch_in_subprocess", launched.get)
        code = feature_probe.main([*arguments])
        return code, capsys.readouterr().out.splitlines()

    return command


def test_without_a_gpu_the_command_assembles_only(command):
    code, lines = command()
    assert code == 0
    assert lines[:2] == [
        "NVRTC 13.5 compiles for sm_90, sm_100, sm_103, sm_121",
        "no GPU here: what follows was assembled, nothing was launched",
    ]
    assert lines[3] == "                     sm90     sm100    sm103    sm121"
    assert "tma                  sm_90    sm_100   sm_103   sm_121" in lines
    row = lines.index("wgmma                sm_90a   -        -        -")
    assert lines[row + 1] == "    sm_90: Instruction 'wgmma' not supported on .target 'sm_90'"
    assert lines[row + 2] == "    sm_100a: Instruction 'wgmma' not supported on .target 'sm_100a'"
    assert "    sm_121a: mind the speed" in lines
    assert lines[-1] == "as in the table"


def test_with_a_gpu_the_command_also_launches(command):
    code, lines = command(machine=H200)
    assert code == 0
    assert lines[1] == "NVIDIA H200 is sm90"
    assert lines[3] == "                     sm90     sm100    sm103    sm121    runs on this GPU"
    assert "wgmma                sm_90a   -        -        -        yes" in lines
    assert "tcgen05              -        sm_100f  sm_103f  -" in lines
    needs = "not launched: needs a tensor map"
    assert f"tma                  sm_90    sm_100   sm_103   sm_121   {needs}" in lines


def test_a_failed_launch_is_a_difference(command):
    code, lines = command(machine=H200, faults={"wgmma": "CUDA_ERROR_ILLEGAL_INSTRUCTION"})
    assert code == 1
    fault = "no: CUDA_ERROR_ILLEGAL_INSTRUCTION"
    assert f"wgmma                sm_90a   -        -        -        {fault}" in lines
    assert lines[-2:] == [
        "not as in the table of pytest_aisp/page/gpu_specs.py:",
        "wgmma on sm90: on this GPU: CUDA_ERROR_ILLEGAL_INSTRUCTION",
    ]


def test_an_unlisted_gpu_launches_nothing(command):
    code, lines = command(machine=RTX, faults={"tma": "must not be launched"})
    assert code == 0
    assert lines[1] == "NVIDIA RTX is sm120, which is not in the table: nothing was launched"
    assert not lines[3].endswith("GPU")


def test_a_wrong_table_is_a_difference(command, monkeypatch):
    monkeypatch.setitem(ASSEMBLED, "wgmma", {"sm90": "a", "sm100": "a"})
    real = {**ASSEMBLED, "wgmma": {"sm90": "a"}}

    def attempt(feature, target):
        with monkeypatch.context() as patch:
            patch.setitem(ASSEMBLED, feature, real[feature])
            return by_the_table(feature, target)

    code, lines = command(attempt=attempt)
    assert code == 1
    assert lines[-2:] == [
        "not as in the table of pytest_aisp/page/gpu_specs.py:",
        "wgmma on sm100: the table says sm_100a, nothing takes it",
    ]


def test_archs_unknown_to_the_compiler_are_a_difference(command):
    code, lines = command(known=(90, 100))
    assert code == 1
    assert lines[3] == "                     sm90     sm100"
    assert lines[-3:] == [
        "not as in the table of pytest_aisp/page/gpu_specs.py:",
        "sm103: NVRTC 13.5 does not know it",
        "sm121: NVRTC 13.5 does not know it",
    ]
    code, lines = command(known=(75,))
    assert code == 1
    assert "sm90: NVRTC 13.5 does not know it" in lines


def test_without_a_compiler_the_command_says_what_to_install(monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nvrtc, "import_module", missing)
    nvrtc.toolchain.cache_clear()
    assert feature_probe.main([]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("pip install cuda-core cuda-bindings nvidia-cuda-nvrtc")
    assert second == "(No module named 'cuda.core')"


@needs_nvrtc
def test_nvrtc_lists_the_archs_it_knows():
    assert {90, 100, 103, 121} <= set(feature_probe.known())


def test_the_command_prints_the_table():
    command = [sys.executable, feature_probe.__file__, "--table"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == feature_probe.table()
    assert "| `wgmma` | wgmma.mma_async," in done.stdout
    assert "| `sm_90a` | no | no | no |\n" in done.stdout


# Launches


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("pass", 600, ""),
        ("print('the result is wrong'); exit(1)", 600, "the result is wrong"),
        ("raise OSError('CUDA_ERROR_UNKNOWN')", 600, "OSError: CUDA_ERROR_UNKNOWN"),
        ("import os; os._exit(11)", 600, "it died without a message, exit code 11"),
        ("import time; time.sleep(600)", 2, "no answer within 2 s"),
    ],
    ids=["right", "wrong", "error", "fault", "hang"],
)
def test_a_launch_runs_in_its_own_process(monkeypatch, code, seconds, message):
    monkeypatch.setattr(feature_probe, "LAUNCH", (sys.executable, "-c", code))
    monkeypatch.setattr(feature_probe, "SECONDS", seconds)
    assert feature_probe._launch_in_subprocess("tma") == message


def test_every_launchable_feature_of_the_arch_is_launched(monkeypatch):
    monkeypatch.setattr(feature_probe, "_launch_in_subprocess", lambda feature: "")
    on_b200 = {feature for feature, archs in ASSEMBLED.items() if "sm100" in archs}
    launched = feature_probe.launches(Machine("sm100", "nvidia-b200", "NVIDIA B200", ("GPU-1",)))
    assert set(launched) == on_b200 - set(feature_probe.NOT_LAUNCHED)
    assert feature_probe.launches(CPU) == feature_probe.launches(RTX) == {}


class Core:
    """The part of cuda.core that `launch` uses, with kernels that write `answers`."""

    def __init__(self, answers, capability=(9, 0)):
        self.answers, self.capability, self.launched = answers, capability, []
        self.ObjectCode = SimpleNamespace(from_cubin=self.loaded)

    def Device(self, index):
        stream = SimpleNamespace(sync=lambda: None)
        return SimpleNamespace(
            set_current=lambda: None,
            compute_capability=self.capability,
            create_stream=lambda: stream,
        )

    def loaded(self, code):
        return SimpleNamespace(get_kernel=lambda name: (name, code))

    def LaunchConfig(self, **geometry):
        return geometry

    def LegacyPinnedMemoryResource(self):
        self.memory = (ctypes.c_uint32 * 2)(9, 9)
        address = ctypes.addressof(self.memory)
        return SimpleNamespace(allocate=lambda size: SimpleNamespace(handle=address))

    def launch(self, stream, config, kernel, address, nothing):
        self.launched.append((config, kernel, nothing))
        self.memory[:] = self.answers


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([1, 1], ""),
        ([0, 1], ""),
        ([1, 2], "the instruction's result is wrong"),
        ([0, 0], "the kernel wrote no answer"),
    ],
)
def test_a_launched_probe_checks_its_result(monkeypatch, answers, message):
    core = Core(answers)
    monkeypatch.setattr(feature_probe, "toolchain", lambda: nvrtc.Toolchain(core, "13.5", 0))
    monkeypatch.setattr(feature_probe, "attempt", by_the_table)
    assert feature_probe.launch("wgmma") == message
    assert core.launched == [({"grid": 2, "block": 128}, ("probe", b"code"), 0)]


def test_a_probe_that_does_not_assemble_is_not_launched(monkeypatch):
    core = Core([1, 1], capability=(12, 1))
    monkeypatch.setattr(feature_probe, "toolchain", lambda: nvrtc.Toolchain(core, "13.5", 0))
    monkeypatch.setattr(feature_probe, "attempt", by_the_table)
    assert feature_probe.launch("wgmma") == "Instruction 'wgmma' not supported on .target 'sm_121'"
    assert core.launched == []


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("wrong", 1)])
def test_the_launch_process_prints_its_result(monkeypatch, capsys, fault, code):
    monkeypatch.setattr(feature_probe, "launch", lambda feature: fault)
    assert feature_probe.main(["--launch", "tma"]) == code
    assert capsys.readouterr().out == f"{fault}\n"


# The targets of a page's kernel files


@pytest.mark.parametrize(
    ("arch", "needs", "target"),
    [
        ("sm90", (), "sm_90"),
        ("sm90", ("tma", "te"), "sm_90"),
        ("sm90", ("tma", "wgmma"), "sm_90a"),
        ("sm90", ("setmaxnreg",), "sm_90a"),
        ("sm100", ("tcgen05",), "sm_100a"),
        ("sm121", ("tma",), "sm_121"),
        ("sm121", ("mma_block_scale",), "sm_121a"),
        ("sm121", ("tcgen05",), "sm_121"),
        ("sm89", ("setmaxnreg",), "sm_89"),
    ],
)
def test_the_target_is_the_least_specific_with_the_needed_features(arch, needs, target):
    assert target_of(arch, needs) == target


PAGE = """
import torch

from pytest_aisp import Conditions, Variant, Work, compare, cuda_module

plain = cuda_module("plain.cu")
special = cuda_module("special.cu"{targets})


def naive(x):
    plain.naive[1, 1](x)


def launched(x):
    special.warpgroup[1, 128](x)


def warpgroup(x):
    launched(x)


@compare(
    baseline=naive,
    optimized=[{optimized}],
    inputs=lambda device, n: (torch.zeros(n, device=device),),
    reference=lambda x: x,
    sizes=[{{"n": 4}}],
    check_sizes=[{{"n": 3}}],
    work=lambda n: Work(read=n),
    bound="dram",
    {more}
)
def test_page(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
"""
WGMMA = """
extern "C" __global__ void warpgroup(float* x) {
  float d[4] = {};
  const unsigned long long tile = 8ull << 16 | 16ull << 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(tile)
      : "memory");
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  x[threadIdx.x] = d[0];
}
"""
KERNEL = 'extern "C" __global__ void {}(float* x) {{ asm volatile("{}"); }}'


@pytest.fixture
def page(tmp_path):
    """Import a page of two kernel files. `special.cu` has an instruction of sm_90a."""

    def page(*, optimized="warpgroup", targets="", more=""):
        (tmp_path / "plain.cu").write_text(KERNEL.format("naive", ""))
        source = KERNEL.format("warpgroup", "wgmma.fence.sync.aligned;")
        (tmp_path / "special.cu").write_text(source)
        path = tmp_path / "page_test.py"
        path.write_text(PAGE.format(optimized=optimized, targets=targets, more=more))
        return loader.load_page(str(path), str(tmp_path), f"page_{uuid.uuid4().hex}")

    return page


@pytest.mark.parametrize(
    ("options", "plain", "special"),
    [
        (
            {"optimized": "Variant(warpgroup, needs=['tma', 'wgmma'])"},
            {"sm90": "sm_90"},
            {"sm90": "sm_90a", "sm100": "sm_100"},
        ),
        (
            {"more": "conditions=Conditions(needs='wgmma')"},
            {"sm90": "sm_90a"},
            {"sm90": "sm_90a"},
        ),
        ({"more": "conditions=Conditions(needs='tma')"}, {"sm90": "sm_90"}, {"sm90": "sm_90"}),
        (
            {
                "more": "conditions=Conditions(needs='setmaxnreg')",
                "targets": ', targets={"sm100": "sm_100f"}',
            },
            {"sm100": "sm_100a"},
            {"sm100": "sm_100f", "sm103": "sm_103a"},
        ),
    ],
    ids=["needs of a variant", "needs of a page", "needs that every target has", "explicit"],
)
def test_targets_follow_from_needs(page, options, plain, special):
    module = page(**options)
    assert {arch: module.plain.target(arch) for arch in plain} == plain
    assert {arch: module.special.target(arch) for arch in special} == special


@needs_nvrtc
def test_undeclared_features_do_not_assemble(page, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert list(page(more="conditions=Conditions(needs='wgmma')").special.assemble("sm90")) == [
        "warpgroup"
    ]
    with pytest.raises(nvrtc.CompileError, match=r"'wgmma.fence' not supported on .target 'sm_90'"):
        page().special.assemble("sm90")


@needs_nvrtc
@pytest.mark.skipif(Machine.here().arch == "sm90", reason="here the page is launched, not compiled")
def test_a_page_that_needs_wgmma_is_compiled_for_the_arch_that_has_it(pytester):
    (pytester.path / "plain.cu").write_text(KERNEL.format("naive", ""))
    (pytester.path / "special.cu").write_text(WGMMA)
    text = PAGE.format(optimized="Variant(warpgroup, needs=['wgmma'])", targets="", more="")
    pytester.makepyfile(page_test=text)
    result = pytester.runpytest_subprocess("--aisp-check", "-v", "-p", "no:randomly")
    result.stdout.fnmatch_lines(
        [
            "*COMPILED needs wgmma (sm90); *",
            "not timed: --aisp-check",
            "compiled and not checked: 1 case; CUDA C++ is checked on a GPU or with the emulator:"
            " docs/how-to/check-cuda-without-a-gpu.md",
            "*1 compiled in *",
        ]
    )
    assert result.ret == 0
