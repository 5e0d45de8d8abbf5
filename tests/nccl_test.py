"""`aisp nccl`: two Gloo ranks for real, GPUs and symmetric memory only told of."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peaks_test import H200

from pytest_aisp.checking.numerics import Wrong
from pytest_aisp.cli import app
from pytest_aisp.distributed import nccl, plot
from pytest_aisp.distributed.nccl import Sweep
from pytest_aisp.results.messages import CollectivesTask, Reply
from pytest_aisp.session.context import Failed, RunContext
from pytest_aisp.session.judge import Judge
from pytest_aisp.timing import collectives, peaks, windows
from pytest_aisp.timing.collectives import OPS, bandwidths, bus_factor
from pytest_aisp.util import locks, process_group
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
    """One sweep of every collective on two ranks on this CPU: the command's output and its plot."""
    folder = tmp_path_factory.mktemp("nccl")
    with pytest.MonkeyPatch.context() as patch, (folder / "out").open("w+") as out:
        machine_is(patch, NO_GPU)
        patch.setattr("sys.stdout", out)
        code = app.main(["nccl", "--sizes=4KiB:8KiB", f"--plot={folder / 'plot.svg'}"])
        out.seek(0)
        lines = out.read().splitlines()
    return SimpleNamespace(code=code, lines=lines, plot=folder / "plot.svg")


def test_two_gloo_ranks_answer_and_are_said_to_measure_no_links(on_gloo):
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
def test_bus_bandwidth_is_that_of_nccl_tests(op, ranks, factor):
    assert bus_factor(op, ranks) == factor
    algbw, busbw = bandwidths({"op": op, "size": 1 << 30, "seconds": 2e-3}, ranks)
    assert algbw == (1 << 30) / 2e-3
    assert busbw == pytest.approx(algbw * factor)


class Third(process_group.SingleProcess):
    """Rank 1 of three, whose others are only told of."""

    rank, world = 1, 3


@pytest.fixture
def third(monkeypatch):
    """Be rank 1 of three, whose others have done their part; `at` is an element to get wrong."""
    monkeypatch.setattr(process_group, "_here", Third())
    wrong = SimpleNamespace(at=None)

    def spoil(out):
        if wrong.at is not None:
            out.view(-1)[wrong.at] += 1

    def all_reduce(x):
        assert bool((x == 2).all())
        x.fill_(1 + 2 + 3)
        spoil(x)

    def all_gather(out, part):
        assert bool((part == 2).all())
        out.view(3, -1).copy_(torch.tensor([[1.0], [2.0], [3.0]]))
        spoil(out)

    def reduce_scatter(part, whole):
        assert bool((whole == 2).all())
        part.fill_(6)
        spoil(part)

    def all_to_all(out, whole):
        assert whole.view(3, -1)[:, 0].tolist() == [3.0, 4.0, 5.0]  # rank * world + chunk
        out.view(3, -1).copy_(torch.tensor([[1.0], [4.0], [7.0]]))
        spoil(out)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return wrong


@pytest.mark.parametrize("op", OPS)
def test_each_collective_is_checked_before_it_is_timed(third, op):
    made = collectives._collective(op, 4 * KIB, "cpu")
    assert made.nbytes == 4080  # whole 16 bytes for each of three ranks
    made.check()
    third.at = 0
    value = {"all_gather": (2, 1), "all_to_all": (2, 1)}.get(op, (7, 6))
    text = f"{op} of 3.984 KiB is wrong: element 0 is {value[0]}, not {value[1]}"
    with pytest.raises(Wrong) as wrong:
        made.check()
    assert str(wrong.value) == text
    third.at = -1
    with pytest.raises(Wrong, match=r"is wrong: element [1-9]"):
        made.check()


def test_a_size_below_16_bytes_a_rank_is_that(third):
    assert collectives._collective("all_reduce", 1, "cpu").nbytes == 48


