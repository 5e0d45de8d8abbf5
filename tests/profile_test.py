"""`--aisp-profile`: the files it writes, the links to them, and that verdicts do not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks_test import write as write_ranks

from pytest_aisp import Work, compare
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.page.pair import ROLES
from pytest_aisp.results.messages import ProfileTask, Reply
from pytest_aisp.results.row import Profile
from pytest_aisp.session import sandbox_and_profile
from pytest_aisp.session.run_context import Interrupted
from pytest_aisp.worker import ncu_counters, nvidia_tools, timeline, torch_profiler
from pytest_aisp.worker.loader import pair_of
from pytest_aisp.worker.nvidia_tools import NsightError, missing_profiler, profile_side
from pytest_aisp.worker.torch_profiler import Differences, Usage, table_lines, usage_per_call

NAME = "ch99.doubling_test.test_doubling.doubled-n1001"
CHECK = ["--aisp-check", "--aisp-profile"]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_torch_profile_on_a_cpu_writes_traces_tables_and_differences(page, pytester):
    page()
    result = pytester.runpytest_subprocess(*CHECK, "--aisp-artifacts=out", "-vv")
    result.stdout.fnmatch_lines(
        [
            f"test_doubling[[]doubled[]]: profile (torch): out/profile/{NAME}",
            "test_doubling[[]doubled[]]: profile: new: *aten::*; gone: aten::add (1)",
            f"profiles (torch) of 1 case: {Path('out/profile')}",
        ]
    )
    assert result.ret == 0
    [row] = rows_of(pytester.path / "out")
    assert row["verdict"] == "checked"
    linked = row["profile"]
    assert (linked["tool"], linked["folder"]) == ("torch", f"profile/{NAME}")
    assert "aten::mul" in linked["differences"]["new"]
    assert linked["differences"]["gone"] == {"aten::add": 1.0}
    folder = pytester.path / "out" / linked["folder"]
    named = [name for names in linked["files"].values() for name in names]
    assert sorted(named) == sorted(file.name for file in folder.iterdir())
    for role, operator in (("baseline", "aten::add"), ("optimized", "aten::mul")):
        trace = json.loads((folder / f"{role}.trace.json").read_text())["traceEvents"]
        names = [event.get("name") for event in trace]
        assert names.count(operator) == torch_profiler.CALLS  # the warm-up is not in it
        assert f"aisp-{role}" in names
        text = (folder / f"{role}.operators.txt").read_text()
        assert operator in text
        assert "Self CPU time total" in text
        # At the check size, not at the timed one.
        assert any([33] in e.get("args", {}).get("Input Dims", []) for e in trace)
    assert "gone   1 -> 0  aten::add" in (folder / "differences.txt").read_text()


def test_without_artifacts_profiles_go_to_a_folder_below_the_root(page, pytester):
    page()
    # The path is no value of the bare option before it.
    result = pytester.runpytest_subprocess(*CHECK, "ch99")
    result.stdout.fnmatch_lines(
        ["profiles (torch) of 1 case: */aisp-profile; --aisp-artifacts=DIR keeps them elsewhere"]
    )
    assert (pytester.path / "aisp-profile" / NAME / "baseline.trace.json").exists()


@pytest.mark.parametrize("workers", [["-n0"], ["-n2"]])
def test_timed_cases_are_profiled_at_their_size_unless_they_are_wrong(
    page, gpu, pytester, read_junit, workers
):
    gpu(added=2e-5, doubled=1e-5)
    page(name="green_test.py")
    page(name="red_test.py", at_least="3.0")
    page("3 * x", name="wrong_test.py")
    arguments = ["--aisp-profile=torch", "--aisp-artifacts=out", "--junitxml=junit.xml", *workers]
    result = pytester.runpytest_subprocess(*arguments)
    result.stdout.fnmatch_lines(["profiles (torch) of 2 cases: out/profile"])
    assert result.ret == 1
    verdicts = {
        name: case.verdict for name, case in read_junit(pytester.path / "junit.xml").items()
    }
    assert verdicts == {"green": "new", "red": "fail", "wrong": "wrong"}
    for row in rows_of(pytester.path / "out"):
        if row["verdict"] == "wrong":
            assert row["profile"] == {}
            continue
        trace = pytester.path / "out" / row["profile"]["folder"] / "baseline.trace.json"
        events = json.loads(trace.read_text())["traceEvents"]
        assert any([1001] in e.get("args", {}).get("Input Dims", []) for e in events)


def test_it_is_off_by_default(page, pytester):
    page()
    result = pytester.runpytest_subprocess("--aisp-check", "--aisp-artifacts=out")
    assert "profile" not in result.stdout.str()
    [row] = rows_of(pytester.path / "out")
    assert row["profile"] == {}
    assert not (pytester.path / "out" / "profile").exists()


FAILS = """
    def doubled(x):
        import torch

        if torch.autograd.profiler._is_profiler_enabled:
            {does}
        return 2 * x
