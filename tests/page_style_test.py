"""The style of pages: their headings, sides by name, every pair judged, no side effects."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import math
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pytest_aisp.page.cost import cost_at
from pytest_aisp.page.pair import CLAIM_WORDS, Pair
from pytest_aisp.results import store
from pytest_aisp.results.models import Result, pooled
from pytest_aisp.results.stats import pooled_spread
from pytest_aisp.timing.predict import RateMissing, predict
from pytest_aisp.tools.stored_results import stored_peaks
from pytest_aisp.worker.loader import load_page, pair_of

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "suites").rglob("*_test.py"))
ARCH_OF = {"nvidia-h100-80gb-hbm3": "sm90", "nvidia-h200": "sm90"}
GOALS = ("pair.assert_memory(", "pair.assert_goodput(")
HEADINGS = ["Problem", "Baseline", "Optimized", "Bound", "Use when"]
FIGURE = re.compile(r"(\d+(?:\.(\d+))?) ?(x|times|us|ms|%|TB/s|GB/s|TFLOP/s)(?![\w/])")
UNITS = {"us": 1e-6, "ms": 1e-3, "%": 1e-2, "TB/s": 1e12, "GB/s": 1e9, "TFLOP/s": 1e12}
every_page = pytest.mark.parametrize("path", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> types.ModuleType:
    return load_page(str(path), str(ROOT), f"pages_of_{path.parent.name}.{path.stem}")


@functools.cache
def stored(file: Path) -> Mapping[str, Result]:
    return store.load(file).results


def pairs(path: Path) -> list[Pair]:
    """Return the pairs that the page declares."""
    each = (pair_of(thing) for thing in vars(imported(path)).values() if callable(thing))
    return [pair for pair in each if pair is not None]


def sections(path: Path) -> dict[str, str]:
    """Return the docstring's text by heading."""
    heading = rf"^({'|'.join(HEADINGS)}|Seen) {{2,}}"
    parts = re.split(heading, ast.get_docstring(parsed(path)) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def calls(path: Path) -> Iterator[str]:
    """Yield the last name of everything that the page calls."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2]


def test_suites_have_pages():
    assert PAGES


@every_page
def test_docstring_has_a_title_and_the_headings(path):
    title, blank = (ast.get_docstring(parsed(path)) or "").splitlines()[:2]
    assert re.fullmatch(r".+: .+\.", title)
    assert blank == ""
    assert [heading for heading in sections(path) if heading in HEADINGS] == HEADINGS


@every_page
def test_docstring_names_the_baseline_and_the_variants(path):
    baseline, optimized = (sections(path)[heading] for heading in ("Baseline", "Optimized"))
    baselines, sides = (
        set(re.findall(r"^ *(\w+): ", text, flags=re.MULTILINE))
        for text in (baseline, baseline + optimized)  # a variant may be the next pair's baseline
    )
    assert re.match(r"\w+: ", baseline)
    for pair in pairs(path):
        assert pair.baseline.__name__ in baselines
        assert {variant.name for variant in pair.variants} <= sides


def stored_figures(path: Path) -> Iterator[float]:
    """Yield every speedup, time, share and rate that stored results and costs of the page hold."""
    for file in sorted((ROOT / "baselines").glob(f"*/{path.parent.name}.json")):
        peaks = stored_peaks(ROOT / "baselines", file.parent.name)
        yield from () if peaks is None else peaks.rates.values()
        for key, result in stored(file).items():
            if not key.startswith(f"{path.name}::") or result.value is None:
                continue
            yield from (math.exp(result.value), result.share or 0.0)
            yield from result.seconds.values()
    for pair in pairs(path):
        for case, graph, product in itertools.product(pair.cases(), (True, False), ARCH_OF):
            sides = (pair.baseline, case.variant.side)
            costs = [cost_at(pair, side, case.size, case.gpus) for side in sides]
            found = stored_peaks(ROOT / "baselines", product)
            with contextlib.suppress(RateMissing):
                times = [predict(cost, found, graph=graph).seconds for cost in costs if cost]
                yield from times
                yield from [times[0] / times[1]] if len(times) == 2 else []


@every_page
def test_no_figure_of_a_stored_result_or_of_a_cost_is_typed_by_hand(path):
    """Such a figure is wrong after the next record. `aisp suite show` prints the current one."""
    known = list(stored_figures(path))
    typed = []
    for match in FIGURE.finditer(ast.get_docstring(parsed(path)) or ""):
        number, digits, unit = match.groups()
        step = UNITS.get(unit, 1.0) * 10 ** -len(digits or "")
        value = float(number) * UNITS.get(unit, 1.0)
        significant = len(number.replace(".", "").lstrip("0")) > 1
        if significant and any(abs(value - each) <= 0.501 * step for each in known):
            typed.append(match[0])
    assert typed == []


@every_page
def test_page_judges_each_of_its_pairs(path):
    tests = [n for n in parsed(path).body if isinstance(n, ast.FunctionDef) and "test_" in n.name]
    assert f"test_{path.stem.removesuffix('_test')}" in {test.name for test in tests}
    assert len(pairs(path)) == len(tests) > 0
    for test in tests:
        last = ast.unparse(test.body[-1])
        assert last == "pair.assert_speedup()" or last.startswith(GOALS)


@every_page
def test_page_does_not_print_sleep_seed_or_change_sys_path(path):
    assert set(calls(path)) & {"print", "sleep", "_sleep", "manual_seed", "seed"} == set()
    attributes = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute)]
    assert "sys.path" not in map(ast.unparse, attributes)


@every_page
def test_page_can_be_checked_on_a_laptop_and_every_case_has_work(path):
    for pair in pairs(path):
        assert pair.check_sizes or pair.cpu_sizes
        for case in pair.cases():
            work = pair.work_at(case.size, case.gpus)
            assert work.read + work.write + work.wire + sum(work.flops.values()) > 0


@pytest.mark.parametrize("path", sorted((ROOT / "suites").rglob("*.cu")), ids=lambda p: p.stem)
def test_kernel_file_has_the_name_of_a_page_beside_it(path):
    names = (page.stem.removesuffix("_test") for page in PAGES if page.parent == path.parent)
    assert any(path.stem == name or path.stem.startswith(f"{name}_") for name in names)


def test_suites_have_no_conftest():
    assert list((ROOT / "suites").rglob("conftest.py")) == []


@every_page
def test_claim_is_clearly_below_the_stored_result(path):
    """A claim within five spreads of the stored result would be measured again in every run.

    A spread from sessions of two processes is uncertain. It is shrunk as in a run, and a claim
    keeps three of these spreads away.
    """
    for file in sorted((ROOT / "baselines").glob(f"*/{path.parent.name}.json")):
        if file.name == "peaks.json":
            continue
        results = stored(file)
        arch = ARCH_OF[re.sub(r"-x\d+$", "", file.parent.name)]
        declared = ((name, pair_of(thing)) for name, thing in vars(imported(path)).items())
        named = [(name, case) for name, pair in declared if pair for case in pair.cases()]
        for name, case in named:
            key = f"{path.name}::{name}[{case.id}]"
            claim = case.claim(arch)
            if key in results and results[key].value is not None and claim not in CLAIM_WORDS:
                result = results[key]
                far = 5 * (own := result.own_spread or 0.0)
                if own and not any(len(session) >= 3 for session in result.values):
                    others = pooled(results.values(), result.clock)
                    far = 3 * min(own, pooled_spread(own, result.processes, others))
                assert math.log(claim) < result.value - far, key
