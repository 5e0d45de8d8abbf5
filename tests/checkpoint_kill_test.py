"""If saving a checkpoint is killed midway, the previous checkpoint stays readable and complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

ROOT = Path(__file__).parents[1]

RENAMED = """
import os, signal, sys
import torch
from suites.ch05 import async_checkpoint_test as page

folder, saves = sys.argv[1], []

class Halting:
    "A file that never gets past its first 2000 bytes."

    def __init__(self, file):
        self.file, self.left = file, 2000

    def write(self, data):
        self.file.write(data[: self.left])
        self.left -= len(data)
        if self.left <= 0:
            self.file.flush()
            print("half", flush=True)
            signal.pause()
        return len(data)

def written(weights):
    saves.append(weights)
    with open(f"{folder}/new.pt", "wb") as file:
        torch.save(weights, file if len(saves) == 1 else Halting(file))
    os.replace(f"{folder}/new.pt", f"{folder}/checkpoint.pt")
    print(sum(float(weight.double().sum()) for weight in weights.values()), flush=True)

page.written = written
torch.manual_seed(0)
state = page.state("cpu", 2, 64, 16)
loop = next(page.threaded(state, *page.inputs("cpu", 2, 64, 16)))
loop()
"""

DISTRIBUTED = """
import signal, sys
import torch
from torch import distributed
from torch.distributed import checkpoint

folder, stage = sys.argv[1:]
distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
weights = {name: torch.full((64, 64), 1.0) for name in "abc"}
checkpoint.async_save(weights, checkpoint_id=f"{folder}/first").result()
print("first", flush=True)
saved = []

def halt():
    print("half", flush=True)
    signal.pause()

def save(*arguments, plain=torch.save):
    saved.append(plain(*arguments))
    if len(saved) == 2:
        halt()

class Writer(checkpoint.FileSystemWriter):
    def finish(self, metadata, results):
        halt()

path = f"{folder}/second"
if stage == "data":
    torch.save = save
    writer = checkpoint.FileSystemWriter(path)
else:
    writer = Writer(path)
for weight in weights.values():
    weight.fill_(2.0)
checkpoint.async_save(weights, storage_writer=writer).result()
"""


def killed_at_half(code, *arguments):
    """Run `code` until it prints ``half``, kill it, and return what it printed before."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if line.strip() == "half":
                break
            printed.append(line.strip())
        process.kill()
        assert process.wait() == -signal.SIGKILL
    return printed


def test_the_last_checkpoint_is_complete_after_a_kill_in_the_next(tmp_path):
    [total] = killed_at_half(RENAMED, tmp_path)
    weights = torch.load(tmp_path / "checkpoint.pt")
    assert sum(float(weight.double().sum()) for weight in weights.values()) == float(total)
    assert 0 < (tmp_path / "new.pt").stat().st_size < (tmp_path / "checkpoint.pt").stat().st_size
    with pytest.raises(RuntimeError, match=r"zip archive|central directory"):
        torch.load(tmp_path / "new.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", ["data", "metadata"])
def test_the_last_distributed_checkpoint_is_complete_after_a_kill_in_the_next(tmp_path, stage):
    assert killed_at_half(DISTRIBUTED, tmp_path, stage) == ["first"]
    weights = {name: torch.zeros(64, 64) for name in "abc"}
    assert list((tmp_path / "second").glob("*.distcp"))  # a part of it was written
    with pytest.raises(CheckpointException, match=r"\.metadata"):
        checkpoint.load(weights, checkpoint_id=tmp_path / "second")
    assert all(weight.eq(0).all() for weight in weights.values())
    checkpoint.load(weights, checkpoint_id=tmp_path / "first")
    assert all(weight.eq(1).all() for weight in weights.values())
