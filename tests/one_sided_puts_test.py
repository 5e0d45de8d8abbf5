"""One-sided exchange of tokens (suites/ch15/expert_puts_test.py), run by ranks on CPUs.

Shared memory replaces symmetric memory, a Gloo barrier replaces its barrier, and the kernels run in
Triton's interpreter. So the ranks write into each other's memory and wait for real signals.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
SCRIPT = """
import contextlib, os, sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

world, sys.path[:0] = int(sys.argv[2]), [sys.argv[1]]
from suites.ch04.host_memory import shared_by_all
from suites.ch15 import expert_puts_test as page

dist.init_process_group("gloo")
rank, held, maps = dist.get_rank(), contextlib.ExitStack(), {}


def empty(shape, dtype, device):
    every = held.enter_context(shared_by_all(torch.empty(shape, dtype=dtype)))
    maps[every[rank].data_ptr()] = every
    return every[rank]


def rendezvous(memory, group):
    every = maps[memory.data_ptr()]
    get_buffer = lambda other, shape, dtype: every[other].view(shape).view(dtype)
    return SimpleNamespace(get_buffer=get_buffer, barrier=lambda channel: dist.barrier())


symmetric.empty, symmetric.rendezvous = empty, rendezvous
page.CAPACITY, page.PROGRAMS = 9, 2
SPLITS = [[[4, 1, 2], [0, 0, 7], [3, 3, 1]], [[0, 7, 0], [7, 0, 0], [1, 0, 6]], [[2, 2, 3]] * 3]
WRONG = [[[99, 1, 1], [3, 99, 0], [7, 0, 99]]]  # more than the 7 rows that there are
for side in ("puts", "signalled"):
    torch.manual_seed(rank)
    x, counts = torch.randn(7, 33).bfloat16(), torch.zeros(world, dtype=torch.int64)
    own = torch.randn(33).bfloat16()
    run = next(getattr(page, side)(x, counts, own))
    for splits in SPLITS + WRONG + SPLITS:
        counts.copy_(torch.tensor(splits[rank]))
        x.copy_(torch.randn(7, 33))
        found = run().clone()
        each = [None] * world
        dist.all_gather_object(each, (x, counts, own))
        if splits not in WRONG:
            wanted = page.reference(each)[rank].bfloat16()
            assert torch.equal(found, wanted), (rank, side, splits)
    os.write(1, f"{side}\\n".encode())  # one write, because the ranks share the stream
    dist.barrier()
os._exit(0)
"""


def test_every_rank_gets_its_results(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, script, ROOT, "3"],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        timeout=120,
    )
    assert done.stdout.split() == ["puts"] * 3 + ["signalled"] * 3, done.stderr
