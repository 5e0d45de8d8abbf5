"""`aisp bottleneck`: scripts of every kind, their exit codes, and that all is put back."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.optim import optimizer
from torch.utils.data import DataLoader

from pytest_aisp.cli import app
from pytest_aisp.training_loop import script
from pytest_aisp.training_loop.steps import BODY, Event, Instruments, Plan
from pytest_aisp.util.cli_result import CliError

HEAD = """
import sys
import torch
from torch.utils.data import DataLoader

class Data(list):
    transform = None

data = Data(torch.ones(2) for _ in range(8))
weights = torch.nn.Linear(2, 2)
stepper = torch.optim.SGD(weights.parameters(), lr=0.1)
other = torch.optim.SGD(weights.parameters(), lr=0.1)

def train(batch, *optimizers):
    weights(batch).sum().backward()
    for each in optimizers or [stepper]:
        each.step()
"""
QUICK = Plan(warmup=1)


@pytest.fixture
def put_back():
    """Hold everything that is replaced against what it was."""

    def state():
        hooks = dict(optimizer._global_optimizer_post_hooks)
        return DataLoader.__iter__, hooks, sys.argv, sys.path, list(sys.path)

    before = state()
    yield
    assert state() == before


@pytest.fixture
def wrote(tmp_path, put_back):
    """Return a script with these lines behind the usual ones."""

    def write(lines):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(lines))
        return path

    return write


class Ticks:
    """A clock that moves by one each time it is read, and a profiler without a GPU."""

    def __init__(self, gpu=False):
        self.now, self.gpu, self.calls = 0, gpu, []

    def instruments(self):
        return Instruments(self.tick, lambda: None, lambda: self if self.gpu else "no GPU is used")

    def tick(self):
        self.now += 1
        return self.now

    def body(self):
        self.calls.append("body")

    def rest(self):
        self.calls.append("rest")

    def stop(self):
        self.calls.append("stop")

    def events(self):
        return [Event("kernel", 0.0, 1.0, on_gpu=True), Event(BODY, 0.0, 1.0)]


def told(path, *arguments, plan=QUICK, gpu=False):
    """Return the JSON of a script that was measured by ticks, and its exit code."""
    ticks = Ticks(gpu)
    answer = script.run_script(
        path, arguments, plan=plan, as_json=True, instruments=ticks.instruments()
    )
    return json.loads("".join(answer.lines)), answer.code, ticks


LOOP = """
for batch in DataLoader(data, 2):
    train(batch)
