"""`aisp links diagnose`: the verdict and the output on simulated arrivals."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from nccl_test import TWO, Ranks, machine_is

from pytest_aisp.cli import app
from pytest_aisp.distributed import nccl
from pytest_aisp.distributed.slow_collectives import diagnose_result, diagnosis
from pytest_aisp.page.pair import PageError
from pytest_aisp.results.messages import Reply
from pytest_aisp.util import gpu_lease
from pytest_aisp.worker import collective_arrivals
from pytest_aisp.worker.collective_arrivals import (
    CALLS,
    DiagnoseResult,
    Meeting,
    SideArrivals,
    aligned,
    meetings,
)
from pytest_aisp.worker.collective_events import Operation, operations

MS, US = 1e-3, 1e-6


def simulated(
    *, late=None, blocked=None, transfer=1 * MS, alone=1 * MS, noise=20 * US, ranks=4, seed=0
):
    """Return arrivals at two collectives per call, of which each rank is late at the first one.

    Args:
        late: seconds by rank, or a function that returns them for a call.
        blocked: seconds by rank that it waited for data.
        noise: standard deviation of each arrival, and of each transfer.
    """
    rng = random.Random(seed)
    calls = []
    for number in range(CALLS):
        delays = late(number, rng) if callable(late) else (late or [0.0] * ranks)
        call = []
        for k, each in enumerate((delays, [0.0] * ranks)):
            start = number + 0.5 * k
            arrived = [start + delay + rng.gauss(0, noise) for delay in each]
            end = max(arrived) + transfer / 2 + rng.gauss(0, noise / 2)
            waits = (blocked or [0.0] * ranks) if k == 0 else [0.0] * ranks
            call.append(Meeting("all_reduce", 4096, arrived, [end] * ranks, waits))
        calls.append(call)
    return SideArrivals(calls, [alone / 2 if alone else None] * 2)


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_healthy(seed):
    found = diagnosis(simulated(seed=seed), 0.0)
    assert (found.verdict, found.late, found.advice) == ("healthy", (), "")


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_late_in_turn_are_no_straggler(seed):
    found = diagnosis(simulated(noise=1 * MS, seed=seed), 0.0)
    assert found.verdict in ("unclear", "contention")
    found = diagnosis(simulated(noise=1 * MS, seed=seed, alone=None), 0.0)
    assert found.verdict == "unclear"
    assert "but no rank is late in 90% of the calls" in found.evidence
    assert found.advice.startswith("Repeat it while nothing else runs here")


@pytest.mark.parametrize(
    ("late", "named", "words"),
    [
        ([0, 5 * MS, 0, 0], [1], "rank 1 is late by"),
        ([5 * MS, 0, 0, 4 * MS], [0, 3], "ranks 0 and 3 are late by"),
        ([0, 5 * MS, 5 * MS, 5 * MS], [1, 2, 3], "ranks 1 and 2 and 3 are late by"),
        ([0, 5 * MS, 0.5 * MS, 0], [1], "rank 1 is late by"),  # rank 2 loses no time for others
        (lambda n, rng: [0, rng.expovariate(1 / (5 * MS)) + 1 * MS, 0, 0], [1], "rank 1 is late"),
    ],
)
def test_ranks_that_are_late_in_most_calls_are_named(late, named, words):
    found = diagnosis(simulated(late=late), 0.0)
    assert (found.verdict, list(found.late)) == ("straggler", named)
    assert words in found.evidence
    assert "aisp machine doctor" in found.advice


def test_figures_of_the_ranks():
    found = diagnosis(simulated(late=[0, 5 * MS, 0], ranks=3, noise=0.0), 0.0)
    early, late, _ = found.ranks
    assert early.wait == pytest.approx(5 * MS, rel=0.01)
    assert early.inside == pytest.approx(6 * MS, rel=0.01)
    assert (late.wait, late.last) == (0.0, 1.0)
    assert late.inside == pytest.approx(1 * MS, rel=0.01)


def test_a_rank_that_is_late_in_half_of_the_calls_is_unclear():
    found = diagnosis(simulated(late=lambda n, rng: [0, 5 * MS * (n % 2), 0, 0]), 0.0)
    assert found.verdict == "unclear"


def test_a_short_delay_before_long_transfers_is_healthy():
    side = simulated(late=[0, 5 * MS, 0, 0], transfer=50 * MS, alone=50 * MS)
    assert diagnosis(side, 0.0).verdict == "healthy"


def test_slow_transfers_of_ranks_that_arrive_together_are_contention():
    found = diagnosis(simulated(transfer=3 * MS), 0.0)
    assert (found.verdict, found.late) == ("contention", ())
    assert "3.0x the 1 ms that they take alone" in found.evidence
    assert "aisp links bandwidth" in found.advice
    assert diagnosis(simulated(transfer=1.3 * MS), 0.0).verdict == "healthy"
    assert diagnosis(simulated(transfer=3 * MS, alone=None), 0.0).verdict == "healthy"


def test_transfers_that_are_slow_in_some_calls_are_no_contention():
    slow, usual = simulated(transfer=3 * MS), simulated(transfer=1 * MS, alone=1.1 * MS)
    mixed = SideArrivals([*slow.calls[:18], *usual.calls[18:]], usual.alone)
    assert diagnosis(mixed, 0.0).verdict == "healthy"


def test_of_a_late_rank_and_contention_the_larger_loss_is_named():
    assert diagnosis(simulated(late=[0, 5 * MS, 0, 0], transfer=3 * MS), 0.0).verdict == "straggler"
    assert diagnosis(simulated(late=[0, 1 * MS, 0, 0], transfer=4 * MS), 0.0).verdict == (
        "contention"
    )


def test_ranks_that_wait_for_data_are_a_dependency():
    chain = [0, 2 * MS, 4 * MS, 6 * MS]
    found = diagnosis(simulated(late=chain, blocked=chain), 0.0)
    assert (found.verdict, list(found.late)) == ("dependency", [0, 1, 2, 3])
    assert "rank 3 waits 6 ms for data" in found.evidence
    assert "in the order 0 -> 1 -> 2 -> 3" in found.evidence
    assert "microbatches" in found.advice


def test_ranks_that_arrive_together_after_waiting_for_data_are_a_dependency():
    side = simulated(late=[5 * MS] * 4, blocked=[0, 5 * MS, 5 * MS, 5 * MS])
    assert diagnosis(side, 0.0).verdict == "dependency"


def test_a_straggler_within_a_chain_is_named():
    chain, blocked = [0, 9 * MS, 11 * MS, 13 * MS], [0, 2 * MS, 11 * MS, 13 * MS]
    found = diagnosis(simulated(late=chain, blocked=blocked), 0.0)
    assert (found.verdict, list(found.late)) == ("straggler", [1])


def test_a_rank_whose_own_delay_is_small_beside_the_chain_is_not_blamed():
    chain, blocked = [0, 10 * MS, 20 * MS, 30 * MS], [0, 10 * MS, 20 * MS, 26 * MS]
    assert diagnosis(simulated(late=chain, blocked=blocked), 0.0).verdict == "dependency"


def test_what_a_wrong_clock_may_cause_is_no_straggler():
    side = simulated(late=[0, 0.8 * MS, 0, 0])
    assert diagnosis(side, 10 * US).verdict == "straggler"
    found = diagnosis(side, 300 * US)  # of two collectives
    assert found.verdict == "unclear"
    assert "but the clocks agree only within 1.8 ms" in found.evidence


def at(name, start, end, nbytes=0):
    return Operation(name, nbytes, start, end)


def test_time_before_a_send_is_waiting_and_the_time_after_it_is_not():
    ends = [at("end of the call", 30, 30)]
    sender = [at("send", 10, 11), at("all_reduce", 12, 21), *ends]
    waits = [at("recv", 0, 10.5), at("recv", 2, 10.5), at("all_reduce", 20, 21), *ends]
    posted = [at("recv", 9, 19), at("all_reduce", 20, 21), *ends]
    ((meeting,),) = meetings([[sender], [waits], [posted]])
    assert meeting.blocked == [0.0, 10.0, 1.0]  # two receives at once wait only once
    assert meeting.arrived == [12, 20, 20]
    assert meeting.spread == 8
    assert meeting.transfer == 1


def test_waiting_belongs_to_the_next_collective():
    first = [at("send", 2, 3), at("all_reduce", 5, 6), at("send", 9, 9), at("all_reduce", 11, 12)]
    second = [at("recv", 1, 3), at("all_reduce", 5, 6), at("recv", 7, 9), at("all_reduce", 11, 12)]
    ((one, two),) = meetings([[first], [second]])
    assert (one.blocked, two.blocked) == ([0.0, 1.0], [0.0, 2.0])


def test_a_later_send_is_not_what_a_receive_waited_for():
    first = [at("send", 0, 1), at("send", 5, 6), at("all_reduce", 7, 8)]
    second = [at("recv", 0, 6), at("recv", 0, 6), at("all_reduce", 7, 8)]
    third = [at("recv", 0, 4), at("all_reduce", 7, 8)]
    ((meeting,),) = meetings([[first], [second], [third]])
    assert meeting.blocked == [0.0, 5.0, 0.0]


def test_ranks_without_collectives_meet_at_the_end_of_the_call():
    first = [at("send", 0, 1), at("end of the call", 1, 1)]
    second = [at("recv", 0, 2), at("end of the call", 3, 3)]
    ((meeting,),) = meetings([[first], [second]])
    assert meeting.arrived == [1, 3]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[[]], [[]]], "it calls no collective of torch.distributed"),
        (
            [[[at("all_reduce", 0, 1), at("all_gather", 2, 3)]], [[at("all_reduce", 0, 1)]]],
            "its ranks do not make the same collectives: rank 0 2, rank 1 1",
        ),
        (
            [[[at("all_reduce", 0, 1)], []], [[at("all_reduce", 0, 1)], []]],
            "its calls do not make the same collectives each time",
        ),
    ],
)
def test_recordings_that_cannot_be_compared_are_refused(ranks, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        meetings(ranks)


def event(name, start, end, *, shapes=(), dtypes=(), device="CPU"):
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: int(start * 1e9),
        end_ns=lambda: int(end * 1e9),
        shapes=lambda: list(shapes),
        dtypes=lambda: list(dtypes),
        device_type=lambda: SimpleNamespace(name=device),
    )


def test_operations_of_a_call_are_on_rank_0s_clock():
    recorded = [
        event("gloo:barrier", 0, 1),  # between two calls
        event("gloo:all_reduce", 6, 7, shapes=[[3, 4]], dtypes=["c10::BFloat16"]),
        event("aisp-call", 2, 9),
        event("gloo:send", 3, 4, shapes=[[5]], dtypes=["float"]),
        event("aten::add", 4, 5),
    ]
    ((send, reduced, end),) = operations(recorded, 1.0)
    assert send == at("send", 2, 3)
    assert reduced == at("all_reduce", 5, 6, 24)
    assert end == at("end of the call", 8, 8)


def recorded_on_a_gpu(ahead=0.0, late=0.0):
    """Return the events of two calls on a rank, whose kernels seem to run `ahead` seconds later.

    Args:
        late: seconds by which the rank is late at its all-reduce.
    """
    events = []
    for t in (0, 20):
        wait = t + ahead
        events += [
            event("nccl:all_reduce", t + 0.5, t + 0.6, shapes=[[1]], dtypes=["float"]),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", wait + 1, wait + 2, device="CUDA"),
            event("aisp-call", t + 2.1, t + 11),
            event("nccl:send 0->1", t + 3, t + 3.1, shapes=[[5]], dtypes=["float"]),
            event("ncclDevKernel_SendRecv(x)", wait + 5, wait + 6, device="CUDA"),
            event("nccl:all_reduce", t + 4, t + 4.1, shapes=[[8]], dtypes=["float"]),
            event(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                wait + 7 + late,
                wait + 10,
                device="CUDA",
            ),
        ]
    return events


def test_on_a_gpu_the_kernels_tell_the_times():
    (start, send, reduced, end), _ = operations(recorded_on_a_gpu(), 0.0)
    assert (start.name, start.end) == ("start of the call", 2)
    assert (send, reduced, end.end) == (at("send", 5, 6), at("all_reduce", 7, 10, 32), 11)
    # A kernel belongs to its operation, even if the GPU's clock puts it outside the call.
    (_, send, _, _), (_, then, _, _) = operations(recorded_on_a_gpu(ahead=9), 0.0)
    assert (send.start, then.start) == pytest.approx((14, 34))
    with pytest.raises(PageError, match="6 operations of NCCL launched 5 kernels: which"):
        operations(recorded_on_a_gpu()[:-1], 0.0)


def test_the_error_of_a_gpus_clock_makes_no_straggler():
    ranks = [operations(recorded_on_a_gpu(ahead), 0.0) for ahead in (0, 4, -3)]
    moved, error = aligned(ranks)
    assert error == pytest.approx(1)  # seconds of the all-reduce on the rank that starts it last
    for call in meetings(moved):
        assert [meeting.spread for meeting in call] == pytest.approx([0])
    ranks[1] = operations(recorded_on_a_gpu(4, late=2), 0.0)
    for (meeting,) in meetings(aligned(ranks)[0]):
        assert meeting.arrived[1] - meeting.arrived[0] == pytest.approx(2)


def test_gloo_stays_on_the_hosts_clock():
    ranks = [[[at("all_reduce", 1, 2), at("end of the call", 3, 3)]]] * 2
    assert aligned(ranks) == (ranks, None)


def test_a_healthy_case_exits_with_0_and_gpus_are_locked(monkeypatch, tmp_path, capsys):
    machine_is(monkeypatch, TWO)
    monkeypatch.setattr(nccl, "RankSet", Ranks)
    monkeypatch.setattr(gpu_lease, "lease_folder", lambda: tmp_path)
    side = simulated(ranks=2)
    plain = {
        "clock_error": 1e-6,
        "sides": {
            "tuned": {"calls": [[vars_of(m) for m in c] for c in side.calls], "alone": side.alone}
        },
    }
    monkeypatch.setattr(Ranks, "reply", Reply(result=plain), raising=False)
    assert app.main(["links", "diagnose"]) == 0
    assert (Ranks.seen.count, Ranks.seen.task.device) == (2, "cuda")
    assert {p.name for p in tmp_path.glob("*.lock")} == {"host.lock", "GPU-a.lock", "GPU-b.lock"}
    out = capsys.readouterr().out
    assert out.startswith("2 ranks, NVIDIA H200; clocks agree within 1 us\n")
    assert "\nhealthy: the ranks arrive within" in out
    assert "contention" not in out


def vars_of(meeting):
    return {name: getattr(meeting, name) for name in meeting.__struct_fields__}


def test_one_side_that_is_not_healthy_gives_exit_code_1():
    sides = {"good": simulated(), "bad": simulated(late=[0, 5 * MS, 0, 0])}
    result = diagnose_result(DiagnoseResult(sides, 0.0), "4 ranks")
    assert result.code == 1
    verdicts = [line.split(":")[0] for line in result.lines if line.startswith(("heal", "stra"))]
    assert verdicts == ["healthy", "straggler"]


@pytest.mark.parametrize("queued", [True, False])
def test_a_queued_call_does_not_wait_for_the_host(monkeypatch, queued):
    done = []
    group = SimpleNamespace(start_window=lambda device: done.append("start"))
    monkeypatch.setattr(collective_arrivals, "current_group", lambda: group)
    monkeypatch.setattr(
        collective_arrivals, "synchronizer", lambda device: lambda: done.append("wait")
    )
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("busy"))
    collective_arrivals._record(lambda: done.append("call"), "cpu", 0.0, queued=queued)
    one = ["busy", "start", "call", "wait"] if queued else ["start", "wait", "call", "wait"]
    calls = collective_arrivals.WARMUP + collective_arrivals.CALLS
    assert done == calls * one
