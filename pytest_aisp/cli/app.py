"""The command line `aisp`: its groups of commands, and the exit codes.

Exit code 0 means that the command succeeded and found no problem. Exit code 1 means that the
command found a problem, such as a missing GPU, a slow link, or a result below its claim. Exit code
2 means that the command cannot run here, or that its arguments are wrong. A command that runs
pytest or a script returns the exit code of pytest or the script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import typer
from typer.core import TyperCommand

from ..util.cli_result import CliError
from . import judge, machine, results, suite
from .console import print_error

Command = Callable[..., None]

GROUPS: Mapping[str, tuple[str, Mapping[str, Command]]] = {
    "suite": (
        "List pages, and check or measure them with pytest.",
        {
            "list": suite.list_pages,
            "show": suite.show,
            "changed": suite.changed,
            "bisect": suite.bisect,
            "run": suite.run,
            "verify": suite.verify,
            "replay": suite.replay,
        },
    ),
    "results": (
        "Compare, check, report and export runs and stored results.",
        {
            "compare": results.compare,
            "history": results.history,
            "expectations": results.expectations,
            "predictions": results.predictions,
            "prune": results.prune,
            "checksums": results.checksums,
            "report": results.report,
            "export": results.export,
            "roofline": results.roofline,
        },
    ),
    "machine": (
        "Check this machine, measure its peak rates, and clean up.",
        {"doctor": machine.doctor, "peak": machine.peak, "clean": machine.clean},
    ),
    "links": (
        "Show and measure the links between GPUs.",
        {
            "topology": machine.topology,
            "bandwidth": machine.bandwidth,
            "nccl": machine.nccl,
            "diagnose": machine.diagnose,
            "nccl-env": machine.nccl_env,
        },
    ),
    "fleet": (
        "Run one suite on many machines: pytest --aisp-fleet.",
        {
            "start": machine.fleet_start,
            "resume": machine.fleet_resume,
            "boards": machine.fleet_boards,
        },
    ),
    "ci": ("Combine the runs of several machines in CI.", {"gate": results.gate}),
}
OLD_SPELLINGS = {
    "suite list": "bench list-targets",
    "suite run": "bench run",
    "results checksums": "seals",
}
"""Old names of commands. The old name of any other command is the last word of the current name."""
CLASSES: Mapping[Command, type[TyperCommand]] = {
    suite.run: suite.PytestCommand,
    suite.verify: suite.PytestCommand,
    suite.replay: suite.PytestCommand,
    results.roofline: suite.TargetsCommand,
    results.predictions: suite.TargetsCommand,
}


def build() -> typer.Typer:
    """Return the app with all groups of commands. Old names of commands work, but are hidden."""
    app = _group("Measure pages with pytest, judge stored results, and inspect the machine.")
    bench = _group("The old spelling of `aisp suite`.")
    for name, (text, commands) in GROUPS.items():
        group = _group(text)
        for word, command in commands.items():
            _add(group, word, command)
            *parents, old = OLD_SPELLINGS.get(f"{name} {word}", word).split()
            _add(bench if parents else app, old, command, hidden=not parents)
        app.add_typer(group, name=name)
    app.add_typer(bench, name="bench", hidden=True)
    app.command()(judge.judge)
    # All arguments after the script belong to the script, even `--json`.
    app.command(context_settings={"allow_interspersed_args": False})(machine.bottleneck)
    return app


def _group(text: str) -> typer.Typer:
    # Print errors without boxes, which are hard to read in a log.
    return typer.Typer(
        name="aisp", help=text, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def _add(group: typer.Typer, name: str, command: Command, *, hidden: bool = False) -> None:
    group.command(name, cls=CLASSES.get(command, TyperCommand), hidden=hidden)(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, print its result, and return its exit code."""
    command = typer.main.get_command(build())
    try:
        command.main(None if arguments is None else list(arguments), prog_name="aisp")
    except CliError as error:
        print_error(str(error))
        return error.code
    except SystemExit as end:  # Typer always ends in this way, even after an error or --help
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0
