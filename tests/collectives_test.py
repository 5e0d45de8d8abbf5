"""Collectives on ranks: bandwidth arithmetic, checks before timing, clocks, one-shot all-reduce."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pytest_aisp.checking.numerics import Wrong
from pytest_aisp.timing import collectives, cuda_graph
from pytest_aisp.timing.collectives import OPS, bandwidths, bus_factor
from pytest_aisp.util import process_group

KIB = 1 << 10


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("one_shot", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
    ],
)
def test_bus_bandwidth_follows_nccl_tests(op, ranks, factor):
    assert bus_factor(op, ranks) == factor
    algbw, busbw = bandwidths({"op": op, "size": 1 << 30, "seconds": 2e-3}, ranks)
    assert algbw == (1 << 30) / 2e-3
    assert busbw == pytest.approx(algbw * factor)


class Third(process_group.SingleProcess):
    """Rank 1 of three."""

    rank, world = 1, 3


@pytest.fixture
def third(monkeypatch):
    """Simulate rank 1 of 3. Collectives return a wrong value at the index `at`."""
    monkeypatch.setattr(process_group, "_current", Third())
    wrong = SimpleNamespace(at=None)

    def corrupt(out):
        if wrong.at is not None:
            out.view(-1)[wrong.at] += 1

    def all_reduce(x):
        assert bool((x == 2).all())
        x.fill_(1 + 2 + 3)
        corrupt(x)

    def all_gather(out, part):
        assert bool((part == 2).all())
        out.view(3, -1).copy_(torch.tensor([[1.0], [2.0], [3.0]]))
        corrupt(out)

    def reduce_scatter(part, whole):
        assert bool((whole == 2).all())
        part.fill_(6)
        corrupt(part)

    def all_to_all(out, whole):
        assert whole.view(3, -1)[:, 0].tolist() == [3.0, 4.0, 5.0]  # rank * world + chunk
        out.view(3, -1).copy_(torch.tensor([[1.0], [4.0], [7.0]]))
        corrupt(out)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return wrong


@pytest.mark.parametrize("op", OPS)
def test_each_collective_checks_every_element(third, op):
    collective = collectives.known_collective(op, 4 * KIB, "cpu")
    assert collective.nbytes == 4080  # whole 16 bytes for each of three ranks
    collective.check()
    third.at = 0
    value = {"all_gather": (2, 1), "all_to_all": (2, 1)}.get(op, (7, 6))
    text = f"{op} of 3.984 KiB is wrong: element 0 is {value[0]}, not {value[1]}"
    with pytest.raises(Wrong) as wrong:
        collective.check()
    assert str(wrong.value) == text
    third.at = -1
    with pytest.raises(Wrong, match=r"is wrong: element [1-9]"):
        collective.check()


def test_the_smallest_size_is_16_bytes_per_rank(third):
    assert collectives.known_collective("all_reduce", 1, "cpu").nbytes == 48


class Window:
    """A window whose calls take 100 us each."""

    def __init__(self, side, calls):
        self.calls = calls

    def __call__(self):
        return 1e-4


def side():
    return SimpleNamespace(name="all_reduce")


def test_graph_clock_falls_back_to_the_host_clock(monkeypatch):
    def refuse(side, calls):
        raise cuda_graph.Uncapturable("NCCL cannot be captured")

    monkeypatch.setattr(collectives, "GraphWindow", Window)
    monkeypatch.setattr(collectives, "HostWindow", lambda side, calls, device: Window(0, 0))
    assert collectives._seconds(side(), "cuda") == ("graph", 1e-4)
    monkeypatch.setattr(collectives, "GraphWindow", refuse)
    assert collectives._seconds(side(), "cuda") == ("host", 1e-4)


def test_windows_are_so_long_that_late_ranks_do_not_matter(monkeypatch):
    late = 50e-6
    monkeypatch.setattr(collectives, "GraphWindow", lambda side, calls: lambda: 2e-6 + late / calls)
    clock, seconds = collectives._seconds(side(), "cuda")
    assert clock == "graph"
    assert seconds == pytest.approx(2e-6, rel=0.03)


def test_a_failed_capture_on_one_rank_stops_all(monkeypatch):
    class Other(process_group.SingleProcess):
        def first_message(self, text):
            return "rank 1: refused"

    monkeypatch.setattr(process_group, "_current", Other())
    with pytest.raises(cuda_graph.Uncapturable, match="rank 1: refused"):
        cuda_graph.on_all_ranks(lambda: "a window")


class Symmetric:
    """Fake symmetric memory of torch."""

    def __init__(self):
        self.met = []

    def empty(self, count, *, dtype, device):
        return torch.empty(count, dtype=dtype)

    def rendezvous(self, buffer, group):
        self.met.append(buffer.numel())
        return self


@pytest.fixture
def symmetric(third, monkeypatch):
    import torch.distributed._symmetric_memory as module

    fake = Symmetric()
    monkeypatch.setattr(module, "empty", fake.empty)
    monkeypatch.setattr(module, "rendezvous", fake.rendezvous)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    one_shot = SimpleNamespace(one_shot_all_reduce=lambda buffer, op, name: buffer * 3)
    monkeypatch.setattr(torch.ops, "symm_mem", one_shot, raising=False)
    plain = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, device=None: plain(*a))
    return fake


def test_one_shot_has_the_size_of_the_all_reduce(symmetric):
    collective = collectives._one_shot(4 * KIB, "cuda")
    assert collective.nbytes == collectives.known_collective("all_reduce", 4 * KIB, "cpu").nbytes
    assert symmetric.met == [1020]
    collective.check()  # the fake triples the 2 of this rank; the sum of 1, 2 and 3 is 6 too


@pytest.mark.parametrize("refusal", [None, "no peer access"])
def test_latencies_leave_out_the_copy_and_the_start_of_a_kernel(symmetric, monkeypatch, refusal):
    calls, times = [], iter([1e-6, 9e-6, 4e-6])

    def seconds(bound, device):
        bound.cycle(1, 0)
        return "graph", next(times)

    monkeypatch.setattr(collectives, "_one_shot_refusal", lambda device: refusal)
    monkeypatch.setattr(collectives, "_seconds", seconds)
    monkeypatch.setattr(dist, "all_reduce", lambda buffer: calls.append("all_reduce"))
    symmetric.barrier = lambda channel: calls.append("barrier")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None: zeros(*shape))
    least = collectives.latencies("cuda")
    names = ["all_reduce"] if refusal else ["all_reduce", "barrier"]
    assert calls == names
    assert least == {
        name: pytest.approx(each) for name, each in zip(names, (7e-6, 2e-6), strict=False)
    }


def test_a_wrong_one_shot_sum_is_detected(symmetric, monkeypatch):
    wrong = SimpleNamespace(one_shot_all_reduce=lambda buffer, op, name: buffer * 2)
    monkeypatch.setattr(torch.ops, "symm_mem", wrong, raising=False)
    with pytest.raises(Wrong, match=r"one_shot of 3\.984 KiB is wrong: element 0 is 4, not 6"):
        collectives._one_shot(4 * KIB, "cuda").check()


def test_refused_symmetric_memory_is_reported(symmetric, monkeypatch):
    import torch.distributed._symmetric_memory as module

    def refuse(buffer, group):
        raise RuntimeError("no peer access\nmore")

    assert collectives._one_shot_refusal("cuda") is None
    monkeypatch.setattr(module, "rendezvous", refuse)
    assert collectives._one_shot_refusal("cuda") == "no peer access"
