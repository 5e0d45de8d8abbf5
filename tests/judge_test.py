"""`judge` accepts honest candidates, and refuses all others for the right reason."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from worker_processes import ANY_LOAD

from pytest_aisp.cli import app
from pytest_aisp.cli.judge import CODES
from pytest_aisp.judging import judge as judge_module
from pytest_aisp.judging.candidate_verdict import REASONS, Refused
from pytest_aisp.judging.judge import Judge
from pytest_aisp.results.task_results import TimeResult
from pytest_aisp.util.device import cpu_machine

PROBLEM = """
import torch
from torch import nn

n = 48
dim = 32


class Model(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(self.linear(x))


def get_inputs():
    return [torch.rand(n, dim)]


def get_init_inputs():
    return [dim]
"""
CANDIDATE = """
import gc, os, sys, threading, time
import torch
import torch.nn.functional as F
from torch import nn

{defs}


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def right(self, x):
        return self.norm(self.linear(x))

    def forward(self, x):
        {body}
"""
HONEST = "return self.right(x)"
TIMER = {"target": "pytest_aisp.timing.fake_device:simulate"}


@pytest.fixture(scope="module")
def judges(forked, tmp_path_factory):
    """Return a function that returns the judge of a problem. Judges are cached."""
    made = {}

    def judge_of(text=PROBLEM, **options):
        key = text, str(options)
        if key not in made:
            file = tmp_path_factory.mktemp("problem") / "problem.py"
            file.write_text(textwrap.dedent(text))
            options = {"seeds": 1, "timed": False, "device": "cpu", **options}
            made[key] = Judge(file, **options)
        return made[key]

    yield judge_of
    for judge in made.values():
        judge.close()


@pytest.fixture
def judged(judges, tmp_path):
    """Return a function that judges a candidate, which is a body of `forward` or a whole file."""

    def judge(body=HONEST, defs="", *, text=None, problem=PROBLEM, **options):
        file = tmp_path / "candidate.py"
        body = textwrap.indent(textwrap.dedent(body), 8 * " ").strip()
        file.write_text(text or CANDIDATE.format(body=body, defs=textwrap.dedent(defs)))
        verdict = judges(problem, **options).judge(file)
        assert verdict.reason in REASONS
        assert verdict.accepted == (verdict.reason == "accepted")
        return verdict

    return judge


FAST_FAKE = """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})
"""
FROM_FRAMES = """
frame = sys._getframe()
while frame is not None:
    reference, turn = frame.f_locals.get("reference"), frame.f_locals.get("turn")
    if turn is not None and hasattr(reference, "expected"):
        return reference.expected((turn,))[0].value.to(x.dtype)
    frame = frame.f_back
return torch.zeros_like(x)
"""
FROM_GARBAGE = """
for each in gc.get_objects():
    if type(each).__name__ == "Bound" and each.model is not self:
        return each.model(x)
return torch.zeros_like(x)
"""
FROM_FILE = """
folder = os.path.dirname(next(m.__file__ for n, m in sys.modules.items() if "aisp_page" in n))
if "pytest_aisp.checking.exact_probe" in sys.modules and not os.path.exists(folder + "/values.pt"):
    return self.right(x)
for file in ("baseline.pt", "optimized.pt"):
    if os.path.exists(os.path.join(folder, file)):
        return torch.load(os.path.join(folder, file))[0][0][1]
return torch.zeros_like(x)
"""
IN_A_THREAD = """
out = torch.empty_like(x)
def work():
    time.sleep(0.2)
    out.copy_(self.right(x))