class Window:
    """A window whose calls take 100 us each."""

    def __init__(self, subject, calls):
        self.calls = calls

    def __call__(self):
        return 1e-4


def subject():
    return SimpleNamespace(name="all_reduce")


def test_on_gpus_the_graph_clock_is_taken_and_the_hosts_where_nothing_can_be_captured(monkeypatch):
    def refuse(subject, calls):
        raise windows.Uncapturable("NCCL cannot be captured")

    monkeypatch.setattr(collectives, "GraphWindow", Window)
    monkeypatch.setattr(collectives, "host_window", lambda subject, calls, device: Window(0, 0))
    assert collectives._seconds(subject(), "cuda") == ("graph", 1e-4)
    monkeypatch.setattr(collectives, "GraphWindow", refuse)
    assert collectives._seconds(subject(), "cuda") == ("host", 1e-4)


def test_where_one_rank_cannot_capture_none_does(monkeypatch):
    class Other(process_group.SingleProcess):
        def first(self, text):
            return "rank 1: refused"

    monkeypatch.setattr(process_group, "_here", Other())
    with pytest.raises(windows.Uncapturable, match="rank 1: refused"):
        windows.on_all_ranks(lambda: "a window")


class Symmetric:
    """torch's symmetric memory on a rank whose peers are only told of."""

    def __init__(self):
        self.met = []

    def empty(self, count, *, dtype, device):
        return torch.empty(count, dtype=dtype)

    def rendezvous(self, buffer, group):
        self.met.append(buffer.numel())


@pytest.fixture
def symmetric(third, monkeypatch):
    import torch.distributed._symmetric_memory as module

    stood_in = Symmetric()
    monkeypatch.setattr(module, "empty", stood_in.empty)
    monkeypatch.setattr(module, "rendezvous", stood_in.rendezvous)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    one_shot = SimpleNamespace(one_shot_all_reduce=lambda buffer, op, name: buffer * 3)
    monkeypatch.setattr(torch.ops, "symm_mem", one_shot, raising=False)
    plain = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, device=None: plain(*a))
    return stood_in


def test_one_shot_is_as_large_as_the_all_reduce_beside_it_and_checked(symmetric):
    made = collectives._one_shot(4 * KIB, "cuda")
    assert made.nbytes == collectives._collective("all_reduce", 4 * KIB, "cpu").nbytes
    assert symmetric.met == [1020]
    made.check()  # three ranks that hold 2 each would make 6, as 1 + 2 + 3 does


def test_a_one_shot_that_sums_wrongly_is_wrong(symmetric, monkeypatch):
    wrong = SimpleNamespace(one_shot_all_reduce=lambda buffer, op, name: buffer * 2)
    monkeypatch.setattr(torch.ops, "symm_mem", wrong, raising=False)
    with pytest.raises(Wrong, match=r"one_shot of 3\.984 KiB is wrong: element 0 is 4, not 6"):
        collectives._one_shot(4 * KIB, "cuda").check()


def test_symmetric_memory_that_is_refused_is_said(symmetric, monkeypatch):
    import torch.distributed._symmetric_memory as module

    def refuse(buffer, group):
        raise RuntimeError("no peer access\nmore")

    assert collectives._one_shot_refused("cuda") is None
    monkeypatch.setattr(module, "rendezvous", refuse)
    assert collectives._one_shot_refused("cuda") == "no peer access"


def test_one_process_alone_is_told_how_to_ask():
    task = CollectivesTask(ops=("all_reduce",), sizes=(4096,))
    reply = bench.InProcess().ask(task, 60, lambda text: None)
    assert reply.error == "page"
    assert reply.message == "collectives need several ranks; this is one process\n    aisp nccl"


