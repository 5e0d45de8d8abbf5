"""Change points of simulated histories: the quick form of benchmarks/change_points.py."""

import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_aisp.results.change_points import FLOOR, change_points

spec = importlib.util.spec_from_file_location(
    "simulated_histories", Path(__file__).parents[1] / "benchmarks" / "change_points.py"
)
simulated = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated)
SERIES = 400


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("white noise of 0.2 %", 0.01),
        ("white noise of 1 %", 0.01),
        ("3 % spikes of 4 %", 0.02),
        ("noise of 1 %, 3 % spikes of 20 %", 0.02),
        ("AR(0.7)", 0.02),
        ("AR(0.7) of 1 %", 0.02),
        ("white noise of 1 %, 20 runs", 0.01),
        ("AR(0.7) of 1 %, 20 runs", 0.02),
    ],
)
def test_few_false_changes(name, most):
    assert simulated.trial(simulated.FALSE[name], simulated.found, 1, SERIES) <= most * SERIES


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("1 % at noise of 0.2 %, after 3 runs", 0.95),
        ("1 % at noise of 0.2 %, in the middle", 0.95),
        ("1 % with AR(0.7) of 0.2 %, in the middle", 0.90),
        ("3 % for 10 runs, then back, noise of 0.2 %", 0.95),
        ("1 % at noise of 0.2 %, 3 % spikes, after 5 runs", 0.90),
    ],
)
def test_a_planted_change_is_found_where_it_is(name, least):
    assert simulated.trial(simulated.PLANTED[name], simulated.found, 2, SERIES) >= least * SERIES


def noise(count, spread=0.002, seed=3):
    rng = random.Random(seed)
    return [rng.gauss(0, spread) for _ in range(count)]


def with_step(at, step, count=100, **fields):
    return [v + step * (n >= at) for n, v in enumerate(noise(count, **fields))]


def places(values, error=0.002, **fields):
    return [change.at for change in change_points(values, [error] * len(values), **fields)]


def test_the_size_is_known_with_its_interval():
    sizes = []
    for seed in range(100):
        [change] = change_points(with_step(60, -0.05, seed=seed), [0.002] * 100)
        low, high = change.interval
        assert low < change.size < high
        sizes.append(low < -0.05 < high)
    assert sum(sizes) >= 97


def test_several_changes_are_found_in_order():
    values = [v + 0.05 * (n >= 30) - 0.02 * (n >= 70) for n, v in enumerate(noise(100))]
    assert places(values) == [30, 70]


def test_two_points_on_a_side_are_needed():
    values = [0.0001 * (-1) ** n for n in range(20)]
    assert places([*values, 0.5]) == []
    assert places([*values, 0.5, 0.5]) == [20]
    assert places([0.5, 0.5, *values]) == [2]
    assert places([*values, 0.5, 0.5, *values]) == [], "two spikes in a row"
    assert places([*values, 0.5, 0.5, 0.5, *values]) == [20, 23]


def test_a_change_that_is_certainly_below_the_floor_is_not_reported():
    assert places(with_step(500, 0.9 * FLOOR, count=1000)) == []
    assert places(with_step(500, 1.1 * FLOOR, count=1000)) == [500]


def test_larger_stored_errors_hide_a_change():
    values = with_step(15, 0.02, count=30)
    assert places(values) == [15]
    assert places(values, error=0.02) == []
    assert places(values, session=0.05) == []


def test_a_run_with_a_large_error_counts_less():
    values, errors = with_step(97, 0.01), [0.002] * 100
    assert len(change_points(values, errors)) == 1
    assert change_points(values, [*errors[:97], 0.02, 0.02, 0.02]) == []


def test_a_known_position_needs_less_evidence_and_keeps_the_change():
    found = {True: 0, False: 0}
    for seed in range(50):
        values = with_step(95, 0.01, spread=0.005, seed=seed)
        for known in found:
            found[known] += places(values, error=0.005, known=[95] * known) == [95]
    assert found[True] >= 25 > 10 >= found[False]
    values = with_step(50, 0.008, spread=0.004, seed=5)
    assert places(values, error=0.004, known=[51]) == [51]


def test_a_change_far_from_the_known_position_is_not_moved_there():
    for known in (45, 48, 52, 55):
        assert places(with_step(50, 0.02), known=[known]) == [50]
    assert places(with_step(50, 0.02), known=[20, 80]) == [50]


def test_known_positions_without_a_change_are_no_changes():
    false = sum(bool(places(noise(60, seed=n), known=range(0, 60, 7))) for n in range(100))
    assert false <= 1
    assert places(noise(30), known=range(-2, 40)) == []


@pytest.mark.parametrize("count", range(6))
def test_a_short_history_has_no_change(count):
    assert places(noise(count)) == []
    assert places([0.0] * count) == []


def test_the_other_tool_sees_the_speedups_and_its_settings(monkeypatch):
    asked = []

    def compute(series, **settings):
        asked.append((series, settings))
        return [SimpleNamespace(index=7)], None

    modules = {
        "analysis": {"compute_change_points": compute},
        "series": {"AnalysisOptions": lambda: SimpleNamespace(window_len=50, max_pvalue=0.001)},
    }
    monkeypatch.setitem(sys.modules, "otava", ModuleType("otava"))
    for name, content in modules.items():
        module = ModuleType(f"otava.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import change_points_otava as other

    monkeypatch.delitem(sys.modules, "change_points_otava")
    assert other.default([0.0, math.log(2)], [0.1, 0.1]) == [7]
    assert other.with_floor([0.0, math.log(2)], [0.1, 0.1]) == [7]
    speedups = [1.0, pytest.approx(2.0)]
    settings = {"window_len": 50, "max_pvalue": 0.001}
    assert asked == [
        (speedups, {**settings, "min_magnitude": 0.0}),
        (speedups, {**settings, "min_magnitude": FLOOR}),
    ]