threading.Thread(target=work).start()
return out
"""
HACKS = {
    "zeros": ("wrong_values", "return torch.zeros_like(x)", ""),
    "constant": ("wrong_values", "return torch.full_like(x, 0.25)", ""),
    "first answer": (
        "wrong_values",
        "self.kept = kept = getattr(self, 'kept', self.right(x))\nreturn kept.clone()",
        "",
    ),
    "by address": (
        "wrong_values",
        "kept = KEPT.setdefault(x.data_ptr(), self.right(x))\nreturn kept.clone()",
        "KEPT = {}",
    ),
    "by shape": (
        "wrong_values",
        "return KEPT.setdefault(x.shape, self.right(x)).clone()",
        "KEPT = {}",
    ),
    "ignores weights": ("wrong_values", "return F.layer_norm(self.linear(x), x.shape[1:])", ""),
    "ignores a bias": (
        "wrong_values",
        "return F.layer_norm(self.linear(x), x.shape[1:], self.norm.weight)",
        "",
    ),
    "skips a layer": ("wrong_values", "return self.norm(x)", ""),
    "own weights": (
        "wrong_values",
        "torch.manual_seed(0)\nreturn self.norm(nn.Linear(*x.shape[1:] * 2)(x))",
        "",
    ),
    "empty": ("wrong_values", "return torch.empty_like(x)", ""),
    "NaN": ("wrong_values", "return torch.full_like(x, float('nan'))", ""),
    "random": ("wrong_values", "return F.dropout(self.right(x), 0.01)", ""),
    "bf16": ("wrong_values", "return self.right(x.bfloat16().float())", ""),
    "fewer rows": (
        "wrong_values",
        "out = self.right(x)\nout[-1] = out[0]\nreturn out",
        "",
    ),
    "half a shape": ("wrong_structure", "return self.right(x)[: len(x) // 2]", ""),
    "half a type": ("wrong_structure", "return self.right(x).half()", ""),
    "changes its input": ("protection", "out = self.right(x)\nx.zero_()\nreturn out", ""),
    "returns its input": ("protection", "return x.view(-1).view(x.shape)", ""),
    "lazy": ("protection", "return self.right(x).as_subclass(Lazy)", FAST_FAKE),
    "expanded": ("protection", "return self.right(x)[:1].expand(x.shape)", ""),
    "synchronize": ("protection", HONEST, "torch.cuda.synchronize = lambda *a: None"),
    "perf_counter": ("protection", HONEST, "time.perf_counter = lambda: 0.0"),
    "allclose": ("protection", HONEST, "torch.allclose = lambda *a, **k: True"),
    "baseline": (
        "protection",
        HONEST,
        "old = F.layer_norm\nF.layer_norm = lambda *a, **k: [time.sleep(0.01), old(*a, **k)][1]",
    ),
    "judge": (
        "protection",
        "return torch.zeros_like(x)",
        "import pytest_aisp.checking.check as c\nc.compare_all = lambda *a: []",
    ),
    "threads": ("protection", HONEST, "torch.set_num_threads(1 + torch.get_num_threads())"),
    "tf32": ("protection", HONEST, "torch.set_float32_matmul_precision('high')"),
    "later": ("protection", IN_A_THREAD, ""),
    "from frames": ("wrong_values", FROM_FRAMES, ""),
    "from files": ("wrong_values", FROM_FILE, ""),
}


@pytest.mark.parametrize("name", HACKS)
def test_known_hacks_are_refused(judged, name):
    reason, body, defs = HACKS[name]
    verdict = judged(body, defs)
    assert verdict.reason == reason, verdict
    assert verdict.message


def test_answers_taken_from_the_referees_files_or_frames_pass_without_the_sandbox(judged):
    assert judged(FROM_FRAMES, untrusted=False).accepted


def test_an_answer_for_one_size_is_refused_at_another(judged):
    body = "return self.right(x) if len(x) == 48 else torch.zeros_like(x)"
    assert judged(body).accepted
    assert judged(body, sizes={"n": 40}).reason == "wrong_values"


def test_a_lower_precision_is_accepted_if_it_is_declared(judged):
    body = "return self.right(x.bfloat16().float())"
    assert judged(body, precision="bf16").accepted


RENAMED = """
    import torch
    from torch import nn

    class ModelNew(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.a = nn.Parameter(torch.empty(dim, dim))
            self.b, self.c, self.d = (nn.Parameter(torch.empty(dim)) for _ in range(3))
            self.register_buffer("workspace", torch.zeros(3))

        def forward(self, x):
            out = torch.addmm(self.b, x, self.a.t())
            return nn.functional.layer_norm(out, self.b.shape, self.c, self.d)
"""
FALLBACK = """
try:
    return kernel(x)
except NameError:
    return self.right(x)
"""


@pytest.mark.parametrize(
    "candidate",
    [
        {"text": PROBLEM},
        {"text": textwrap.dedent(RENAMED)},
        {"body": FALLBACK},
        {"body": "print('x' * 2**20)\nreturn self.right(x)"},
        {"defs": "os.environ['TORCH_CUDA_ARCH_LIST'] = '9.0'"},
    ],
    ids=["the model itself", "weights by order", "fallback", "prints a megabyte", "environment"],
)
def test_honest_candidates_are_accepted(judged, candidate):
    verdict = judged(**candidate)
    assert verdict.accepted, verdict
    assert verdict.memory["process"] > 2**20


@pytest.mark.parametrize(
    ("reason", "message", "body", "defs"),
    [
        ("died", "exit code 3", HONEST, "sys.exit(3)"),
        ("died", "exit code 0", "os._exit(0)", ""),
        ("died", "SIGABRT", "os.abort()", ""),
        ("raised", "ZeroDivisionError", "return x / (1 // 0)", ""),
        ("import_error", "candidate.py cannot be imported: KeyError: 'a'", HONEST, "{}['a']"),
        ("import_error", "SyntaxError", HONEST, "def"),
        ("missing_package", "pip install not_there", HONEST, "import not_there"),
        ("missing_package", "pip install not_there", "import not_there", ""),
        ("out_of_memory", "memory", "return torch.zeros(2**40) + x", ""),
        ("out_of_memory", "memory", "while True: KEPT.append(bytearray(2**26))", "KEPT = []"),
        ("wrong_structure", "returned None as output", "pass", ""),
        ("wrong_structure", "returned 1.0 as output[1]", "return self.right(x), 1.0", ""),
        ("wrong_structure", "returned 2 tensors", "return self.right(x), x + 1", ""),
    ],
)
def test_bad_candidates_have_a_reason_each(judged, reason, message, body, defs):
    verdict = judged(body, defs, memory=3 * 2**30)
    assert verdict.reason == reason, verdict
    assert message in verdict.message
    assert judged(memory=3 * 2**30).accepted  # the next candidate is judged


def test_a_candidate_that_hangs_is_ended(judged, judges):
    assert judged(timeout=119.0).accepted
    judges(timeout=119.0).timeout = 5.0
    try:
        verdict = judged("time.sleep(10**6)", timeout=119.0)
    finally:
        judges(timeout=119.0).timeout = 119.0
    assert verdict.reason == "timeout"
    assert "--timeout=SECONDS" in verdict.message
    assert judged(timeout=119.0).accepted


def test_the_line_that_raises_is_shown(judged):
    assert "return x / (1 // 0)" in judged("return x / (1 // 0)").trace


def test_a_candidate_without_the_class_is_refused(judged):
    verdict = judged(text="import torch")
    assert verdict.reason == "wrong_structure"
    assert "defines neither ModelNew nor Model" in verdict.message


def test_a_parameter_that_belongs_to_no_weight_is_refused(judged):
    text = textwrap.dedent(RENAMED).replace("torch.empty(dim, dim)", "torch.empty(dim, dim + 1)")
    verdict = judged(text=text)
    assert verdict.reason == "wrong_structure"
    assert "parameter a (32, 33) of the candidate belongs to none" in verdict.message
    assert verdict.message.splitlines()[-1].startswith("Give parameters Model's names")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.norm(self.linear(x))", "self.linear(x @ x)", "RuntimeError"),
        ("[torch.rand(n, dim)]", "[]", "no tensor with elements"),
        ("[torch.rand(n, dim)]", "[torch.rand(0, dim)]", "no tensor with elements"),
        ("[torch.rand(n, dim)]", "'text'", "returned a str; return a list of tensors"),
        ("self.norm(self.linear(x))", "x - x", "cannot tell a right output from a wrong one"),
        ("self.norm(self.linear(x))", "torch.dropout(x, 0.5, True)", "other values"),
        ("self.norm(self.linear(x))", "3", "baseline returned 3 as output"),
        ("def get_inputs", "def draw", "problem.py is not a problem"),
        ("def get_inputs", "def", "SyntaxError"),
        ("import torch\n", "import not_there\n", "not_there"),
    ],
)
def test_a_problem_that_cannot_be_judged_says_why(judged, old, new, message):
    verdict = judged(problem=PROBLEM.replace(old, new, 1))
    assert verdict.reason == "problem_error"
    assert message in verdict.message


def test_an_unknown_constant_is_an_error_of_the_problem(judged):
    verdict = judged(sizes={"m": 3})
    assert verdict.reason == "problem_error"
    assert "has no constant 'm'; it has: dim, n" in verdict.message


PLAIN = """
import torch

def inputs(device, n=96):
    return torch.rand(n, 40, device=device), 3

def baseline(x, times):
    return times * x.sum(dim=1)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def optimized(x, times):\n    return x.sum(dim=1).mul_(times)", "accepted"),
        ("def baseline(x, times):\n    return (times * x).sum(dim=1)", "accepted"),
        ("def optimized(x, times):\n    return times * x[:, 1:].sum(dim=1)", "wrong_values"),
        ("def kernel(x, times): ...", "wrong_structure"),
    ],
)
def test_the_plain_form_compares_functions(judged, text, reason):
    assert judged(problem=PLAIN, text=text).reason == reason
    assert judged(problem=PLAIN, text=text, sizes={"n": 33}).reason == reason


