"""The folder and the manifest of a run; no file has a secret in it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from pytest_aisp.results import results_json, run_reader
from pytest_aisp.session import config as session_config
from pytest_aisp.session import options, recorder, startup
from pytest_aisp.session.options import SETTINGS
from pytest_aisp.timing import peaks
from pytest_aisp.util import device

SECRET = "hunter2-5ecret"
PLANTED = {
    "NCCL_AUTH_TOKEN": SECRET,
    "TORCH_API_KEY": SECRET,
    "PYTORCH_DB_PASSWORD": SECRET,
    "TRITON_CLIENT_SECRET": SECRET,
    "NVSHMEM_CREDENTIALS": SECRET,
    "TORCH_INDEX": f"https://me:{SECRET}@example.org/simple",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "HOME_OF_MINE": SECRET,
    "MY_NCCL_DEBUG": SECRET,
}


def test_a_run_has_a_folder_with_its_manifest_and_no_secret(page, gpu, pytester, monkeypatch):
    for name, value in {**PLANTED, "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    page()
    page("3 * x", name="wrong_test.py")
    gpu(added=2e-5, doubled=1e-5)
    stored = peaks.Peaks("simulated-gpu", {"copy": 1e9}, {"gpu": "simulated"})
    folder = pytester.mkdir("baselines") / "simulated-gpu"
    folder.mkdir()
    peaks.save(folder / "peaks.json", stored)
    result = pytester.runpytest_subprocess("--aisp-artifacts", "ch99", "-k", "doubling")
    [made] = [p for p in (pytester.path / "artifacts").iterdir() if not p.is_symlink()]
    result.stdout.fnmatch_lines([f"artifacts: {made}"])
    run = run_reader.load(pytester.path / "artifacts" / "latest")
    assert run.path == made
    said = json.loads((made / "results.json").read_text())
    jsonschema.validate(said, results_json.schema())
    assert said == run.plain()
    about = run.manifest
    assert (about.complete, about.exit_code, about.verdicts) == (
        True,
        1,
        {"new": 1, "wrong": 1},
    )
    assert about.environment.items() >= {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3"}.items()
    assert about.workload.keyword == "doubling"
    assert about.options["artifacts"] == str(made)
    assert about.machine.product == "simulated-gpu"
    assert about.packages.keys() >= {"torch", "numpy"}
    assert about.peaks["simulated-gpu"].origin == "baselines/simulated-gpu/peaks.json"
    assert about.mode == "measure"
    assert (made / "results.md").read_text().startswith("**1 wrong, 1 new** on simulated-gpu, ")
    files = [file for file in made.rglob("*") if file.is_file()]
    assert len(files) == 9  # seven, and the samples of two cases
    assert (made / "report.html").read_text().startswith("<!doctype html>")
    assert [file.name for file in files if SECRET in file.read_text()] == []


def test_only_listed_variables_without_secrets_are_recorded():
    kept = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "2"}
    assert recorder.environment({**PLANTED, **kept}) == kept
    assert recorder.environment({"NCCL_token": "1", "XCUDA_VISIBLE_DEVICES": "1"}) == {}


def test_git_state_has_commit_branch_and_dirty_files(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert recorder.git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    (tmp_path / "page.py").write_text("1")
    for arguments in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    found = recorder.git_state(tmp_path)
    assert (len(found.commit), found.branch, found.dirty) == (40, "main", False)
    (tmp_path / "page.py").write_text("2")
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    found = recorder.git_state(tmp_path)
    assert (found.branch, found.dirty) == (None, True)


def test_the_clocks_are_asked_of_the_first_visible_gpu(monkeypatch):
    class Nvml:
        NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

        def __getattr__(self, name):
            answers = {
                "nvmlDeviceGetCount": lambda: 2,
                "nvmlDeviceGetHandleByIndex": lambda index: index,
                "nvmlDeviceGetIndex": lambda handle: handle,
                "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
                "nvmlDeviceGetClockInfo": lambda handle, domain: 1000 * handle + domain,
            }
            return answers[name]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = Nvml()
    monkeypatch.setattr(device, "load_nvml", lambda: nvml)
    # Facts that this driver does not give are None.
    monkeypatch.setattr(Nvml, "nvmlDeviceGetMaxClockInfo", staticmethod(lambda: 1), raising=False)
    assert device.clocks() == {
        "sm_mhz": 1001,
        "memory_mhz": 1002,
        "sm_max_mhz": None,
        "memory_max_mhz": None,
    }
    monkeypatch.setattr(device, "load_nvml", lambda: None)
    assert device.clocks() == {}


# Where the folder is


class Config:
    """A pytest configuration with these options and this ini key."""

    def __init__(self, root, arguments="", ini=""):
        args = arguments.split()
        options.fill_in_values(args)
        pairs = [arg.removeprefix("--").replace("-", "_").partition("=") for arg in args]
        self.given = {name: value if equals else True for name, equals, value in pairs}
        self.rootpath, self._ini, self.stash = root, ini, {}

    def getoption(self, name, default=None):
        return self.given.get(name, default)

    def getini(self, name):
        return {"aisp_artifacts": self._ini}[name]


@pytest.mark.parametrize(
    ("arguments", "ini", "stamped", "exactly"),
    [
        ("", "", None, None),
        ("--aisp-artifacts", "", "artifacts", None),
        ("--aisp-artifacts=out", "", None, "out"),
        ("", "kept", "kept", None),
        ("--aisp-artifacts", "kept", "kept", None),
        ("--aisp-artifacts=out", "kept", None, "out"),
        ("--aisp-aa", "kept", "kept", None),
        ("--aisp-check", "kept", None, None),
        ("--aisp-check --aisp-artifacts", "kept", "kept", None),
        ("--aisp-compile=sm90", "kept", None, None),
        ("--aisp-replay=seen", "kept", None, None),
        ("--collectonly", "kept", None, None),
        ("--collectonly --aisp-artifacts=out", "", None, None),
        ("--showfixtures --aisp-artifacts", "", None, None),
    ],
)
def test_options_and_ini_key_choose_the_artifacts_folder(
    tmp_path, arguments, ini, stamped, exactly
):
    config = Config(tmp_path, arguments, ini)
    folder, parent = session_config._artifact_folders(config)
    assert parent == (stamped and tmp_path / stamped)
    assert str(folder) == str(exactly)


def test_a_folder_without_a_name_is_refused(tmp_path):
    with pytest.raises(pytest.UsageError) as refused:
        session_config._artifact_folders(Config(tmp_path, "--aisp-artifacts="))
    assert str(refused.value) == (
        "--aisp-artifacts=: give a folder, or nothing for a timestamped one\n"
        "    pytest --aisp-artifacts"
    )


def test_a_replayed_folder_is_not_overwritten(pytester):
    with pytest.raises(pytest.UsageError) as refused:
        pytester.parseconfigure("--aisp-replay=out/results.jsonl", "--aisp-artifacts=./out/")
    assert str(refused.value) == (
        "--aisp-artifacts=out would overwrite what --aisp-replay reads\nGive another folder"
    )


@dataclass(frozen=True)
class Folders:
    """The settings that are about folders."""

    artifacts: Path | None = None
    replay: Path | None = None


def test_a_worker_has_the_folders_of_its_controller(tmp_path):
    made, latest = tmp_path / "then", tmp_path / "latest"
    made.mkdir()
    latest.symlink_to("then")
    config = Config(tmp_path)
    config.stash[SETTINGS] = Folders(replay=latest)
    assert startup._of_controller(config, {}).replay == made
    latest.unlink()
    latest.symlink_to("now")  # as the controller has done by the time that a worker starts
    config.stash[SETTINGS] = Folders(replay=latest)
    given = {"aisp_folders": {"artifacts": "artifacts/now", "replay": str(made)}}
    found = startup._of_controller(config, given)
    assert found == Folders(Path("artifacts/now"), made) == config.stash[SETTINGS]


def test_the_controller_hands_its_folders_to_workers(tmp_path):
    kept = SimpleNamespace(artifacts=tmp_path, replay=None)
    gather = startup._Gather(None, SimpleNamespace(settings=kept, started=0.0))
    node = SimpleNamespace(workerinput={})
    gather.pytest_configure_node(node)
    assert node.workerinput["aisp_folders"] == {"artifacts": str(tmp_path)}
