"""`aisp links nccl` on two real Gloo ranks and on simulated GPUs."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from peaks_test import H200

from pytest_aisp.cli import app
from pytest_aisp.distributed import nccl, plot
from pytest_aisp.distributed.nccl import Sweep
from pytest_aisp.results.messages import CollectivesTask, Reply
from pytest_aisp.results.task_results import TimeResult
from pytest_aisp.results.verdict import Reading
from pytest_aisp.session.measurement import Timing, with_limit
from pytest_aisp.session.run_context import Failed, RunContext
from pytest_aisp.session.stored_result import StoredResult
from pytest_aisp.timing import peaks
from pytest_aisp.timing.collectives import OPS
from pytest_aisp.util import gpu_lease
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.util.device import Machine
from pytest_aisp.worker import server as bench

KIB, MIB = 1 << 10, 1 << 20
NO_GPU = Machine("cpu", "cpu-x-2c", "x, 2 cores")
TWO = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-b", "GPU-a"), {"driver": "580"})


def machine_is(monkeypatch, machine):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory):
    """The command's output and plot for every collective on two ranks on this CPU."""
    folder = tmp_path_factory.mktemp("nccl")
    with pytest.MonkeyPatch.context() as patch, (folder / "out").open("w+") as out:
        machine_is(patch, NO_GPU)
        patch.setattr("sys.stdout", out)
        code = app.main(["nccl", "--sizes=4KiB:8KiB", f"--plot={folder / 'plot.svg'}"])
        out.seek(0)
        lines = out.read().splitlines()
    return SimpleNamespace(code=code, lines=lines, plot=folder / "plot.svg")


def test_gloo_results_carry_a_caveat(on_gloo):
    assert on_gloo.code == 0
    assert on_gloo.lines[0] == (
        f"2 ranks, Gloo on a CPU (not a measurement of links), torch {torch.__version__};"
        " slowest rank, median of 7 windows"
    )
    rows = [line.split()[:3] for line in on_gloo.lines[2:10]]
    assert rows == [[op, size, "KiB"] for op in OPS for size in "48"]
    assert all(line.endswith("  host") for line in on_gloo.lines[2:10])
    assert on_gloo.lines[10:] == [
        "one-shot all-reduce in symmetric memory is not available: rank 0: it needs GPUs",
        f"drawn in {on_gloo.plot}",
    ]


def test_the_plot_has_a_curve_for_each_collective(on_gloo):
    drawn = ElementTree.parse(on_gloo.plot).getroot()
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert set(OPS) <= set(texts)
    assert {"4 KiB", "8 KiB", "Bus bandwidth of collectives"} <= set(texts)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == len(OPS) * 2


def test_collectives_in_one_process_are_refused():
    task = CollectivesTask(ops=("all_reduce",), sizes=(4096,))
    reply = bench.InProcess().ask(task, 60, lambda text: None)
    assert reply.error == "page"
    expected = "collectives need several ranks; this is one process\n    aisp links nccl"
    assert reply.message == expected


class Ranks:
    """Fake ranks: they return `reply` and record the task."""

    reply: Reply
    seen: SimpleNamespace

    def __init__(self, count, environment):
        Ranks.seen = SimpleNamespace(count=count, environment=environment, closed=False)

    def ask(self, task, seconds, progress):
        Ranks.seen.task, Ranks.seen.seconds = task, seconds
        return Ranks.reply

    def close(self):
        Ranks.seen.closed = True


