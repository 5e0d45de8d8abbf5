"""From made-up events and intervals to figures and advice: nothing here runs a loop."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_aisp.training_loop import advice
from pytest_aisp.training_loop.breakdown import Breakdown, Loader
from pytest_aisp.training_loop.find import plain, text
from pytest_aisp.training_loop.stages import Stage
from pytest_aisp.training_loop.steps import BODY, COPY, ITEM, Event, Gpu, Step, summarize


def gpu(name, start, end):
    return Event(name, start, end, on_gpu=True)


GEMM, ADD = "sm90_xmma_gemm", "void at::native::vectorized_elementwise_kernel<4>"
PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
EVENTS = [
    Event(BODY, 0, 100, annotation=True),
    Event(COPY, 1, 12),
    Event("cudaMemcpyAsync", 2, 6),
    Event("cudaStreamSynchronize", 6, 10),
    Event("cudaLaunchKernel", 12, 13),
    Event(ITEM, 50, 80),
    Event("cudaStreamSynchronize", 60, 80),
    Event("cudaDeviceSynchronize", 90, 95),
    Event("cudaDeviceSynchronize", 200, 300),  # the profiler's own, in no step
    gpu(PAGEABLE, 3, 9),
    gpu(GEMM, 20, 40),
    gpu(ADD, 30, 60),
    gpu(PINNED, 55, 62),
    gpu("Memcpy DtoH (Device -> Pinned)", 70, 71),
    gpu("Memset (Device)", 71, 72),
    Event("Optimizer.step#SGD.step", 20, 90, on_gpu=True, annotation=True),
]


def test_events_become_seconds_a_step():
    assert summarize(EVENTS, 2, memory=100, used=40) == Gpu(
        2,
        busy=(6 + 42 + 2) / 2,
        kernels=40 / 2,
        copies=(6 + 7 + 1) / 2,
        uploads=(6 + 2) / 2,
        pageable=6 / 2,
        stalls=(8 + 20 + 5) / 2,
        item=20 / 2,
        copy=8 / 2,
        fusible=30 / 2,
        launches=1,
        items=0.5,
        memory=100,
        used=40,
    )


def test_a_stretch_without_work_for_the_gpu_has_no_figures():
    assert summarize([e for e in EVENTS if not e.on_gpu or e.annotation], 2) is None


LOADER = Loader("DataLoader", 8, 32, 0, False, False)
FAST = Loader("DataLoader", 8, 32, 4, True, True)


def found(wait, body, *, loader=LOADER, steps=10, **more):
    return Breakdown("train.py", "H200", loader, (Step(wait, body),) * steps, **more)


def advised(breakdown):
    return [(round(a.share, 2), a.text) for a in advice.advise(breakdown)]


def test_workers_are_as_many_as_the_work_leaves_time_for():
    (line,) = advised(found(3.0, 1.0))
    assert line == (
        0.75,
        "num_workers=3 instead of 0: the loop waits 3 s a step for its batch;"
        " a batch takes 3 s to load, the work on it 1 s",
    )


def test_workers_that_cannot_keep_up_load_for_as_long_as_a_step_of_all_of_them():
    ((share, line),) = advised(found(1.0, 1.0, loader=replace(LOADER, workers=2)))
    assert (share, line.partition(":")[0]) == (0.5, "num_workers=4 instead of 2")


@pytest.mark.parametrize("cores", [2, 8])
def test_there_are_no_more_workers_than_cores(cores):
    ((_, line),) = advised(found(1.0, 0.0, loader=replace(LOADER, cores=cores)))
    assert line.startswith(f"num_workers={cores} instead of 0")


def test_one_worker_beside_a_loop_that_only_loads_wins_nothing():
    assert advised(found(1.0, 0.0, loader=replace(LOADER, cores=1))) == []


def test_where_there_are_no_more_cores_loading_has_to_become_cheaper():
    ((share, line),) = advised(found(1.0, 1.0, loader=replace(LOADER, workers=2, cores=2)))
    assert (share, line) == (
        0.5,
        "load less or faster: the loop waits 1 s a step for its batch,"
        " and 2 workers on 2 cores are all there can be",
    )


def test_what_is_no_loader_is_loaded_ahead():
    ((share, line),) = advised(found(1.0, 1.0, loader=Loader("generator", 8)))
    assert (share, line.partition(":")[0]) == (0.5, "load ahead, in a DataLoader with workers")


def test_the_slowest_stage_is_named_and_held_against_the_wait():
    stages = (Stage("Blur", 32, 0.8), Stage("collate", 1, 0.1))
    lines = advised(found(1.0, 1.0, stages=stages))
    assert lines[1] == (
        0.4,
        "Blur is the slowest stage of loading, 800 ms a batch of the 900 ms of all that is timed:"
        " make it cheaper, do it once and keep the result, or do it on whole batches",
    )
    workers = replace(LOADER, workers=4, persistent=True)
    shares = [s for s, line in advised(found(1.0, 1.0, loader=workers, stages=stages))]
    assert shares == [0.5, 0.1]


def test_late_first_batches_keep_their_workers():
    epochs = (Step(5.0, 1.0, first=True), *(Step(0.0, 1.0),) * 4) * 2
    loader = replace(LOADER, workers=2)
    breakdown = replace(found(0, 0, loader=loader), steps=epochs)
    assert advised(breakdown) == [
        (
            0.5,
            "persistent_workers=True: first batches of epochs come later than others by 1 s a step",
        )
    ]
    assert advised(replace(breakdown, loader=replace(loader, persistent=True))) == []


def on_gpu(wait=0.0, body=1.0, **figures):
    return found(wait, body, loader=FAST, gpu=Gpu(10, **figures))


def test_copies_from_pageable_memory_are_pinned():
    ((share, line),) = advised(on_gpu(busy=0.98, uploads=0.3, pageable=0.3, copy=0.2, stalls=0.2))
    assert (share, line) == (
        0.3,
        "pin_memory=True and .to(device, non_blocking=True): 300 ms a step of copies from memory"
        " that is not pinned, the host waits 200 ms in copies",
    )


def test_copies_from_pinned_memory_need_not_be_waited_for():
    lines = advised(on_gpu(busy=0.8, uploads=0.3, copy=0.4, stalls=0.4))
    assert lines[0] == (
        0.2,
        "non_blocking=True where tensors are copied: the host waits 400 ms a step in copies",
    )


def test_items_are_counted_and_held_against_the_idle_gpu():
    ((share, line), *_) = advised(on_gpu(busy=0.7, stalls=0.9, item=0.9, items=12))
    assert (share, line) == (
        0.3,
        "fewer .item(): 12 a step (float() and bool() too) wait 900 ms; keep losses on the GPU"
        " and read them every hundredth step",
    )


def test_other_waits_have_a_line_of_their_own():
    ((share, line), *_) = advised(on_gpu(busy=0.5, stalls=0.9, item=0.5, copy=0.1))[1:]
    assert (share, line) == (
        0.3,
        "no other waiting: 300 ms a step in cudaStreamSynchronize and the like, outside .item()"
        " and copies: torch.cuda.synchronize(), nonzero() and boolean masks wait",
    )


def test_a_loop_that_launches_for_long_gets_a_graph_and_a_larger_batch():
    lines = advised(on_gpu(busy=0.4, kernels=0.4, launches=400, memory=80 << 30, used=8 << 30))
    assert lines == [
        (
            0.6,
            'a CUDA graph (torch.cuda.graph, or torch.compile with mode="reduce-overhead"): the'
            " host takes 1 s a step to launch 400 kernels of 1 ms, the GPU is idle for 60% of a"
            " step",
        ),
        (
            0.3,
            "a batch twice as large: the host's 1 s are paid once a batch, 8 GiB of 80 GiB of the"
            " GPU's memory are used",
        ),
    ]


@pytest.mark.parametrize(("memory", "used"), [(80, 41), (0, 0)])
def test_a_full_or_unknown_memory_has_no_room_for_a_larger_batch(memory, used):
    lines = advised(on_gpu(busy=0.4, kernels=0.4, launches=400, memory=memory, used=used))
    assert [line.partition(" (")[0] for _, line in lines] == ["a CUDA graph"]


def test_a_busy_gpu_with_much_elementwise_work_gets_a_compiler():
    assert advised(on_gpu(busy=0.97, kernels=0.97, fusible=0.4, launches=4)) == [
        (
            0.4,
            "torch.compile, which merges them: 400 ms a step in PyTorch's elementwise and reducing"
            " kernels",
        )
    ]
    assert not any("merges" in line for _, line in advised(on_gpu(busy=0.4, fusible=0.3)))


def test_no_change_wins_more_than_the_gpu_is_idle():
    for wait, body in ((9.0, 1.0), (1.0, 9.0)):
        lines = advised(on_gpu(wait, body, busy=9.0, kernels=9.0, launches=2, stalls=2, item=2))
        assert lines
        assert all(share <= 0.1 for share, _ in lines)


def test_the_largest_win_comes_first():
    shares = [s for s, _ in advised(on_gpu(0.2, 1, busy=0.3, stalls=0.5, item=0.3, copy=0.2))]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 3


def test_nothing_stands_out_where_nothing_does():
    said = text(on_gpu(0.01, 0.99, busy=0.98, kernels=0.97, launches=9))[-1]
    reason = "no change that is known here can win 5%."
    assert said == f"Nothing stands out: the GPU is busy for 98% of a step, {reason}"
    said = text(found(0.01, 0.99))[-1]
    host = "the step's own Python and operators take 99%"
    assert said == f"Nothing stands out: {host}, {reason}"


def test_a_clock_that_stood_still_is_no_error():
    assert text(found(0.0, 0.0))[-1].startswith("Nothing stands out")


REPORT = """
train.py on H200: 10 steps of DataLoader (batch 32, 4 workers, pinned), after 5 of warm-up in 10 s
GPU: 10 other steps under torch.profiler, 8 kernels and 2 .item() a step

                                           a step  share  in total
