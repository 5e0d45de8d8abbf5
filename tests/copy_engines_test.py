"""All-reduces by copy engines (suites/ch04/copy_engines.py), run on CPUs.

Shared memory replaces symmetric memory, and a Gloo barrier replaces its barrier.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import contextlib, os, sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/suites"]
from ch04.copy_engines import CopiedSums
from ch04.host_memory import shared_by_all

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
held = contextlib.ExitStack()


def empty(shape, dtype, device):
    held.maps = held.enter_context(shared_by_all(torch.empty(shape, dtype=dtype)))
    return held.maps[rank]


def rendezvous(tensor, group):
    return SimpleNamespace(
        get_buffer=lambda other, shape, dtype: held.maps[other].view(shape),
        barrier=lambda channel: dist.barrier(),
    )


symmetric.empty, symmetric.rendezvous = empty, rendezvous
torch.cuda.Stream = lambda priority: SimpleNamespace(wait_stream=lambda other: None)
torch.cuda.current_stream = lambda: torch.cuda.Stream(0)
torch.cuda.stream = lambda stream: contextlib.nullcontext()

COUNT, SHAPE = 3, (5, 7)  # 35 elements, which no two or three ranks share evenly
sums = CopiedSums(COUNT, SHAPE, torch.empty(0))
for call in range(2):
    every = [torch.arange(105.0).view(COUNT, *SHAPE) * (r + 1) + call for r in range(world)]
    for k in reversed(range(COUNT)):
        if k == 1:  # already in place
            sums.mine[k].copy_(every[rank][k])
            sums.start(k)
        else:
            sums.start(k, every[rank][k])
    sums.wait()
    assert torch.equal(sums.mine, sum(every)), (rank, call)
    dist.barrier()  # every rank has compared
os.write(1, b"summed\\n")  # one write, because the ranks share the stream
dist.barrier()
os._exit(0)
"""


def test_every_rank_gets_the_sum_of_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    done = subprocess.run([*run, script, ROOT], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["summed"] * 3, done.stderr
