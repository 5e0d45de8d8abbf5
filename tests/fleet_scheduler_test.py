"""Which node of a fleet runs which case, on a simulated cluster with a simulated clock."""

from __future__ import annotations

import heapq
import itertools
import tracemalloc
from collections import Counter
from time import perf_counter

import pytest

from pytest_aisp.fleet.scheduler import Scheduler
from pytest_aisp.fleet.scheduler_types import Node, Start, Work

START, CANARY, WAY = 5.0, 3.0, 0.005
"""Seconds that pytest takes to start, that a canary takes, and that a message takes."""


class Cluster:
    """Carries out the scheduler's actions. `log` has an entry for each run of a case."""

    def __init__(
        self, works, nodes, *, patience=60.0, seconds=lambda key: 10.0, killers=(), span=False
    ):
        self.plan = Scheduler(works, patience, span=span)
        self.seconds, self.killers = seconds, set(killers)
        self.now, self.queues, self.dead, self.hung = 0.0, {}, set(), set()
        self.log, self.red, self.notes, self.unproved = [], {}, [], []
        self.proved, self.done = Counter(), []
        self._events, self._order = [], itertools.count()
        for node in nodes:
            self.plan.node_joined(node)

    def at(self, seconds, event, *args):
        heapq.heappush(self._events, (seconds, next(self._order), event, args))

    def run(self):
        self._act()
        while not self.plan.done:
            self.now, _, event, args = (
                heapq.heappop(self._events) if self._events else (self.now + 1, 0, self._idle, ())
            )
            event(*args)
            for seat in self.plan.seats.values():
                for part, node in enumerate(seat.nodes):
                    if node.id not in self.hung:
                        self.plan.heard(seat.id, self.now, part)
            self._act()
            assert self.now < 1e6
        return self

    def _idle(self):
        pass

    def _act(self):
        for action in self.plan.plan(self.now):
            getattr(self, f"_{type(action).__name__.lower()}")(action)

    def _start(self, action):
        for name in action.nodes:
            node = self.plan.nodes[name]
            assert node.gpus >= sum(s.width for s in self.plan.seats.values() if node in s.nodes)
        self.queues[action.seat] = []
        self.at(self.now + START, self._ready, action.seat)

    def _ready(self, seat):
        if self._alive(seat):
            self.plan.ready(seat, self.now)

    def _alive(self, seat):
        live = self.plan.seats.get(seat)
        down = self.dead | self.hung
        return live is not None and not any(node.id in down for node in live.nodes)

    def _give(self, action):
        queue = self.queues[action.seat]
        queue.append(action.work)
        if len(queue) == 1:
            self._begin(action.seat)

    def _begin(self, seat):
        work = self.queues[seat][0]
        where = "+".join(node.name for node in self.plan.seats[seat].nodes)
        self.log.append((work.key, where, work.again))
        if work.key in self.killers:
            self.at(self.now + 1, self.plan.lost, seat, "its pytest ended with code -9")
        else:
            self.at(self.now + self.seconds(work.key) + WAY, self._end, seat, work)

    def _end(self, seat, work):
        if not self._alive(seat):
            return
        self.queues[seat].remove(work)
        if not work.again:
            self.done.append(work.key)
        self.plan.finished(seat, work, unproved=True)
        if self.queues[seat]:
            self._begin(seat)

    def _finish(self, action):
        self.at(self.now + CANARY, self._canary, action.seat)

    def _canary(self, seat):
        if self._alive(seat):
            self.proved.update(work.key for work in self.plan.seats[seat].unproved)
            self.plan.proved(seat)
            self.plan.ended(seat)

    def _kill(self, action):
        self.queues.pop(action.seat, None)

    def _noverdict(self, action):
        self.red[action.work.key] = action.why

    def _unproved(self, action):
        self.unproved += action.keys

    def _note(self, action):
        self.notes.append(action.text)

    def lose(self, node, why="Ray lost it"):
        self.dead.add(node)
        self.plan.node_left(node, why)


def works(count, product="a", gpus=1):
    return [Work(f"case{i}", product, gpus) for i in range(count)]


def node(name, gpus=1, product="a"):
    return Node(name, name, product, gpus)


def names(count):
    return [f"case{i}" for i in range(count)]