"""


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raise RuntimeError('no profiler, please')", "RuntimeError: no profiler, please, during:"),
        ("import os; os._exit(3)", "the worker process ended with exit code 3 during: profile"),
    ],
)
def test_a_failure_under_the_profiler_keeps_the_verdict(page, pytester, does, message):
    page(defs=FAILS.format(does=does))
    result = pytester.runpytest_subprocess(*CHECK, "--aisp-artifacts=out")
    result.stdout.fnmatch_lines([f"doubling_test.py::*: not profiled (torch): {message}*"])
    assert result.ret == 0
    [row] = rows_of(pytester.path / "out")
    assert (row["verdict"], row["profile"]) == ("checked", {})


def test_an_unwritable_folder_keeps_the_verdict(page, pytester):
    page()
    (pytester.path / "aisp-profile").write_text("a file is in the way")
    result = pytester.runpytest_subprocess(*CHECK)
    result.stdout.fnmatch_lines(["doubling_test.py::*: not profiled (torch): *Error: *"])
    assert result.ret == 0


LATE = """
    import pytest
    from pytest_aisp.session import sandbox_and_profile

    sandbox_and_profile.profile = lambda case: pytest.fail("Timeout (>1.0s) from pytest-timeout.")
"""


def test_a_timeout_under_the_profiler_keeps_the_verdict(page, pytester):
    page()
    pytester.makeconftest(LATE)
    result = pytester.runpytest_subprocess(*CHECK)
    result.stdout.fnmatch_lines(["doubling_test.py::*: not profiled: Timeout (>1.0s) from pytest*"])
    assert result.ret == 0


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put profilers on PATH that are this shell script."""

    def says(script):
        for name, tool in nvidia_tools.PROFILERS.items():
            path = tmp_path / name
            path.write_text(script.replace("SUFFIX", tool.suffix))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return says


