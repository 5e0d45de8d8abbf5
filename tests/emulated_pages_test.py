"""Every page with CUDA C++ kernels is checked on the CPU, in two thread orders."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from pytest_aisp_emulator import emulated
from pytest_aisp_emulator.compiler import COMPILER

from pytest_aisp.page.sources import kernel_files
from pytest_aisp.results.messages import CheckTask
from pytest_aisp.worker.engine import Engine
from pytest_aisp.worker.loader import load_page, pair_of

ROOT = Path(__file__).parents[1]
GPU_ONLY = {
    "ch04/symmetric_all_reduce-pushed": "Default process group has not been initialized",
    "ch07/histogram-library": "not implemented for 'Int'",
    "ch07/l2_persistence": "inline assembly",
    "ch07/online_softmax-kept": "clusters, cooperative groups",
    "ch07/tile_copy": "inline assembly, tensor maps",
    "ch09/cross_entropy-clustered": "clusters, cooperative groups",
    "ch09/cross_entropy-pushed": "clusters, cooperative groups",
    "ch09/cross_entropy-ring": "clusters, cooperative groups",
    "ch09/rms_norm-clustered": "clusters, cooperative groups",
    "ch09/rms_norm-pushed": "clusters, cooperative groups",
    "ch09/rms_norm-ring": "clusters, cooperative groups",
    "ch09/softmax-clustered": "clusters, cooperative groups",
    "ch10/cluster_reduction": "clusters, cooperative groups",
    "ch10/gemm": "inline assembly",
    "ch10/gemm-test_gemm_beside_the_library": "the accelerator reads GPU memory",
    "ch11/dependent_launch-loads_first": "inline assembly",
    "ch11/dependent_launch-waits_first": "inline assembly",
    "ch10/tcgen05": "the accelerator reads GPU memory",
    "ch12/segments-device_launches": "expected primary-expression before '<' token",
    "ch18/cuda_attention-cudnn": "No viable backend",
    "ch18/cuda_attention-mma_sync": "inline assembly",
    "ch18/cuda_attention_hopper": "inline assembly",
    "ch19/fp8_blocks-hopper_blocks": "the accelerator reads GPU memory",
    "ch19/fp8_blocks-hopper_rows": "the accelerator reads GPU memory",
    "ch19/fp8_blocks-hopper_summed": "the accelerator reads GPU memory",
    "ch19/fp8_blocks-test_fp8_product_beside_the_library": "the accelerator reads GPU memory",
}
"""Pages, tests and cases that cannot be emulated, with their error. A test fails when one works."""
PAGES = [
    path
    for path in sorted((ROOT / "suites").rglob("*_test.py"))
    if "cuda_module" in path.read_text()
]
SLOW = {
    "ch07/matmul-vectorized",
    "ch07/matmul-register_tiled",
    "ch20/decode_ladder-prefetched",
    "ch20/decode_ladder-test_decode_ladder_persistent",
}
"""Cases whose kernels are also those of another test, or like those of the next rung."""
SEEDS = (1, pytest.param(2, marks=pytest.mark.slow))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def name_of(path):
    return f"{path.parent.name}/{path.stem.removesuffix('_test')}"


@functools.cache
def cases():
    """Return page, module, test function and variant of every case with CUDA C++ kernels."""
    found = []
    for path in PAGES:
        module = f"emulated_{path.parent.name}.{path.stem}"
        page = load_page(str(path), str(ROOT), module)
        for function, value in list(vars(page).items()):
            pair = pair_of(value)
            for variant in pair.variants if pair else ():
                if kernel_files([pair.baseline, variant.side], str(ROOT)):
                    found.append((path, module, function, variant.name))
    return found


def keywords(path, function):
    """Return the keywords that the test gives to `assert_equivalent`."""
    tree = ast.parse(path.read_text())
    [test] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
    calls = [n for n in ast.walk(test) if isinstance(n, ast.Call)]
    [call] = [c for c in calls if ast.unparse(c.func) == "pair.assert_equivalent"]
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords}


@functools.lru_cache(maxsize=1)
def engine_for(path, seed):
    """Return an engine that checks the baseline of a page once for all of its variants."""
    return Engine()


def check(path, module, function, variant, seed):
    """Check one case."""
    pair = pair_of(getattr(load_page(str(path), str(ROOT), module), function))
    common = {"page": str(path), "root": str(ROOT), "module": module, "function": function}
    common |= {"variant": variant, "size": dict(pair.sizes[0]), "device": "cpu", "at": "check"}
    rule = keywords(path, function)
    with emulated(seed):
        return engine_for(path, seed).check(CheckTask(seed=seed, rule=rule, **common))


def names(case):
    """Return the names that may stand for a case in `GPU_ONLY`: page, test and case."""
    path, _, function, variant = case
    return name_of(path), f"{name_of(path)}-{function}", f"{name_of(path)}-{variant}"


def params():
    for case in cases():
        marks = [pytest.mark.slow] * bool(SLOW & {*names(case)})
        yield pytest.param(case, id=names(case)[-1], marks=marks)


@pytest.mark.parametrize("case", list(params()))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_page_computes_correct_results_in_the_emulator(case, seed):
    [*errors] = filter(None, map(GPU_ONLY.get, names(case)))
    if errors:
        with pytest.raises(Exception, match=re.escape(errors[-1])):
            check(*case, seed)
    else:
        assert check(*case, seed).sizes


def test_every_entry_names_a_page():
    assert {*GPU_ONLY, *SLOW} <= {name for case in cases() for name in names(case)}
