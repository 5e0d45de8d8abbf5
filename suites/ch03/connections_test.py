"""Hardware queues: give each of several overlapping streams its own queue.

Problem    Run 16 independent chains of four layer norms, each in its own stream. A matrix has few
           rows, and a kernel has one block per row, so a single kernel leaves most SMs idle. The
           host launches all kernels of a chain before the kernels of the next chain, as in a loop
           over streams.
Baseline   one_queue: `CUDA_DEVICE_MAX_CONNECTIONS=1`. All streams share one queue to the GPU. While
           the second kernel of a chain waits in the queue for the first, all kernels behind it wait
           too. Megatron requires this setting on Hopper and older GPUs, because kernels then start
           in launch order. So a collective gets its SMs before a matrix product that is launched
           later.
Optimized  eight_queues: changes `one_queue`. The variable is not set. The default is 8 queues, so
           two chains share a queue.
           a_queue_each: changes `eight_queues`. The variable is set to 32, its largest value.
Bound      Latency: a block reads its row, waits for the mean, and reads it again. `one_queue` runs
           the chains almost one after another, because a chain can start only when the previous
           chain has reached its last kernel. If each chain has its own queue, all chains run at the
           same time. The costs count bytes and operations at the rates of a whole GPU, and leave
           out latency and queues. So the costs predict no gain.
Seen       On an H200, `eight_queues` is more than five times as fast as `one_queue`, and
           `a_queue_each` more than eight times. All sides take much longer than predicted:
           `one_queue` nearly 200 times as long, `eight_queues` more than 30 times, and
           `a_queue_each` more than 20 times. The measured times fit a count of the kernels that run
           one after another. In `one_queue`, a chain starts when the previous chain has reached its
           last kernel, so 49 kernels run one after another. In `eight_queues`, two chains share a
           queue, so 7 kernels do. In `a_queue_each`, 4 kernels do. The three times agree with this
           count within a few percent if such a kernel takes 1.7 ms and everything else takes 3.6
           ms. We fitted these two numbers, and did not measure them separately.
Use when   Several streams of small kernels run at once. Set the variable to 1 only if a framework
           requires it. With one stream, or with kernels that fill the GPU, the number of queues
           makes no difference. Kernels must also take longer than their launches. The rows of this
           page are much longer than those of a model, so one of its kernels takes far longer than a
           launch. If kernels are as short as their launches, the host is the limit, and the gain is
           small with any number of queues. The page does not show where this begins. A CUDA graph
           does not need the setting, because the graph contains the dependencies between its
           kernels.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare, fresh_process

CHAINS, LAYERS = 16, 4


def inputs(device, rows, columns):
    return (
        torch.randn(CHAINS, rows, columns, device=device),
        torch.randn(LAYERS, columns, device=device),
        torch.randn(LAYERS, columns, device=device),
    )


def reference(x, scales, shifts):
    x = x.double()
    for scale, shift in zip(scales.double(), shifts.double(), strict=True):
        spread = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        x = (x - x.mean(-1, keepdim=True)) / spread * scale + shift
    return x


def normed(x, scales, shifts):
    for scale, shift in zip(scales, shifts, strict=True):
        x = F.layer_norm(x, scale.shape, scale, shift)
    return x


def in_streams(x, scales, shifts):
    if not x.is_cuda:
        return torch.stack([normed(matrix, scales, shifts) for matrix in x])
    main, chains = torch.cuda.current_stream(), []
    for matrix in x:
        stream = torch.cuda.Stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            chains.append((stream, normed(matrix, scales, shifts)))
    for stream, _ in chains:
        main.wait_stream(stream)
    return torch.stack([result for _, result in chains])


@fresh_process(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
def one_queue(x, scales, shifts):
    return in_streams(x, scales, shifts)


@fresh_process(environment={"CUDA_DEVICE_MAX_CONNECTIONS": None})
def eight_queues(x, scales, shifts):
    return in_streams(x, scales, shifts)


@fresh_process(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
def a_queue_each(x, scales, shifts):
    return in_streams(x, scales, shifts)


def norms(rows, columns):
    matrix, vectors = 4 * rows * columns, 8 * columns
    norm = Cost(read=matrix + vectors, write=matrix, ops={"fp32": 7 * rows * columns}, launches=1)
    joined = Cost(read=CHAINS * matrix, write=CHAINS * matrix, launches=1)
    return CHAINS * LAYERS * norm + joined


@compare(
    baseline=one_queue,
    optimized=[eight_queues, a_queue_each],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2, "columns": 1 << 20}],
    check_sizes=[{"rows": 2, "columns": 67}],
    work=lambda rows, columns: Work(
        read=4 * CHAINS * rows * columns,
        write=4 * CHAINS * rows * columns,
        flops={"fp32": 7 * CHAINS * LAYERS * rows * columns},
        terms=columns,
        roundings=LAYERS,
    ),
    bound="latency",
    costs=dict.fromkeys((one_queue, eight_queues, a_queue_each), norms),
)
def test_connections(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
