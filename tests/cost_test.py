"""What a side costs, and the time that it predicts from the rates of a product."""

from __future__ import annotations

import re

import pytest
from declare_test import declared, fast, message, slow

from pytest_aisp import Cost, Work
from pytest_aisp.page.cost import cost_at, is_seen, seen_section
from pytest_aisp.timing.peaks import Peaks
from pytest_aisp.timing.predict import RateMissing, explains, predict

PEAKS = Peaks(
    "made-up",
    {
        **{"copy": 4e12, "read": 4e12, "write": 2e12, "bf16": 1e14, "h2d": 5e10, "d2h": 4e10},
        **{"peer": 4e11, "busbw": 3e11, "launch": 1e-5, "graph_node": 1e-6, "all_reduce": 1e-5},
        **{
            "l2": 8e12,
            "shared": 3e13,
            "atomics": 2e11,
            "sfu": 4e12,
            "blocks": 1e9,
            "in_flight": 2e8,
            "pcie_both": 6e10,
        },
        **{"host_step": 1e-6, "sync": 2e-5, "barrier": 3e-6},
    },
)


@pytest.mark.parametrize(
    ("cost", "graph", "seconds", "limit"),
    [
        (Cost(read=4e9), True, 1e-3, "read"),
        (Cost(read=4e9, write=8e9), True, 2e-3 + 2e-3, "copy"),  # 8 GB as a copy, 4 GB written
        (Cost(read=4e9, ops={"bf16": 2e11}), True, 2e-3, "bf16"),
        (Cost(read=4e9) + Cost(ops={"bf16": 2e11}), True, 3e-3, "bf16"),
        (3 * (Cost(read=4e9) + Cost(h2d=5e7)), True, 6e-3, "read"),
        (Cost(read=4e9, l2=1.6e10), True, 2e-3, "l2"),
        (Cost(shared=3e10, sfu=8e9), True, 2e-3, "sfu"),
        (Cost(shared=3e10, blocks=2e6), True, 2e-3, "blocks"),
        (Cost(atomics=2e8), True, 1e-3, "atomics"),
        (Cost(read=4e9, in_flight=5000), True, 17**0.5 * 1e-3, "in_flight"),  # 1 ms and 4 ms
        (Cost(d2h=4e7, h2d=1e7), True, 1e-3, "d2h"),
        (Cost(d2h=4e7, h2d=5e7), True, 1.5e-3, "pcie_both"),
        (Cost(sent=4e8), True, 1e-3, "peer"),
        (Cost(nccl=3e8), True, 1e-3, "busbw"),
        (Cost(sent=4e8, collectives=2), True, 1.02e-3, "peer"),
        (Cost(launches=1, barriers=2), True, 7e-6, "barrier"),
        (Cost(read=4e6, launches=3), True, 4e-6, "graph_node"),
        (Cost(read=4e6, launches=3), False, 3e-5, "launch"),
        (Cost(read=4e9, launches=3), False, 1e-3, "read"),
        (Cost(read=4e6, launches=3, host_steps=5), False, 3.5e-5, "launch"),
        (Cost(read=4e6, launches=3, host_steps=5), True, 4e-6, "graph_node"),
        (Cost(read=4e9, launches=1, graph_nodes=100), False, 1.1e-3, "read"),
        # The host waits for the first kernel, and then launches ten while the GPU works.
        (Cost(read=4e9, launches=1, syncs=1) + Cost(launches=10), False, 1.12e-3, "read"),
    ],
)
def test_the_predicted_time(cost, graph, seconds, limit):
    predicted = predict(cost, PEAKS, graph=graph)
    assert predicted.seconds == pytest.approx(seconds)
    assert predicted.limit == limit


def test_a_measured_time_is_explained_within_a_quarter():
    seconds = predict(Cost(read=4e9), PEAKS, graph=True).seconds
    assert seconds == pytest.approx(1e-3)
    found = [explains(seconds, measured) for measured in (0.74e-3, 0.76e-3, 1.24e-3, 1.26e-3)]
    assert found == [False, True, True, False]


@pytest.mark.parametrize(
    ("cost", "rate", "command"),
    [
        (Cost(ops={"fp8": 1}), "fp8", "machine peak"),
        (Cost(sent=1), "peer", "links bandwidth"),
        (Cost(collectives=1), "all_reduce", "links nccl"),
        (Cost(barriers=1), "barrier", "links nccl"),
        (Cost(read=1, in_flight=1), "read", "machine peak"),
    ],
)
def test_a_rate_that_was_not_measured_is_named(cost, rate, command):
    with pytest.raises(RateMissing) as error:
        predict(cost, Peaks("made-up", {}), graph=True)
    assert error.value.rate == rate
    assert str(error.value).splitlines() == [
        f"the rate {rate!r} was not measured on made-up; measure it there:",
        f"    aisp {command} --store",
    ]


@pytest.mark.parametrize(
    ("doc", "seen"),
    [
        (None, ""),
        ("A title.\n\n    Seen       An H200 waits.\n    ", "An H200 waits."),
        (
            "A title.\n\nSeen       It waits.\n\n           Twice.\nUse when   never",
            "It waits.\n\n           Twice.",
        ),
        ("A title.\n\nBound      DRAM.\n           Seen  by nobody.\n", ""),
        ("A title.\n\nSeen twice.\n", ""),
    ],
)
def test_a_page_may_say_what_was_seen(doc, seen):
    assert seen_section(doc) == seen


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        ("", []),
        ("The L2 holds half of the values.", []),
        ("`fast` waits for its loads.", ["optimized"]),
        ("fast_too waits for its loads.", []),
        ("The baseline waits.", ["baseline"]),
        ("slow and fast wait.", ["baseline", "optimized"]),
        ("Both sides wait.", ["baseline", "optimized"]),
        ("fast does not wait, but the other\n  kernels do.", ["baseline", "optimized"]),
        ("All loads wait.", []),
    ],
)
def test_what_was_seen_names_a_side_or_all_sides(seen, named):
    sides = {"baseline": "slow", "optimized": "fast"}
    assert [role for role, side in sides.items() if is_seen(side, role, seen)] == named


