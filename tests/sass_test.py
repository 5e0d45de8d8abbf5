"""Machine code: its registers without any tool, its instructions, and what each feature is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aisp.kernels import cuda_cpp, nvrtc, sass
from pytest_aisp.page.gpu_specs import FEATURES, GPU_ARCHS, INSTRUCTIONS

pytest.importorskip("cuda.bindings", reason="needs NVRTC: pip install cuda-core cuda-bindings")

KERNEL = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(float* x) {
  __shared__ alignas(128) float b[512];
  const unsigned s = static_cast<unsigned>(__cvta_generic_to_shared(b));
  PROBE
  x[0] = b[threadIdx.x] + s;
}
"""
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
PROBES = {
    "load": (f"{LOAD} [%0], [%1, {{%2, %2}}], [%3];", "UTMALDG"),
    "store": (
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%1, {%2, %2}], [%0];",
        "UTMASTG",
    ),
    "reduce": (
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%1, {%2, %2}], [%0];",
        "UTMAREDG",
    ),
    "bulk": (f"{BULK} [%0], [%1], 128, [%3];", "UBLKCP"),
    "bulk_reduce": (
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%1], [%0], 128;",
        "UBLKRED",
    ),
}
MULTICAST = {
    "load": (f"{LOAD}.multicast::cluster [%0], [%1, {{%2, %2}}], [%3], %4;", "UTMALDG.MULTICAST"),
    "bulk": (f"{BULK}.multicast::cluster [%0], [%1], 128, [%3], %4;", "UBLKCP.MULTICAST"),
}
ROOT = Path(__file__).parents[1]
DOTS = Path(__file__).parent / "data" / "dots.py"


@pytest.fixture
def instructions_of(tmp_path):
    """Return the instructions of a kernel with an assembler statement, or of none."""

    def instructions_of(arch, statement=""):
        operands = '"r"(s), "l"(x), "r"(0), "r"(s + 1024), "h"(static_cast<short>(3))'
        probe = f'asm volatile("{statement}" ::{operands} : "memory");' if statement else ""
        (tmp_path / "probe.cu").write_text(KERNEL.replace("PROBE", probe))
        module = cuda_cpp.cuda_module(tmp_path / "probe.cu")
        return sass.instructions(nvrtc.compile_module(module, module.target(arch)).code)["k"]

    return instructions_of


@pytest.mark.parametrize("arch", GPU_ARCHS)
@pytest.mark.parametrize("probe", PROBES)
def test_tma_is_these_instructions(instructions_of, arch, probe):
    statement, instruction = PROBES[probe]
    known = INSTRUCTIONS["tma"] + INSTRUCTIONS["bulk_copy"]
    assert instruction in known
    assert sass.contains(instructions_of(arch, statement), instruction)
    assert not any(sass.contains(instructions_of(arch), other) for other in known)


@pytest.mark.parametrize("arch", GPU_ARCHS)
@pytest.mark.parametrize("probe", MULTICAST)
def test_multicast_is_an_instruction_except_on_sm121(instructions_of, arch, probe):
    statement, instruction = MULTICAST[probe]
    assert instruction in INSTRUCTIONS["multicast"]
    instructions = instructions_of(arch, statement)
    assert sass.contains(instructions, instruction) is (arch != "sm121")
    assert sass.contains(instructions, "CALL") is (arch == "sm121")


