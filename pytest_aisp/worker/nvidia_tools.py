"""Run a side under Nsight Systems (`nsys`), Nsight Compute (`ncu`) or compute-sanitizer.

The tool starts a program that runs one side. The program needs no pipes and has no time limit, so a
user can run the same command again by hand with other options.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from ..results import encoding
from ..results.messages import TIMEOUT_HINT, ProfileTask, Reply, Task
from . import ncu_counters
from .client import (
    PROGRAM,
    Progress,
    WorkerProcess,
    describe_exit,
    interpreter,
    worker_environment,
)
from .output_capture import Stream
from .torch_profiler import range_name

PROFILER_SLOWDOWN = 20.0
"""A profiler's time limit is this many times longer. `ncu` runs each kernel about 40 times."""
RANKS_PROGRAM = ("-m", "pytest_aisp.distributed.rank", "profile")
LAUNCHES = 100
"""The largest number of kernel launches of a side that `ncu` profiles."""
NO_COUNTERS = "ERR_NVGPUCTRPERM"
COUNTERS = (
    f"ncu may not read the GPU's performance counters ({NO_COUNTERS})\n"
    "Let every user read them, and restart the driver:\n"
    "    echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' |"
    " sudo tee /etc/modprobe.d/ncu.conf"
)


class NsightError(Exception):
    """The profiler failed. The message contains the reason and a remedy."""


@dataclass(frozen=True)
class Profiler:
    """The command line of a profiler.

    Attributes:
        product: the product to install.
        suffix: the suffix of the profiler's reports.
        options: the options before the program. ``{range}`` is replaced with the name of the side's
            range, and ``{report}`` with the report's path without the suffix.
        collected: further options for a side in one process.
        of_ranks: further options for a side on several ranks.
    """

    product: str
    suffix: str
    options: Sequence[str]
    collected: Sequence[str] = ()
    of_ranks: Sequence[str] = ()


