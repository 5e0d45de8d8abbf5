"""`aisp bottleneck`: scripts of every kind, their exit codes, and what is restored afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from fake_loop import CpuProfile, FakeMachine
from torch.optim import optimizer
from torch.utils.data import DataLoader

from pytest_aisp.cli import app
from pytest_aisp.training_loop.loop import BODY, Plan
from pytest_aisp.training_loop.watch import LoopFinder, bottleneck_result
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
def restored():
    """Assert that everything that the command replaces is restored."""

    def state():
        hooks = dict(optimizer._global_optimizer_post_hooks)
        return DataLoader.__iter__, hooks, sys.argv, sys.path, list(sys.path)

    before = state()
    yield
    assert state() == before


@pytest.fixture
def script(tmp_path, restored):
    """Write a script: the usual lines, then these."""

    def write(lines):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(lines))
        return path

    return write


def measure(path, *arguments, plan=QUICK, gpu=False):
    """Measure a script on a clock of ticks; return its JSON, its exit code, and the ticks."""
    ticks = FakeMachine(gpu, tick=1.0)
    result = bottleneck_result(path, arguments, plan=plan, as_json=True, instruments=ticks)
    return json.loads("".join(result.lines)), result.code, ticks


LOOP = """
for batch in DataLoader(data, 2):
    train(batch)