WORKING = """#!/bin/sh
if [ "$1" = --import ]; then cat "$(dirname "$0")/raw.csv" 2>/dev/null; exit; fi
for word in "$@"; do case "$word" in --output=*|--export=*) report="${word#*=}";; esac; done
while [ "${1%%/python*}" = "$1" ]; do echo "option $1"; shift; done
"$@" || exit $?
echo kept > "${report}SUFFIX"
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--aisp-profile=perf"], ["*--aisp-profile=perf: choose one of torch, nsys, ncu"]),
        (["--aisp-profile", "--aisp-replay=x"], ["*combined with --aisp-replay: it runs nothing*"]),
        (["--aisp-profile", "--aisp-compile"], ["*combined with --aisp-compile: it runs nothing*"]),
        (["--aisp-profile", "--aisp-aa"], ["*combined with --aisp-aa: both sides would be the *"]),
        (["--aisp-profile", "--aisp-sanitize"], ["*with --aisp-sanitize: only one tool *"]),
        (["--aisp-profile=ncu"], ["*--aisp-profile=ncu needs a GPU; there is none here*"]),
    ],
)
def test_illegal_values_and_combinations_are_refused(
    tools, pytester, monkeypatch, arguments, words
):
    tools(WORKING)
    monkeypatch.setattr(nvidia_tools, "sanitizer_installed", lambda: "compute-sanitizer")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = pytester.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(words)
    assert result.stderr.lines[-1 - (not result.stderr.lines[-1])].startswith("    pytest --aisp-")


@pytest.mark.parametrize(
    ("tool", "product"), [("nsys", "Nsight Systems"), ("ncu", "Nsight Compute")]
)
def test_a_missing_profiler_is_refused_with_its_download_page(pytester, monkeypatch, tool, product):
    monkeypatch.setenv("PATH", "")
    result = pytester.runpytest(f"--aisp-profile={tool}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            f"*--aisp-profile={tool}: {tool} is not on PATH; it is {product}, which comes with the"
            f" CUDA toolkit, in bin/, or from https://developer.nvidia.com/nsight-*",
            "    pytest --aisp-profile=torch",
        ]
    )
    assert missing_profiler(tool) in result.stderr.str()


@pytest.fixture
def task(page, pytester):
    """Return the task of one side of the page on disk."""

    def of(role="optimized", **more):
        path = page(**more)
        where = {"page": str(path), "root": str(pytester.path), "module": "ch99.doubling_test"}
        case = {"function": "test_doubling", "variant": "doubled", "size": {"n": 1001}}
        return ProfileTask(side=role, **where, **case)

    return of


ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None}


OPTIONS = {
    "nsys": {"option profile", "option --capture-range=cudaProfilerApi"},
    "ncu": {"option --nvtx", "option --nvtx-include", "option aisp-optimized/"},
}


@pytest.mark.parametrize("tool", OPTIONS)
def test_a_profiler_runs_one_side_and_its_script_runs_it_again(tools, task, tmp_path, tool):
    tools(WORKING)
    folder = tmp_path / "a folder" / "case"
    files = profile_side(tool, task(), folder, ENVIRONMENT, 60.0)
    suffix = nvidia_tools.PROFILERS[tool].suffix
    names = [f"optimized{suffix}", f"optimized.{tool}.sh", f"optimized.{tool}.txt"]
    assert files == [*names, "optimized.task.json"]
    log = (folder / f"optimized.{tool}.txt").read_text().splitlines()
    assert OPTIONS[tool] <= set(log)
    (folder / files[0]).unlink()
    subprocess.run(["sh", folder / files[1]], check=True, stdout=subprocess.DEVNULL)
    assert (folder / files[0]).read_text() == "kept\n"


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = ["ID", "Kernel Name", ncu_counters.TIME, *ncu_counters.OCCUPANCY, ncu_counters.ISSUED[1]]
COLUMNS += [STALLED.format(reason) for reason in ("long_scoreboard", "wait", "selected")]
ROWS = [
    ["", "", "nsecond", "%", "%", "inst", "inst", "inst"],
    ["0", 'void add<"4">(float*, int)', "1,000", "50.0", "40.00", "6", "2", "1"],
    ["1", "memset, then", "3,000", "90.0", "n/a", "2", "1", "1"],
]


def raw_csv(*rows):
    """Return what `ncu --import --csv --page=raw` prints: names, units, and a row per kernel."""
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 1", *quoted, ""])


def test_counters_of_ncu_are_means_by_the_times_of_kernels():
    found = ncu_counters.parse(raw_csv(COLUMNS, *ROWS))
    assert found.kernels == 2
    assert found.occupancy == pytest.approx((50 + 3 * 90) / 400)
    assert found.issue_slots == pytest.approx(0.4)  # of the kernel for which ncu knows it
    assert (found.stall, found.stall_share) == ("long scoreboard", pytest.approx(3 / 5.25))
    words = "achieved occupancy 80%, issue slots 40%, top stall long scoreboard 57%"
    assert found.words() == words


def test_counters_are_read_from_a_report_of_ncu_2025_3_on_an_h200():
    text = (Path(__file__).parent / "data" / "ncu_raw.csv").read_text()  # columns left out
    words = "achieved occupancy 82%, issue slots 6%, top stall long scoreboard 83%"
    assert ncu_counters.parse(text).words() == words


@pytest.mark.parametrize(
    "text",
    ["", "==ERROR== no kernels", raw_csv(COLUMNS, ROWS[0]), raw_csv(["ID"], ["0"]), '"ID"\n"0"'],
)
def test_a_report_of_ncu_without_counters_has_none(text):
    assert ncu_counters.parse(text) is None


def test_counters_are_written_beside_the_report_of_ncu(tools, task, tmp_path):
    tools(WORKING)
    (tmp_path / "raw.csv").write_text(raw_csv(COLUMNS, *ROWS))
    files = profile_side("ncu", task(), tmp_path / "case", ENVIRONMENT, 60.0)
    assert files[-1] == "optimized.counters.json"
    notes = sandbox_and_profile.counter_notes(tmp_path / "case")
    assert notes == [
        "profile: counters of baseline: none in the report of ncu",
        "profile: counters of optimized: achieved occupancy 80%, issue slots 40%,"
        " top stall long scoreboard 57%",
    ]


def test_an_ncu_that_cannot_print_its_report_costs_only_the_counters(tmp_path):
    missing = str(tmp_path / "ncu")
    assert ncu_counters.import_report(missing, tmp_path / "x.ncu-rep", {}, 5.0) is None


SCRIPTS = {
    "#!/bin/sh\necho ==ERROR== ERR_NVGPUCTRPERM\nexit 1\n": nvidia_tools.COUNTERS,
    "#!/bin/sh\necho No kernels were profiled.\n": "ncu left no report\nNo kernels were profiled.",
    "#!/bin/sh\necho broken\nexit 9\n": "ncu ended with exit code 9\nbroken",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_profiler_without_a_report_says_why(tools, task, tmp_path, script):
    tools(script)
    (tmp_path / "optimized.ncu-rep").write_text("of another run")
    with pytest.raises(NsightError) as error:
        profile_side("ncu", task(), tmp_path, ENVIRONMENT, 60.0)
    assert str(error.value) == SCRIPTS[script]


def test_an_error_of_a_side_under_a_profiler_is_shown(tools, task, tmp_path):
    tools(WORKING)
    with pytest.raises(NsightError, match=r"exit code 1\n(.*\n)+ValueError: not me"):
        profile_side(
            "ncu", task(defs="def doubled(x): raise ValueError('not me')"), tmp_path, {}, 60.0
        )


def test_a_profiler_that_hangs_is_killed(tools, task, tmp_path):
    tools(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    with pytest.raises(NsightError, match=r"nsys took longer than 4 s\n.*timeout_multiplier=2"):
        profile_side("nsys", task(), tmp_path, {}, 4 / nvidia_tools.PROFILER_SLOWDOWN)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


CALLED: list[str] = []


@pytest.fixture
def cuda(monkeypatch):
    """Replace torch's CUDA functions, and record the order of calls."""

    @contextmanager
    def range_(name):
        CALLED.append(f"push {name}")
        yield
        CALLED.append("pop")

    history = SimpleNamespace(on=False)

    def record(enabled="all", max_entries=0):
        history.on = enabled is not None

    def dump(path):
        Path(path).write_text(f"recorded: {history.on}, {len(CALLED)} calls")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: CALLED.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", range_)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: CALLED.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: CALLED.append("stop"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100 + 10 * len(CALLED))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 500)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return history


