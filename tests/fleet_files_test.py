"""The files of ci/fleet, against stand-ins for srun, ssh, kubectl's schema, and aisp."""

from __future__ import annotations

import os
import subprocess

import pytest
import typer
from ci_files_test import CI, load, write_program
from docs_test import leaves

from pytest_aisp.cli import app
from pytest_aisp.fleet.setup import OPTION

FLEET = CI / "fleet"
LOG = '#!/bin/sh\necho "{name} $*" >> "$LOG"\n{then}\n'


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Put fake programs that log their arguments on PATH. Return a shell and the log."""
    stand_ins = {"aisp": "", "ray": "", "hostname": "echo head.example"}
    stand_ins |= {"python": "exit ${CODE:-0}", "scontrol": "printf 'n1\\nn2\\nn3\\n'"}
    stand_ins |= {"timeout": "", "ssh": 'shift; sh -c "$1"'}
    options = 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"'
    for name, then in {**stand_ins, "srun": options}.items():
        write_program(tmp_path / "bin" / name, LOG.format(name=name, then=then))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.chdir(tmp_path)

    def run(file, *words, **variables):
        command = ["bash", FLEET / file, *words]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        log = tmp_path / "log"
        return done, log.read_text().splitlines() if log.exists() else []

    return run


SLURM = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}


def test_slurm_starts_a_head_the_other_nodes_and_pytest(shell):
    done, log = shell("slurm.sbatch", "bench", "-x", **SLURM)
    assert done.returncode == 0, done.stderr
    assert "aisp fleet start --head --block" in log
    assert "aisp fleet start --address=n1:6379 --block" in log
    others = [line for line in log if "--exclude=n1" in line]
    assert others == [
        "srun --overlap --nodes=2 --ntasks-per-node=1 --exclude=n1"
        " aisp fleet start --address=n1:6379 --block"
    ]
    assert "python -m pytest --aisp-fleet --aisp-artifacts=fleet bench -x" in log


def test_slurm_with_one_node_starts_only_a_head(shell):
    _, log = shell("slurm.sbatch", "bench", **{**SLURM, "SLURM_JOB_NUM_NODES": "1"})
    assert not [line for line in log if "--address" in line]


def test_ssh_starts_ray_everywhere_and_stops_it_after_a_red_run(shell):
    done, log = shell("ssh.sh", "gpu1,gpu2", "bench", CODE="1", AISP_OUT="out")
    assert done.returncode == 1
    assert [line for line in log if not line.startswith("ssh")] == [
        "aisp fleet start --head",
        "hostname -f",
        *["aisp fleet start --address=head.example:6379"] * 2,
        "python -m pytest --aisp-fleet --aisp-artifacts=out bench",
        *["ray stop"] * 3,
    ]


def test_ssh_explains_wrong_arguments(shell):
    done, log = shell("ssh.sh", "gpu1")
    assert (done.returncode, log) == (2, [])
    assert done.stderr.startswith("usage: ci/fleet/ssh.sh HOST,HOST...")


def test_kuberay_runs_once_with_whole_cpus_at_the_usual_priority():
    [job] = load(FLEET / "kuberay.yaml")
    assert (job["apiVersion"], job["kind"], job["spec"]["backoffLimit"]) == (
        "ray.io/v1",
        "RayJob",
        0,
    )
    assert f"pytest {OPTION} " in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        resources = container["resources"]
        gpus = {k: v for k, v in resources["limits"].items() if k not in resources["requests"]}
        assert resources["limits"] == {**resources["requests"], **gpus}
        assert resources["requests"]["cpu"].isdecimal(), "a share of a core is no core of its own"
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    for group in cluster["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1


@pytest.mark.parametrize("file", ["slurm.sbatch", "ssh.sh"])
def test_commands_of_the_scripts_parse(shell, file):
    _, log = shell(file, "gpu1", "bench", **SLURM)
    lines = [line.split()[1:] for line in log if line.startswith("aisp ")]
    assert lines
    for line in lines:
        command, called = typer.main.get_command(app.build()), []
        for leaf in leaves(command):
            leaf.callback = lambda called=called, **options: called.append(options)
        command.main(line, prog_name="aisp", standalone_mode=False)
        assert len(called) == 1