def test_a_type_without_a_peak_has_no_command():
    with pytest.raises(RateMissing) as error:
        predict(Cost(ops={"fp64": 1}), PEAKS, graph=True)
    text = "the rate 'fp64' was not measured on made-up; no command measures it"
    assert str(error.value) == text


def test_phases_are_kept_in_order():
    one, two, three = (Cost(launches=k) for k in (1, 2, 3))
    assert (one + (two + three)).phases() == ((one + two) + three).phases() == (one, two, three)
    assert (2 * (one + two)).phases() == (one, two, one, two)


REFUSED = {
    "negative": ({fast: lambda n: Cost(read=-n)}, "Cost(read=-4096) must be a number >= 0"),
    "infinite": ({fast: lambda n: Cost(read=float("inf"))}, "Cost(read=inf) must be a number >= 0"),
    "not a number": ({fast: lambda n: Cost(l2=float("nan"))}, "Cost(l2=nan) must be a number >= 0"),
    "nothing": (
        {fast: lambda n: Cost() + Cost(launches=0)},
        "fast costs nothing at n=4096; a call at least launches a kernel: Cost(launches=1)",
    ),
    "a text": ({fast: lambda n: Cost(read="n")}, "Cost(read='n') must be a number >= 0"),
    "negative operations": (
        {fast: lambda n: Cost(ops={"fp32": -1})},
        "Cost(fp32=-1) must be a number >= 0",
    ),
    "unknown type": (
        {fast: lambda n: Cost(ops={"fp12": n})},
        "unknown type in Cost(ops=) 'fp12'; legal: fp64, fp32, ",
    ),
    "unknown resource": (
        {fast: lambda n: Cost(l3=n)},
        "unexpected keyword argument 'l3'; legal: read, write, in_flight, l2, shared, atomics, ",
    ),
    "no repetition": ({fast: lambda n: 0 * Cost(read=n)}, "0 * Cost(...) must repeat it at least"),
    "no cost": ({fast: lambda n: 4 * n}, "the cost of fast is 16384; return a Cost"),
    "no function": (
        {fast: Cost(read=1)},
        "costs[fast] is Cost(read=1, write=0, in_flight=0, h2d=0, d2h=0, sent=0, nccl=0, l2=0,",
    ),
    "another size": (
        {fast: lambda n, m: Cost(read=n)},
        "sizes lacks the key 'm', which the cost of fast needs; keys: n",
    ),
    "no size": (
        {fast: lambda: Cost(read=1)},
        "sizes has the key 'n', which the cost of fast does not take ()",
    ),
    "no side": (
        {re.sub: lambda n: Cost(read=n)},
        "costs= has 'sub', which is not a side of this page; its sides are slow, fast",
    ),
    "less than the work": (
        {slow: lambda n: Cost(read=n)},
        "slow costs 4096 bytes read at n=4096, but work= says that any implementation needs 16384;"
        " correct one of the two",
    ),
}


@pytest.mark.parametrize(("costs", "text"), REFUSED.values(), ids=REFUSED)
def test_a_cost_that_makes_no_sense_is_refused(costs, text):
    assert text in message(costs=costs)


@pytest.mark.parametrize(
    ("side", "cost", "text"),
    [
        (fast, lambda n: Cost(read=-1), "the cost of fast at n=4096: "),
        (fast, lambda n, m: Cost(read=n), "sizes lacks the key 'm', "),
        (fast, lambda: Cost(read=1), "sizes has the key 'n', "),
        (re.sub, lambda n: Cost(read=n), "costs= has 'sub', "),
    ],
)
def test_the_message_names_the_line_of_the_cost(side, cost, text):
    line = cost.__code__.co_firstlineno
    assert message(costs={side: cost}).startswith(f"@compare: {__file__}:{line}: {text}")


def test_a_type_error_in_a_cost_does_not_list_the_resources():
    refused = message(costs={fast: lambda n: Cost(read=len(n))})
    assert refused.endswith("object of type 'int' has no len()")


@pytest.mark.parametrize(
    ("work", "cost", "text"),
    [
        (Work(write=8), Cost(write=4), "fast costs 4 bytes written"),
        (Work(wire=8), Cost(sent=2, h2d=2), "fast costs 4 bytes over a link"),
    ],
)
def test_every_resource_of_the_work_is_compared(work, cost, text):
    refused = message(work=lambda n: work, costs={fast: lambda n: cost})
    assert f"{text} at n=4096, but work= says that any implementation needs 8;" in refused


def test_operations_are_compared_in_sum_because_a_side_may_use_another_type():
    work = {"work": lambda n: Work(flops={"fp32": 2 * n})}
    refused = message(costs={fast: lambda n: Cost(ops={"tf32": n})}, **work)
    assert "fast costs 4096 operations at n=4096, but work= says" in refused
    declared(costs={fast: lambda n: Cost(ops={"tf32": 2 * n})}, **work)


def test_a_cost_may_depend_on_the_number_of_ranks():
    def cost(n, world):
        return Cost(read=4 * n * world)

    pair = declared(costs={fast: cost}, gpus=1).kwargs["pair"]
    assert cost_at(pair, fast, {"n": 3}, 2) == Cost(read=24)
    assert cost_at(pair, slow, {"n": 3}, 2) is None
