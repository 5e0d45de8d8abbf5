"""NVSHMEM pipeline: a put with a signal needs no handshake with the receiver.

Problem    Each of two ranks computes one stage. The first stage multiplies `batches` micro-batches
           of `rows` rows by a matrix, and the second stage multiplies the results by another
           matrix. Each stage returns its results.
Baseline   exchanged: the first rank sends each micro-batch as soon as it is computed. The receives
           are posted in advance, on NCCL's stream, so both stages and the link can work at the same
           time.
Optimized  whole: the first stage computes all micro-batches and sends them as one message. Then the
           second stage begins. There is one handshake and no overlap.
           signalled: changes `exchanged`. With NVSHMEM, on its own stream, the first rank puts each
           micro-batch into the second rank's memory and sets a signal after it. The second rank's
           stream waits for the signal. An all-reduce of a flag ends each call.
Bound      The host. A product and a message of this size take the GPU a few microseconds, less than
           the host needs to start them. `exchanged` and `signalled` make several calls from Python
           per micro-batch. `whole` makes only one call to send everything. All sides are timed as
           ordinary calls, because a replay of `signalled` as a CUDA graph never finished. NVLink
           multicast was off (README). A put to one GPU does not use multicast.
Seen       Every side takes several times as long as predicted. The prediction counts launches and
           views. A call of `isend` or of a put takes the host longer than a launch, and peaks.json
           has no rate for such calls. `whole` makes only one such call, so launching its products
           must also take the host longer than predicted. We cannot explain this. `exchanged`, the
           baseline of both variants, was measured twice. The two times differ a lot, so the gain of
           `signalled` is uncertain.
Use when   Use one message if the second stage can wait for the first. Use puts with signals inside
           a kernel, where a put needs no Python call. From Python, puts gain little over NCCL.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from .wire_costs import collective

FIRST, SECOND = 0, 1


def inputs(device, batches, rows, width):
    make = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(batches, rows, width, **make)
    return x, *(torch.randn(width, width, **make) / width**0.5 for _ in range(2))


def reference(ranks):
    """Return the first stage's results on rank 0, and the second stage's results on rank 1."""
    x, first, _ = ranks[FIRST]
    *_, second = ranks[SECOND]
    between = x.double() @ first.double()
    return [between, between @ second.double()]


def exchanged(x, first, second):
    between, requests = torch.empty_like(x), []
    if dist.get_rank() == FIRST:
        for k in range(len(x)):
            torch.mm(x[k], first, out=between[k])
            requests.append(dist.isend(between[k], SECOND))
        for request in requests:
            request.wait()
        return between
    out, requests = torch.empty_like(x), [dist.irecv(part, FIRST) for part in between]
    for k, request in enumerate(requests):
        request.wait()
        torch.mm(between[k], second, out=out[k])
    return out


def whole(x, first, second):
    between = torch.empty_like(x)
    if dist.get_rank() == FIRST:
        for k in range(len(x)):
            torch.mm(x[k], first, out=between[k])
        dist.send(between, SECOND)
        return between
    dist.recv(between, FIRST)
    out = torch.empty_like(x)
    for k in range(len(x)):
        torch.mm(between[k], second, out=out[k])
    return out


def signalled(x, first, second):
    between = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    signals = symmetric.empty(len(x), dtype=torch.int64, device=x.device).zero_()
    for memory in (between, signals):
        symmetric.rendezvous(memory, dist.group.WORLD)
    flag, puts = torch.zeros(1, device=x.device), torch.cuda.Stream()
    dist.all_reduce(flag)  # now the signals of all ranks are zero

    def put():
        now = torch.cuda.current_stream()
        for k in range(len(x)):
            torch.mm(x[k], first, out=between[k])
            puts.wait_stream(now)
            with torch.cuda.stream(puts):
                torch.ops.symm_mem.nvshmem_put_with_signal(between[k], signals[k], 1, SECOND)
        now.wait_stream(puts)
        return between

    def take():
        out = torch.empty_like(x)
        for k in range(len(x)):
            torch.ops.symm_mem.nvshmem_wait_for_signal(signals[k], 1, FIRST)
            torch.mm(between[k], second, out=out[k])
        signals.zero_()
        return out

    def run():
        out = put() if dist.get_rank() == FIRST else take()
        dist.all_reduce(flag)  # now all messages have been read, and the signals are zero
        return out

    yield run


def products(batches, rows, width, launches, host_steps):
    """Return the cost of one stage on one rank, with its calls per micro-batch."""
    one = Cost(
        l2=2 * width**2 + 4 * rows * width,
        ops={"bf16": 2 * rows * width**2},
        launches=launches,
        host_steps=host_steps,
    )
    return batches * one


def message_by_message(batches, rows, width):
    """Return the cost of one rank: a product, a send or receive, three views, and a wait."""
    stage = products(batches, rows, width, launches=2, host_steps=4)
    return stage + Cost(sent=2 * batches * rows * width, collectives=1)


def one_message(batches, rows, width):
    """Return the cost of both stages. The second stage's launches overlap with the first stage."""
    first = products(batches, rows, width, launches=1, host_steps=2)
    second = products(batches, rows, width, launches=0, host_steps=0)
    return first + collective(2 * batches * rows * width) + second


def put_by_put(batches, rows, width):
    """Return the cost of the first rank: a product, a put, four views, and two stream calls."""
    stage = products(batches, rows, width, launches=2, host_steps=6)
    return stage + Cost(sent=2 * batches * rows * width) + Cost(launches=1, collectives=1)


@compare(
    baseline=exchanged,
    optimized=[
        Variant(whole, at_least="yardstick"),
        Variant(signalled, gpu_only="NVSHMEM", at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"batches": 32, "rows": 16, "width": 2048}],
    check_sizes=[{"batches": 3, "rows": 5, "width": 33}, {"batches": 1, "rows": 2, "width": 65}],
    work=lambda batches, rows, width: Work(
        wire=2 * batches * rows * width,
        flops={"bf16": 2 * batches * rows * width**2},
        terms=width,
        roundings=2,
    ),
    bound="launch",
    costs={exchanged: message_by_message, whole: one_message, signalled: put_by_put},
    conditions=Conditions(gpus=2, l2="warm", environment={"TORCH_SYMMMEM": "NVSHMEM"}),
)
def test_nvshmem_pipeline(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