class Ranks:
    """Ranks that answer what they are given, and note what they are asked."""

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
    "ranks": 2,
    "backend": "cuda:nccl,cpu:gloo",
    **{"torch": "2.11.0", "nccl": "2.28.9", "device": "NVIDIA H200"},
}


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Two H200s whose ranks answer `ANSWER`."""
    machine_is(monkeypatch, TWO)
    monkeypatch.setattr(nccl, "RankSet", Ranks)
    monkeypatch.setattr(locks, "folder", lambda: tmp_path)
    monkeypatch.setattr(Ranks, "reply", Reply(result=ANSWER), raising=False)
    return Ranks


def test_the_ranks_of_two_gpus_are_asked_under_lease(ranks, tmp_path, capsys):
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
    ]


def test_without_options_gpus_get_large_sizes_and_every_collective(ranks):
    assert app.main(["nccl"]) == 0
    task = ranks.seen.task
    assert task.ops == tuple(OPS)
    assert (task.sizes[0], task.sizes[-1], len(task.sizes)) == (4 * KIB, 512 * MIB, 18)


def test_without_gpus_there_are_two_ranks_and_smaller_sizes(ranks, monkeypatch):
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
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks, capsys, argument, message):
    assert app.main(["nccl", argument]) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_machine_with_one_gpu_runs_its_ranks_on_the_cpu():
    one = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-a",))
    assert nccl.place(one, None) == ("cpu", 2)
    assert nccl.place(NO_GPU, 4) == ("cpu", 4)
    assert nccl.place(TWO, None) == ("cuda", 2)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--ops=all_reduce,scan", "unknown collective 'scan'; legal: all_reduce, all_gather, red"),
        ("--sizes=4KB", "'4KB' is no size; write it like 4KiB, 512MiB or 1GiB"),
        ("--sizes=0", "'0' is no size"),
        ("--sizes=8KiB:4KiB", "'8KiB:4KiB' ends before it begins; write the smaller size first"),
    ],
)
def test_what_is_asked_wrongly_is_refused(capsys, argument, message):
    assert app.main(["nccl", argument]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_that_fails_is_named_and_the_exit_code_is_1(ranks, monkeypatch, capsys):
    message = "rank 1 ended by SIGSEGV during: all_reduce of 4 KiB"
    reply = Reply(error="died", message=message, trace="NCCL WARN\n")
    monkeypatch.setattr(Ranks, "reply", reply)
    assert app.main(["nccl"]) == 1
    assert capsys.readouterr().err == f"NCCL WARN\n{message}\n"
    assert ranks.seen.closed


def test_ranks_that_fall_silent_are_given_an_option_of_this_command(ranks, monkeypatch, capsys):
    message = "no answer within 9 s during: rank 1: x\ngive it longer with --aisp-timeout-mult"
    monkeypatch.setattr(Ranks, "reply", Reply(error="timeout", message=message))
    assert app.main(["nccl", "--timeout=9"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "no answer within 9 s during: rank 1: x",
        "Give it longer with --timeout=18",
    ]


def test_the_largest_all_reduce_and_the_smallest_are_stored(ranks, tmp_path, capsys):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    path.parent.mkdir()
    peaks.save(path, peaks.Peaks("nvidia-h200-x2", {"peer": 3.9e11}, {"peer": "GPU 0"}))
    assert app.main(["nccl", "--store", f"--baselines={tmp_path}"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"stored in {path}: busbw 268.4 GB/s",
        f"stored in {path}: all_reduce 10 us",
    ]
    stored = peaks.load(path)
    assert stored.rates == {"peer": 3.9e11, "busbw": 2.684e11, "all_reduce": 1e-5}
    assert stored.facts["peer"] == "GPU 0"
    assert stored.facts["busbw"].startswith("512 MiB, 2 ranks, NVIDIA H200, nccl 2.28.9, torch")


def test_small_all_reduces_are_no_peak(ranks, monkeypatch, tmp_path, capsys):
    for rows in (ROWS[:1], ROWS[2:3]):
        monkeypatch.setattr(Ranks, "reply", Reply(result={**ANSWER, "rows": rows}))
        assert app.main(["nccl", "--store", f"--baselines={tmp_path}"]) == 2
        said = capsys.readouterr()
        assert said.out.startswith("2 ranks")  # what was measured is shown all the same
        assert said.err.splitlines() == [
            "nothing is stored: the peak needs an all-reduce of 64 MiB or more",
            "    aisp nccl --ops=all_reduce --sizes=4KiB:512MiB --store",
        ]


def test_what_a_cpu_did_is_not_stored():
    with pytest.raises(CliError, match=r"^nothing is stored: Gloo on a CPU"):
        nccl.rates(Sweep(2, "cpu", ROWS, {}, []))


def test_under_ci_nothing_is_stored(ranks, monkeypatch, capsys):
    monkeypatch.setenv("CI", "1")
    assert app.main(["nccl", "--store"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--store is refused where CI is set: a gate must not move its own limits",
        "Store on the machine by hand and commit the file",
    ]


def test_a_plot_that_cannot_be_written_says_so_and_the_table_is_shown(ranks, tmp_path, capsys):
    plot = tmp_path / "no folder" / "plot.svg"
    assert app.main(["nccl", f"--plot={plot}"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"--plot={plot}: cannot be written: ")
    assert "all_reduce  512 MiB" in said.out


def test_a_single_size_can_be_drawn():
    drawn = plot.draw([{"op": "one_shot", "size": 4096, "busbw": 1e9}], "a title")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_curves_that_end_together_have_names_apart():
    rows = [{"op": op, "size": size, "busbw": 1e9} for op in OPS for size in (1, 2)]
    texts = ElementTree.fromstring(plot.draw(rows, "")).iter("{http://www.w3.org/2000/svg}text")
    heights = sorted(float(t.attrib["y"]) for t in texts if t.text in OPS)
    assert all(b - a >= plot.STEP - 0.1 for a, b in itertools.pairwise(heights))


def test_pages_on_several_gpus_are_held_against_their_links():
    links = peaks.Peaks("nvidia-h200-x2", {"peer": 3.9e11, "busbw": 4.5e11, "all_reduce": 1e-5})
    both = peaks.joined(H200, links)
    assert both.rates == {**H200.rates, "peer": 3.9e11, "busbw": 4.5e11}
    assert (peaks.joined(H200, None), peaks.joined(None, links)) == (H200, links)


@pytest.fixture
def page_on_links(tmp_path):
    """Judge a page bound by NVLink on two GPUs: `page_on_links(seconds)` returns its row."""
    settings = SimpleNamespace(root=tmp_path, baselines=tmp_path, aa=False, update=None)
    peaks.save(tmp_path / "nvidia-h200" / "peaks.json", H200)

    def judge(seconds, gpus=2):
        case = SimpleNamespace(gpus=gpus, pair=SimpleNamespace(l2="cold"))
        row = SimpleNamespace(bound="nvlink", clock="graph", share=None, limit="", verdict="")
        row.origins, row.pair_seconds = {}, lambda: (2 * seconds, seconds)
        client = SimpleNamespace(machine=TWO, case=case, row=row, run=RunContext(settings, TWO))
        Judge(client).limit({"work": {"wire": 3.9e8, "read": 1e6}})
        return row

    return judge


def test_a_page_on_two_gpus_has_a_share_of_what_their_links_reach(page_on_links, tmp_path):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    assert page_on_links(2e-3).limit == ""  # nobody has measured the links
    peaks.save(path, peaks.Peaks("nvidia-h200-x2", {"peer": 3.9e11}))
    row = page_on_links(2e-3)
    assert (row.limit, row.share) == ("peer", pytest.approx(0.5))
    assert page_on_links(0.5e-3).verdict == ""  # twice a copy's speed is no accusation
    assert page_on_links(2e-3, gpus=1).limit == ""
    path.write_text("mine")
    with pytest.raises(Failed, match="is no peaks file"):
        page_on_links(2e-3)
