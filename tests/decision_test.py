"""Statistics and gates on the simulated device: the quick form of benchmarks/error_rates.py."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aisp.isolation.interference import Cause, Disturbed
from pytest_aisp.results import stats, verdict
from pytest_aisp.results.verdict import Reading
from pytest_aisp.timing.fake_device import Noise, Process
from pytest_aisp.timing.schedule import Budget, join, measure

spec = importlib.util.spec_from_file_location(
    "error_rates", Path(__file__).parents[1] / "benchmarks" / "error_rates.py"
)
error_rates = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(error_rates)


@pytest.mark.parametrize("model", error_rates.MODELS)
def test_few_false_reds_and_few_misses(model):
    _, clean, lost = error_rates.trial((model, 7, 50, 4, 2, ""))
    assert clean.total() == 200
    assert sum(clean[v] for v in verdict.RED) <= 1
    assert sum(lost[v] for v in verdict.RED) >= 98


@pytest.mark.parametrize("model", sorted(set(error_rates.MODELS) - set(error_rates.RESTLESS)))
def test_the_code_gate_has_few_false_reds_and_few_misses(model):
    _, clean, lost = error_rates.trial((model, 7, 50, 4, 2, "code"))
    assert clean.total() == 200
    assert clean["regressed"] <= 1
    assert lost["regressed"] >= 97


@pytest.mark.parametrize("speedup", [0.5, 1.0, 1.01, 3.7])
@pytest.mark.parametrize("noise", [Noise(), Noise(drift=0.05), Noise(ramp=0.05), Noise(step=0.01)])
def test_the_measured_value_is_the_true_ratio(speedup, noise):
    process = Process((speedup * 1e-5, 1e-5), noise, random.Random(3))
    assert process.measure(Budget()).value == pytest.approx(math.log(speedup), abs=0.005)


def test_windows_last_equally_long_and_orders_are_balanced():
    process = Process((4e-5, 1e-5), Noise(), random.Random(3))
    samples = process.measure(Budget())
    slow, fast = samples.details["calls"]
    assert fast == 4 * slow
    assert len(samples.laps) == 4
    assert set(samples.orders) == {"ABBA", "BAAB"}
    assert len(samples.blocks) == 20


def test_a_throttled_block_is_measured_again_and_counted():
    process = Process((1e-5, 1e-5), Noise(throttle=0.2), random.Random(5))
    samples = process.measure(Budget())
    assert len(samples.blocks) == 20
    assert set(samples.dropped) == {"thermal slowdown (simulated)"}
    assert abs(samples.value) < 0.005


def test_a_gpu_that_always_throttles_gives_no_measurement():
    with pytest.raises(Disturbed, match="thermal slowdown"):
        Process((1e-5, 1e-5), Noise(throttle=1.0), random.Random(5)).measure(Budget())


def test_a_coarse_clock_does_not_bias_the_value():
    process = Process((3.3e-6, 2.2e-6), Noise(resolution=1e-6), random.Random(3))
    assert process.measure(Budget()).value == pytest.approx(math.log(1.5), abs=0.005)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=20), st.floats(-5, 5))
def test_the_spread_does_not_depend_on_the_center(values, shift):
    moved = [v + shift for v in values]
    assert stats.trimmed_spread(moved) == pytest.approx(stats.trimmed_spread(values), abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=20))
def test_one_rogue_process_cannot_inflate_the_spread(values):
    calm = stats.trimmed_spread([*values, values[0]])
    assert stats.trimmed_spread([*values, 1e6]) <= 20 * (calm + 1) * 3


def test_spread_is_unbiased_in_its_square():
    rng = random.Random(1)
    for count in (3, 5, 8, 12):
        draws = [[rng.gauss(0, 0.01) for _ in range(count)] for _ in range(4000)]
        mean = sum(stats.trimmed_spread(d) ** 2 for d in draws) / 4000
        assert math.sqrt(mean) == pytest.approx(0.01, rel=0.06)


def test_a_small_spread_is_pulled_toward_the_products():
    others = [0.002] * 10
    assert stats.pooled_spread(0.0001, 8, others) > 0.0013
    assert stats.pooled_spread(0.0001, 8, []) == stats.FLOOR


@pytest.mark.parametrize(
    ("value", "votes", "expected"),
    [
        (0.10, [], "clear"),
        (-0.10, [-0.10] * 3, "red"),
        (-0.001, [0.001, 0.002, 0.003], "green"),
        (-0.001, [-0.001] * 5, "open"),
        (-0.10, [-0.10, -0.10, 0.1, 0.1, 0.1], "green"),
    ],
)
def test_the_claim_gate(value, votes, expected):
    gate = verdict.claim_gate(1.0, 0.002)
    assert gate.decide(Reading(value), [Reading(v) for v in votes]) == expected


def test_a_process_with_scattered_laps_is_judged_by_their_spread():
    assert verdict.effective_spread(0.001, Reading(0.0, 0.0014)) == 0.001
    assert verdict.effective_spread(0.001, Reading(0.0, 0.0030)) == 0.0030
    slower = verdict.same_gates(0.001)[0]
    sure, unsure = Reading(-0.006, 0.001), Reading(-0.006, 0.0030)
    assert slower.decide(sure, [sure] * 3) == "red"
    assert slower.decide(sure, [unsure] * 3) == "open"
    sure = Reading(-0.004, 0.001)
    assert slower.decide(sure, [sure] * 3) == "red"
    assert slower.decide(unsure, [sure] * 3) == "open"  # together they are unsure
    assert slower.decide(sure, [Reading(-0.009, 0.0030)] * 3) == "red"


def test_voting_stops_when_it_is_decided():
    votes = []

    def vote():
        votes.append(-0.1)
        return Reading(-0.1)

    decision = verdict.decide(Reading(-0.1), [verdict.claim_gate(1.0, 0.002)], vote)
    assert decision.outcomes == {"claim": "red"}
    assert len(votes) == 3


def test_a_suspect_without_votes_is_inconclusive():
    decision = verdict.decide(Reading(-0.1), [verdict.claim_gate(1.0, 0.002)], lambda: None)
    assert verdict.verdict_of(decision, stored=True, same_environment=True) == "inconclusive"


# What must hold for any numbers. A case: its first value, the votes on it, what it is held against.

LN = st.floats(-0.5, 0.5)
SPREADS = st.floats(0.001, 0.05)
VOTES_OF_FIVE = st.lists(LN, min_size=5, max_size=5)
MILDER = ("improved", "pass", "inconclusive", "regressed", "fail")


def gates_of(claim, stored, spread, clock="graph"):
    margin = verdict.record_margin(spread, 0.001, clock)
    return [verdict.claim_gate(claim, spread), *verdict.record_gates(stored, margin)]


def judged(value, votes, gates):
    left = iter(votes)
    decision = verdict.decide(Reading(value), gates, lambda: Reading(next(left)))
    return verdict.verdict_of(decision, stored=True, same_environment=True)


def alike(value, gates):
    """Return the verdict if every vote equals the first value."""
    return judged(value, [value] * verdict.ATTEMPTS, gates)


@given(LN, st.floats(0, 0.5), st.floats(0.8, 1.2), LN, SPREADS)
def test_a_larger_loss_never_gets_a_better_verdict(value, loss, claim, stored, spread):
    gates = gates_of(claim, stored, spread)
    verdicts = [alike(v, gates) for v in (value, value - loss)]
    assert MILDER.index(verdicts[0]) <= MILDER.index(verdicts[1])


@given(LN, VOTES_OF_FIVE, st.floats(0, 0.5), st.floats(0.8, 1.2), SPREADS)
def test_votes_that_lose_more_never_make_a_claim_better(value, votes, loss, claim, spread):
    order = ("green", "open", "red")
    gate = verdict.claim_gate(claim, spread)
    both = votes, [vote - loss for vote in votes]
    before, after = (gate.decide(Reading(value), [Reading(v) for v in vs]) for vs in both)
    if before != "clear":
        assert order.index(before) <= order.index(after)


@given(LN, st.floats(0.5, 2.0), st.floats(1, 2), VOTES_OF_FIVE, SPREADS)
def test_a_higher_claim_never_turns_fail_into_pass(value, claim, more, votes, spread):
    lower, higher = (verdict.claim_gate(at, spread) for at in (claim, claim * more))
    if judged(value, votes, [lower]) == "fail":
        assert judged(value, votes, [higher]) == "fail"


@given(LN, st.floats(0.8, 1.2), LN, SPREADS, st.floats(1, 20))
def test_a_larger_spread_never_makes_a_clear_case_red(value, claim, stored, spread, more):
    narrow, wide = (gates_of(claim, stored, s) for s in (spread, spread * more))
    clear = [g.decide(Reading(value), []) == "clear" for g in narrow]
    decision = verdict.decide(Reading(value), wide, lambda: Reading(value))
    for was_clear, gate in zip(clear, wide, strict=True):
        assert not (was_clear and decision.outcomes[gate.name] == "red")


@given(LN, VOTES_OF_FIVE, LN, SPREADS, st.floats(1, 20))
def test_a_larger_margin_never_turns_green_into_red(value, votes, stored, spread, more):
    narrow, wide = (
        verdict.record_gates(stored, verdict.record_margin(s, 0.001, "graph"))[0]
        for s in (spread, spread * more)
    )
    readings = [Reading(vote) for vote in votes]
    if wide.decide(Reading(value), readings) == "red":
        assert narrow.decide(Reading(value), readings) == "red"


@given(LN, VOTES_OF_FIVE, st.randoms(), st.floats(0.8, 1.2), LN, SPREADS)
def test_the_order_of_votes_does_not_matter(value, votes, rng, claim, stored, spread):
    gates = gates_of(claim, stored, spread)
    shuffled = rng.sample(votes, len(votes))
    assert judged(value, votes, gates) == judged(value, shuffled, gates)


BLOCKS = st.lists(st.floats(-1, 1), min_size=3, max_size=20)


@given(BLOCKS, st.randoms())
def test_the_order_of_values_does_not_matter(values, rng):
    shuffled = rng.sample(values, len(values))
    for robust in (False, True):
        assert stats.process_value(values, robust=robust) == stats.process_value(
            shuffled, robust=robust
        )
    assert stats.trimmed_spread(values) == stats.trimmed_spread(shuffled)
    assert stats.rms(values) == stats.rms(shuffled)
    assert stats.pooled_spread(0.01, 8, values) == stats.pooled_spread(0.01, 8, shuffled)


@given(st.lists(st.lists(BLOCKS, min_size=1, max_size=3), min_size=1, max_size=4), st.randoms())
def test_the_order_of_sessions_and_cases_does_not_matter(cases, rng):
    shuffled = [
        [rng.sample(v, len(v)) for v in rng.sample(c, len(c))]
        for c in rng.sample(cases, len(cases))
    ]
    before, after = stats.session_spread(cases, 0.01), stats.session_spread(shuffled, 0.01)
    assert after**2 == pytest.approx(before**2, abs=1e-12)


@pytest.mark.parametrize("processes", [(6, 1), (2, 1), (2, 2), (3, 6, 1), (8, 4)])
@pytest.mark.parametrize("session", [0.002, 0.02])
def test_the_session_spread_is_separated_from_the_process_spread(processes, session):
    rng = random.Random(f"{processes}{session}")

    def values(count):
        shift = rng.gauss(0, session)
        return [rng.gauss(shift, 0.003) for _ in range(count)]

    cases = [[values(count) for count in processes] for _ in range(4000)]
    assert stats.session_spread(cases, 0.01) == pytest.approx(session, rel=0.12)


def test_a_few_equal_sessions_do_not_narrow_the_margin():
    alike = [[0.1, 0.1001], [0.1]]
    assert stats.session_spread([], 0.01) == 0.01
    assert stats.session_spread([[[0.1], [0.3]], [[0.1, 0.2, 0.3]]], 0.01) == 0.01
    assert stats.session_spread([alike], 0.01) == pytest.approx(0.01 * math.sqrt(4 / 5), rel=1e-3)
    assert stats.session_spread([alike] * 96, 0.01) == pytest.approx(0.002, rel=1e-3)


def test_noisy_processes_do_not_hide_the_assumed_session_spread():
    noisy = [[[1.4, 1.6], [1.3, 1.95]], [[0.0, 0.2], [0.1]]] * 5
    assert stats.session_spread(noisy, 0.01) == pytest.approx(0.01 * math.sqrt(4 / 14))


@given(BLOCKS, st.integers(0, 19), st.floats(0, 1))
def test_a_slower_block_never_makes_a_process_faster(values, which, loss):
    slower = list(values)
    slower[which % len(values)] -= loss
    for robust in (False, True):
        before, after = (stats.process_value(v, robust=robust) for v in (values, slower))
        assert after <= before + 1e-12


@given(
    SPREADS, st.floats(1, 10), st.floats(0, 0.05), st.sampled_from(sorted(verdict.NEUTRAL_FLOOR))
)
def test_more_noise_never_lowers_the_detectable_loss(spread, more, session, clock):
    def promised(spread, session):
        margin = verdict.record_margin(spread, session, clock)
        gates = [verdict.claim_gate(1.0, spread), *verdict.record_gates(0.0, margin)]
        return margin, verdict.detectable(gates, spread, session)

    calm = promised(spread, session)
    assert all(a <= b for a, b in zip(calm, promised(spread * more, session), strict=True))
    assert all(a <= b for a, b in zip(calm, promised(spread, session * more), strict=True))


def test_memory_placement_cancels_between_laps_of_both_build_orders():
    def measured(placement):
        noise = Noise(window=0.001, capture=0.0002, process=0.0, placement=placement)
        processes = (Process((2e-6, 2e-6), noise, random.Random(seed)) for seed in range(50))
        return [process.measure(Budget()) for process in processes]

    still, moved = measured(0.0), measured(0.01)
    assert stats.rms(s.value for s in moved) < 1.5 * stats.rms(s.value for s in still)
    assert stats.rms(s.error for s in moved) < 1.5 * stats.rms(s.error for s in still)
    assert stats.rms(s.laps[0] for s in moved) > 20 * stats.rms(s.value for s in moved)


def test_blocks_of_both_orders_weigh_the_same():
    assert stats.process_value([0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1], robust=False) == 0.5
    assert stats.process_value([0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1], robust=True) == 0.5
    assert stats.process_value([0.0, 0.0, 0.0, 1.0], [1, 1, 1, 1], robust=True) == 0.0


@pytest.mark.parametrize("laps", [3, 4])
def test_the_error_of_a_process_matches_the_scatter_of_its_value(laps):
    rng, values, errors = random.Random(5), [], []
    for _ in range(2000):
        bias, blocks, firsts = rng.gauss(0, 3), [], []
        for lap in range(laps):
            captured = bias * (-1) ** lap + rng.gauss(0, 1)
            blocks += [captured + rng.gauss(0, 0.1) for _ in range(4)]
            firsts += [lap % 2] * 4
        errors.append(stats.process_error(blocks, laps, firsts))
        values.append(stats.process_value(blocks, firsts, robust=False))
    assert stats.rms(errors) == pytest.approx(stats.rms(values), rel=0.15)


def test_one_slow_block_changes_neither_value_nor_error():
    calm = [0.001 * (i % 3) for i in range(16)]
    firsts = [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    dipped = [*calm[:-1], -0.1]
    assert stats.process_error(dipped, 4, firsts) < 0.001
    assert stats.process_value(dipped, firsts, robust=False) == pytest.approx(
        stats.process_value(calm, firsts, robust=False), abs=0.0005
    )


def test_the_error_needs_more_than_two_laps_of_equal_length():
    assert stats.process_error([0.0, 1.0], 2) == 0
    with pytest.raises(ValueError, match="5 blocks cannot be divided into 4 equal laps"):
        stats.process_error([0.0] * 5, 4)


class Even:
    """A window whose calls always take the same time."""

    calls = counted = repeats = 1

    def __call__(self):
        return 1e-5


@pytest.mark.parametrize(
    ("words", "strict", "expected"),
    [
        ([], False, ""),
        (["pass"], False, "pass"),
        (["pass", "new"], False, "new"),
        (["stale", "improved"], False, "stale"),
        (["stale", "inconclusive"], False, "stale"),
        (["stale", "inconclusive"], True, "regressed"),
        (["new", "regressed"], False, "regressed"),
        (["checked", "pass"], False, "pass"),
        (["inconclusive", "invalid"], False, "invalid"),
    ],
)
def test_the_verdict_is_the_worst_finding(words, strict, expected):
    findings = [verdict.Finding(word) for word in words]
    for order in (findings, findings[::-1]):
        assert verdict.case_verdict(order, strict_environment=strict) == expected


class Watched:
    """A bout whose third and fourth blocks are disturbed, and that is looked at now and then."""

    clock = "graph"
    windows = (Even(), Even())

    def __init__(self):
        self.checks = 0

    def refresh(self, *, last):
        pass

    def disturbance(self):
        self.checks += 1
        return Cause("hot") if self.checks in (4, 5) else None

    def details(self):
        return {"looks": [[0, 1980], [1, 1980], [3, 1900], [4, 1800], [5, 1800], [6, 1900]]}


def test_dropped_blocks_and_telemetry_name_their_position():
    budget = Budget(laps=2).exactly(4)
    parts = [measure(Watched(), budget, random.Random(1)) for _ in range(2)]
    looks = [[0, 1980], [0, 1980], [2, 1900], [2, 1800], [2, 1800], [3, 1900]]
    assert parts[0].dropped_at == [2, 2]
    assert parts[0].details["looks"] == looks
    joined = join(parts)
    assert joined.dropped_at == [2, 2, 6, 6]
    assert joined.details["looks"] == looks + [[4 + at, mhz] for at, mhz in looks]