@pytest.fixture
def pool(cuda):
    def inputs(device, n):
        return (torch.ones(n),)

    def added(x):
        CALLED.append("call")
        return x + x

    def doubled(x):
        return 2 * x

    @compare(
        baseline=added,
        optimized=[doubled],
        inputs=inputs,
        reference=added,
        sizes=[{"n": 8}],
        check_sizes=[{"n": 3}],
        bound="dram",
        work=lambda n: Work(read=4 * n, write=4 * n),
    )
    def test_it(pair):
        """A pair, never run as a test."""

    CALLED.clear()
    return InputPool(pair_of(test_it), {"n": 8}, "cuda", 1, 2)


def test_a_profiler_records_only_the_calls_in_the_range(pool, cuda):
    torch_profiler.replay_side(pool, pool.pair.baseline, "baseline")
    warm = ["call"] * torch_profiler.WARMUP + ["wait"]
    seen = ["start", "push aisp-baseline", *["call"] * torch_profiler.CALLS, "wait", "pop", "stop"]
    assert warm + seen == CALLED


def test_only_rank_0_opens_the_range_that_ncu_profiles(pool, cuda, monkeypatch):
    monkeypatch.setattr(torch_profiler, "current_group", lambda: SimpleNamespace(rank=1))
    torch_profiler.replay_side(pool, pool.pair.baseline, "baseline")
    assert "call" in CALLED
    assert "push aisp-baseline" not in CALLED


