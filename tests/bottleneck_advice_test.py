"""The figures and the advice of `aisp bottleneck`, from made-up events; nothing runs a loop."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_aisp.training_loop.breakdown import Breakdown, Loader, advise
from pytest_aisp.training_loop.loop import BODY, COPY, ITEM, Event, GpuStep, Step, summarize
from pytest_aisp.training_loop.stages import Stage


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
    Event("cudaDeviceSynchronize", 200, 300),  # the profiler's own, outside the steps
    gpu(PAGEABLE, 3, 9),
    gpu(GEMM, 20, 40),
    gpu(ADD, 30, 60),
    gpu(PINNED, 55, 62),
    gpu("Memcpy DtoH (Device -> Pinned)", 70, 71),
    gpu("Memset (Device)", 71, 72),
    Event("Optimizer.step#SGD.step", 20, 90, on_gpu=True, annotation=True),
]


def test_events_become_seconds_per_step():
    assert summarize(EVENTS, 2, memory=100, used=40) == GpuStep(
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
    assert summarize([e for e in EVENTS if not e.on_gpu or e.annotation], 2) is None


LOADER = Loader("DataLoader", 8, 32, 0, False, False)
FAST = Loader("DataLoader", 8, 32, 4, True, True)


def found(wait, body, *, loader=LOADER, steps=10, **more):
    return Breakdown("train.py", "H200", loader, (Step(wait, body),) * steps, **more)


def on_gpu(wait=0.0, body=1.0, **figures):
    return found(wait, body, loader=FAST, gpu=GpuStep(10, **figures))


def advised(breakdown):
    return [(round(a.share, 2), a.text) for a in advise(breakdown)]


@pytest.mark.parametrize(
    ("breakdown", "share", "text"),
    [
        (
            found(3.0, 1.0),
            0.75,
            "num_workers=3 instead of 0: the loop waits 3 s per step for its batch;"
            " loading a batch takes 3 s, working on it 1 s",
        ),
        (found(1.0, 1.0, loader=replace(LOADER, workers=2)), 0.5, "num_workers=4 instead of 2"),
        (found(1.0, 0.0, loader=replace(LOADER, cores=2)), 0.5, "num_workers=2 instead of 0"),
        (found(1.0, 0.0), 0.88, "num_workers=8 instead of 0"),
        (
            found(1.0, 1.0, loader=replace(LOADER, workers=2, cores=2)),
            0.5,
            "load less data, or load it faster: the loop waits 1 s per step for its batch,"
            " and 2 cores have no room for more than 2 workers",
        ),
        (
            found(1.0, 1.0, loader=Loader("generator", 8)),
            0.5,
            "load ahead, in a DataLoader with workers: the loop waits 1 s per step for its batch",
        ),
        (
            on_gpu(busy=0.98, uploads=0.3, pageable=0.3, copy=0.2, stalls=0.2),
            0.3,
            "pin_memory=True and .to(device, non_blocking=True): copies from unpinned memory take"
            " 300 ms per step, and the host waits 200 ms per step in copies",
        ),
        (
            on_gpu(busy=0.97, kernels=0.97, fusible=0.4, launches=4),
            0.4,
            "torch.compile, which fuses kernels: PyTorch's elementwise and reduction kernels take"
            " 400 ms per step",
        ),
    ],
)
def test_the_only_advice_for_a_loop(breakdown, share, text):
    ((seen, line),) = advised(breakdown)
    assert (seen, line[: len(text)]) == (share, text)


@pytest.mark.parametrize(
    ("breakdown", "place", "share", "text"),
    [
        (
            found(1.0, 1.0, stages=(Stage("Blur", 32, 0.8), Stage("collate", 1, 0.1))),
            1,
            0.4,
            "Blur is the slowest stage of loading, 800 ms of the 900 ms timed per batch: make it"
            " cheaper, cache its result, or apply it to whole batches",
        ),
        (
            on_gpu(busy=0.8, uploads=0.3, copy=0.4, stalls=0.4),
            0,
            0.2,
            "non_blocking=True where tensors are copied: the host waits 400 ms per step in copies",
        ),
        (
            on_gpu(busy=0.7, stalls=0.9, item=0.9, items=12),
            0,
            0.3,
            "fewer .item() calls: 12 per step, float() and bool() included, wait 900 ms; keep"
            " losses on the GPU and read them every 100 steps",
        ),
        (
            on_gpu(busy=0.5, stalls=0.9, item=0.5, copy=0.1),
            1,
            0.3,
            "fewer other waits: 300 ms per step in cudaStreamSynchronize and similar calls, which"
            " torch.cuda.synchronize(), nonzero() and boolean masks make",
        ),
    ],
)
def test_one_line_among_several(breakdown, place, share, text):
    assert advised(breakdown)[place] == (share, text)


def test_a_stage_in_several_workers_saves_its_part_of_the_wait():
    stages = (Stage("Blur", 32, 0.8), Stage("collate", 1, 0.1))
    workers = replace(LOADER, workers=4, persistent=True)
    shares = [share for share, _ in advised(found(1.0, 1.0, loader=workers, stages=stages))]
    assert shares == [0.5, 0.1]


def test_late_first_batches_need_persistent_workers():
    epochs = (Step(5.0, 1.0, first=True), *(Step(0.0, 1.0),) * 4) * 2
    loader = replace(LOADER, workers=2)
    breakdown = replace(found(0, 0, loader=loader), steps=epochs)
    text = "persistent_workers=True: the first batch of an epoch takes longer than the others,"
    assert advised(breakdown) == [(0.5, f"{text} which costs 1 s per step")]
    assert advised(replace(breakdown, loader=replace(loader, persistent=True))) == []


def test_many_launches_need_a_graph_or_a_larger_batch():
    lines = advised(on_gpu(busy=0.4, kernels=0.4, launches=400, memory=80 << 30, used=8 << 30))
    assert lines == [
        (
            0.6,
            'a CUDA graph (torch.cuda.graph, or torch.compile with mode="reduce-overhead"): the'
            " host takes 1 s per step to launch 400 kernels of 1 ms, and the GPU is idle for 60%"
            " of a step",
        ),
        (
            0.3,
            "a batch twice as large: the host takes 1 s for a batch of any size, and only 8 GiB of"
            " the GPU's 80 GiB are used",
        ),
    ]


@pytest.mark.parametrize(("memory", "used"), [(80, 41), (0, 0)])
def test_a_full_or_unknown_memory_has_no_room_for_a_larger_batch(memory, used):
    lines = advised(on_gpu(busy=0.4, kernels=0.4, launches=400, memory=memory, used=used))
    assert [line.partition(" (")[0] for _, line in lines] == ["a CUDA graph"]


@pytest.mark.parametrize(
    "breakdown",
    [
        found(1.0, 0.0, loader=replace(LOADER, cores=1)),  # one worker is no faster than the loop
        found(0.0, 1.0, loader=None),
        found(0.0, 0.0),  # a clock that stood still
        on_gpu(0.01, 0.99, busy=0.98, kernels=0.97, launches=9),
    ],
)
def test_nothing_stands_out(breakdown):
    assert advised(breakdown) == []
    assert breakdown.report()[-1].startswith("Nothing stands out: ")


def test_without_advice_the_report_says_what_takes_the_time():
    reason = "and no known change can save 5%."
    idle = on_gpu(0.01, 0.99, busy=0.98, kernels=0.97, launches=9).report()[-1]
    assert idle == f"Nothing stands out: the GPU is busy for 98% of a step, {reason}"
    host = "Python and operators in the step take 99%"
    assert found(0.01, 0.99).report()[-1] == f"Nothing stands out: {host}, {reason}"


def test_no_change_saves_more_than_the_gpu_is_idle():
    for wait, body in ((9.0, 1.0), (1.0, 9.0)):
        lines = advised(on_gpu(wait, body, busy=9.0, kernels=9.0, launches=2, stalls=2, item=2))
        assert lines
        assert all(share <= 0.1 for share, _ in lines)
    idle = advised(on_gpu(busy=0.4, fusible=0.3))
    assert not any("fuses" in line for _, line in idle)


def test_the_largest_saving_comes_first():
    shares = [s for s, _ in advised(on_gpu(0.2, 1, busy=0.3, stalls=0.5, item=0.3, copy=0.2))]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 3


REPORT = """
train.py on H200: 10 steps over DataLoader (batch 32, 4 workers, pinned), after 5 warm-up steps in\
 10 s