ROWS = [
    {"op": "all_reduce", "size": 4 * KIB, "seconds": 1e-5, "clock": "graph"},
    {"op": "all_reduce", "size": 512 * MIB, "seconds": 2e-3, "clock": "graph"},
    {"op": "all_gather", "size": 4 * KIB, "seconds": 1e-5, "clock": "graph"},
    {"op": "one_shot", "size": 4 * KIB, "seconds": 4e-6, "clock": "graph"},
]
ANSWER = {
    "rows": ROWS,
    "notes": [],
    "latencies": {"all_reduce": 8e-6, "barrier": 2e-6},
    "ranks": 2,
    "backend": "cuda:nccl,cpu:gloo",
    **{"torch": "2.11.0", "nccl": "2.28.9", "device": "NVIDIA H200"},
}


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Two fake H200s whose ranks return `ANSWER`."""
    machine_is(monkeypatch, TWO)
    monkeypatch.setattr(nccl, "RankSet", Ranks)
    monkeypatch.setattr(gpu_lease, "lease_folder", lambda: tmp_path)
    monkeypatch.setattr(Ranks, "reply", Reply(result=ANSWER), raising=False)
    return Ranks


def test_two_gpus_are_locked_and_measured(ranks, tmp_path, capsys):
    assert app.main(["nccl", "--ops=all_reduce", "--sizes=4KiB", "--timeout=30"]) == 0
    seen = ranks.seen
    assert (seen.count, seen.environment) == (2, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})
    assert seen.seconds == 30
    assert seen.task == CollectivesTask(device="cuda", ops=("all_reduce",), sizes=(4096,))
    assert seen.closed
    assert {p.name for p in tmp_path.glob("*.lock")} == {"host.lock", "GPU-a.lock", "GPU-b.lock"}
    assert capsys.readouterr().out.splitlines() == [
        "2 ranks, NVIDIA H200, nccl 2.28.9, torch 2.11.0; slowest rank, median of 7 windows",
        "collective  size     time   algbw        busbw        clock  one-shot  its busbw",
        "all_reduce  4 KiB    10 us  0.4096 GB/s  0.4096 GB/s  graph  4 us      1.024 GB/s",
        "all_reduce  512 MiB  2 ms   268.4 GB/s   268.4 GB/s   graph",
        "all_gather  4 KiB    10 us  0.4096 GB/s  0.2048 GB/s  graph",
        "beyond the start of a kernel: all-reduce of 4 KiB 8 us, barrier in symmetric memory 2 us",
    ]


def test_defaults_on_gpus(ranks):
    assert app.main(["nccl"]) == 0
    task = ranks.seen.task
    assert task.ops == tuple(OPS)
    assert (task.sizes[0], task.sizes[-1], len(task.sizes)) == (4 * KIB, 512 * MIB, 18)


def test_defaults_on_a_cpu(ranks, monkeypatch):
    machine_is(monkeypatch, NO_GPU)
    assert app.main(["nccl"]) == 0
    assert (ranks.seen.count, ranks.seen.environment) == (2, {"CUDA_VISIBLE_DEVICES": ""})
    assert ranks.seen.task.device == "cpu"
    assert ranks.seen.task.sizes[-1] == 4 * MIB


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--ranks=1", "--ranks=1: a collective needs 2 ranks or more"),
        ("--ranks=3", "--ranks=3: this machine has 2 GPUs\nGive --ranks=2"),
    ],
)
def test_an_impossible_number_of_ranks_is_refused(ranks, capsys, argument, message):
    assert app.main(["nccl", argument]) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_machine_with_one_gpu_runs_its_ranks_on_the_cpu():
    one = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-a",))
    assert nccl.choose_ranks(one, None) == ("cpu", 2)
    assert nccl.choose_ranks(NO_GPU, 4) == ("cpu", 4)
    assert nccl.choose_ranks(TWO, None) == ("cuda", 2)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--ops=all_reduce,scan", "unknown collective 'scan'; legal: all_reduce, all_gather, red"),
        ("--sizes=4KB", "'4KB' is not a size; write it like 4KiB, 512MiB or 1GiB"),
        ("--sizes=0", "'0' is not a size"),
        ("--sizes=8KiB:4KiB", "'8KiB:4KiB' ends before it begins; write the smaller size first"),
    ],
)
def test_invalid_options_are_refused(capsys, argument, message):
    assert app.main(["nccl", argument]) == 2
    assert message in capsys.readouterr().err


def test_a_failed_rank_is_named_with_exit_code_1(ranks, monkeypatch, capsys):
    message = "rank 1 ended by SIGSEGV during: all_reduce of 4 KiB"
    reply = Reply(error="died", message=message, trace="NCCL WARN\n")
    monkeypatch.setattr(Ranks, "reply", reply)
    assert app.main(["nccl"]) == 1
    assert capsys.readouterr().err == f"NCCL WARN\n{message}\n"
    assert ranks.seen.closed


def test_a_timeout_suggests_the_timeout_option(ranks, monkeypatch, capsys):
    message = "no answer within 9 s during: rank 1: x\ngive it longer with --aisp-timeout-mult"
    monkeypatch.setattr(Ranks, "reply", Reply(error="timeout", message=message))
    assert app.main(["nccl", "--timeout=9"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "no answer within 9 s during: rank 1: x",
        "Allow more time with --timeout=18",
    ]


def test_peaks_of_the_all_reduce_are_stored(ranks, tmp_path, capsys):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    path.parent.mkdir()
    peaks.save(path, peaks.Peaks("nvidia-h200-x2", {"peer": 3.9e11}, {"peer": "GPU 0"}))
    assert app.main(["nccl", "--store", f"--baselines={tmp_path}"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"stored in {path}: busbw 268.4 GB/s",
        f"stored in {path}: all_reduce 8 us",
        f"stored in {path}: barrier 2 us",
    ]
    stored = peaks.load(path)
    latencies = ANSWER["latencies"]
    assert stored.rates == {"peer": 3.9e11, "busbw": 2.684e11, **latencies}
    assert stored.facts["barrier"].startswith("barrier in symmetric memory, 2 ranks, NVIDIA H200")
    assert stored.facts["peer"] == "GPU 0"
    assert stored.facts["busbw"].startswith("512 MiB, 2 ranks, NVIDIA H200, nccl 2.28.9, torch")


def test_small_all_reduces_are_not_stored(ranks, monkeypatch, tmp_path, capsys):
    for rows in (ROWS[:1], ROWS[2:3]):
        monkeypatch.setattr(Ranks, "reply", Reply(result={**ANSWER, "rows": rows}))
        assert app.main(["nccl", "--store", f"--baselines={tmp_path}"]) == 2
        output = capsys.readouterr()
        assert output.out.startswith("2 ranks")  # the results are shown anyway
        assert output.err.splitlines() == [
            "nothing is stored: the peak needs an all-reduce of 64 MiB or more",
            "    aisp links nccl --ops=all_reduce --sizes=4KiB:512MiB --store",
        ]


def test_cpu_results_are_not_stored():
    with pytest.raises(CliError, match=r"^nothing is stored: Gloo on a CPU"):
        nccl.collective_peaks(Sweep(2, "cpu", ROWS, {}, [], {}))


def test_store_is_refused_under_ci(ranks, monkeypatch, capsys):
    monkeypatch.setenv("CI", "1")
    assert app.main(["nccl", "--store"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--store is refused if CI is set: a gate must not change its own limits",
        "Store on the machine by hand and commit the file",
    ]


def test_an_unwritable_plot_is_reported_below_the_table(ranks, tmp_path, capsys):
    plot = tmp_path / "no folder" / "plot.svg"
    assert app.main(["nccl", f"--plot={plot}"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"--plot={plot}: cannot be written: ")
    assert "all_reduce  512 MiB" in output.out


def test_plot_of_a_single_size():
    drawn = plot.draw([{"op": "one_shot", "size": 4096, "busbw": 1e9}], "a title")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_labels_of_equal_curves_do_not_overlap():
    rows = [{"op": op, "size": size, "busbw": 1e9} for op in OPS for size in (1, 2)]
    texts = ElementTree.fromstring(plot.draw(rows, "")).iter("{http://www.w3.org/2000/svg}text")
    heights = sorted(float(t.attrib["y"]) for t in texts if t.text in OPS)
    assert all(b - a >= plot.STEP - 0.1 for a, b in itertools.pairwise(heights))


def test_peaks_of_links_are_added_to_those_of_one_gpu():
    links = peaks.Peaks("nvidia-h200-x2", {"peer": 3.9e11, "busbw": 4.5e11, "all_reduce": 1e-5})
    joined = peaks.joined(H200, links)
    assert joined.rates == {**H200.rates, **links.rates}
    assert (peaks.joined(H200, None), peaks.joined(None, links)) == (H200, links)


@pytest.fixture
def page_on_links(tmp_path):
    """Judge a page bound by NVLink on two GPUs: `page_on_links(seconds)` returns its timing."""
    settings = SimpleNamespace(root=tmp_path, baselines=tmp_path, aa=False, update=None)
    peaks.save(tmp_path / "nvidia-h200" / "peaks.json", H200)

    def judge(seconds, gpus=2):
        case = SimpleNamespace(gpus=gpus, pair=SimpleNamespace(l2="cold", bound="nvlink"))
        run = RunContext(settings, TWO)
        client = SimpleNamespace(machine=TWO, case=case, run=run)
        timing = Timing(
            result=TimeResult(
                clock="graph",
                baseline=[],
                optimized=[],
                value=0.7,
                work={"wire": 3.9e8, "read": 1e6},
            ),
            reading=Reading(0.7),
            clock="graph",
            spread=0.0,
            seconds={"slow": 2 * seconds, "fast": seconds},
            environment={},
            sources={},
            launch_bound={},
        )
        return with_limit(client, StoredResult(run, tmp_path / "ch99.json", "key", case), timing)

    return judge


def test_a_case_on_two_gpus_has_a_share_of_the_link_peak(page_on_links, tmp_path):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    assert page_on_links(2e-3).limit == ""  # no peak is stored
    peaks.save(path, peaks.Peaks("nvidia-h200-x2", {"peer": 3.9e11}))
    row = page_on_links(2e-3)
    assert (row.limit, row.share) == ("peer", pytest.approx(0.5))
    assert page_on_links(0.5e-3).shortest is None  # above the peak is not an error
    assert page_on_links(2e-3, gpus=1).limit == ""
    path.write_text("mine")
    with pytest.raises(Failed, match="is not a peaks file"):
        page_on_links(2e-3)
