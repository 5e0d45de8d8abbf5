"""A watched loop: its steps on a clock of our own, its stages, what it leaves behind."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from pytest_aisp import bottleneck
from pytest_aisp.training_loop import find, stages
from pytest_aisp.training_loop.find import Watch
from pytest_aisp.training_loop.stages import Stages, name_of, places
from pytest_aisp.training_loop.steps import BODY, Event, Instruments, Plan, Step
from pytest_aisp.util.cli_result import CliError


class Machine:
    """A clock that moves when told, a GPU with a queue, a profiler that writes down its calls."""

    def __init__(self, gpu=False):
        self.now, self.queue, self.calls, self.gpu = 0.0, 0.0, [], gpu
        self.seen = [Event("kernel", 0.0, 3.0, on_gpu=True), Event(BODY, 0.0, 4.0)]
        self.instruments = Instruments(lambda: self.now, self.drain, self.stretch)

    def drain(self):
        self.now, self.queue = self.now + self.queue, 0.0

    def stretch(self):
        return self if self.gpu else find.NO_GPU

    def body(self):
        self.calls.append("body")

    def rest(self):
        self.calls.append("rest")

    def stop(self):
        self.calls.append("stop")

    def events(self):
        return self.seen

    def batches(self, waits, made=0.0):
        self.now += made
        for wait in waits:
            self.now += wait
            yield wait


class Loader:
    """An iterable that takes what time it is told."""

    def __init__(self, machine, waits, made=0.0):
        self.machine, self.waits, self.made = machine, waits, made

    def __iter__(self):
        self.machine.now += self.made
        return self.machine.batches(self.waits)

    def __len__(self):
        return len(self.waits)


def watched(machine, waits, plan, made=0.0):
    return Watch(Loader(machine, waits, made), plan, machine.instruments)


def work(machine, watch, seconds, stop=None):
    for index, _ in enumerate(watch):
        if index == stop:
            break
        machine.now += seconds


def test_a_step_is_a_wait_and_the_work_until_the_next_request():
    machine = Machine()
    watch = watched(machine, [9, 1, 2, 3], Plan(warmup=1), made=5)
    work(machine, watch, 10)
    found = watch.measured()
    assert found.warm == (Step(14, 10, first=True),)
    assert found.steps == (Step(1, 10), Step(2, 10), Step(3, 10))
    assert (found.wait, found.body, found.step) == (2, 10, 12)
    assert (found.gpu, found.note, len(watch)) == (None, find.NO_GPU, 4)


def test_epochs_add_up_and_what_is_between_them_does_not_count():
    machine = Machine()
    watch = watched(machine, [1, 1], Plan(warmup=0), made=4)
    for _ in range(2):
        work(machine, watch, 3)
        machine.now += 1000
    assert watch.measured().steps == 2 * (Step(5, 3, first=True), Step(1, 3))
    assert watch.measured().starts == 2


def test_a_loop_that_breaks_drops_its_last_step():
    machine = Machine()
    watch = watched(machine, [1, 1, 1, 1], Plan(warmup=0))
    for stop in (2, 1):
        work(machine, watch, 3, stop=stop)
        machine.now += 1000
    assert [s.wait + s.body for s in watch.measured().steps] == [4, 4, 4]


def test_as_many_steps_are_timed_as_asked_for_and_all_batches_come():
    machine = Machine()
    watch = watched(machine, [1] * 9, Plan(warmup=2, steps=3))
    assert list(watch) == [1] * 9
    assert len(watch.measured().steps) == 3


def test_a_gpu_is_profiled_between_warm_up_and_the_timed_steps():
    machine = Machine(gpu=True)
    watch = watched(machine, [1] * 6, Plan(warmup=1, profiled=2))
    work(machine, watch, 3)
    assert machine.calls == ["body", "rest", "body", "rest", "stop"]
    found = watch.measured()
    assert (len(found.warm), found.gpu.steps, found.gpu.busy, len(found.steps)) == (1, 2, 1.5, 3)


def test_what_the_gpu_still_does_after_an_epoch_is_counted():
    machine = Machine()
    watch = watched(machine, [1] * 3, Plan(warmup=1))
    for _ in watch:
        machine.now += 1
        machine.queue += 5  # that of warm-up is emptied before the first timed step
    found = watch.measured()
    assert (found.drained, found.drain, found.step) == (10, 5, 7)


@pytest.mark.parametrize(
    ("waits", "stop", "calls", "timed"),
    [
        ([1], None, ["stop", "body", "rest", "stop"], 1),
        ([1, 1], None, ["body", "rest", "stop"], 4),
        ([1, 1, 1], 1, ["body", "rest", "stop"], 2),
    ],
)
def test_the_profile_ends_with_its_epoch(waits, stop, calls, timed):
    machine = Machine(gpu=True)
    watch = watched(machine, waits, Plan(warmup=1, profiled=5))
    for _ in range(3):
        work(machine, watch, 3, stop=stop)
    assert machine.calls == calls
    found = watch.measured()
    assert (found.gpu.steps, len(found.steps)) == (1, timed)


def test_the_profile_ends_where_loading_fails():
    machine = Machine(gpu=True)
    watch = watched(machine, [1, 1, "no seconds"], Plan(warmup=1))
    with pytest.raises(TypeError):
        list(watch)
    assert machine.calls == ["body", "rest", "stop"]


@pytest.mark.parametrize(
    ("seen", "note"),
    [
        ([Event(BODY, 0.0, 4.0)], "2 profiled steps launched nothing on it"),
        ([], "the loop's own profiler took over while steps were profiled"),
    ],
)
def test_a_profile_without_figures_says_why(seen, note):
    machine = Machine(gpu=True)
    machine.seen = seen
    watch = watched(machine, [1] * 6, Plan(warmup=1, profiled=2))
    work(machine, watch, 3)
    assert (watch.measured().gpu, watch.measured().note) == (None, note)


def test_a_profiler_that_begins_within_ours_takes_over():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    ours = Instruments(lambda: 0.0, lambda: None, lambda: find.Profiled(gpu=False))
    watch = Watch(range(5), Plan(1, 3), ours)
    for index in watch:
        if index == 2:
            with torch.profiler.profile(activities=cpu):
                torch.ones(2).sum()
    assert watch.measured().note.startswith("the loop's own profiler took over")


def test_too_short_a_loop_says_what_to_do():
    watch = watched(Machine(), [1, 1], Plan())
    assert list(watch) == [1, 1]
    with pytest.raises(CliError) as said:
        watch.report()
    assert str(said.value) == (
        "the loop ended after 2 steps, and none was left to time: the first 5 are warm-up,"
        " 10 more are profiled where there is a GPU\n"
        "let it run for longer, or ask for fewer: --warmup=1 --profiled=1,"
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


def named(dataset):
    return [name_of(place.get()) for place in places(dataset)]


def test_transforms_are_found_where_datasets_keep_them():
    lone, inner = Data(double), Data(Compose(Compose(double), functools.partial(double)))
    assert named(lone) == ["double"]
    assert named(inner) == ["double", "double"]
    assert named(Subset(ConcatDataset([lone, inner]), [0])) == ["double"] * 3
    assert named(Data(None)) == named([1, 2]) == named(Data(3)) == []
    assert named(Data([double, Compose()])) == ["double", "Compose"]


def test_a_compose_that_a_dataset_keeps_twice_is_timed_once():
    both = Data(Compose(double))
    both.transforms = SimpleNamespace(transform=both.transform, target_transform=None)
    assert named(both) == ["double"]


def test_a_dataset_that_holds_itself_is_walked_once():
    data = Data(double)
    data.dataset = data
    assert named(data) == ["double"]


def test_a_lambda_is_named_by_its_line():
    assert name_of(lambda x: x).startswith("lambda in bottleneck_test.py:")


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
    items = {} if start == "spawn" else {"Data.__getitem__": 2}  # a class is imported anew there
    assert calls == {"double": 2, "double #2": 2, "collate": 1, **items}
    assert all(stage.seconds > 0 for stage in found.stages)
    own = watch._stages._cells[: watch._stages._width]
    assert any(own) == (workers == 0)  # two processes that add to one cell lose counts
    assert "collate" in watch.report()
    assert watch.to_json()["loader"]["workers"] == workers


def test_what_a_stage_does_inside_another_is_its_own_time(monkeypatch):
    seconds = iter(range(100))  # each look at the clock is a second after the one before
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(seconds))
    loader = DataLoader(Data(Compose(double, double)), 1, sampler=[0])
    timed = Stages(loader)
    with timed.attached():
        list(loader)
    found = {stage.name: stage.seconds for stage in timed.read()}
    assert found == {"Data.__getitem__": 3, "double": 1, "double #2": 1, "collate": 1}


class Heir(Data):
    """Its `__getitem__` is inherited."""


def test_the_items_of_a_loaders_own_datasets_are_timed_and_no_others():
    one, other, heir = Data(double), Data(double), Heir(double)
    mixed = Subset(ConcatDataset([one, heir, [1, 2]]), [0, 1, 6])
    assert [type(d) for d in stages.innermost(mixed)] == [Data, Heir, list]
    timed = Stages(DataLoader(mixed, 3))
    with timed.attached():
        for dataset in (one, other, heir):
            dataset[0]
        timed._cells[timed._width - 2] = 1  # as if a batch had been made
    found = {stage.name: stage.calls for stage in timed.read()}
    assert found["Data.__getitem__"] == found["Heir.__getitem__"] == 1
    assert "__getitem__" not in vars(Heir)
    assert not hasattr(Data.__getitem__, "__wrapped__")


def test_everything_is_put_back_even_where_the_loop_breaks():
    data = Data(Compose(double))
    loader = DataLoader(data, 2)
    before = (data.transform.transforms[0], loader.collate_fn)
    for _ in bottleneck(loader):
        assert isinstance(data.transform.transforms[0], stages.Timed)
        break
    assert (data.transform.transforms[0], loader.collate_fn) == before


def test_a_timed_callable_is_what_it_was_to_others():
    data = Data(Compose(Compose()))
    loader = DataLoader(data)
    with Stages(loader).attached():
        timed = data.transform.transforms[0]
        assert timed.transforms == []
        assert type(copy.deepcopy(timed)) is type(pickle.loads(pickle.dumps(timed))) is Compose


def test_a_transform_that_fails_is_counted_and_fails():
    def fails(x):
        raise ValueError("no image")

    watch = bottleneck(DataLoader(Data(fails)), warmup=0)
    with pytest.raises(ValueError, match="no image"):
        list(watch)


def test_running_workers_are_not_seen_and_that_is_said():
    loader = DataLoader(Data(double), 2, num_workers=1, persistent_workers=True)
    list(loader)
    watch = bottleneck(loader, warmup=0)
    list(watch)
    assert watch.measured().stages == ()
    assert "loading: nothing was timed: its workers ran before the watch began" in watch.report()


def test_the_profiler_gives_events_in_seconds():
    stretch = find.Profiled(gpu=False)
    for _ in range(2):
        stretch.body()
        torch.ones(3).sum().item()
        stretch.rest()
    stretch.stop()
    events = stretch.events()
    bodies = [e for e in events if e.name == BODY]
    items = [e for e in events if e.name == "aten::_local_scalar_dense"]
    assert len(bodies) == len(items) == 2
    assert all(e.annotation and not e.on_gpu and e.start < e.end for e in bodies)
    for body, item in zip(bodies, items, strict=True):
        assert body.start < item.start <= item.end < body.end


def test_nothing_is_profiled_without_a_gpu_or_under_another_profiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert find._stretch() == "no GPU is used"
    assert find.memory_of_gpu() == (0, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert find._stretch() == "another profiler was running, and there can be one only"


def test_a_gpu_is_asked_for_its_name_its_memory_and_to_finish(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 100))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 40)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    find.here().drain()
    assert (find.device(), find.memory_of_gpu()) == ("NVIDIA H200", (100, 40))
    assert asked == ["synchronize"]
