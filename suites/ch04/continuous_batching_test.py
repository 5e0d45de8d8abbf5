"""Continuous batching: a slot whose request has ended takes the next one.

Problem    Serve `requests` requests of 1 to `longest` steps with 16 slots; most are short. A step
           attends from one token of each slot to that slot's cache, and applies an MLP; the result
           of every step of every request counts. When one ends is known once its step is done.
Baseline   static: 16 requests at a time, until the longest of them has ended; the slots of those
           that ended earlier compute on for nobody.
Optimized  continuous: after each step the slots that have become free take the next requests.
           Both run the same step, and both read 16 flags from the device after each.
Bound      Host: a step is some 30 launches of 5 us and a read of flags, 0.17 ms, whatever its slots
           hold: the number of steps counts. Lengths are a uniform number's third power: of 1 to
           64, 16.5 on average, and 54 the longest of 16. 64 requests are 4 x 54 = 216 steps to
           static; to continuous 64 x 16.5 / 16 = 66, and some 30 while the last ones end: 2.2
           times fewer. Taking requests in costs 7 launches up to 64 times, where static does it
           4 times: a tenth, so 2 times. Each of several GPUs serves its own requests this way.
Seen       An H200: 2.11x; of 128 requests with up to 128 steps 2.5x. A step takes 0.25 ms.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Work, compare

SLOTS = 16


def inputs(device, requests, longest, width):
    def normal(*shape):
        return torch.randn(shape, device=device)

    tokens = normal(requests, longest, width)
    lengths = (longest * torch.rand(requests, device=device) ** 3).long() + 1
    weights = [normal(width, many * width) / width**0.5 for many in (3, 4)]
    return tokens, lengths, *weights, normal(4 * width, width) / (4 * width) ** 0.5


def reference(tokens, lengths, to_heads, up, down):
    """Compute all steps of all requests at once, and keep those before each request's end."""
    x, steps = tokens.double(), tokens.shape[1]
    query, key, value = (x @ to_heads.double()).chunk(3, dim=-1)
    later = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    x = x + scores.softmax(-1) @ value
    x = x + F.gelu(x @ up.double()) @ down.double()
    alive = torch.arange(steps, device=x.device) < lengths[:, None]
    return x.where(alive[..., None], 0.0)


def new_slots(tokens, lengths):
    """Return empty slots; `request` of one that is free is a row of `out` that nobody reads."""
    requests, longest, width = tokens.shape
    flags = {"device": tokens.device, "dtype": torch.long}
    return SimpleNamespace(
        request=torch.full((SLOTS,), requests, **flags),
        position=torch.zeros(SLOTS, **flags),
        last=torch.zeros(SLOTS, **flags),
        number=torch.arange(SLOTS, device=tokens.device),
        column=torch.arange(longest, device=tokens.device),
        cache=torch.zeros(2, SLOTS, longest, width, device=tokens.device),
        out=torch.zeros(requests + 1, longest, width, device=tokens.device),
        tokens=F.pad(tokens, (0, 0, 0, 0, 0, 1)),
        lasts=lengths - 1,
    )


def admit(slots, free, requests):
    """Let the slots `free` begin with `requests`."""
    device = slots.position.device
    which, taken = torch.tensor([free, requests], device=device)
    slots.request[which] = taken
    slots.position[which] = 0
    slots.last[which] = slots.lasts[taken]


def step(slots, to_heads, up, down):
    """Advance every slot by one token and return which have no request any more."""
    number, at = slots.number, slots.position
    x = slots.tokens[slots.request, at]
    query, key, value = (x @ to_heads).chunk(3, dim=-1)
    keys, values = slots.cache
    keys[number, at], values[number, at] = key, value
    scores = (keys @ query.unsqueeze(-1)).squeeze(-1) / query.shape[-1] ** 0.5
    shares = scores.masked_fill(slots.column > at[:, None], -torch.inf).softmax(-1)
    x = x + (shares.unsqueeze(1) @ values).squeeze(1)
    x = x + F.gelu(x @ up) @ down
    slots.out[slots.request, at] = x
    ended = at >= slots.last
    slots.request.masked_fill_(ended, len(slots.out) - 1)
    slots.position += ~ended
    return ended.tolist()


def static(tokens, lengths, to_heads, up, down):
    slots = new_slots(tokens, lengths)
    for first in range(0, len(tokens), SLOTS):
        requests = list(range(first, min(first + SLOTS, len(tokens))))
        admit(slots, list(range(len(requests))), requests)
        while not all(step(slots, to_heads, up, down)):
            pass
    return slots.out[:-1].clone()


def continuous(tokens, lengths, to_heads, up, down):
    slots = new_slots(tokens, lengths)
    waiting, ended = list(range(len(tokens))), [True] * SLOTS
    while waiting or not all(ended):
        free = [slot for slot, has_ended in enumerate(ended) if has_ended][: len(waiting)]
        if free:
            admit(slots, free, waiting[: len(free)])
            del waiting[: len(free)]
        ended = step(slots, to_heads, up, down)
    return slots.out[:-1].clone()


@compare(
    baseline=static,
    optimized=[continuous],
    inputs=inputs,
    reference=reference,
    sizes=[{"requests": 64, "longest": 64, "width": 512}],
    cpu_sizes=[{"requests": 64, "longest": 16, "width": 32}],
    # Fewer requests than slots, a rest of one, and requests of one step.
    check_sizes=[
        {"requests": 9, "longest": 7, "width": 33},
        {"requests": 33, "longest": 9, "width": 17},
        {"requests": 50, "longest": 2, "width": 9},
    ],
    work=lambda requests, longest, width: Work(
        # A request has longest / 4 steps on average, and attends to longest^2 / 14 positions.
        flops={"fp32": requests * longest * width * (22 * width / 4 + 4 * longest / 14)},
        terms=4 * width,
        roundings=4,
    ),
    bound="host",
    at_least={"sm90": 1.6, "cpu": 1.2},
)
def test_continuous_batching(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
