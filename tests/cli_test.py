"""The command line itself: how it is started, its help, sizes as people write them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aisp.common import answers
from pytest_aisp.common.answers import columns, parse_bytes, parse_sizes, size_text
from pytest_aisp.ranks import nccl_env
from pytest_aisp.tools import cli

ROOT = Path(__file__).parents[1]
COMMANDS = ("topology", "bandwidth", "nccl", "nccl-env", "compare", "bottleneck")


def test_the_console_script_is_main():
    found = re.search(r'^aisp = "([\w.]+):(\w+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert getattr(importlib.import_module(found[1]), found[2]) is cli.main


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "pytest_aisp.tools.cli", "nccl-env"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(nccl_env.version())


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_names_every_command_and_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert command or all(re.search(rf"^ +{name}\b", said, re.M) for name in COMMANDS)


def test_every_option_and_command_is_in_the_guide():
    guide = (ROOT / "docs" / "tools.md").read_text()
    (commands,) = (a for a in cli.parser()._actions if a.choices)
    assert tuple(commands.choices) == COMMANDS
    for name, command in commands.choices.items():
        assert f"## aisp {name}" in guide
        named = [a for a in command._actions if a.option_strings and a.dest != "help"]
        options = [a.option_strings[0] for a in named]
        assert all(option in guide for option in options), options


def test_without_a_command_it_is_asked_wrongly(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err


def test_what_is_being_done_is_shown_on_a_terminal_alone(monkeypatch, capsys):
    cli._tell("GPU 0 -> GPU 1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cli._tell("GPU 0 -> GPU 1")
    cli._done()
    assert capsys.readouterr().err == "\r\033[KGPU 0 -> GPU 1\r\033[K"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4B", 4), ("4KiB", 4096), (" 3 MiB", 3 << 20), ("1GiB", 1 << 30)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "0KiB", "-1", "1.5GiB", "1GB", "1 TiB", "4KiB:"])
def test_what_is_no_size_says_how_to_write_one(text):
    message = re.escape(f"{text!r} is no size; write it like 4KiB, 512MiB or 1GiB")
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
def test_ranges_double_and_lists_are_sorted(text, sizes):
    assert parse_sizes(text) == sizes


def test_sizes_are_written():
    texts = [size_text(n) for n in (1, 1023, 4096, 4080, 1 << 30, 3 << 29)]
    assert texts == ["1 B", "1023 B", "4 KiB", "3.984 KiB", "1 GiB", "1.5 GiB"]


def test_columns_stand_below_each_other():
    assert columns([("a", "bb"), ("ccc", "")]) == ["a    bb", "ccc"]
    assert answers.rate_text(387.44e9) == "387.4 GB/s"