"""


def test_the_loop_of_a_script_is_found(script):
    found, code, _ = measure(script(LOOP))
    assert (found["name"], len(found["warm"]), len(found["steps"]), code) == ("train.py", 1, 3, 0)
    assert found["loader"]["batch"] == 2
    assert [stage["name"] for stage in found["stages"]] == ["collate"]


def test_the_training_loop_is_the_one_in_which_an_optimizer_steps(script):
    path = script(
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
    assert measure(path)[0]["loader"]["batch"] == 4


def test_the_longer_of_two_training_loops_is_measured(script):
    path = script("for size in (4, 1, 2):\n    for batch in DataLoader(data, size): train(batch)")
    assert measure(path)[0]["loader"]["batch"] == 1


def test_gpu_steps_are_profiled_once_the_optimizer_has_stepped(script):
    path = script("for i, batch in enumerate(DataLoader(data, 1)):\n    i < 2 or train(batch)")
    found, _, ticks = measure(path, plan=Plan(1, 2), gpu=True)
    assert ticks.calls == ["begin", "end", "begin", "end", "stop"]
    assert (len(found["warm"]), found["gpu"]["steps"], len(found["steps"])) == (3, 2, 3)


def test_the_profile_stops_if_the_script_fails(script):
    path = script("for i, x in enumerate(DataLoader(data, 1)):\n    train(x if i < 3 else 0)")
    ticks = FakeMachine(gpu=True, tick=1.0)
    with pytest.raises(CliError, match="before a step was timed") as error:
        bottleneck_result(path, [], plan=Plan(1, 9), instruments=ticks)
    assert (error.value.code, ticks.calls[-2:]) == (1, ["end", "stop"])


@pytest.mark.parametrize("optimizers", ["stepper", "stepper, other"])
def test_without_a_loader_the_first_optimizer_marks_the_steps(script, optimizers):
    path = script(f"for _ in range(5):\n    train(torch.ones(1, 2), {optimizers})")
    found, _, _ = measure(path)
    assert (found["loader"], len(found["warm"]) + len(found["steps"])) == (None, 4)
    assert list(found["rows"]) == ["step", "host"]


def test_a_script_ends_after_the_planned_steps(script, capsys):
    path = script(LOOP + "print('all of it')")
    found, code, _ = measure(path, plan=Plan(1, 1, 2))
    assert (len(found["steps"]), code) == (2, 0)
    assert "all of it" not in capsys.readouterr().out
    path = script("for _ in range(9): train(torch.ones(1, 2))\nprint('all of it')")
    assert len(measure(path, plan=Plan(1, 1, 2))[0]["steps"]) == 2
    assert "all of it" not in capsys.readouterr().out


def test_a_script_that_catches_the_exit_continues_unmeasured(script, capsys):
    path = script(
        """
        try:
            for batch in DataLoader(data, 1): train(batch)
        except SystemExit:
            for batch in DataLoader(data, 1): train(batch)
            print("on")
        """
    )
    assert len(measure(path, plan=Plan(1, 1, 2))[0]["steps"]) == 2
    assert capsys.readouterr().out == "on\n"


def test_a_watched_iterator_behaves_like_the_original(script, capsys):
    path = script(
        """
        loader = DataLoader(data, 2)
        batches = iter(loader)
        print(len(batches), batches._num_yielded, iter(batches) is batches)
        train(next(batches))
        print(batches._num_yielded, hasattr(batches, "nothing"))
        for batch in loader: train(batch)
        """
    )
    measure(path)
    assert capsys.readouterr().out == "4 0 True\n1 False\n"


def test_the_error_of_making_an_iterator_reaches_the_script(script, capfd):
    path = script(
        """
        class Broken(DataLoader):
            def _get_iterator(self):
                raise OSError("no disk")
        iter(Broken(data))
        """
    )
    with pytest.raises(CliError):
        bottleneck_result(path, [], plan=QUICK)
    assert capfd.readouterr().err.rstrip().endswith("OSError: no disk")


def test_a_script_sees_the_arguments_and_path_that_python_gives(script, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    path = script(LOOP + "import beside; print(beside.NAME, sys.argv, __name__, __file__)")
    measure(path, "--lr", "1")
    assert capsys.readouterr().out == f"beside {[str(path), '--lr', '1']} __main__ {path}\n"


@pytest.mark.parametrize(
    ("ends", "code", "stderr"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('out of data')", 1, "out of data\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_the_exit_code_is_that_of_the_script(script, capsys, ends, code, stderr):
    found, given, _ = measure(script(LOOP + ends))
    assert (len(found["steps"]), given) == (3, code)
    err = capsys.readouterr().err
    assert err.endswith(stderr)
    assert bool(err) == bool(stderr)


def test_a_traceback_begins_in_the_script(script, capsys):
    path = script("def bad():\n    1 / 0\nbad()")
    with pytest.raises(CliError) as error:
        bottleneck_result(path, [], plan=QUICK)
    assert error.value.code == 1
    assert str(error.value).startswith(f"{path} ended with exit code 1 before a step was timed\n")
    err = capsys.readouterr().err
    assert err.startswith(f'Traceback (most recent call last):\n  File "{path}"')
    assert "runpy" not in err
    assert "in bad" in err


def test_a_syntax_error_is_shown_with_its_line(script, capsys):
    path = script("def :")
    with pytest.raises(CliError):
        bottleneck_result(path, [], plan=QUICK)
    assert f'File "{path}", line' in capsys.readouterr().err


def test_a_missing_script_is_an_error(tmp_path, capsys):
    path = tmp_path / "trian.py"
    assert app.main(["bottleneck", str(path)]) == 2
    message = f"{path}: no such script\naisp bottleneck train.py [its arguments]\n"
    assert capsys.readouterr().err == message


def test_a_script_without_a_training_loop_is_an_error(script, capsys):
    path = script("for batch in DataLoader(data): pass")
    assert app.main(["bottleneck", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"{path}: no training loop found: it iterated 1 DataLoaders, and no optimizer made a step\n"
        "A loop must call step() of a torch.optim.Optimizer, usually while it iterates a"
        " torch.utils.data.DataLoader. Watch any other loop with pytest_aisp.bottleneck:\n"
        "for batch in (watch := bottleneck(loader)): ...\n"
    )


def test_a_loop_that_is_too_short_is_an_error(script, capsys):
    assert app.main(["bottleneck", str(script(LOOP))]) == 2
    assert capsys.readouterr().err.startswith("the loop ended after 4 steps, before any step")


def test_the_command_prints_the_report_after_the_scripts_own_output(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + LOOP + "print(sys.argv[1:])\nimport os\nos.system('echo shell')")
    command = [sys.executable, "-m", "pytest_aisp.cli", "bottleneck", "--warmup=1"]
    done = subprocess.run([*command, path, "--json"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["['--json']", "shell"]
    assert lines[2].startswith("train.py on ")
    assert "3 steps over DataLoader (batch 2, 0 workers), after 1 warm-up step in" in lines[2]
    command += ["--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["steps"]) == 3
    assert done.stderr == "[]\nshell\n"


@pytest.mark.slow
def test_spawned_workers_of_a_script_are_timed(tmp_path):
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


def test_optimizer_steps_can_be_profiled():
    """A step's annotation begins inside one of PyTorch's own and ends inside the next."""
    weights = torch.nn.Linear(2, 2)
    stepper = torch.optim.SGD(weights.parameters(), lr=0.1)
    finder = LoopFinder(Plan(1, 3), CpuProfile())
    with finder.installed():
        for _ in range(7):
            weights(torch.ones(1, 2)).sum().backward()
            stepper.step()
    loop = finder.training_loop(None).loop
    bodies = [e for e in loop.profile.events() if e.name == BODY]
    assert (len(bodies), loop.profiled, len(loop.timed)) == (3, 3, 2)
