"""The command line itself: start, help, errors in options, sizes, and tables."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pytest_aisp.cli import app, console
from pytest_aisp.distributed import nccl
from pytest_aisp.util import cli_result
from pytest_aisp.util.cli_result import columns, parse_bytes, parse_sizes, size_text

ROOT = Path(__file__).parents[1]


def commands(command, name=()):
    """Yield the name of each visible command, word by word, with its options; groups too."""
    yield name, [o.opts[0] for o in command.params if o.opts[0].startswith("--")]
    for word, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*name, word))


OPTIONS = dict(commands(typer.main.get_command(app.build())))
COMMANDS = list(OPTIONS)


def test_console_script_runs_main():
    found = re.search(r'^aisp = "([\w.]+):(\w+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert getattr(importlib.import_module(found[1]), found[2]) is app.main


def test_package_runs_as_a_module():
    command = [sys.executable, "-m", "pytest_aisp.cli", "nccl-env"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(nccl.nccl_version())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_command_and_option(command, capsys):
    assert app.main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    inner = {name[len(command)] for name in COMMANDS if name[:-1] == command and name}
    assert all(re.search(rf"^ +{name}\b", text, re.M) for name in inner)
    assert all(option in text for option in OPTIONS[command])


def test_reference_lists_every_command_and_option():
    guide = (ROOT / "docs/reference/cli.md").read_text()
    for name, options in OPTIONS.items():
        assert f"aisp {' '.join(name)}".strip() in guide
        assert all(option in guide for option in options), (name, options)


SPELLINGS = {
    "suite list": "bench list-targets",
    "suite show": "show",
    "suite changed": "changed",
    "suite bisect": "bisect",
    "suite run": "bench run",
    "suite verify": "verify",
    "suite replay": "replay",
    "results compare": "compare",
    "results history": "history",
    "results expectations": "expectations",
    "results predictions": "predictions",
    "results prune": "prune",
    "results checksums": "seals",
    "results report": "report",
    "results export": "export",
    "results roofline": "roofline",
    "machine doctor": "doctor",
    "machine peak": "peak",
    "machine clean": "clean",
    "links topology": "topology",
    "links bandwidth": "bandwidth",
    "links nccl": "nccl",
    "links diagnose": "diagnose",
    "links nccl-env": "nccl-env",
    "ci gate": "gate",
}
"""Each command of a group, and its spelling without the group."""


def command_of(words):
    command = typer.main.get_command(app.build())
    for word in words.split():
        command = command.commands[word]
    return command


@pytest.mark.parametrize(("spelling", "old"), SPELLINGS.items())
def test_old_spelling_runs_the_same_command(spelling, old):
    new, same = command_of(spelling), command_of(old)
    assert inspect.unwrap(new.callback) is inspect.unwrap(same.callback)
    assert [p.opts for p in new.params] == [p.opts for p in same.params]
    assert not new.hidden
    assert command_of(old.split()[0]).hidden


def test_help_shows_groups_and_hides_old_spellings():
    visible = {" ".join(name) for name in COMMANDS}
    groups = {spelling.split()[0] for spelling in SPELLINGS}
    new = {"bottleneck", "judge", "fleet", "fleet start", "fleet resume", "fleet boards"}
    assert visible == {"", *new, *groups, *SPELLINGS}


def test_missing_command_is_an_error(capsys):
    assert app.main([]) == 2
    assert "Error: Missing command." in capsys.readouterr().err


def test_unknown_command_is_refused_with_the_nearest_one(capsys):
    assert app.main(["bottlneck", "train.py"]) == 2
    error = "Error: No such command 'bottlneck'. Did you mean 'bottleneck'?"
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("suite run --profile=all", "'all' is not one of 'none', 'minimal', 'full'"),
        ("results expectations --format=xml", "'xml' is not one of 'text', 'csv', 'json'"),
        ("results compare a b --format=xml", "'xml' is not one of 'text', 'markdown', 'json'"),
        ("ci gate a --format=xml", "'xml' is not one of 'text', 'markdown', 'github', 'gitlab',"),
        ("bottleneck --steps=0 a.py", "0 is not in the range x>=1"),
        ("bottleneck --warmup=-1 a.py", "-1 is not in the range x>=0"),
        ("bottleneck --profiled=x a.py", "'x' is not a valid int"),
    ],
)
def test_illegal_value_of_an_option_is_refused(line, error, capsys):
    assert app.main(line.split()) == 2
    assert error in " ".join(capsys.readouterr().err.split())


def test_progress_is_shown_only_on_a_terminal(monkeypatch, capsys):
    with console.show_progress() as progress:
        progress("GPU 0 -> GPU 1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with console.show_progress() as progress:
        progress("GPU [0] -> GPU 1 (1 of 2 done)")
    output = capsys.readouterr()
    assert "GPU [0] -> GPU 1" in output.err
    assert "done)" not in output.err
    assert output.out == ""


def test_text_with_progress_is_split_again():
    text = cli_result.with_progress("all_reduce of 4 KiB", 3, 18)
    assert text == "all_reduce of 4 KiB (3 of 18 done)"
    assert cli_result.split_progress(text) == ("all_reduce of 4 KiB", 3, 18)
    assert cli_result.split_progress("rank 0: start") == ("rank 0: start", 0, None)


def test_shell_completes_commands():
    environment = {**os.environ, "_AISP_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    environment["COMP_WORDS"] = "aisp bo"
    command = [sys.executable, "-m", "pytest_aisp.cli"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["bottleneck"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4B", 4), ("4KiB", 4096), (" 3 MiB", 3 << 20), ("1GiB", 1 << 30)],
)
def test_sizes_are_parsed(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "0KiB", "-1", "1.5GiB", "1GB", "1 TiB", "4KiB:"])
def test_invalid_size_is_refused_with_legal_forms(text):
    message = re.escape(f"{text!r} is not a size; write it like 4KiB, 512MiB or 1GiB")
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4KiB:16KiB", (4096, 8192, 16384)),
        ("4KiB:15KiB", (4096, 8192)),
        ("1:1", (1,)),
        ("8KiB,4KiB,8KiB", (4096, 8192)),
    ],
)
def test_size_ranges_double_and_lists_are_sorted(text, sizes):
    assert parse_sizes(text) == sizes


def test_sizes_are_formatted():
    texts = [size_text(n) for n in (1, 1023, 4096, 4080, 1 << 30, 3 << 29)]
    assert texts == ["1 B", "1023 B", "4 KiB", "3.984 KiB", "1 GiB", "1.5 GiB"]


def test_columns_are_aligned():
    assert columns([("a", "bb"), ("ccc", "")]) == ["a    bb", "ccc"]
    assert cli_result.rate_text(387.44e9) == "387.4 GB/s"
