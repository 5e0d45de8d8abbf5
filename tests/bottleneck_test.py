"""`bottleneck(loader)`: steps on a fake clock, stages of loading, and what is restored."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_loop import CpuProfile, FakeMachine
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from pytest_aisp import bottleneck
from pytest_aisp.training_loop import loop, stages
from pytest_aisp.training_loop.loop import BODY, Event, Instruments, Plan, Step, TorchProfile
from pytest_aisp.training_loop.stages import Stages, name_of, places
from pytest_aisp.training_loop.watch import Watch
from pytest_aisp.util.cli_result import CliError


class Loader:
    """An iterable whose iterator takes `made` seconds, and each batch the seconds in `waits`."""

    def __init__(self, machine, waits, made=0.0):
        self.machine, self.waits, self.made = machine, waits, made

    def __iter__(self):
        self.machine.now += self.made
        return self.batches()

    def batches(self):
        for wait in self.waits:
            self.machine.now += wait
            yield wait

    def __len__(self):
        return len(self.waits)


def watched(machine, waits, plan, made=0.0):
    return Watch(Loader(machine, waits, made), plan, machine)


def work(machine, watch, seconds, stop=None):
    for index, _ in enumerate(watch):
        if index == stop:
            break
        machine.now += seconds


def test_a_step_is_the_wait_for_a_batch_and_the_work_until_the_next_request():
    machine = FakeMachine()
    watch = watched(machine, [9, 1, 2, 3], Plan(warmup=1), made=5)
    work(machine, watch, 10)
    found = watch.measured()
    assert found.warm == (Step(14, 10, first=True),)
    assert found.steps == (Step(1, 10), Step(2, 10), Step(3, 10))
    assert (found.wait, found.body, found.step) == (2, 10, 12)
    assert (found.gpu, found.note, len(watch)) == (None, "no GPU is used", 4)


def test_time_between_epochs_does_not_count():
    machine = FakeMachine()
    watch = watched(machine, [1, 1], Plan(warmup=0), made=4)
    for _ in range(2):
        work(machine, watch, 3)
        machine.now += 1000
    assert watch.measured().steps == 2 * (Step(5, 3, first=True), Step(1, 3))
    assert watch.measured().starts == 2


def test_a_step_that_ends_in_a_break_does_not_count():
    machine = FakeMachine()
    watch = watched(machine, [1, 1, 1, 1], Plan(warmup=0))
    for stop in (2, 1):
        work(machine, watch, 3, stop=stop)
        machine.now += 1000
    assert [s.wait + s.body for s in watch.measured().steps] == [4, 4, 4]


def test_the_loop_gets_all_batches_after_the_last_timed_step():
    machine = FakeMachine()
    watch = watched(machine, [1] * 9, Plan(warmup=2, steps=3))
    assert list(watch) == [1] * 9
    assert len(watch.measured().steps) == 3


def test_a_gpu_is_profiled_between_warm_up_and_the_timed_steps():
    machine = FakeMachine(gpu=True)
    watch = watched(machine, [1] * 6, Plan(warmup=1, profiled=2))
    work(machine, watch, 3)
    assert machine.calls == ["begin", "end", "begin", "end", "stop"]
    found = watch.measured()
    assert (len(found.warm), found.gpu.steps, found.gpu.busy, len(found.steps)) == (1, 2, 1.5, 3)


def test_work_that_the_gpu_finishes_after_an_epoch_is_counted():
    machine = FakeMachine()
    watch = watched(machine, [1] * 3, Plan(warmup=1))
    for _ in watch:
        machine.now += 1
        machine.queue += 5  # the warm-up's queue is emptied before the first timed step
    found = watch.measured()
    assert (found.drained, found.drain, found.step) == (10, 5, 7)


@pytest.mark.parametrize(
    ("waits", "stop", "calls", "timed"),
    [
        ([1], None, ["stop", "begin", "end", "stop"], 1),
        ([1, 1], None, ["begin", "end", "stop"], 4),
        ([1, 1, 1], 1, ["begin", "end", "stop"], 2),
    ],
)
def test_the_profile_ends_with_its_epoch(waits, stop, calls, timed):
    machine = FakeMachine(gpu=True)
    watch = watched(machine, waits, Plan(warmup=1, profiled=5))
    for _ in range(3):
        work(machine, watch, 3, stop=stop)
    assert machine.calls == calls
    found = watch.measured()
    assert (found.gpu.steps, len(found.steps)) == (1, timed)


def test_the_profile_ends_if_loading_fails():
    machine = FakeMachine(gpu=True)
    watch = watched(machine, [1, 1, "no seconds"], Plan(warmup=1))
    with pytest.raises(TypeError):
        list(watch)
    assert machine.calls == ["begin", "end", "stop"]


@pytest.mark.parametrize(
    ("recorded", "note"),
    [
        ([Event(BODY, 0.0, 4.0)], "2 profiled steps launched nothing on it"),
        ([], "the loop's own profiler took over while steps were profiled"),
    ],
)
def test_a_profile_without_figures_says_why(recorded, note):
    machine = FakeMachine(gpu=True)
    machine.recorded = recorded
    watch = watched(machine, [1] * 6, Plan(warmup=1, profiled=2))
    work(machine, watch, 3)
    assert (watch.measured().gpu, watch.measured().note) == (None, note)


def test_the_loops_own_profiler_takes_over():
    watch = Watch(range(5), Plan(1, 3), CpuProfile())
    for index in watch:
        if index == 2:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                torch.ones(2).sum()
    assert watch.measured().note.startswith("the loop's own profiler took over")


def test_a_loop_that_is_too_short_says_what_to_do():
    watch = watched(FakeMachine(), [1, 1], Plan())
    assert list(watch) == [1, 1]
    with pytest.raises(CliError) as error:
        watch.report()
    assert str(error.value) == (
        "the loop ended after 2 steps, before any step was timed: the first 5 are warm-up,"
        " and with a GPU 10 more are profiled\n"
        "let it run longer, or ask for fewer: --warmup=1 --profiled=1,"
        " or bottleneck(loader, warmup=1, profiled=1)"
    )


def test_the_example_of_the_guide_works(capsys):
    guide = (Path(__file__).parents[1] / "docs/reference/cli.md").read_text()
    example = re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1]
    trained = []
    exec(example, {"loader": range(20), "train": trained.append})
    assert trained == list(range(20))
    assert capsys.readouterr().out.startswith("range on ")


def double(x):
    return 2 * x


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Data(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.transform(torch.ones(2))


def transforms_of(dataset):
    return [name_of(place.get()) for place in places(dataset)]


def test_transforms_are_found_in_datasets_and_in_what_they_wrap():
    lone, inner = Data(double), Data(Compose(Compose(double), functools.partial(double)))
    assert transforms_of(lone) == ["double"]
    assert transforms_of(inner) == ["double", "double"]
    assert transforms_of(Subset(ConcatDataset([lone, inner]), [0])) == ["double"] * 3
    assert transforms_of(Data(None)) == transforms_of([1, 2]) == transforms_of(Data(3)) == []
    assert transforms_of(Data([double, Compose()])) == ["double", "Compose"]
    assert transforms_of(Data(Compose)) == ["Compose"]  # a class
    (place,) = places(Data(lambda x: x))
    assert name_of(place.get()).startswith("lambda in bottleneck_test.py:")


def test_a_transform_that_is_reached_twice_is_timed_once():
    both = Data(Compose(double))
    both.transforms = SimpleNamespace(transform=both.transform, target_transform=None)
    assert transforms_of(both) == ["double"]
    cycle = Data(double)
    cycle.dataset = cycle
    assert transforms_of(cycle) == ["double"]


@pytest.mark.parametrize("start", [None, "fork", "spawn"])
def test_stages_are_counted_in_every_process(start):
    workers = 0 if start is None else 2
    loader = DataLoader(
        Data(Compose(double, double)), 2, num_workers=workers, multiprocessing_context=start
    )
    watch = bottleneck(loader, warmup=0)
    assert [batch.tolist() for batch in watch] == [[[4.0, 4.0]] * 2] * 3
    found = watch.measured()
    calls = {stage.name: stage.calls for stage in found.stages}
    items = {} if start == "spawn" else {"Data.__getitem__": 2}  # spawn imports the class anew
    assert calls == {"double": 2, "double #2": 2, "collate": 1, **items}
    assert all(stage.seconds > 0 for stage in found.stages)
    timed = watch._source.stages
    own = timed._cells[: timed._width]
    assert any(own) == (workers == 0)  # two processes that add to one cell would lose counts
    assert "collate" in watch.report()
    assert watch.to_json()["loader"]["workers"] == workers


def test_time_inside_another_stage_counts_only_for_the_inner_one(monkeypatch):
    seconds = iter(range(100))  # the clock advances by a second each time it is read
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(seconds))
    loader = DataLoader(Data(Compose(double, double)), 1, sampler=[0])
    timed = Stages(loader)
    with timed.attached():
        list(loader)
    found = {stage.name: stage.seconds for stage in timed.read()}
    assert found == {"Data.__getitem__": 3, "double": 1, "double #2": 1, "collate": 1}


class Subclass(Data):
    """A dataset that inherits `__getitem__`."""


def test_only_items_of_the_loaders_own_datasets_are_timed():
    one, other, subclass = Data(double), Data(double), Subclass(double)
    mixed = Subset(ConcatDataset([one, subclass, [1, 2]]), [0, 1, 6])
    assert [type(d) for d in stages.innermost(mixed)] == [Data, Subclass, list]
    timed = Stages(DataLoader(mixed, 3))
    with timed.attached():
        for dataset in (one, other, subclass):
            dataset[0]
        timed._cells[timed._width - 2] = 1  # as if a batch had been collated
    found = {stage.name: stage.calls for stage in timed.read()}
    assert found["Data.__getitem__"] == found["Subclass.__getitem__"] == 1
    assert "__getitem__" not in vars(Subclass)
    assert not hasattr(Data.__getitem__, "__wrapped__")


def test_everything_is_restored_even_if_the_loop_breaks():
    data = Data(Compose(double))
    loader = DataLoader(data, 2)
    before = (data.transform.transforms[0], loader.collate_fn)
    for _ in bottleneck(loader):
        assert isinstance(data.transform.transforms[0], stages.Timed)
        break
    assert (data.transform.transforms[0], loader.collate_fn) == before


def test_a_timed_callable_has_the_attributes_and_copies_of_the_original():
    data = Data(Compose(Compose()))
    with Stages(DataLoader(data)).attached():
        timed = data.transform.transforms[0]
        assert timed.transforms == []
        assert type(copy.deepcopy(timed)) is type(pickle.loads(pickle.dumps(timed))) is Compose


def test_the_error_of_a_transform_reaches_the_loop():
    def fails(x):
        raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"):
        list(bottleneck(DataLoader(Data(fails)), warmup=0))


def test_workers_that_are_already_running_are_not_timed():
    loader = DataLoader(Data(double), 2, num_workers=1, persistent_workers=True)
    list(loader)
    watch = bottleneck(loader, warmup=0)
    list(watch)
    assert watch.measured().stages == ()
    why = "loading: not timed, because the workers started before the measurement"
    assert why in watch.report()


def test_the_profiler_returns_events_in_seconds():
    profile = TorchProfile(gpu=False)
    for _ in range(2):
        profile.begin_step()
        torch.ones(3).sum().item()
        profile.end_step()
    profile.stop()
    events = profile.events()
    bodies = [e for e in events if e.name == BODY]
    items = [e for e in events if e.name == "aten::_local_scalar_dense"]
    assert len(bodies) == len(items) == 2
    assert all(e.annotation and not e.on_gpu and e.start < e.end for e in bodies)
    for body, item in zip(bodies, items, strict=True):
        assert body.start < item.start <= item.end < body.end


def test_nothing_is_profiled_without_a_gpu_or_beside_another_profiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert Instruments().profile() == "no GPU is used"
    assert loop.gpu_memory() == (0, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        why = "another profiler was running, and a process can have only one"
        assert Instruments().profile() == why