@pytest.fixture(scope="module")
def dots():
    """The instructions of a few matrix products by Triton, by feature or none, and arch."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(DOTS)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("feature", ["wgmma", "tcgen05", "mma_block_scale"])
def test_a_matrix_product_contains_its_archs_instruction(dots, feature):
    for arch in GPU_ARCHS:
        instructions = dots[feature][arch]
        has = any(sass.contains(instructions, instruction) for instruction in INSTRUCTIONS[feature])
        assert has is (arch in FEATURES[feature]), (arch, instructions)


def test_the_instruction_table_lists_known_features():
    assert set(INSTRUCTIONS) <= set(FEATURES)


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_registers_match_the_assemblers_report(arch):
    module = cuda_cpp.cuda_module("data/build.cu")
    cubin = nvrtc.compile_module(module, module.target(arch))
    read = sass.usage(cubin.code)
    assert {k: u["registers"] for k, u in read.items()} == {
        k: u["registers"] for k, u in cubin.usage.items()
    }
    assert {u["stack"] for u in read.values()} == {0}


def test_large_arrays_count_as_stack(tmp_path):
    (tmp_path / "k.cu").write_text(
        'extern "C" __global__ void k(int* x, int n) { int a[100];'
        " for (int i = 0; i < 100; ++i) a[i] = x[i]; x[0] = a[n]; }"
    )
    module = cuda_cpp.cuda_module(tmp_path / "k.cu")
    assert sass.usage(nvrtc.compile_module(module, "sm_90").code)["k"]["stack"] == 400


def test_the_spills_that_a_page_states_are_those_of_its_machine_code():
    page = (ROOT / "suites/ch08/spills_test.py").read_text()
    stores, loads = re.search(r"^SPILLS = (\d+) \+ (\d+) ", page, re.MULTILINE).groups()
    stacks = re.findall(r"compiler spills (\d+) bytes per thread", page)
    (registers,) = re.findall(r"uses (\d+) registers per thread for sm_90", page)
    assert re.findall(r"(\d+)\s+(?:stores|loads) \((STL|LDL)\)", page) == [
        (stores, "STL"),
        (loads, "LDL"),
    ]
    module = cuda_cpp.cuda_module(ROOT / "suites/ch08/spills.cu")
    code = nvrtc.compile_module(module, "sm_90").code
    usage, lines = sass.usage(code), sass.listing(code)["eight_blocks"]
    assert usage["no_limit"]["registers"] == int(registers)
    assert [str(usage[k]["stack"]) for k in ("four_blocks", "eight_blocks")] == stacks
    for name, stated in (("STL", stores), ("LDL", loads)):
        assert sum(re.search(rf"\b{name}\b", line) is not None for line in lines) == int(stated)


@pytest.mark.parametrize(
    ("instruction", "promised", "is_it"),
    [
        ("LDG.E.128.CONSTANT", "LDG.128", True),
        ("LDG.E.64", "LDG.128", False),
        ("LDGSTS.E.128", "LDG.128", False),
        ("UTMALDG.2D", "UTMALDG", True),
        ("UTMALDG.2D", "UTMALDG.MULTICAST", False),
        ("HGMMA.64x128x16.F32", "HGMMA", True),
    ],
)
def test_promises_match_by_name_and_modifiers(instruction, promised, is_it):
    assert sass.contains([instruction], promised) is is_it


def test_invalid_machine_code_shows_the_disassemblers_error():
    message = "nvdisasm cannot read it: nvdisasm.*: pip install -U nvidia-cuda-nvdisasm"
    with pytest.raises(sass.NoDisassembler, match=message):
        sass.instructions(b"no machine code")


def test_without_a_disassembler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sass, "disassemblers", tuple)
    message = "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
    with pytest.raises(sass.NoDisassembler, match=message):
        sass.instructions(b"whatever")


def test_the_next_disassembler_is_tried_when_one_fails(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("#!/bin/sh\nexit 1\n")
    new.write_text("#!/bin/sh\nprintf '.text.k:\\n        /*0000*/   MOV R1, R2 ;\\n'\n")
    old.chmod(0o755)
    new.chmod(0o755)
    monkeypatch.setattr(sass, "disassemblers", lambda: (str(old), str(new)))
    assert sass.instructions(b"of a newer arch") == {"k": frozenset(["MOV"])}


def test_a_listing_has_no_addresses_and_its_own_labels(tmp_path, monkeypatch):
    text = "        /*0000*/  @P0 BRA `(.L_x_8) ;\n        /*0010*/  MOV R1, R2 ;\n.L_x_8:\n"
    text += "        /*0020*/  EXIT ;\n.L_x_9:\n        /*0030*/  BRA `(.L_x_9);\n"
    text += "        /*0040*/  NOP;\n.L_x_11:\n"
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n.text.k:\n{text}END\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sass, "disassemblers", lambda: (str(tool),))
    lines = ["    @P0 BRA `(.L0)", "    MOV R1, R2", ".L0:", "    EXIT", ".L1:", "    BRA `(.L1)"]
    assert sass.listing(b"labels") == {"k": lines}


def test_disassemblers_on_the_path_come_before_packages(tmp_path, monkeypatch):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    find = sass.disassemblers.__wrapped__
    monkeypatch.setenv("PATH", str(tmp_path))
    first, *packaged = find()
    assert first == str(tool)
    assert all(path.endswith("/bin/nvdisasm") for path in packaged)
    monkeypatch.setenv("PATH", "")
    assert [*find()] == packaged
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    assert find() == ()
