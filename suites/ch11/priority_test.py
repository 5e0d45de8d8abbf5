"""Stream priority: small urgent kernels do not have to wait for a large kernel.

Problem    A large kernel computes the sigmoid of n fp32 values. At the same time, a recurrent
           network of width m computes `steps` steps of h = tanh(W h + x), each with three small
           kernels. Each step needs the result of the previous step. The network alone takes
           slightly less time than the large kernel alone, so the call takes longer if the network
           has to wait.
Baseline   same_priority: the large kernel on the current stream, and the network on a second one.
           The large kernel is launched first, so the GPU starts all its blocks before any block of
           the network.
Optimized  urgent: changes `same_priority`. The second stream has a higher priority. When a block of
           the large kernel ends, a waiting block of the network takes its place. Running blocks are
           not interrupted.
Bound      DRAM limits the large kernel, and the latency of small kernels limits the network. In
           `same_priority`, the two times add up. In `urgent`, they overlap, so a call takes only as
           long as the longer of the two. The costs include the start of a small kernel, but not its
           latency. The costs of `urgent` leave out the network's starts, which happen during the
           large kernel.
Seen       On an H200, `urgent` gains an eighth, but a gain of 40 % was predicted. `same_priority`
           takes about 30 % longer than predicted, and `urgent` about 60 % longer. The latency of
           the network's 96 small kernels, which the costs leave out, is probably the reason in
           `same_priority`. In `urgent`, the network and the large kernel overlap only in part. If
           the large kernel takes as long as predicted, only about a quarter of the network's time
           is hidden. While the large kernel runs, the network's kernels probably take longer,
           because they wait for free SMs and share DRAM and the L2. We did not measure this. These
           times are from CUDA graphs. In ordinary calls, `urgent` gains nothing: the host launches
           the network's kernels so slowly that such a call takes about four times as long.
Use when   Urgent requests share a GPU with other work, and the kernels of the other work have many
           short blocks. Priority does not help if these blocks run for milliseconds, as in
           persistent kernels. An SM must also have room for an urgent block next to the other
           blocks. The host must launch the urgent kernels fast enough, for example as a CUDA graph.
           A kernel in a CUDA graph keeps the priority of the stream on which it was captured. A
           call ends when both the network and the large kernel have ended, so this page does not
           time the network alone.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare


def inputs(device, n, steps, m):
    weight = torch.randn(m, m, device=device) / m**0.5
    return torch.randn(n, device=device), weight, torch.randn(steps, m, device=device)


def reference(large, weight, xs):
    h = torch.zeros_like(xs[0], dtype=torch.float64)
    for x in xs.double():
        h = torch.tanh(weight.double() @ h + x)
    return 1 / (1 + torch.exp(-large.double())), h


def beside(large, weight, xs, priority):
    gpu = torch.get_device_module(large.device)
    main = gpu.current_stream()
    network = gpu.Stream(priority=priority)
    if network == main:  # streams come from a pool, which may return the current stream
        network = gpu.Stream(priority=priority)
    network.wait_stream(main)
    out = torch.sigmoid(large)
    with gpu.stream(network):
        h = torch.zeros_like(xs[0])
        for x in xs:
            h = torch.mv(weight, h).add_(x).tanh_()  # addmv would copy x first
    main.wait_stream(network)
    return out, h


def same_priority(large, weight, xs):
    return beside(large, weight, xs, priority=0)


def urgent(large, weight, xs):
    return beside(large, weight, xs, priority=-1)


def sigmoids(n):
    # The division of a sigmoid takes a reciprocal after the exponential.
    return Cost(read=4 * n, write=4 * n, sfu=2 * n, ops={"fp32": 4 * n}, launches=1)


def recurrence(steps, m):
    """Return the cost of the network, which reads the weights from the L2."""
    first = Cost(read=4 * m * m, launches=1)
    step = Cost(read=4 * m, l2=4 * m * m, ops={"fp32": 2 * m * m + m}, launches=3)
    return first + steps * step + Cost(write=4 * m)


def apart(n, steps, m):
    return sigmoids(n) + recurrence(steps, m)


def at_once(n, steps, m):
    """Return the cost of the large kernel, with the bytes and operations of the network."""
    small = recurrence(steps, m)
    return Cost(
        read=4 * n + small.total("read"),
        write=4 * n + small.total("write"),
        l2=small.total("l2"),
        sfu=2 * n,
        ops={"fp32": 4 * n + steps * (2 * m * m + m)},
        launches=1,
    )


@compare(
    baseline=same_priority,
    optimized=[urgent],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27, "steps": 32, "m": 512}],
    check_sizes=[
        {"n": 1023, "steps": 5, "m": 33},
        {"n": st.integers(1, 999), "steps": st.integers(1, 6), "m": st.integers(1, 40)},
    ],
    work=lambda n, steps, m: Work(
        read=4 * (n + m * m + steps * m),
        write=4 * (n + m),
        flops={"fp32": 2 * steps * m * m},
        terms=m,
        roundings=4,
    ),
    bound="latency",
    costs={same_priority: apart, urgent: at_once},
)
def test_priority(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