def test_each_case_runs_once_on_a_node_of_its_product():
    cases = [*works(5), *(Work(f"b{i}", "b") for i in range(3))]
    done = Cluster(cases, [node("n1", 2), node("n2", 2, "b")]).run()
    assert sorted(done.done) == sorted(work.key for work in cases)
    assert {where for key, where, _ in done.log if key.startswith("b")} == {"n2"}
    assert set(done.proved) == set(done.done)
    assert (done.red, done.notes) == ({}, [])


def test_a_thousand_cases_on_sixteen_gpus_take_at_most_a_tenth_longer_than_ideal():
    lengths = {f"case{i}": 5.0 + i % 11 for i in range(1000)}
    fleet = [node(f"n{i}", 4) for i in range(4)]
    tracemalloc.start()
    begun = perf_counter()
    done = Cluster(works(1000), fleet, seconds=lengths.get).run()
    seconds, (_, peak) = perf_counter() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ideal = START + sum(lengths.values()) / 16 + CANARY
    assert len(done.done) == 1000
    assert ideal / done.now >= 0.9
    assert seconds / 1000 < 0.02
    assert peak < 8 << 20


def test_no_more_seats_start_than_there_are_cases():
    done = Cluster(works(3), [node("n1", 8), node("n2", 8)]).run()
    assert len(done.queues) == 3
    assert {where for _, where, _ in done.log} == {"n1", "n2"}


def test_wide_cases_run_first_and_get_gpus_of_one_node():
    cases = [*works(8), *(Work(f"wide{i}", "a", 4) for i in range(3))]
    done = Cluster(cases, [node("n1", 4), node("n2", 2)]).run()
    on_n1 = [key for key, where, _ in done.log if where == "n1"]
    assert on_n1[:3] == ["wide0", "wide1", "wide2"]
    assert len(done.done) == 11
    assert not any(key.startswith("wide") for key, where, _ in done.log if where == "n2")


def test_a_case_wider_than_any_node_runs_on_the_widest():
    done = Cluster(works(1, gpus=16), [node("n1", 4), node("n2", 2)]).run()
    assert done.log == [("case0", "n1", False)]


def test_a_lost_node_loses_no_case_and_its_unproved_verdicts_are_confirmed():
    fleet = Cluster(works(20), [node("n1"), node("n2"), node("n3")])
    fleet.at(37, fleet.lose, "n2")
    done = fleet.run()
    assert sorted(done.done) == sorted(names(20))
    late = [key for key, where, _ in done.log if where == "n2"]
    again = [key for key, _, second in done.log if second]
    assert again == late[:-1]  # the last one was running, and simply runs elsewhere
    assert set(done.proved) == set(names(20))
    assert done.notes == ["n2 gets no more work: Ray lost it"]
    assert not [w for _, w, _ in done.log[len(done.log) - 10 :] if w == "n2"]


def test_a_lost_worker_starts_again_and_its_case_runs_on_another_node():
    fleet = Cluster(works(6), [node("n1"), node("n2")])
    fleet.at(8, lambda: fleet.plan.lost(next(iter(fleet.plan.seats)), "killed"))
    done = fleet.run()
    assert sorted(done.done) == sorted(names(6))
    assert [where for key, where, _ in done.log if key == "case0"] == ["n1", "n2"]
    assert done.notes == ["n1 lost a worker: killed"]
    assert "n1" in {where for _, where, _ in done.log[2:]}


def test_a_case_that_kills_its_node_is_given_up_after_two_and_named():
    done = Cluster(works(6), [node("n1"), node("n2"), node("n3")], killers=["case1"]).run()
    assert sorted(done.done) == sorted(set(names(6)) - {"case1"})
    [why] = done.red.values()
    first, second = (where for key, where, _ in done.log if key == "case1")
    assert why == (
        f"given up: {first} and {second} were lost while they ran it\n"
        "Run it alone on a node to see why"
    )
    assert first != second


def test_a_case_before_one_that_kills_its_node_is_not_blamed():
    """The seat is lost before the message that the previous case has ended arrives."""
    fleet = Cluster(works(20), [node("n1"), node("n2"), node("n3")], killers=["case7"])
    begin = fleet._begin

    def begin_at_once(seat):
        queue = fleet.queues[seat]
        if len(queue) > 1 and queue[1].key == "case7":
            fleet.log.append(("case7", fleet.plan.seats[seat].nodes[0].name, False))
            fleet.at(fleet.now + 1, fleet.plan.lost, seat, "killed")
        else:
            begin(seat)

    fleet._begin = begin_at_once
    done = fleet.run()
    assert sorted(done.done) == sorted(set(names(20)) - {"case7"})
    assert done.red.keys() == {"case7"}
    assert len([key for key, _, _ in done.log if key == "case7"]) == 2


