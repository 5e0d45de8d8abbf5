"""KV hand-off: send a layer's cache while the GPU computes the next layer.

Problem    A prefill rank computes `layers` layers for `tokens` tokens. A decode rank needs the KV
           cache of these layers, `kv` bf16 numbers per token and layer. A layer is a projection to
           keys and values, a projection to the next layer's input, and a norm.
Baseline   staged: each layer's cache goes through pinned memory that both ranks share. The prefill
           rank copies a layer's cache to the host, and waits for the copy before it computes the
           next layer. The decode rank fetches the cache while the prefill rank computes the next
           layer. `staged` shows the cost of this order on GPUs without peer access. With NVLink, an
           engineer would start with `sent`.
Optimized  sent: the prefill rank computes all layers, then sends the whole cache in one NCCL
           message.
           pipelined: the prefill rank sends each layer's cache on NCCL's stream while it computes
           the next layer.
Bound      Tensor cores. `pipelined` hides every message except the last behind the products of a
           layer. PCIe limits `staged`: each layer's cache crosses PCIe before the next layer
           begins. These layers have no attention and no MLP. A whole transformer layer would
           compute about nine times as much for a cache of this size, so both gains are smaller in a
           real model. NVLink multicast was off (README). A message to one GPU does not use
           multicast.
Seen       All sides take as long as predicted. `sent` gains mostly because `staged` waits for each
           copy, not because NVLink is faster. Copying a layer's cache to the host takes about as
           long as computing a layer. If staged copied on a separate stream during the next layer,
           it would take only about a fifth longer than `sent`, according to the costs. We did not
           measure such a version.
Use when   Prefill and decode run on different GPUs. Overlap each layer's message with the next
           layer, whatever path the message takes. If the GPUs have peer access, send the messages
           over NVLink.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Work, compare

from .host_memory import shared_by_all
from .wire_costs import collective

PREFILL, DECODE = 0, 1


def inputs(device, layers, tokens, hidden, kv):
    make = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **make)
    to_next = torch.randn(layers, hidden, hidden, **make) / hidden**0.5
    to_cache = torch.randn(layers, hidden, kv, **make) / hidden**0.5
    return x, to_next, to_cache


def reference(ranks):
    x, to_next, to_cache = (t.double() for t in ranks[PREFILL])
    cache = []
    for onwards, keys_and_values in zip(to_next, to_cache, strict=True):
        cache.append(x @ keys_and_values)
        x = F.rms_norm(x @ onwards, x.shape[-1:])
    return [x, torch.stack(cache)]


def new_cache(x, to_cache):
    return torch.empty(len(to_cache), len(x), to_cache.shape[-1], dtype=x.dtype, device=x.device)


def layer(x, onwards, keys_and_values, cache):
    torch.mm(x, keys_and_values, out=cache)
    return F.rms_norm(x @ onwards, x.shape[-1:])


def staged(x, to_next, to_cache):
    flag = torch.zeros(1, device=x.device)
    with shared_by_all(new_cache(x, to_cache)) as hosts:
        host = hosts[PREFILL]

        def run():
            cache, now = new_cache(x, to_cache), x
            for k in range(len(cache)):
                if dist.get_rank() == PREFILL:
                    now = layer(now, to_next[k], to_cache[k], cache[k])
                    host[k].copy_(cache[k], non_blocking=True)
                dist.all_reduce(flag)  # layer k is on the host
                if dist.get_rank() == DECODE:
                    cache[k].copy_(host[k], non_blocking=True)
            dist.all_reduce(flag)  # the whole cache has been fetched
            return now if dist.get_rank() == PREFILL else cache

        yield run


def sent(x, to_next, to_cache):
    cache = new_cache(x, to_cache)
    if dist.get_rank() == DECODE:
        dist.recv(cache, PREFILL)
        return cache
    for k in range(len(cache)):
        x = layer(x, to_next[k], to_cache[k], cache[k])
    dist.send(cache, DECODE)
    return x


def pipelined(x, to_next, to_cache):
    cache, requests = new_cache(x, to_cache), []
    for k in range(len(cache)):
        if dist.get_rank() == PREFILL:
            x = layer(x, to_next[k], to_cache[k], cache[k])
            requests.append(dist.isend(cache[k], DECODE))
        else:
            requests.append(dist.irecv(cache[k], PREFILL))
    for request in requests:
        request.wait()
    return x if dist.get_rank() == PREFILL else cache


def layers_of(layers, tokens, hidden, kv, sent=0):
    """Return the cost of `layers` layers. `sent` bytes of one layer are sent during the next."""
    row = 2 * tokens * hidden
    to_cache = Cost(
        read=row + 2 * hidden * kv,
        write=2 * tokens * kv,
        ops={"bf16": 2 * tokens * hidden * kv},
        launches=1,
    )
    to_next = Cost(
        read=row + 2 * hidden**2,
        write=row,
        ops={"bf16": 2 * tokens * hidden**2},
        sent=sent,
        launches=2 if sent else 1,
    )
    return layers * (to_cache + to_next + Cost(read=row, write=row, launches=1))


def through_host(layers, tokens, hidden, kv):
    """Return the cost of the prefill rank, plus the decode rank's copy of the last layer's
    cache."""
    message = 2 * tokens * kv
    flag = Cost(launches=1, collectives=1)
    copied = Cost(d2h=message, launches=1) + flag
    return (
        layers * (layers_of(1, tokens, hidden, kv) + copied) + Cost(h2d=message, launches=1) + flag
    )


def sent_at_the_end(layers, tokens, hidden, kv):
    return layers_of(layers, tokens, hidden, kv) + collective(2 * layers * tokens * kv)


def sent_under_layers(layers, tokens, hidden, kv):
    message = 2 * tokens * kv
    first = layers_of(1, tokens, hidden, kv)
    return first + layers_of(layers - 1, tokens, hidden, kv, sent=message) + collective(message)


@compare(
    baseline=staged,
    optimized=[sent, pipelined],
    at_least={"sm90": 1.6},
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 8, "tokens": 4096, "hidden": 4096, "kv": 2048}],
    check_sizes=[
        {"layers": 2, "tokens": 17, "hidden": 33, "kv": 9},
        {"layers": 3, "tokens": 5, "hidden": 65, "kv": 31},
    ],
    work=lambda layers, tokens, hidden, kv: Work(
        wire=2 * layers * tokens * kv,
        flops={"bf16": 2 * layers * tokens * hidden * (hidden + kv)},
        terms=hidden,
        roundings=2 * layers,
    ),
    bound="tensor",
    costs={staged: through_host, sent: sent_at_the_end, pipelined: sent_under_layers},
    conditions=Conditions(gpus=2),
)
def test_kv_hand_off(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