def test_memory_is_measured_before_and_after_with_a_snapshot_between(pool, cuda, tmp_path):
    file = tmp_path / "memory.pickle"
    held = torch_profiler._memory(pool, pool.pair.baseline, file)
    assert held == {
        "before": {"allocated": 100, "reserved": 500, "difference": 400},
        "after": {"allocated": 140, "reserved": 500, "difference": 360},
    }
    assert file.read_text() == "recorded: True, 4 calls"
    assert not cuda.on


def test_recording_of_memory_ends_when_a_side_raises(pool, cuda, tmp_path):
    with pytest.raises(ZeroDivisionError):
        torch_profiler._memory(pool, lambda x: 1 / 0, tmp_path / "memory.pickle")
    assert not cuda.on


def test_on_a_gpu_only_kernels_are_counted():
    def event(name, where, annotation=False):
        span = SimpleNamespace(elapsed_us=lambda: 2.0)
        kind = SimpleNamespace(name=where)
        return SimpleNamespace(
            name=name, device_type=kind, is_user_annotation=annotation, time_range=span
        )

    events = [event("add_kernel", "CUDA"), event("aten::add", "CPU")]
    events.append(event("aisp-baseline", "CUDA", annotation=True))
    profiler = SimpleNamespace(events=lambda: events)
    found = torch_profiler._events(profiler, SimpleNamespace(device="cuda"))
    assert list(found) == [("add_kernel", pytest.approx(2e-6))]


def span(name, stream, start, end):
    """Return a kernel or copy as torch's profiler reports it, in microseconds."""
    kind = SimpleNamespace(name="CUDA")
    where = {"device_type": kind, "device_resource_id": stream, "is_user_annotation": False}
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **where)


def test_a_timeline_begins_with_the_first_kernel_and_keeps_its_stream(tmp_path):
    spans = [span("add", 13, 104.0, 106.5), span("Memcpy HtoD", 7, 100.0, 103.0)]
    lanes = timeline.lanes_of([*spans, span("add", 7, 107.0, 108.0)])
    found = timeline.Timeline(3, lanes, timeline.lanes_of([]))
    found.write(tmp_path)
    read = timeline.Timeline.read(tmp_path)
    assert read == found
    assert json.loads((tmp_path / timeline.FILE).read_text())["baseline"] == {
        "bars": [[7, 0, 0.0, 3.0], [13, 1, 4.0, 2.5], [7, 1, 7.0, 1.0]],
        "names": ["Memcpy HtoD", "add"],
        "count": 3,
        "streams": 2,
    }


def test_a_timeline_is_bounded_and_says_how_much_there_was(tmp_path):
    many = [span(f"k{n}" + "x" * 500, n % 40, float(n), n + 0.5) for n in range(2000)]
    lanes = timeline.lanes_of(many)
    assert (lanes.count, lanes.streams) == (2000, 40)
    assert len(lanes.bars) == timeline.MAX_BARS
    assert len({bar.stream for bar in lanes.bars}) == timeline.MAX_LANES
    assert max(map(len, lanes.names)) == timeline.MAX_NAME
    timeline.Timeline(3, lanes, lanes).write(tmp_path)
    assert (tmp_path / timeline.FILE).stat().st_size < timeline.MAX_BYTES
    read = timeline.Timeline.read(tmp_path, 50)
    assert (len(read.optimized.bars), len(read.optimized.names)) == (50, 50)


def test_one_kernel_a_call_on_one_stream_has_no_timeline(tmp_path):
    one = timeline.lanes_of([span("add", 7, float(n), n + 0.5) for n in range(3)])
    two = timeline.lanes_of([span("add", 7, float(n), n + 0.5) for n in range(6)])
    timeline.Timeline(3, one, one).write(tmp_path)
    assert timeline.Timeline.read(tmp_path) is None
    timeline.Timeline(3, two, one).write(tmp_path)
    assert timeline.Timeline.read(tmp_path) is not None