"""


def test_the_loop_of_a_script_is_found(wrote):
    found, code, _ = told(wrote(LOOP))
    assert (found["name"], len(found["warm"]), len(found["steps"]), code) == ("train.py", 1, 3, 0)
    assert found["loader"]["batch"] == 2
    assert [stage["name"] for stage in found["stages"]] == ["collate"]


def test_it_is_the_loop_in_which_an_optimizer_steps(wrote):
    path = wrote(
        """
        training, checking = DataLoader(data, 4), DataLoader(data, 1)
        for epoch in range(2):
            for batch in training:
                for _ in checking:
                    pass
                next(iter(checking))
                train(batch)
            for _ in checking:
                pass
        """
    )
    assert told(path)[0]["loader"]["batch"] == 4


def test_of_two_training_loops_it_is_the_longer_one(wrote):
    path = wrote("for size in (4, 1, 2):\n    for batch in DataLoader(data, size): train(batch)")
    assert told(path)[0]["loader"]["batch"] == 1


def test_gpu_steps_are_profiled_once_the_optimizer_has_stepped(wrote):
    path = wrote("for i, batch in enumerate(DataLoader(data, 1)):\n    i < 2 or train(batch)")
    found, _, ticks = told(path, plan=Plan(1, 2), gpu=True)
    assert ticks.calls == ["body", "rest", "body", "rest", "stop"]
    assert (len(found["warm"]), found["gpu"]["steps"], len(found["steps"])) == (3, 2, 3)


def test_a_profile_is_stopped_where_the_script_fails(wrote):
    path = wrote("for i, x in enumerate(DataLoader(data, 1)):\n    train(x if i < 3 else 0)")
    ticks = Ticks(gpu=True)
    with pytest.raises(CliError, match="before a step was timed") as said:
        script.run_script(path, [], plan=Plan(1, 9), instruments=ticks.instruments())
    assert (said.value.code, ticks.calls[-2:]) == (1, ["rest", "stop"])


@pytest.mark.parametrize("optimizers", ["stepper", "stepper, other"])
def test_without_a_loader_the_first_optimizer_tells_the_steps(wrote, optimizers):
    path = wrote(f"for _ in range(5):\n    train(torch.ones(1, 2), {optimizers})")
    found, _, _ = told(path)
    assert (found["loader"], len(found["warm"]) + len(found["steps"])) == (None, 4)
    assert list(found["rows"]) == ["step", "host"]


def test_a_script_ends_after_the_steps_that_were_asked_for(wrote, capsys):
    path = wrote(LOOP + "print('all of it')")
    found, code, _ = told(path, plan=Plan(1, 1, 2))
    assert (len(found["steps"]), code) == (2, 0)
    assert "all of it" not in capsys.readouterr().out
    path = wrote("for _ in range(9): train(torch.ones(1, 2))\nprint('all of it')")
    assert len(told(path, plan=Plan(1, 1, 2))[0]["steps"]) == 2
    assert "all of it" not in capsys.readouterr().out


def test_a_script_that_will_not_end_goes_on_unmeasured(wrote, capsys):
    path = wrote(
        """
        try:
            for batch in DataLoader(data, 1): train(batch)
        except SystemExit:
            for batch in DataLoader(data, 1): train(batch)
            print("on")
        """
    )
    assert len(told(path, plan=Plan(1, 1, 2))[0]["steps"]) == 2
    assert capsys.readouterr().out == "on\n"


def test_an_iterator_is_what_it_was_to_the_script(wrote, capsys):
    path = wrote(
        """
        loader = DataLoader(data, 2)
        batches = iter(loader)
        print(len(batches), batches._num_yielded, iter(batches) is batches)
        train(next(batches))
        print(batches._num_yielded, hasattr(batches, "nothing"))
        for batch in loader: train(batch)
        """
    )
    told(path)
    assert capsys.readouterr().out == "4 0 True\n1 False\n"


def test_an_iterator_that_cannot_be_made_fails_as_it_did(wrote, capfd):
    path = wrote(
        """
        class Broken(DataLoader):
            def _get_iterator(self):
                raise OSError("no disk")
        iter(Broken(data))
        """
    )
    with pytest.raises(CliError):
        script.run_script(path, [], plan=QUICK)
    assert capfd.readouterr().err.rstrip().endswith("OSError: no disk")


def test_arguments_and_folder_are_those_of_python(wrote, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    path = wrote(LOOP + "import beside; print(beside.NAME, sys.argv, __name__, __file__)")
    told(path, "--lr", "1")
    assert capsys.readouterr().out == f"beside {[str(path), '--lr', '1']} __main__ {path}\n"


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('out of data')", 1, "out of data\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_the_exit_code_is_the_scripts_and_its_steps_are_told(wrote, capsys, ends, code, said):
    found, given, _ = told(wrote(LOOP + ends))
    assert (len(found["steps"]), given) == (3, code)
    err = capsys.readouterr().err
    assert err.endswith(said)
    assert bool(err) == bool(said)


def test_a_traceback_begins_in_the_script(wrote, capsys):
    path = wrote("def bad():\n    1 / 0\nbad()")
    with pytest.raises(CliError) as said:
        script.run_script(path, [], plan=QUICK)
    assert said.value.code == 1
    assert str(said.value).startswith(f"{path} ended with exit code 1 before a step was timed\n")
    err = capsys.readouterr().err
    assert err.startswith(f'Traceback (most recent call last):\n  File "{path}"')
    assert "runpy" not in err
    assert "in bad" in err


def test_a_script_that_is_no_python_says_where(wrote, capsys):
    path = wrote("def :")
    with pytest.raises(CliError):
        script.run_script(path, [], plan=QUICK)
    assert f'File "{path}", line' in capsys.readouterr().err


def test_a_missing_script_is_said_to_be(tmp_path, capsys):
    path = tmp_path / "trian.py"
    assert app.main(["bottleneck", str(path)]) == 2
    said = f"{path}: no such script\naisp bottleneck train.py [its arguments]\n"
    assert capsys.readouterr().err == said


def test_a_script_without_a_training_loop_says_what_one_is(wrote, capsys):
    path = wrote("for batch in DataLoader(data): pass")
    assert app.main(["bottleneck", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"{path}: no training loop was seen: 1 DataLoaders were iterated,"
        " no optimizer made a step\n"
        "a loop is what goes over a torch.utils.data.DataLoader and calls the step() of a"
        " torch.optim.Optimizer, or calls that alone; any other is watched in the script:\n"
        "from pytest_aisp import bottleneck; for batch in (watch := bottleneck(loader)): ...\n"
    )


def test_too_short_a_loop_is_said_to_be(wrote, capsys):
    assert app.main(["bottleneck", str(wrote(LOOP))]) == 2
    assert capsys.readouterr().err.startswith("the loop ended after 4 steps, and none was left")


@pytest.mark.parametrize(
    ("option", "least"), [("--steps=0", 1), ("--warmup=-1", 0), ("--profiled=x", 1)]
)
def test_what_is_no_number_of_steps_says_how_to_write_one(option, least, capsys):
    assert app.main(["bottleneck", option, "train.py"]) == 2
    said = f"{option.partition('=')[2]!r} is no number of steps; write {least} or more, as 100"
    assert said in capsys.readouterr().err


def test_from_the_command_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + LOOP + "print(sys.argv[1:])\nimport os\nos.system('echo shell')")
    command = [sys.executable, "-m", "pytest_aisp.cli", "bottleneck", "--warmup=1"]
    done = subprocess.run([*command, path, "--json"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["['--json']", "shell"]
    assert lines[2].startswith("train.py on ")
    assert "3 steps of DataLoader (batch 2, 0 workers), after 1 of warm-up in" in lines[2]
    command += ["--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["steps"]) == 3
    assert done.stderr == "[]\nshell\n"


def test_workers_of_a_script_are_timed_and_pickled_classes_found(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        HEAD.replace("data = Data(torch.ones(2) for _ in range(8))", "data = Data([1.0] * 8)")
        + textwrap.dedent(
            """
            def tensor(x):
                return torch.full((2,), x)

            class Images:
                def __init__(self):
                    self.transform = tensor
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    return self.transform(1.0)

            if __name__ == "__main__":
                spawned = DataLoader(Images(), 2, num_workers=1, multiprocessing_context="spawn")
                for batch in spawned:
                    train(batch)
            """
        )
    )
    command = [sys.executable, "-m", "pytest_aisp.cli", "bottleneck", "--warmup=1", "--json"]
    done = subprocess.run([*command, path], capture_output=True, text=True, check=True)
    assert {s["name"]: s["calls"] for s in json.loads(done.stdout)["stages"]} == {
        **{"tensor": 2, "collate": 1}
    }


def test_the_steps_of_the_optimizer_can_be_profiled():
    """The annotation of a step begins within one of PyTorch's own, and ends in the next."""
    from pytest_aisp.training_loop.find import Profiled

    weights = torch.nn.Linear(2, 2)
    stepper = torch.optim.SGD(weights.parameters(), lr=0.1)
    source = script.Watcher(
        Plan(1, 3), Instruments(lambda: 0.0, lambda: None, lambda: Profiled(gpu=False))
    )
    with source.installed():
        for _ in range(7):
            weights(torch.ones(1, 2)).sum().backward()
            stepper.step()
    loop = source.training(None).loop
    bodies = [e for e in loop.stretch.events() if e.name == BODY]
    assert (len(bodies), loop.profiled, len(loop.timed)) == (3, 3, 2)