PROFILERS = {
    "nsys": Profiler(
        "Nsight Systems",
        ".nsys-rep",
        (
            *("profile", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"),
            *("--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"),
            *("--capture-range-end=stop", "--stats=true", "--force-overwrite=true"),
            "--output={report}",
        ),
    ),
    "ncu": Profiler(
        "Nsight Compute",
        ".ncu-rep",
        (
            *("--nvtx", "--nvtx-include", "{range}/"),
            "--clock-control=none",  # the clocks of the timed run; ncu would lock lower ones
            *(f"--launch-count={LAUNCHES}", "--force-overwrite", "--export={report}"),
        ),
        # Do not profile compilers that a side may start.
        ("--target-processes=application-only", "--set=full"),
        # ncu cannot repeat the kernel of a collective: it would wait for other ranks, which launch
        # theirs only once. So ncu runs all ranks once for each pass, and the set is smaller. NCCL
        # cannot connect ranks if only one of them runs under ncu, so all do. Only rank 0 opens the
        # range, because ncu lets only one process at a time run a profiled kernel.
        (
            *("--target-processes=all", "--replay-mode=application", "--set=basic"),
            *("--section=SchedulerStats", "--section=WarpStateStats"),
        ),
    ),
}


def missing_profiler(name: str) -> str:
    """Return the message for a profiler that is not installed."""
    product = PROFILERS[name].product
    page = f"https://developer.nvidia.com/{product.lower().replace(' ', '-')}"
    return (
        f"{name} is not on PATH; it is {product}, which comes with the CUDA toolkit, in bin/, or"
        f" from {page}\ntorch's profiler needs neither:\n    pytest --aisp-profile=torch"
    )


def profiler_installed(name: str) -> str | None:
    """Return the path of a profiler, or None."""
    return shutil.which(name)


def profile_side(
    name: str,
    task: ProfileTask,
    folder: Path,
    environment: Mapping[str, str | None],
    seconds: float,
    ranks: int = 1,
) -> list[str]:
    """Run the side `task.side` under the profiler `name`. Return the names of the files.

    Args:
        environment: variables to set for the side. The value None removes a variable.
        seconds: the time limit that the side would have without a profiler.
        ranks: the number of ranks of the side. Only rank 0 is profiled.

    Raises:
        NsightError: if the profiler failed or wrote no report.
        OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    profiler, side, limit = PROFILERS[name], task.side, PROFILER_SLOWDOWN * seconds
    report = folder / f"{side}{profiler.suffix}"
    report.unlink(missing_ok=True)
    task_file = folder / f"{side}.task.json"
    task_file.write_bytes(encoding.encode(task))
    values = {"range": range_name(side), "report": str(report.with_suffix(""))}
    further = profiler.collected if ranks == 1 else profiler.of_ranks
    options = [option.format(**values) for option in (*profiler.options, *further)]
    program = [*interpreter(), *PROGRAM, str(task_file)]
    if ranks > 1:
        program = [*interpreter(), *RANKS_PROGRAM, str(task_file), str(ranks)]
    command = [profiler_installed(name) or name, *options, *program]
    script = folder / f"{side}.{name}.sh"
    script.write_text(_script(command, environment))
    log = folder / f"{side}.{name}.txt"
    variables = worker_environment(environment)
    code = _run(command, variables, log, limit)
    if not report.exists() or code != 0:
        raise NsightError(_reason(name, code, limit, log))
    files = [file.name for file in (report, script, log, task_file)]
    if name == "ncu":
        counters = ncu_counters.import_report(command[0], report, variables, limit)
        files += [counters.write(folder, side)] if counters is not None else []
    return files


def _script(command: Sequence[str], environment: Mapping[str, str | None]) -> str:
    """Return a shell script that runs `command` again."""
    path = worker_environment({})["PYTHONPATH"]
    unset = [f"-u {name}" for name, value in environment.items() if value is None]
    assigned = {"PYTHONPATH": path} | {k: v for k, v in environment.items() if v is not None}
    variables = [f"{name}={shlex.quote(value)}" for name, value in assigned.items()]
    line = " ".join(["env", *unset, *variables, shlex.join(command)])
    return f"cd {shlex.quote(os.getcwd())} && {line}\n"


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> int | None:
    """Return the exit code of `command`, or None if it took longer than `seconds`."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # on a timeout or Ctrl-C: kill the profiler
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(name: str, code: int | None, seconds: float, log: Path) -> str:
    with closing(Stream(str(log))) as output:
        printed = output.peek()
    if NO_COUNTERS in "\n".join(printed.lines()[-LAST_LINES:]):
        return COUNTERS
    if code is None:
        return f"{name} took longer than {seconds:g} s\n{TIMEOUT_HINT}"
    ended = f"ended {describe_exit(code)}" if code else "left no report"
    return "\n".join([f"{name} {ended}", *printed.lines()[-LAST_LINES:]])


LAST_LINES = 6
"""The largest number of lines of a profiler's output in an error message."""

SANITIZER = "compute-sanitizer"
MISSING_SANITIZER = f"{SANITIZER} is not on PATH; it comes with the CUDA toolkit, in bin/"
SANITIZER_SLOWDOWN = 20.0
"""Under compute-sanitizer, a task's time limit is this many times longer."""
REPORT_LINES = 12
"""The largest number of lines of the sanitizer's report in a failure message."""
_NO_ERROR = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY: 0 |^=+\s*$|Target application|LEAK SUM")


def sanitizer_installed() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    return shutil.which(SANITIZER)


class SanitizedWorker(WorkerProcess):
    """A worker process under compute-sanitizer, which checks the kernels with the tool `tool`.

    Args:
        tool: ``memcheck``, ``racecheck``, ``initcheck`` or ``synccheck``.
    """

    def __init__(self, tool: str, environment: Mapping[str, str | None] | None = None) -> None:
        handle, self._log = tempfile.mkstemp(prefix="aisp-sanitizer-", suffix=".log")
        os.close(handle)
        self._tool, self._position = tool, 0
        # Errors during a library's own initialization are not the page's fault.
        options = ("--tool", tool, "--log-file", self._log, "--report-api-errors", "no")
        # Without torch's cache, each tensor is a separate allocation, so the tool can detect reads
        # beyond a tensor's end.
        changes = {**(environment or {}), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        super().__init__(changes, [sanitizer_installed() or SANITIZER, *options])

    def ask(self, task: Task, seconds: float, progress: Progress) -> Reply:
        """Return the reply to `task`, or an error reply if the tool reported errors."""
        reply = super().ask(task, SANITIZER_SLOWDOWN * seconds, progress)
        errors = self._new_errors()
        if not errors:
            return reply
        self.kill()  # after an invalid access, all further CUDA calls fail
        lines = [f"{self._tool} found an error in a kernel:", *errors[:REPORT_LINES]]
        if len(errors) > REPORT_LINES:
            lines.append("...")
        return replace(reply, error="page", message="\n".join(lines), trace="")

    def _new_errors(self) -> list[str]:
        """Return the report's new lines without header and footer lines."""
        with open(self._log, errors="replace") as log:
            log.seek(self._position)
            lines = log.read().splitlines()
            self._position = log.tell()
        errors = [line for line in lines if line.strip() and not _NO_ERROR.search(line)]
        return [line.removeprefix("=========").strip() for line in errors]

    def close(self) -> None:
        super().close()
        os.unlink(self._log)