step                                       1 s     100%   10 s
data: waiting for the next batch           250 ms  25%    2.5 s
host: Python and launching                 500 ms  50%    5 s
stalls: the host waits for the GPU         250 ms  25%    2.5 s
drain: the GPU still works after an epoch  0 ns    0%     0 ns
GPU busy                                   500 ms  50%    5 s
kernels                                    400 ms  40%    4 s
copies                                     100 ms  10%    1 s
GPU idle                                   500 ms  50%    5 s

loading, summed over 4 workers  calls a batch  a batch
Blur                            32             600 ms
collate                         1              100 ms
"""


def test_the_report_in_full():
    breakdown = replace(
        on_gpu(0.25, 0.75, busy=0.5, kernels=0.4, copies=0.1, stalls=0.25, items=2, launches=8),
        warm=(Step(1.0, 1.0),) * 5,
        stages=(Stage("Blur", 32, 0.6), Stage("collate", 1, 0.1)),
    )
    assert breakdown.lines() == REPORT.strip().splitlines()


def test_what_the_host_does_adds_up_to_the_step():
    rows = on_gpu(0.25, 0.75, busy=0.5, stalls=2.0).rows()
    assert sum(rows[name] for name in ("data", "host", "stalls", "drain")) == 1.0
    assert (rows["GPU idle"], rows["host"]) == (0.5, 0.0)


def test_the_rest_of_loading_is_shown_where_the_loop_loads_itself():
    lines = found(1.0, 1.0, stages=(Stage("Blur", 32, 0.75),)).lines()
    assert lines[-1].split("  ")[0] == "the rest"
    assert lines[-1].endswith("250 ms")


def test_steps_told_by_the_optimizer_do_not_know_what_they_waited_for():
    lines = found(0.0, 1.0, loader=None, note="no GPU is used").lines()
    assert lines[0] == "train.py on H200: 10 steps of the optimizer"
    assert lines[1] == "GPU: no figures: no GPU is used"
    assert "data too, which nobody was seen to ask for" in lines[-1]
    assert advised(found(0.0, 1.0, loader=None)) == []


def test_json_has_means_totals_every_step_and_the_advice():
    told = json.loads(json.dumps(plain(found(3.0, 1.0, steps=2))))
    assert told["rows"]["data"] == {"a_step": 3.0, "share": 0.75, "total": 6.0}
    assert told["steps"] == [{"wait": 3.0, "body": 1.0, "first": False}] * 2
    assert [a["share"] for a in told["advice"]] == [0.75]
    assert told["gpu"] is None
