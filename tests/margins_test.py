"""The margin of a case with several sessions: the quick form of benchmarks/margins.py."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import random
import sys
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aisp.results import models, stats

spec = importlib.util.spec_from_file_location(
    "margins", Path(__file__).parents[1] / "benchmarks" / "margins.py"
)
margins = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(margins)

POOL = 0.01


def test_one_session_has_the_spread_of_the_chapter():
    assert stats.case_session_spread([[0.1, 0.101, 0.102]], POOL) == POOL
    assert stats.case_session_spread([], POOL) == POOL


@pytest.mark.parametrize("sessions", [2, 3, 5])
def test_sessions_that_agree_narrow_the_margin_by_their_number_only(sessions):
    least = POOL * math.sqrt(4 / (3 + sessions))
    for scatter in (1e-4, 0.1):  # wide processes do not explain more than the sessions' difference
        alike = [[0.5, 0.5 + scatter]] * sessions
        assert stats.case_session_spread(alike, POOL) == pytest.approx(least, rel=1e-3)


def test_sessions_that_differ_widen_the_margin():
    apart = [[0.0, 0.0001], [0.08, 0.0801], [0.16, 0.1601]]
    own = math.sqrt((4 * POOL**2 + 2 * 0.08**2) / 6)
    assert stats.case_session_spread(apart, POOL) == pytest.approx(own, rel=1e-3)


VALUES = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4)


@given(st.lists(VALUES, min_size=1, max_size=5), st.floats(1e-4, 0.1), st.randoms())
def test_the_order_of_sessions_does_not_matter(sessions, pool, rng):
    shuffled = rng.sample(sessions, len(sessions))
    own, again = (stats.case_session_spread(each, pool) for each in (sessions, shuffled))
    assert own == pytest.approx(again, rel=1e-6)
    assert own >= pool * math.sqrt(4 / (3 + len(sessions))) * (1 - 1e-12)


def stored(*means):
    values = tuple((mean, mean + 0.001, mean + 0.002) for mean in means)
    names = tuple("abcde"[: len(means)])
    sides = {"baseline": "0a", "optimized": "0b"}
    times = {"baseline_us": 2.0, "optimized_us": 1.0, "clock": "graph"}
    return models.Result(values=values, environments=names, sources=sides, **times)


def test_a_case_has_its_own_spread_between_sessions():
    quiet, noisy, host = stored(0.5, 0.5, 0.5), stored(0.5, 0.6, 0.7), stored(0.5)
    results = [quiet, noisy, models.replace(host, clock="host")]
    pool = models.session_sd(results, "graph")
    own, other = (models.session_sd(results, "graph", each) for each in (quiet, noisy))
    assert own < pool < other
    assert models.session_sd(results, "graph", results[2]) == pool  # measured with another clock


def simulated(model, sessions, chapters=60, every=1):
    """Return the outcomes by the chapter's spread, and those by the case's own."""
    rng = random.Random(sessions)
    found = [list(margins.chapter(model, sessions, rng))[::every] for _ in range(chapters)]
    return zip(*itertools.chain(*found), strict=True)


def red_runs(outcomes):
    return 1 - (1 - fmean(outcome.red for outcome in outcomes)) ** 250


@pytest.mark.parametrize("model", [margins.alike, margins.unlike])
@pytest.mark.parametrize("sessions", [2, 3, 5])
def test_at_most_five_percent_of_unchanged_runs_are_red(model, sessions):
    _, own = simulated(model, sessions)
    assert red_runs(own) < 0.05
    assert fmean(outcome.missed for outcome in own) < 1 / 473


def test_a_case_that_is_unlike_its_chapter_gets_its_own_margin():
    detects, reds = {}, {}
    for factor in (1 / 3, 3.0):
        model = functools.partial(margins.odd, itertools.count(), factor)
        for name, outcomes in zip(("chapter", "case"), simulated(model, 5, every=10), strict=True):
            detects[factor, name] = median(outcome.detects for outcome in outcomes)
            reds[factor, name] = red_runs(outcomes)
    assert detects[1 / 3, "case"] < 0.85 * detects[1 / 3, "chapter"]
    assert detects[3.0, "case"] > 1.2 * detects[3.0, "chapter"]
    assert reds[3.0, "case"] < 0.6 * reds[3.0, "chapter"]


def test_stored_sessions_judge_each_other():
    rows = {row[0]: row for row in margins.left_out()}
    for product in ("nvidia-h200", "nvidia-h200-x2"):
        _, count, _, reds, _ = rows[product]
        assert int(reds) < int(count) / 50


def test_the_spread_by_size_is_of_the_other_cases_of_this_size():
    small, smaller, large, larger = stored(0.05, 0.06), stored(0.0), stored(1.0, 1.1), stored(-2.0)
    every = [small, smaller, large, larger]
    of_small, of_large = (margins.stats.session_spread([r.values], 0.01) for r in (small, large))
    found = [margins.sized_session(every, result) for result in every]
    assert found == pytest.approx([0.01, of_small, 0.01, of_large])


def test_stored_sessions_judge_each_other_with_a_spread_by_size():
    for *_, reds, _ in margins.sized():
        red, _, count = reds.partition(" of ")
        assert int(red) <= int(count) / 50
