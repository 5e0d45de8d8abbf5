"""Cases that span several nodes of a fleet: where they run, and how they fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_cluster import CONFTEST, NEEDS_RAY, RayCluster, processes_of
from fleet_scheduler_test import Cluster, works
from ranks_test import LAST, write
from worker_processes import wait_for

from pytest_aisp.fleet.scheduler import Scheduler
from pytest_aisp.fleet.scheduler_types import Node, Work
from pytest_aisp.results import run_reader
from pytest_aisp.results.models import base_of, joined


def node(name, gpus=8, versions="1"):
    return Node(name, name, "a", gpus, versions)


def wide(count, gpus=16):
    return [Work(f"wide{i}", "a", gpus) for i in range(count)]


# Where such cases run, on a simulated cluster


def test_a_case_wider_than_any_node_spans_as_few_as_possible():
    nodes = [node(f"n{i}") for i in range(5)]
    done = Cluster([*works(6), *wide(4)], nodes, span=True).run()
    assert sorted(done.done) == sorted(work.key for work in [*works(6), *wide(4)])
    spans = [where for key, where, _ in done.log if key.startswith("wide")]
    assert {len(where.split("+")) for where in spans} == {2}
    assert set(done.proved) == set(done.done)
    assert done.notes == []


def test_a_case_that_fits_on_a_node_never_spans_several():
    done = Cluster(wide(4, gpus=8), [node("n1"), node("n2")], span=True).run()
    assert {where for _, where, _ in done.log} == {"n1", "n2"}


def test_all_seats_have_their_nodes_in_one_order():
    """The leases of a case are taken in this order, so that cases do not wait in a ring."""
    nodes = [node(name) for name in ("n3", "n1", "n2")]
    done = Cluster(wide(3, gpus=24), nodes, span=True).run()
    assert {where for _, where, _ in done.log} == {"n1+n2+n3"}


@pytest.mark.parametrize(
    ("nodes", "listed"),
    [
        ([node("n1"), node("n2", 4)], "n1 x 8, n2 x 4"),
        ([node("n1"), node("n2", versions="2")], "n1 x 8, n2 x 8"),
    ],
    ids=["too few", "other versions"],
)
def test_a_fleet_with_too_few_gpus_only_checks_the_case_and_says_so(nodes, listed):
    done = Cluster(wide(2), nodes, span=True).run()
    assert {where for _, where, _ in done.log} <= {"n1", "n2"}
    assert done.notes == [
        "cases on 16 GPUs are only checked: no nodes of a with the same versions can give 16 GPUs"
        f" in equal shares ({listed})"
    ]


def test_the_largest_set_of_nodes_with_the_same_versions_is_used():
    nodes = [node("n1", versions="2"), *(node(f"m{i}", versions="1") for i in range(2))]
    done = Cluster(wide(2), nodes, span=True).run()
    assert {where for _, where, _ in done.log} == {"m0+m1"}


def test_a_lost_partner_is_a_lost_seat():
    fleet = Cluster(wide(3), [node("n1"), node("n2"), node("n3")], span=True)
    fleet.at(17, fleet.lose, "n2")
    done = fleet.run()
    assert sorted(done.done) == ["wide0", "wide1", "wide2"]
    assert [where for key, where, _ in done.log if key == "wide1"] == ["n1+n2", "n1+n3"]
    assert done.notes == ["n2 gets no more work: Ray lost it"]
    assert set(done.proved) == {"wide0", "wide1", "wide2"}


def test_a_partner_that_hangs_is_avoided():
    fleet = Cluster(wide(3), [node("n1"), node("n2"), node("n3")], span=True)
    fleet.at(17, fleet.hung.add, "n2")
    for second in range(200):
        fleet.at(second, fleet._idle)
    done = fleet.run()
    assert sorted(done.done) == ["wide0", "wide1", "wide2"]
    assert "n2 lost a worker: it was silent for 30 s" in done.notes
    assert "n2 gets no more work: it does not answer" in done.notes


def test_a_case_whose_partner_is_lost_runs_there_again_if_there_is_no_other_node():
    fleet = Cluster(wide(1), [node("n1"), node("n2")], span=True)
    fleet.at(8, lambda: fleet.plan.lost(next(iter(fleet.plan.seats)), "killed", 1))
    done = fleet.run()
    assert [where for _, where, _ in done.log] == ["n1+n2"] * 2
    assert done.notes == ["n2 lost a worker: killed"]


def test_a_lost_wide_case_runs_again_on_its_node_if_no_other_is_wide_enough():
    fleet = Cluster(works(1, gpus=4), [node("n1", 4), node("n2", 2)])
    fleet.at(8, lambda: fleet.plan.lost(next(iter(fleet.plan.seats)), "killed"))
    assert [where for _, where, _ in fleet.run().log] == ["n1", "n1"]


def test_a_second_run_of_a_recording_is_on_other_nodes():
    fleet = Cluster(wide(1), [node(f"n{i}") for i in range(4)], span=True)
    end = fleet._end

    def recorded(seat, work):
        if not work.again:
            fleet.plan.again(work, fleet.plan.seats[seat])
        end(seat, work)

    fleet._end = recorded
    assert [where for _, where, _ in fleet.run().log] == ["n0+n1", "n2+n3"]


def test_nodes_that_cannot_reach_each_other_share_no_case_but_run_others():
    fleet = Cluster([*works(4), *wide(2)], [node(f"n{i}") for i in range(4)], span=True)
    fleet._ready = closed_between(fleet, "n0", fleet._ready)
    done = fleet.run()
    assert sorted(done.done) == sorted(work.key for work in [*works(4), *wide(2)])
    assert {where for key, where, _ in done.log if key.startswith("wide")} == {"n2+n3"}
    assert done.notes == [
        "once more: n0 cannot reach n1",
        "n0 and n1 share no case with other nodes: n0 cannot reach n1",
    ]
    assert {"n0", "n1"} & {where for _, where, _ in done.log}


def test_a_node_that_dies_before_the_connection_is_tried_leaves_its_partner_able_to_share():
    fleet = Cluster(wide(1), [node(f"n{i}") for i in range(3)], span=True)
    ready = fleet._ready

    def begin(seat):
        live = fleet.plan.seats.get(seat)
        if live is not None and live.nodes[1].name == "n1":
            fleet.plan.unreachable(seat, "n0 cannot reach n1 at 10.0.0.1: refused")
            fleet.at(fleet.now + 2, fleet.lose, "n1")
        else:
            ready(seat)

    fleet._ready = begin
    assert [where for _, where, _ in fleet.run().log] == ["n0+n2"]


def test_shares_are_equal_or_the_case_is_only_checked():
    nodes = [node(f"n{i}", 6) for i in range(3)]
    assert [where for _, where, _ in Cluster(wide(1), nodes, span=True).run().log] == ["n0"]


def test_without_the_option_no_case_spans_nodes():
    done = Cluster(wide(1), [node("n1"), node("n2")]).run()
    assert [where for _, where, _ in done.log] == ["n1"]


@pytest.mark.parametrize(
    ("nodes", "has"),
    [
        ([node(f"n{i}") for i in range(4)], True),
        ([node(f"n{i}") for i in range(3)], False),
        ([*(node(f"n{i}") for i in range(3)), node("n3", versions="2")], False),
        ([*(node(f"n{i}") for i in range(3)), node("n3", 4)], False),
    ],
    ids=["others", "too few", "other versions", "too narrow"],
)
def test_a_recording_runs_again_only_if_other_nodes_can_hold_the_case(nodes, has):
    plan = Scheduler(wide(1), 1.0, span=True)
    for each in nodes:
        plan.node_joined(each)
    plan.plan(0.0)
    [seat] = plan.seats.values()
    assert plan.has_others(seat) == has


def closed_between(fleet, name, ready):
    def begin(seat):
        nodes = fleet.plan.seats[seat].nodes
        if len(nodes) > 1 and any(each.name == name for each in nodes):
            fleet.plan.unreachable(seat, f"{name} cannot reach {nodes[1].name}")
        else:
            ready(seat)

    return begin


@pytest.mark.parametrize(
    ("count", "nodes", "name"),
    [(1, 1, "nvidia-h200"), (2, 1, "nvidia-h200-x2"), (16, 2, "nvidia-h200-2x8")],
)
def test_a_product_of_several_machines_has_a_name_of_its_own(count, nodes, name):
    assert joined("nvidia-h200", count, nodes) == name
    assert base_of(name) == "nvidia-h200"
    assert base_of("cpu-amd-9x4-2c") == "cpu-amd-9x4-2c"


# Ranks of Gloo on the CPUs of nodes of a Ray cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    started = RayCluster(folder)
    started.folder = folder
    yield started
    started.close()


@pytest.fixture
def add(cluster):
    """Add nodes with one simulated GPU each, and kill them after the test."""
    added = []

    def start(*names):
        for name in names:
            (cluster.folder / f"leases-{name}").mkdir()
            cluster.add(name, f"simulated-{name[0]}", gpus=1)
            added.append(name)

    yield start
    for name in added:
        cluster.kill(name)
    wait_for(lambda: not processes_of(cluster.folder))


@pytest.fixture
def run(pytester, page, cluster):
    """Start a fleet run of pages in ch99, on the nodes of a product."""
    page().unlink()
    started = []

    def start(product, *args):
        command = [sys.executable, "-m", "pytest", f"--aisp-fleet={cluster.address}"]
        command += [f"--aisp-fleet-products=simulated-{product}", "-v", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=pytester.path, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


SPAN = "--aisp-fleet-span-nodes"
SUITES = Path(__file__).parents[1] / "suites"
BETWEEN_MACHINES = ("all_gather", "bucketed", "compressed", "overlapped", "pipeline")
BETWEEN_MACHINES += ("sharded_optimizer", "tensor_parallel")
"""Pages of chapter 4 that use only messages, not the memory of one machine."""


def tells(folder):
    """Return a statement by which a rank tells its node, in a file `NODE-RANK`."""
    return f"open(f'{folder}/{{os.environ[\"BOARD\"]}}-{{dist.get_rank()}}', 'w').close()"


def told(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.slow
@NEEDS_RAY
def test_a_case_runs_on_ranks_of_two_nodes(add, run, pytester, tmp_path):
    add("s1", "s2")
    folders = {name: tmp_path / name for name in ("right", "wrong", "four", "cpu")}
    for name, folder in folders.items():
        folder.mkdir()
        wrong = f"\n    {LAST}return summed(x) + 1" if name == "wrong" else ""
        does = tells(folder) + wrong
        path = write(pytester.path, name, does, 4 if name == "four" else 2)
        if name == "cpu":
            path.write_text(path.read_text().replace(" sizes=", " sizes=[], cpu_sizes="))
    output, _ = run("s", SPAN, "--aisp-check").communicate(timeout=300)
    lines = pytest.LineMatcher(output.splitlines())
    lines.fnmatch_lines_random(
        [
            "fleet: cases on 4 GPUs are only checked: no nodes of simulated-s with the same"
            " versions can give 4 GPUs in equal shares (s? x 1, s? x 1)",
            "*CHECKED at n=33*ch99/right_test.py*",
            "E *rank 1: other is wrong at n=33*",
            "=* 1 failed, 3 checked in *",
        ]
    )
    assert told(folders["right"]) == told(folders["wrong"])
    assert told(folders["right"]) in (["s1-0", "s2-1"], ["s1-1", "s2-0"])
    for name, ranks in {"four": 4, "cpu": 2}.items():  # a size for CPUs needs no GPUs
        assert {name[:2] for name in told(folders[name])} in ({"s1"}, {"s2"})
        assert len(told(folders[name])) == ranks


@pytest.mark.slow
@NEEDS_RAY
def test_pages_of_chapter_4_are_right_on_two_nodes(add, run, pytester):
    add("k1", "k2")
    shutil.copytree(SUITES / "ch04", pytester.path / "ch04")
    options = SPAN, "--aisp-check", "--aisp-artifacts=kept", "-m", "aisp_gpus(n=2)"
    pages = [f"ch04/{name}_test.py" for name in BETWEEN_MACHINES]
    output, _ = run("k", *options, *pages).communicate(timeout=300)
    rows = list(run_reader.load(pytester.path / "kept").rows())
    assert {row.verdict for row in rows} == {"checked"}, output
    assert all(row.product.endswith("-2x1") for row in rows), output
    assert {row.nodeid.partition("::")[0] for row in rows} == set(pages), output


@pytest.mark.slow
@NEEDS_RAY
def test_without_the_option_one_node_checks_the_case(add, run, pytester, tmp_path):
    add("w1", "w2")
    write(pytester.path, "alone", tells(tmp_path))
    output, _ = run("w").communicate(timeout=300)
    assert "= 1 checked in " in output
    assert "fleet: " not in output
    assert {name[:2] for name in told(tmp_path) if "-" in name} in ({"w1"}, {"w2"})


@pytest.mark.slow
@NEEDS_RAY
def test_results_on_several_nodes_are_of_a_product_of_their_own(add, run, pytester):
    add("p1", "p2")
    pytester.makeconftest(CONFTEST)
    write(pytester.path, "timed")
    output, _ = run("p", SPAN, "--aisp-artifacts=kept").communicate(timeout=300)
    [line] = (pytester.path / "kept/results.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["product"] == "simulated-p-2x1", output
    assert Path(row["file"]).parent.name == "simulated-p-2x1"
    assert "NO CANARY" not in output


@pytest.mark.slow
@NEEDS_RAY
def test_a_case_whose_second_node_dies_runs_again_on_others(add, run, cluster, pytester, tmp_path):
    add("d1", "d2", "d3")
    again = tmp_path / "again"
    wait = f"os.path.exists({str(again)!r}) or time.sleep(1000)"
    write(pytester.path, "dies", f"{tells(tmp_path)}; {wait}")
    process = run("d", SPAN)
    wait_for(lambda: any(name.endswith("-1") for name in told(tmp_path)))
    [victim] = [name.partition("-")[0] for name in told(tmp_path) if name.endswith("-1")]
    again.touch()
    cluster.kill(victim)
    output, _ = process.communicate(timeout=300)
    assert f"fleet: {victim} " in output
    assert "= 1 checked in " in output, output
    ran = {name.partition("-")[0] for name in told(tmp_path) if "-" in name}
    assert ran == {"d1", "d2", "d3"}


@pytest.mark.slow
@NEEDS_RAY
def test_closed_ports_between_nodes_are_named_and_the_case_is_checked_on_one(
    add, run, pytester, tmp_path
):
    add("c1", "c2")
    write(pytester.path, "closed", tells(tmp_path))
    pytester.makeconftest(
        "import socket\n\n\ndef closed(*args, **options):\n"
        "    raise TimeoutError('timed out')\n\n\nsocket.create_connection = closed\n"
    )
    output, _ = run("c", SPAN).communicate(timeout=300)
    lines = pytest.LineMatcher(output.splitlines())
    lines.fnmatch_lines(
        [
            "fleet: c? and c? share no case with other nodes: c? cannot reach c? at *: timed out",
            "fleet: Open the ports between both, or start Ray with --node-ip-address=ADDRESS of *",
            "fleet: cases on 2 GPUs are only checked: *(c? x 1, c? x 1)",
            "=* 1 checked in *",
        ]
    )
    assert {name[:2] for name in told(tmp_path) if "-" in name} in ({"c1"}, {"c2"})


@NEEDS_RAY
def test_fresh_caches_on_several_nodes_are_refused(run, pytester):
    write(pytester.path, "cold")
    output, _ = run("x", SPAN, "--aisp-cold-start").communicate(timeout=60)
    assert "ERROR: --aisp-fleet-span-nodes cannot be combined with --aisp-cold-start: " in output
