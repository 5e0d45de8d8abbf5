"""The parts of a fleet that need no Ray: nodes, trees, environments, checkpoints, commands."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import fake_results
import pytest
from fleet_cluster import NEEDS_RAY
from import_time_test import loaded

from pytest_aisp.cli import app
from pytest_aisp.fleet import PROTOCOL, bridge, nodes, probe, shipping
from pytest_aisp.fleet import setup as fleet_setup
from pytest_aisp.fleet.checkpoint import Checkpoint, CheckpointFile
from pytest_aisp.fleet.nodes import RayNode, arch_of_product, differences, refusal
from pytest_aisp.fleet.seat import Seat, node_environment, uuids_of
from pytest_aisp.fleet.start import resume_command, start_command
from pytest_aisp.results import store
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.util.plugin_digest import PACKAGE, own_digest

H200 = {"index": 0, "name": "NVIDIA H200", "capability": (9, 0), "mig": False}
FACTS = {"plugin": "1.0", "protocol": PROTOCOL, "python": "3.11.7", "pytest": "9.2.0"}
FACTS |= {"torch": "2.13.0", "triton": "3.9.0", "driver": "580.1", "nice": 0, "time": 1000.0}
FACTS |= {
    "digest": own_digest(),
    "host": "n1",
    "product": "nvidia-h200",
    "arch": "sm90",
    "gpus": [H200],
}
VERSION = version("pytest-aisp")
NODE = RayNode("id1", "n1", 1, {"product": "nvidia-h200"})


# Nodes


def test_a_node_like_this_machine_is_accepted():
    assert refusal(NODE, FACTS, now=1001.0) == ""
    assert refusal(RayNode("id1", "n1", 1, {}), FACTS, now=1000.0) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"plugin": None, "protocol": None},
            "it has no pytest-aisp for Python 3.11.7\n    pip install pytest-aisp",
        ),
        (
            {"protocol": 99, "plugin": "7.0"},
            f"its pytest-aisp 7.0 speaks protocol 99, this one {PROTOCOL}\n"
            "Install the same version on both",
        ),
        (
            {"plugin": "0.0.9", "digest": None},
            f"it has pytest-aisp 0.0.9, and this machine has {VERSION}\n"
            "Install the same on both, for example one wheel",
        ),
        (
            {"plugin": VERSION, "digest": "other"},
            f"it has pytest-aisp {VERSION}, with other code\n"
            "Install the same on both, for example one wheel",
        ),
        (
            {"product": "", "gpus": []},
            "NVML finds no GPU on it\nStart Ray there with --num-gpus=0, or repair the driver",
        ),
        (
            {"nice": 15},
            "Ray runs its workers at nice 15, and everything else would go first\n"
            "Start Ray there with: RAY_worker_niceness=0 ray start ..., or aisp fleet start",
        ),
        (
            {"gpus": [H200, {**H200, "index": 1, "mig": True}]},
            "GPU 1 is split by MIG, and slices share clocks and power\n"
            "Turn it off:\n    sudo nvidia-smi -i 1 -mig 0",
        ),
        (
            {"gpus": [H200, {**H200, "name": "NVIDIA H100"}]},
            "it has GPUs of two products: nvidia-h200 and NVIDIA H100\n"
            "Start one Ray node for each, with CUDA_VISIBLE_DEVICES",
        ),
        (
            {"product": "nvidia-b200"},
            "its label says product=nvidia-h200, but its GPU is nvidia-b200\n"
            "Start it with `aisp fleet start`, which reads the product from the driver",
        ),
        (
            {"time": 4600.0},
            "its clock is 3600 s ahead of the clock here, and sessions are told apart by time\n"
            "Set it:\n    sudo chronyc makestep",
        ),
        ({"time": 900.0}, "its clock is 100 s behind the clock here, and sessions are told*"),
        ({"product": "nvidia-h200", "gpus": []}, "AISP_FLEET_SIMULATED=nvidia-h200: begin *"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_node_is_refused_with_the_remedy(changes, why):
    said = refusal(NODE, {**FACTS, **changes}, now=1000.0)
    assert said.startswith(why.rstrip("*")) if why.endswith("*") else said == why


def test_a_node_is_named_once_even_if_two_have_one_host():
    seen = fleet_setup.Nodes()
    for name in ("id1", "id2abcdef"):
        seen.judge(("node", RayNode(name, "n1", 1, {}), FACTS, 1000.0))
    assert [node.name for node in seen.accepted] == ["n1", "n1-id2abc"]
    why = "it did not report its configuration within 60 s"
    seen.judge(("refused", RayNode("id3", "n3", 1, {}), why))
    assert seen.refused == ["n3 is refused: it did not report its configuration within 60 s"]


@pytest.mark.parametrize("name", [*nodes.VERSIONS, "driver"])
def test_nodes_with_other_versions_do_not_share_a_case(name):
    seen = fleet_setup.Nodes()
    for number, facts in enumerate((FACTS, FACTS, {**FACTS, name: "0.1"})):
        seen.judge(("node", RayNode(f"id{number}", f"n{number}", 1, {}), facts, 1000.0))
    first, same, other = (node.versions for node in seen.accepted)
    assert first == same != other


def test_versions_that_differ_are_a_line_of_the_node():
    here = {name: FACTS[name] for name in nodes.VERSIONS}
    assert differences(FACTS, here) == []
    assert differences({**FACTS, "torch": "2.11.0", "triton": None}, here) == [
        "torch 2.11.0, here 2.13.0",
        "triton missing, here 3.9.0",
    ]


def test_the_probe_tells_the_facts_of_a_machine_without_the_plugin():
    source = Path(probe.__file__).read_text() + "\nimport json; print(json.dumps(probe()))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], capture_output=True, text=True, check=True
    )
    assert '"plugin": null' in done.stdout
    assert f'"python": "{sys.version.split()[0]}"' in done.stdout


def test_the_same_code_has_one_digest_wherever_it_is_installed(tmp_path):
    other = tmp_path / "site-packages/pytest_aisp"
    shutil.copytree(PACKAGE, other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "__pycache__").mkdir()
    (other / "__pycache__/plugin.pyc").touch()
    assert own_digest(other) == own_digest()
    accepted = {**FACTS, "plugin": "1.0.dev1", "digest": own_digest(other)}  # a stale version
    assert refusal(NODE, accepted, now=1000.0) == ""
    with open(other / "timing/probes.cu", "a") as file:
        file.write("// changed\n")
    assert own_digest(other) != own_digest()


def test_the_probe_tells_that_an_older_plugin_has_no_digest(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest_aisp.util.plugin_digest", None)
    facts = probe.probe()
    assert (facts["protocol"], facts["digest"]) == (PROTOCOL, None)


def test_the_probe_tells_the_facts_of_this_machine(monkeypatch):
    monkeypatch.setenv("AISP_FLEET_SIMULATED", "simulated-a:sm100")
    facts = probe.probe()
    assert (facts["product"], facts["arch"], facts["protocol"]) == (
        "simulated-a",
        "sm100",
        PROTOCOL,
    )
    assert facts["digest"] == own_digest()
    assert abs(facts["time"] - time.time()) < 10


class TwoProducts:
    """A stand-in for NVML: an H200 and an H100, each with its index as its handle."""

    NVMLError = RuntimeError
    nvmlInit = nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetMigMode = staticmethod(lambda gpu: (gpu, gpu))
    nvmlDeviceGetName = staticmethod(["NVIDIA H200", "NVIDIA H100"].__getitem__)
    nvmlDeviceGetUUID = staticmethod(["GPU-a", "GPU-b"].__getitem__)
    nvmlDeviceGetCudaComputeCapability = staticmethod(lambda gpu: (9, 0))


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("1", [1]), ("GPU-a", [0]), ("", [])],
    ids=["all", "index", "uuid", "none"],
)
def test_the_probe_counts_the_gpus_that_ray_may_use(monkeypatch, visible, indices):
    monkeypatch.setitem(sys.modules, "pynvml", TwoProducts)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = probe.probe()
    assert [gpu["index"] for gpu in facts["gpus"]] == indices
    assert facts["uuids"] == ["GPU-a", "GPU-b"]
    expected = {0: "nvidia-h200", 1: "nvidia-h100", None: ""}
    assert facts["product"] == expected[next(iter(indices), None)]
    assert [gpu["mig"] for gpu in facts["gpus"]] == [bool(index) for index in indices]


@pytest.mark.parametrize(
    ("product", "arch"),
    [("nvidia-h200", "sm90"), ("nvidia-b300-sxm6-ac", "sm103"), ("acme-1", "")],
)
def test_the_arch_of_a_product_without_a_node_follows_from_its_name(product, arch):
    assert arch_of_product(product) == arch


# Environments and GPUs


def test_pytest_on_a_node_sees_nothing_that_ray_added():
    node = {"PATH": "/bin", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/ray"}
    node |= {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/root"}
    found = node_environment(node, {"NCCL_DEBUG": "WARN"}, ["GPU-1", "GPU-2"])
    chosen = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "NCCL_DEBUG": "WARN"}
    assert found == {"PATH": "/bin", "HOME": "/root", **chosen}


def test_no_gpu_is_visible_unless_it_was_given():
    assert "CUDA_VISIBLE_DEVICES" not in node_environment({"CUDA_VISIBLE_DEVICES": "0"}, {}, [])


def test_only_listed_variables_are_shipped_and_no_secrets():
    here = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "AWS_SECRET_ACCESS_KEY": "x"}
    here |= {"TORCH_TOKEN": "x", "NCCL_URL": "http://me:word@host", "CUDA_VISIBLE_DEVICES": "0"}
    here |= {"HF_TOKEN": "x", "LD_PRELOAD": "/here.so", "CUDA_HOME": "/here"}
    assert fleet_setup.shipped_variables(here) == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}


def test_rays_indices_become_uuids():
    uuids = ["GPU-a", "GPU-b", "GPU-c"]
    assert uuids_of([2, "0"], uuids) == ["GPU-c", "GPU-a"]
    assert uuids_of(["GPU-b"], uuids) == ["GPU-b"]
    assert uuids_of([0], []) == []  # simulated


# The tree


@pytest.fixture
def repository(pytester, git, commit):
    """A repository with an old commit, a change, a new file, and an ignored one."""
    (pytester.path / "a.txt").write_text("old")
    (pytester.path / "gone.txt").write_text("gone")
    commit()
    (pytester.path / "a.txt").write_text("new")
    commit()
    git("rm", "-q", "gone.txt")
    (pytester.path / "a.txt").write_text("changed")
    (pytester.path / "untracked.txt").write_text("untracked")
    (pytester.path / "kept").write_text("ignored")
    (pytester.path / "link").symlink_to("a.txt")
    return pytester.path


@pytest.fixture
def trees(tmp_path, monkeypatch):
    monkeypatch.setenv(shipping.FOLDER, str(tmp_path / "trees"))
    return tmp_path / "trees"


def test_the_working_tree_arrives_with_its_history(repository, git, trees):
    tree = shipping.pack(repository, ["HEAD~1"])
    shown = git("status", "--porcelain", "--untracked-files=no").replace("D  ", " D ")
    with shipping.unpacked(tree.data, tree.digest) as folder:
        there = folder / "tree"
        names = {path.name for path in there.iterdir()}
        assert names == {".git", ".gitignore", "a.txt", "untracked.txt", "link"}
        assert (there / "a.txt").read_text() == (there / "link").read_text() == "changed"

        def run(*words):
            return subprocess.run(
                ["git", *words], cwd=there, capture_output=True, text=True, check=True
            ).stdout

        assert run("rev-parse", "HEAD").strip() == git("rev-parse", "HEAD")
        assert run("show", f"{git('rev-parse', 'HEAD~1')}:a.txt") == "old"
        assert run("status", "--porcelain", "--untracked-files=no").strip() == shown.strip()
    assert not folder.exists()


def test_a_shallow_clone_is_shipped(repository, trees, tmp_path):
    clone = tmp_path / "clone"
    source = f"file://{repository}"
    subprocess.run(["git", "clone", "-q", "--depth=1", source, clone], check=True)
    tree = shipping.pack(clone)
    with shipping.unpacked(tree.data, tree.digest) as folder:
        log = ["git", "log", "--oneline"]
        done = subprocess.run(log, cwd=folder / "tree", capture_output=True, text=True, check=True)
        assert len(done.stdout.splitlines()) == 1


def test_a_folder_without_git_is_shipped(tmp_path, trees):
    (tmp_path / "suite/__pycache__").mkdir(parents=True)
    (tmp_path / "suite/a_test.py").write_text("1")
    tree = shipping.pack(tmp_path / "suite")
    with (
        shipping.unpacked(tree.data, tree.digest) as first,
        shipping.unpacked(tree.data, tree.digest) as second,
    ):
        assert first == second
        assert [path.name for path in (first / "tree").iterdir()] == ["a_test.py"]


def test_the_digest_follows_the_files(repository):
    before = shipping.pack(repository)
    assert shipping.pack(repository).digest == before.digest
    (repository / "a.txt").write_text("more")
    after = shipping.pack(repository)
    assert after.digest != before.digest
    assert after.code == before.code  # it is no code
    (repository / "a.py").write_text("more")
    assert shipping.pack(repository).code != before.code


def test_a_tree_above_the_limit_is_refused_with_its_largest_files(repository):
    (repository / "large.bin").write_bytes(b"x" * (3 << 20))
    with pytest.raises(shipping.ShippingError) as refused:
        shipping.pack(repository, limit=1 << 20)
    assert str(refused.value) == (
        f"{repository} has 3 MiB; at most 1 MiB are shipped to a node\n"
        "The largest files: large.bin (3 MiB), .gitignore (0 MiB), untracked.txt (0 MiB)\n"
        "Put what the pages do not need into .gitignore"
    )


def test_a_history_above_the_limit_is_refused(repository, commit):
    (repository / "a.txt").write_bytes(os.urandom(2 << 20))
    commit()
    (repository / "a.txt").write_text("small")
    with pytest.raises(
        shipping.ShippingError, match=r"has 2 MiB with its history.*\nRun from a sh"
    ):
        shipping.pack(repository, limit=1 << 20)


def test_a_node_that_cannot_write_the_tree_says_where(repository, tmp_path, monkeypatch):
    tree = shipping.pack(repository)
    monkeypatch.setenv(shipping.FOLDER, str(tmp_path / "trees"))

    def full(*args, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shipping.tarfile.TarFile, "extractall", full)
    with (
        pytest.raises(shipping.ShippingError) as refused,
        shipping.unpacked(tree.data, tree.digest),
    ):
        pass
    assert str(refused.value) == (
        f"the working tree cannot be unpacked in {tmp_path / 'trees'}: [Errno 28] No space left"
        f" on device\nFree space there, or point {shipping.FOLDER} of that node at another folder"
    )
    assert not list((tmp_path / "trees").glob("*/tree"))


def test_trees_of_killed_runs_are_removed(repository, trees, monkeypatch):
    old = trees / "0123"
    old.mkdir(parents=True)
    (old / "complete").touch()
    os.utime(old / "complete", (1, 1))
    tree = shipping.pack(repository)
    with shipping.unpacked(tree.data, tree.digest):
        assert not old.exists()


# A seat without Ray


def test_a_seat_runs_the_cases_that_it_is_given(pytester, trees):
    pytester.makefile(".ini", pytest="[pytest]\n")
    pytester.makepyfile(a_test="def test_one(): pass\ndef test_two(): assert False\n")
    config = pytester.parseconfigure("--maxfail=1", "-k", "two", "-p", "no:cacheprovider")
    tree = shipping.pack(pytester.path)
    spec = fleet_setup.spec(config, tree.top, tree.digest, ["a_test.py"])
    assert spec["options"].get("maxfail") is None
    worker = {"workerid": "gw0", "workercount": 1, "testrunuid": "1", "mainargv": ["pytest"]}
    seat = Seat()
    try:
        seat.start(tree.data, {**spec, "seat": "s1", "workerinput": worker}, [])
        for message in (("run", "a_test.py::test_one"), ("run", "a_test.py::no"), ("finish",)):
            seat.send(pickle.dumps(message))
        found = []
        while not found or found[-1][0] != "ended":
            found += [pickle.loads(message) for message in seat.poll()]
    finally:
        seat.close()
    kinds = [kind for kind, *_ in found]
    assert kinds == ["ready", "start", *["report"] * 3, "done", "unknown", "output", "ended"]
    assert found[-1][1] == 0


def test_a_seat_that_nobody_polls_ends(monkeypatch):
    from pytest_aisp.fleet import seat as seat_module

    ended = []
    monkeypatch.setattr(seat_module, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(seat_module.os, "_exit", ended.append)
    Seat()._end_if_alone()
    assert ended == [1]


def test_a_closed_seat_does_not_end_its_process(monkeypatch):
    from pytest_aisp.fleet import seat as seat_module

    monkeypatch.setattr(seat_module.os, "_exit", pytest.fail)
    seat = Seat()
    seat.close()
    seat._end_if_alone()


# Connecting


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionError("Could not find any running Ray instance."),
            "there is no Ray cluster at auto on this machine: Could not find any running Ray"
            " instance.\nStart one, on its first machine:\n    aisp fleet start --head",
        ),
        (
            RuntimeError("Version mismatch: The cluster was started with Ray: 2.49.0"),
            "auto runs another version of Ray or Python: Version mismatch: The cluster was started"
            " with Ray: 2.49.0\nInstall the same here",
        ),
        (
            ConnectionAbortedError("Initialization failure from server:\nTraceback"),
            "auto did not start a server for this client in time, as on a busy head\n"
            "Try again, or read ray_client_server.err in the logs of the head",
        ),
    ],
    ids=["none", "version", "busy"],
)
def test_a_connection_is_refused_with_the_remedy(error, said):
    assert bridge._refused_connection("auto", error) == said


@NEEDS_RAY
def test_an_address_without_a_cluster_is_a_usage_error(pytester):
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("--aisp-fleet=127.0.0.1:1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --aisp-fleet=127.0.0.1:1: *", "Start one, on its first machine:", "*fleet start*"]
    )


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--aisp-compile", "--aisp-compile: it needs no GPU: run it here"),
        ("--aisp-in-process", "--aisp-in-process: sides would run on a node, where no debugger is"),
        ("--pdb", "--pdb: tests run on nodes, where no debugger is"),
        ("-n2", "--numprocesses: a fleet has its own processes"),
        ("--reruns=1", "--reruns: a rerun would turn a red verdict green"),
        ("--aisp-profile", "--aisp-profile: profiles stay on the machine: run it on a node"),
    ],
    ids=lambda text: text.partition(":")[0],
)
def test_options_without_a_meaning_in_a_fleet_are_refused(pytester, option, reason):
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("--aisp-fleet=127.0.0.1:1", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --aisp-fleet cannot be combined with {reason}"])


def test_a_wait_that_is_no_number_is_refused(pytester):
    result = pytester.runpytest_subprocess("--aisp-fleet=127.0.0.1:1", "-o", "aisp_fleet_wait=soon")
    result.stderr.fnmatch_lines(["ERROR: aisp_fleet_wait = soon: give seconds, as in *= 300"])


def test_pytest_never_imports_ray():
    modules = loaded("from pytest_aisp.fleet import checkpoint, driver, remote, seat, setup, start")
    assert not {name for name in modules if name.partition(".")[0] == "ray"}


# Node ids


def test_a_product_stands_in_the_id_of_a_case_that_runs_on_several(pytester, page, monkeypatch):
    page()
    (pytester.path / "conftest.py").write_text(
        "from pytest_aisp.session.options import PRODUCTS\n"
        "def pytest_configure(config):\n"
        "    config.stash[PRODUCTS] = {'gpu-a': 'sm90', 'gpu-b': 'sm100'}\n"
    )
    listed = pytester.runpytest_subprocess("--collect-only", "-q")
    names = [line.rpartition("[")[2] for line in listed.outlines if "::" in line]
    assert names == ["doubled-n1001@gpu-a]", "doubled-n1001@gpu-b]"]
    only = pytester.runpytest_subprocess("--collect-only", "-q", "-m", "sm90")
    assert [line for line in only.outlines if "::" in line] == [
        "ch99/doubling_test.py::test_doubling[doubled-n1001@gpu-a]"
    ]


# What an interrupted run keeps


def test_only_proved_verdicts_are_kept(tmp_path):
    run = Checkpoint(["suites", "-v"], str(tmp_path), "abc")
    file = CheckpointFile(tmp_path / "run.pickle", run)
    file.case("plain", [{"outcome": "passed"}], unproved=False)
    for key in ("proved", "unproved"):
        file.case(key, [{"nodeid": key}], unproved=True)
    file.proved(["proved"], {"test": "it"})
    with open(tmp_path / "run.pickle", "ab") as cut_off:
        cut_off.write(pickle.dumps(("case", "late", [], False))[:-5])
    checkpoint = Checkpoint.read(tmp_path / "run.pickle")
    assert (checkpoint.arguments, checkpoint.code) == (["suites", "-v"], "abc")
    assert checkpoint.reports == {
        "plain": [{"outcome": "passed"}],
        "proved": [{"nodeid": "proved"}],
    }
    assert checkpoint.canaries == [{"test": "it"}]
    file.remove()
    assert not (tmp_path / "run.pickle").exists()


def test_resume_types_the_old_command(tmp_path):
    with pytest.raises(CliError, match="no fleet run was interrupted here"):
        resume_command(tmp_path, None)
    folder = tmp_path / ".pytest_cache/d/aisp-fleet"
    folder.mkdir(parents=True)
    CheckpointFile(folder / "run.pickle", Checkpoint(["--aisp-fleet", "suites"], str(tmp_path), ""))
    (tmp_path / "suites").mkdir()
    command, where = resume_command(tmp_path / "suites", "h:1")
    words = ["--aisp-fleet", "suites", "--aisp-fleet-resume", "--aisp-fleet=h:1"]
    assert (command[1:], where) == (["-m", "pytest", *words], tmp_path)


# aisp fleet


def test_ray_is_started_with_the_product_of_the_driver():
    command = start_command({**FACTS, "gpus": [H200] * 8}, head=False, address="h:6379")
    assert command.line == (
        "RAY_worker_niceness=0 ray start --address=h:6379 --labels=product=nvidia-h200"
        " --num-gpus=8 --disable-usage-stats"
    )


def test_a_head_needs_no_gpu_but_any_other_machine_does():
    bare = {**FACTS, "product": "", "gpus": []}
    assert "--num-gpus=0" in start_command(bare, head=True, address=None).line
    with pytest.raises(CliError, match="NVML finds no GPU here"):
        start_command(bare, head=False, address="h:1")


def test_a_machine_with_mig_does_not_start():
    facts = {**FACTS, "gpus": [{**H200, "mig": True}]}
    with pytest.raises(CliError, match="this machine cannot take part: GPU 0 is split by MIG"):
        start_command(facts, head=False, address="h:1")


@pytest.mark.parametrize("words", [[], ["--head", "--address=h:1"]], ids=["neither", "both"])
def test_start_wants_either_a_head_or_an_address(words, capsys):
    assert app.main(["fleet", "start", *words]) == 2
    assert capsys.readouterr().err.startswith("say where this machine belongs:\n    aisp fleet")


def test_boards_of_a_product_are_listed_with_their_disagreement(tmp_path, capsys):
    def recorded(*values):
        return fake_results.result(2.0, values=tuple((value,) for value in values))

    results = {"a.py::t[v-n1]": recorded(0.70, 0.69), "b.py::t[v-n1]": recorded(0.70, 0.67)}
    facts = {
        name: {**fake_results.FACTS, "date": name, "board": board}
        for name, board in (("one", "A"), ("two", "B"))
    }
    (tmp_path / "baselines/gpu").mkdir(parents=True)
    store.write(tmp_path / "baselines/gpu/ch01.json", "gpu", results, facts, replace=True)
    assert app.main(["fleet", "boards", f"--baselines={tmp_path / 'baselines'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["gpu", "B", "2", "-1.98%", "-2.96%"],
        ["gpu", "A", "2", "+2.02%", "+3.05%"],
    ]
    assert lines[1].endswith("b.py::t[v-n1]")


def test_boards_without_two_boards_name_the_command(tmp_path, capsys):
    assert app.main(["fleet", "boards", f"--baselines={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "Record by a fleet:",
        "    pytest --aisp-fleet --aisp-update-expectations",
    ]