def test_on_a_gpu_the_timeline_of_both_sides_is_written(pool, cuda, tmp_path, monkeypatch):
    spans = [span("add_kernel", 7, float(n), n + 0.5) for n in range(6)]
    table = SimpleNamespace(table=lambda **options: "torch's table")
    for one in spans:
        one.time_range.elapsed_us = lambda: 0.5
    recording = SimpleNamespace(
        events=lambda: spans,
        key_averages=lambda: table,
        export_chrome_trace=lambda path: Path(path).write_text("{}"),
    )
    monkeypatch.setattr(torch_profiler, "_profile", lambda pool, side, role: recording)
    sides = {"baseline": pool.pair.baseline, "optimized": pool.pair.baseline}
    result = torch_profiler.profile_sides(pool, sides, tmp_path, lambda text: None)
    assert result.files["both"] == ["differences.txt", "timeline.json"]
    assert timeline.Timeline.read(tmp_path).optimized.count == 6


@pytest.mark.slow
def test_the_code_that_inductor_generated_is_kept_for_a_compiled_side(page, pytester):
    compiled = "def doubled(x):\n    return torch.compile(lambda x: 2 * x, dynamic=False)(x)"
    page(defs=compiled)
    pytester.runpytest_subprocess(*CHECK, "--aisp-artifacts=out", "-k", "doubled")
    [row] = rows_of(pytester.path / "out")
    kept = {role: [n for n in row["profile"]["files"][role] if ".inductor." in n] for role in ROLES}
    assert kept == {"baseline": [], "optimized": ["optimized.inductor.py"]}
    name = f"{row['profile']['folder']}/optimized.inductor.py"
    code = (pytester.path / "out" / name).read_text()
    assert code.startswith("# Graph 1 of 1, generated by Inductor.\n\n")
    assert "2.0" in code
    assert name in (pytester.path / "out" / "report.html").read_text()