def test_a_node_that_keeps_losing_workers_is_avoided():
    fleet = Cluster(works(4), [node("bad"), node("good")])
    start = fleet._ready

    def ready(seat):
        if fleet.plan.seats[seat].nodes[0].name == "bad":
            fleet.plan.lost(seat, "No space left on device")
        else:
            start(seat)

    fleet._ready = ready
    done = fleet.run()
    assert {where for _, where, _ in done.log} == {"good"}
    assert done.notes[-1] == (
        "bad gets no more work: it lost 2 workers, the last one because No space left on device"
    )


def test_a_node_that_hangs_is_avoided():
    fleet = Cluster(works(4), [node("n1"), node("n2")])
    fleet.at(7, fleet.hung.add, "n1")
    for second in range(200):
        fleet.at(second, fleet._idle)
    done = fleet.run()
    assert sorted(done.done) == sorted(names(4))
    assert "n1 lost a worker: it was silent for 30 s" in done.notes
    assert "n1 gets no more work: it does not answer" in done.notes


def test_a_late_node_takes_work():
    fleet = Cluster(works(10), [node("n1")])
    fleet.at(20, lambda: fleet.plan.node_joined(node("late", 2)))
    done = fleet.run()
    shares = Counter(where for _, where, _ in done.log)
    assert shares["late"] >= 5


def test_a_product_without_a_node_is_red_after_the_stated_time():
    done = Cluster([*works(1), Work("b0", "b")], [node("n1")], patience=30).run()
    assert done.done == ["case0"]
    assert done.red["b0"].splitlines() == [
        "no node of b for 30 s (aisp_fleet_wait)",
        "Start one, and run again:",
        "    aisp fleet start --address=HEAD:6379",
    ]
    assert 30 <= done.now < 35


def test_a_product_whose_only_node_is_lost_is_red_with_the_reason():
    fleet = Cluster(works(3), [node("n1")], patience=30)
    fleet.at(17, fleet.lose, "n1")
    done = fleet.run()
    assert done.done == ["case0"]
    assert done.red.keys() == {"case1", "case2"}
    assert "\nn1: Ray lost it\n" in done.red["case2"]
    assert done.unproved == ["case0"]


def test_a_second_run_of_a_recording_is_on_another_node():
    fleet = Cluster(works(3), [node("n1"), node("n2")])
    end = fleet._end

    def recorded(seat, work):
        live = fleet.plan.seats.get(seat)
        if not work.again:
            fleet.plan.again(work, live)
        end(seat, work)

    fleet._end = recorded
    done = fleet.run()
    boards = {key: {w for k, w, _ in done.log if k == key} for key in names(3)}
    assert boards == {key: {"n1", "n2"} for key in names(3)}


def test_a_lost_second_run_leaves_the_first_verdict_unproved():
    fleet = Cluster(works(1), [node("n1"), node("n2"), node("n3")])
    fleet.at(16, fleet.lose, "n1")
    fleet.at(24, fleet.lose, "n2")
    done = fleet.run()
    assert done.done == ["case0"]
    assert done.unproved == ["case0"]
    assert done.red == {}


@pytest.mark.parametrize("event", ["ready", "heard", "proved", "lost", "ended"])
def test_events_of_a_seat_that_is_gone_are_ignored(event):
    plan = Scheduler([], 1.0)
    arguments = {"ready": [0.0], "heard": [0.0], "lost": ["late"]}.get(event, [])
    getattr(plan, event)("gone", *arguments)
    assert plan.plan(0.0) == []


def test_a_hundred_nodes_plan_in_time():
    """A decision about 800 GPUs and 10,000 cases takes less than 20 ms."""
    plan = Scheduler(works(10_000), 60.0)
    for number in range(100):
        plan.node_joined(node(f"n{number}", 8))
    started = plan.plan(0.0)
    assert sum(isinstance(action, Start) for action in started) == 800
    for seat in list(plan.seats):
        plan.ready(seat, 0.0)
    plan.plan(0.0)
    begun = perf_counter()
    for seat in list(plan.seats.values())[:50]:
        plan.finished(seat.id, seat.queue[0], unproved=True)
        plan.plan(0.0)
    assert (perf_counter() - begun) / 50 < 0.02