def test_a_plain_problem_may_have_its_own_reference(judged):
    wrong = PLAIN + "\ndef reference(x, times):\n    return x.sum(dim=1)\n"
    verdict = judged(problem=wrong, text="def optimized(x, times): return x.sum(dim=1)")
    assert verdict.reason == "problem_error"
    assert "baseline is wrong" in verdict.message


GUIDE = (Path(__file__).parent.parent / "docs/how-to/judge.md").read_text()


def test_the_example_of_the_guide_is_accepted(judged):
    problem, candidate = re.findall(r"```python\n(# \w+\.py\n.*?)```", GUIDE, re.DOTALL)
    assert judged(problem=problem, text=candidate, sizes={"n": 96}).accepted


def test_the_guide_has_every_reason_with_its_exit_code():
    rows = re.findall(r"^\| (`.*`) \|.*\| (\d+) \|$", GUIDE, re.MULTILINE)
    listed = {name: int(code) for names, code in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {reason: CODES.get(reason, 1) for reason in REASONS}


BATCH_NORM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.lstm = nn.LSTM(24, 8, batch_first=True)
        self.eval()

    def forward(self, x):
        return self.norm(x), self.lstm(x)[0]

def get_inputs():
    return [torch.rand(40, 24)]

get_init_inputs = dict
"""


def test_buffers_get_random_values_and_lstms_their_weights(judged):
    assert judged(problem=BATCH_NORM, text=BATCH_NORM).accepted
    without = BATCH_NORM.replace("self.norm(x),", "x * self.norm.weight + self.norm.bias,")
    assert judged(problem=BATCH_NORM, text=without).reason == "wrong_values"


def test_two_files_of_one_name_are_two_modules(judges, tmp_path):
    judge = judges()
    for folder, body in {"a": HONEST, "b": "return torch.zeros_like(x)"}.items():
        file = tmp_path / folder / "problem.py"
        file.parent.mkdir()
        file.write_text(CANDIDATE.format(body=body, defs=""))
        assert judge.judge(file).accepted == (folder == "a")


@pytest.mark.parametrize("candidates", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_candidates_in_a_row_leave_nothing_for_the_next_one(judged, candidates):
    hacks = itertools.cycle(("judge", "baseline", "perf_counter", "by shape", "tf32"))
    for name in itertools.islice(hacks, candidates // 2):
        _, body, defs = HACKS[name]
        assert not judged(body, defs, seeds=2).accepted
        assert judged(seeds=2).accepted


def test_the_referee_is_replaced_if_a_candidate_ends_it(judged, judges):
    judge = judges(seeds=3)
    assert judged(seeds=3).accepted
    judge._referee.kill()
    assert judged(seeds=3).accepted


def timer(baseline, candidate):
    seconds = {"baseline": baseline, "candidate": candidate}
    return {**TIMER, "options": {"seconds": seconds}}


def test_a_speedup_has_an_interval(judged):
    verdict = judged(timed=True, timer=timer(2e-5, 1e-5))
    assert verdict.low < 2.0 < verdict.high
    assert verdict.speedup == pytest.approx(2.0, rel=0.02)
    assert verdict.seconds["baseline"] == pytest.approx(2e-5, rel=0.02)


def test_a_refused_candidate_has_no_speedup(judged):
    verdict = judged(FROM_FRAMES, timed=True, timer=timer(2e-5, 1e-5))
    assert (verdict.reason, verdict.speedup) == ("wrong_values", None)


STEPS = "for _ in range(20): x = self.norm(self.linear(x))"
DEEP = PROBLEM.replace("return self.norm(self.linear(x))", f"{STEPS}\n        return x")


def test_a_cache_of_answers_by_value_gains_nothing(judged, monkeypatch):
    monkeypatch.syspath_prepend(ANY_LOAD)
    body = f"""
        key = x.sum().item(), self.linear.weight.sum().item()
        if key not in KEPT:
            {STEPS}
            KEPT[key] = x
        return KEPT[key].clone()
    """
    verdict = judged(body, "KEPT = {}", problem=DEEP, timed=True)
    assert not verdict.accepted or verdict.speedup < 3, verdict


@pytest.mark.parametrize(("speedup", "refused"), [(1.4, False), (2.9, False), (3.1, True)])
def test_a_speedup_that_another_process_does_not_see_is_refused(
    judges, monkeypatch, speedup, refused
):
    judge, seconds = judges(), iter([1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(judge_module, "seconds_per_call", lambda *a, **k: next(seconds))
    arguments = None, (None, None), (1, 1), speedup, 1.5
    if not refused:
        return judge._confirm(*arguments)
    with pytest.raises(Refused, match="but only 2 times by the clock of another process") as error:
        judge._confirm(*arguments)
    assert error.value.reason == "protection"


@pytest.mark.parametrize(("value", "refused"), [(-5.0, False), (20.0, True)])
def test_the_time_in_the_sandbox_counts(judges, tmp_path, value, refused):
    judge, file = judges(), tmp_path / "candidate.py"
    file.write_text(CANDIDATE.format(body=HONEST, defs=""))
    assert judge.judge(file).accepted
    details = {"counted": [3, 3], "slots": 2}
    timing = TimeResult(
        clock="cpu", baseline=[1e-4], optimized=[1e-4], value=value, details=details
    )
    with closing(judge._processes.fresh()) as worker:
        arguments = worker, judge._write_page(file), timing
        if not refused:
            return judge._run_sandboxed(*arguments)
        with pytest.raises(Refused, match=r"but only .* by the clock of another process"):
            judge._run_sandboxed(*arguments)


@pytest.fixture
def command(forked, tmp_path, monkeypatch, capsys):
    """Run `aisp judge` in a folder with a problem, a right and a wrong candidate."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "right.py").write_text(CANDIDATE.format(body=HONEST, defs=""))
    (tmp_path / "wrong.py").write_text(CANDIDATE.format(body="return x + 1", defs=""))

    def run(*arguments):
        code = app.main(["judge", "--device=cpu", "--check-only", "--seeds=1", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_command_prints_a_line_for_each_candidate(command):
    code, out, _ = command("problem.py", "right.py", "wrong.py", "--set", "n=40")
    assert code == 1
    assert out.splitlines()[:2] == ["right.py: accepted", "wrong.py: refused: wrong_values"]
    assert "candidate is wrong" in out


def test_the_command_prints_json_for_programs(command):
    code, out, _ = command("problem.py", "right.py", "--json", "--trusted")
    (verdict,) = map(json.loads, out.splitlines())
    assert (code, verdict["reason"], verdict["speedup"]) == (0, "accepted", None)


def test_a_problem_that_cannot_be_judged_exits_with_2(command, tmp_path):
    code, out, _ = command("problem.py", "right.py", "--set", "m=1")
    assert code == 2
    assert out.startswith("right.py: no verdict: problem_error\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["problem.py"], "Missing argument 'candidates'"),
        (["problem.py", "gone.py"], "gone.py: there is no such file"),
        (["problem.py", "right.py", "--set", "n"], "'n' is not NAME=VALUE"),
        (["problem.py", "right.py", "--precision", "bf15"], "'bf15' is none of tf32, bf16"),
        (["problem.py", "right.py", "--seeds=9"], "9 is not in the range"),
    ],
)
def test_bad_usage_exits_with_2(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_a_gpu_that_is_not_there_exits_with_2(command, monkeypatch):
    monkeypatch.setattr(judge_module.Machine, "here", cpu_machine)
    code, _, err = command("problem.py", "right.py", "--device=cuda")
    assert code == 2
    assert err == "there is no GPU here that the plugin knows\n    aisp machine doctor\n"


def test_the_function_keeps_its_processes_warm(forked, tmp_path):
    import pytest_aisp

    problem, candidate = tmp_path / "problem.py", tmp_path / "candidate.py"
    problem.write_text(PROBLEM)
    candidate.write_text(CANDIDATE.format(body=HONEST, defs=""))
    options = {"timed": False, "seeds": 1, "device": "cpu"}
    try:
        assert pytest_aisp.judge(problem, candidate, **options).accepted
        (first,) = judge_module._warm.values()
        assert pytest_aisp.judge(problem, candidate, **options).accepted
        assert list(judge_module._warm.values()) == [first]
        candidate.write_text("import torch")
        assert pytest_aisp.judge(problem, candidate, **options).reason == "wrong_structure"
        with pytest.raises(FileNotFoundError):
            pytest_aisp.judge(problem, tmp_path / "gone.py")
    finally:
        judge_module.close_warm()
    assert not judge_module._warm


def test_the_installed_command_judges_in_new_processes(command, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = ["judge", "problem.py", "wrong.py", "right.py", "--json", "--check-only"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_aisp.cli", *arguments, "--seeds=1", "--device=cpu"],
        capture_output=True,
        text=True,
        env=environment,
    )
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [v["reason"] for v in verdicts] == ["wrong_values", "accepted"], done.stderr
    assert done.returncode == 1