def test_only_graphs_that_are_new_and_whose_file_exists_are_kept(tmp_path, monkeypatch):
    def module(name, **has):
        return SimpleNamespace(__file__=str(tmp_path / name), **has)

    old, new, gone = (module(f"{name}.py", call=len) for name in ("old", "new", "gone"))
    for name in ("old", "new", "kernel"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    cache = SimpleNamespace(modules=[old, module("kernel.py"), new, gone, new])
    codecache = SimpleNamespace(PyCodeCache=cache)
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", codecache)
    code = torch_profiler.inductor_code([old])
    assert code == "# Graph 1 of 1, generated by Inductor.\n\nnew = 1\n"
    monkeypatch.delitem(sys.modules, "torch._inductor.codecache")
    assert torch_profiler.inductor_code([]) == ""


def judged_case(**changes):
    """Return a case as `sandbox_and_profile` sees it."""
    settings = SimpleNamespace(profile="torch", profiles=Path("out"))
    base = {
        "run": SimpleNamespace(
            settings=settings,
            progress=lambda text: None,
            check_time=lambda: None,
            environment=lambda device, ranks: ENVIRONMENT,
        ),
        "placement": SimpleNamespace(kind="time", device="cuda"),
        "ranks": 1,
        "timeout": 60.0,
        "case": SimpleNamespace(id="a-n1", pair=SimpleNamespace(baseline=len)),
        "location": SimpleNamespace(chapter="ch99", page=Path("/x/p_test.py"), function="test_it"),
    }
    seen = SimpleNamespace(**{**base, **changes})
    results = {"timing": object(), "verdict": "pass", "metrics": {}}
    lists = {"remarks": [], "notes": [], "profile": {}}
    return SimpleNamespace(client=seen, run=seen.run, **results, **lists)


ONE_BY_ONE = SimpleNamespace(environment={})


@pytest.mark.parametrize(
    ("tool", "changes", "words"),
    [
        ("nsys", {"ranks": 2}, "its sides run on 2 ranks, but nsys profiles only one"),
        (
            "nsys",
            {"placement": SimpleNamespace(kind="check", device="cpu")},
            "it runs on the CPU, ",
        ),
        (
            "torch",
            {"placement": SimpleNamespace(kind="compile", device="compiler")},
            "its kernels are only compiled here, so nothing runs",
        ),
        (
            "torch",
            {"case": SimpleNamespace(id="a", pair=SimpleNamespace(baseline=ONE_BY_ONE))},
            "each of its samples is a separate process",
        ),
    ],
)
def test_a_case_that_cannot_be_profiled_says_why(tool, changes, words):
    case = judged_case(**changes)
    case.run.settings.profile = tool
    sandbox_and_profile.profile(case)
    [remark] = case.remarks
    assert remark.startswith(f"not profiled ({tool}): {words}")
    assert case.profile == {}


def test_a_fresh_worker_profiles_the_case_and_is_closed():
    calls = []

    def ask(task, seconds, progress):
        calls.append(task)
        return Reply(result={"files": {}, "words": "none"})

    worker = SimpleNamespace(ask=ask, close=lambda: calls.append("closed"))
    case = judged_case(
        task=lambda kind, **changes: (kind, changes["seed"], changes["at"]),
        fresh_worker=lambda: worker,
    )
    sandbox_and_profile.profile(case)
    assert calls == [(ProfileTask, sandbox_and_profile.SEED, "case"), "closed"]
    assert case.notes[1] == "profile: none"


def test_nothing_is_profiled_after_the_suite_timeout():
    def over():
        raise Interrupted("aisp_suite_timeout: 5 s are over")

    case = judged_case()
    case.run.check_time = over
    sandbox_and_profile.profile(case)
    assert case.remarks == ["not profiled (torch): aisp_suite_timeout: 5 s are over"]


def test_each_side_of_a_gpu_case_runs_under_the_profiler(tools, task, tmp_path):
    tools(WORKING)
    case = judged_case(task=lambda kind, at, seed, side: task(side))
    case.run.settings.profile, case.run.settings.profiles = "ncu", tmp_path / "profile"
    sandbox_and_profile.profile(case)
    assert case.remarks == []
    folder = tmp_path / "profile" / "ch99.p_test.test_it.a-n1"
    none = [f"profile: counters of {role}: none in the report of ncu" for role in ROLES]
    assert case.notes == [f"profile (ncu): {folder}", *none]
    files = case.profile.files
    assert set(files) == {"baseline", "optimized"}
    assert all((folder / name).exists() for names in files.values() for name in names)


REPLAYING = WORKING.replace('"$@" ||', '"$@" && "$@" ||')
"""Like ncu with application replay: the program runs once for each of two passes."""


@pytest.fixture
def ranks_task(tools, page, pytester):
    """Return the task of a side that runs on two ranks, under a profiler that replays it."""

    def of(does):
        tools(REPLAYING)
        page()  # its folder and the configuration
        path = write_ranks(pytester.path, "summing", does)
        where = {"page": str(path), "root": str(pytester.path), "module": "ch99.summing_test"}
        case = {"function": "test_summing", "variant": "other", "size": {"n": 1001}}
        return ProfileTask(side="optimized", seed=1, **where, **case)

    return of


@pytest.mark.slow
def test_ncu_profiles_rank_0_and_each_pass_has_new_ranks(ranks_task, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    name = f"f'{pids}/{{dist.get_rank()}}-{{os.getpid()}}'"
    files = profile_side("ncu", ranks_task(f"open({name}, 'w')"), tmp_path, ENVIRONMENT, 60.0, 2)
    names = ["optimized.ncu-rep", "optimized.ncu.sh", "optimized.ncu.txt", "optimized.task.json"]
    assert files == names
    assert sorted(file.name[0] for file in pids.iterdir()) == ["0", "0", "1", "1"]
    log = (tmp_path / "optimized.ncu.txt").read_text().splitlines()
    wanted = {"--replay-mode=application", "--target-processes=all", "--set=basic"}
    assert {f"option {option}" for option in wanted} <= set(log)
    assert "option --set=full" not in log


def test_a_rank_that_fails_beside_ncu_is_named(ranks_task, tmp_path):
    task = ranks_task("if dist.get_rank() == 1: raise ValueError('not me')")
    with pytest.raises(NsightError, match=r"ncu ended with exit code 1\n(.*\n)*rank 1: .*not me"):
        profile_side("ncu", task, tmp_path, ENVIRONMENT, 60.0, 2)


def test_a_case_on_several_ranks_runs_under_ncu_with_its_variables(monkeypatch, tmp_path):
    pair = SimpleNamespace(baseline=len, environment={"NCCL_ALGO": "Ring"})
    case = judged_case(
        ranks=2,
        case=SimpleNamespace(id="a-n1", pair=pair),
        task=lambda kind, at, seed, side: side,
    )
    case.run.settings.profile, case.run.settings.profiles = "ncu", tmp_path
    asked = []
    monkeypatch.setattr(nvidia_tools, "profile_side", lambda *given: asked.append(given) or [])
    sandbox_and_profile.profile(case)
    assert case.remarks == []
    environment = {**ENVIRONMENT, "NCCL_ALGO": "Ring"}
    assert [given[1] for given in asked] == list(ROLES)
    assert [given[3:] for given in asked] == [(environment, 60.0, 2)] * 2


def test_notes_list_the_allocated_memory():
    held = {"allocated": 1 << 20, "reserved": 2 << 20, "difference": 1 << 20}
    found = Profile(memory={"baseline": {"before": held, "after": held}})
    one = "allocated 1 MiB, reserved 2 MiB, difference 1 MiB"
    notes = [f"profile: memory of baseline: before {one}; after {one}"]
    assert sandbox_and_profile.profile_notes(found) == notes


def test_two_cases_never_share_a_folder():
    ids = ["a-n1", "a-s x", "a-s_x", "b" * 200, "b" * 201]
    cases = [judged_case(case=SimpleNamespace(id=name)).client for name in ids]
    names = [sandbox_and_profile.folder_of(case).name for case in cases]
    assert len(set(names)) == len(ids)
    assert max(map(len, names)) < 255
    assert names[0] == "ch99.p_test.test_it.a-n1"


def test_the_table_is_sorted_by_time():
    seen = usage_per_call([("a", 1e-6), ("b", 6e-6), ("a", 1e-6)], 2)
    assert seen == {"b": Usage(0.5, 3e-6), "a": Usage(1.0, 1e-6)}
    assert table_lines("kernels", seen) == [
        "  a call   time a call   share  kernels",
        "     0.5          3 us   75.0%  b",
        "       1          1 us   25.0%  a",
    ]
    assert table_lines("kernels", {}) == ["  a call   time a call   share  kernels"]


def test_differences_list_new_gone_and_other_counts():
    one, two = Usage(1.0, 1e-6), Usage(2.0, 1e-6)
    found = Differences.between("kernels", {"a": one, "b": one, "c": one}, {"b": two, "c": one})
    assert found.summary() == "gone: a (1); other counts: b (1 -> 2)"
    assert found.lines() == [
        "kernels a call: baseline -> optimized",
        "gone   1 -> 0  a",
        "count  1 -> 2  b",
    ]
    same = Differences.between("operators", {"a": one}, {"a": one})
    assert same.summary() == "both sides run the same operators equally often"
    assert same.lines()[-1] == same.summary()
    many = Differences.between("kernels", {}, {f"{n}" + "k" * 99: one for n in range(6)})
    assert many.summary().endswith("kkk (1), 2 more")
    assert len(many.summary()) < 400


def test_rank_0_writes_the_profile_of_several_ranks(page, pytester):
    page()  # its folder and the configuration
    write_ranks(pytester.path, "doubling")
    result = pytester.runpytest_subprocess(*CHECK, "--aisp-artifacts=out")
    assert result.ret == 0
    [row] = rows_of(pytester.path / "out")
    assert row["remarks"] == []
    trace = pytester.path / "out" / row["profile"]["folder"] / "baseline.trace.json"
    profile = json.loads(trace.read_text())
    assert profile["distributedInfo"]["rank"] == 0
    assert any("allreduce" in str(event.get("name")) for event in profile["traceEvents"])