GPU: 10 more steps under torch.profiler, 8 kernels and 2 .item() per step

                                        per step  share  total
step                                    1 s       100%   10 s
data: waiting for the next batch        250 ms    25%    2.5 s
host: Python and kernel launches        500 ms    50%    5 s
stalls: the host waits for the GPU      250 ms    25%    2.5 s
drain: the GPU finishes after an epoch  0 ns      0%     0 ns
GPU busy                                500 ms    50%    5 s
kernels                                 400 ms    40%    4 s
copies                                  100 ms    10%    1 s
GPU idle                                500 ms    50%    5 s

loading, summed over 4 workers  calls per batch  time per batch
Blur                            32               600 ms
collate                         1                100 ms

The most that each change can save of a step (do not add overlapping savings):
 50%  a CUDA graph
"""


def test_the_report_in_full():
    breakdown = replace(
        on_gpu(0.25, 0.75, busy=0.5, kernels=0.4, copies=0.1, stalls=0.25, items=2, launches=8),
        warm=(Step(1.0, 1.0),) * 5,
        stages=(Stage("Blur", 32, 0.6), Stage("collate", 1, 0.1)),
    )
    assert "\n".join(breakdown.report()).startswith(REPORT.strip())


def test_the_hosts_rows_add_up_to_the_step():
    rows = on_gpu(0.25, 0.75, busy=0.5, stalls=2.0).rows()
    assert sum(rows[name] for name in ("data", "host", "stalls", "drain")) == 1.0
    assert (rows["GPU idle"], rows["host"]) == (0.5, 0.0)


def test_a_loop_that_loads_itself_shows_the_other_loading_time():
    lines = found(1.0, 1.0, stages=(Stage("Blur", 32, 0.75),)).report()
    (other,) = [line.split() for line in lines if line.startswith("other")]
    assert other == ["other", "1", "250", "ms"]


def test_steps_of_the_optimizer_include_loading():
    lines = found(0.0, 1.0, loader=None, note="no GPU is used").report()
    assert lines[0] == "train.py on H200: 10 optimizer steps"
    assert lines[1] == "GPU: no figures: no GPU is used"
    assert any(line.startswith("host: Python and operators; loading data too") for line in lines)


def test_json_has_means_totals_every_step_and_the_advice():
    plain = json.loads(json.dumps(found(3.0, 1.0, steps=2).to_json()))
    assert plain["rows"]["data"] == {"a_step": 3.0, "share": 0.75, "total": 6.0}
    assert plain["steps"] == [{"wait": 3.0, "body": 1.0, "first": False}] * 2
    assert [a["share"] for a in plain["advice"]] == [0.75]
    assert plain["gpu"] is None
