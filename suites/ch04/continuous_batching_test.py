"""Continuous batching: when a request ends, its slot takes the next request.

Problem    Serve `requests` requests of 1 to `longest` steps with 16 slots. Most requests are short.
           In a step, one token of each slot attends to the slot's cache and goes through an MLP.
           All sides return the result of every step of every request. The host knows only after a
           step which requests have ended.
Baseline   static: 16 requests start together, and the next 16 start when the longest request has
           ended. After the end of a shorter request, its slot keeps computing, and the results are
           discarded.
Optimized  continuous: after each step, the next requests take the slots that have become free.
           Both sides run the same step and read 16 flags from the GPU after it.
Bound      The host. A step takes about twenty launches and one read of flags, no matter how many
           slots are in use. So the time depends on the number of steps. Lengths are `longest` times
           the cube of a uniform random number. The mean length is a quarter of `longest`, but the
           longest of 16 requests nearly reaches `longest`. With several GPUs, each GPU can serve
           its own requests in this way.
Seen       A step takes longer than predicted from its launches and its read of flags, by about the
           same factor on both sides. We cannot explain this. The measured speedup is close to the
           prediction.
Use when   The lengths of requests differ a lot, as in serving a language model. vLLM, SGLang and
           TensorRT-LLM use continuous batching. If all requests have the same length, `static` is
           as fast.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

SLOTS = 16


def inputs(device, requests, longest, width):
    def normal(*shape):
        return torch.randn(shape, device=device)

    tokens = normal(requests, longest, width)
    lengths = (longest * torch.rand(requests, device=device) ** 3).long() + 1
    weights = [normal(width, many * width) / width**0.5 for many in (3, 4)]
    return tokens, lengths, *weights, normal(4 * width, width) / (4 * width) ** 0.5


def reference(tokens, lengths, to_heads, up, down):
    """Compute all steps of all requests at once, and keep the steps before the end of each
    request."""
    x, steps = tokens.double(), tokens.shape[1]
    query, key, value = (x @ to_heads.double()).chunk(3, dim=-1)
    later = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    x = x + scores.softmax(-1) @ value
    x = x + F.gelu(x @ up.double()) @ down.double()
    alive = torch.arange(steps, device=x.device) < lengths[:, None]
    return x.where(alive[..., None], 0.0)


def new_slots(tokens, lengths):
    """Return empty slots. Free slots write to a row of `out` that the sides do not return."""
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
    """Start `requests` in the slots whose numbers are in `free`."""
    device = slots.position.device
    which, taken = torch.tensor([free, requests], device=device)
    slots.request[which] = taken
    slots.position[which] = 0
    slots.last[which] = slots.lasts[taken]


def step(slots, to_heads, up, down):
    """Advance every slot by one token. Return a bool per slot: True if it is free."""
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


def served(requests, longest, width, steps, admissions):
    step = Cost(
        ops={"fp32": SLOTS * width * (22 * width + 4 * longest)},
        launches=22,
        host_steps=7,
        syncs=1,
    )
    admission = Cost(launches=6, host_steps=1, syncs=1)
    ends = Cost(write=4 * width * longest * (2 * SLOTS + 2 * requests), launches=12)
    return ends + round(steps) * step + round(admissions) * admission


def expected(longest, requests):
    """Return the expected length of the longest of `requests` requests."""
    return sum(1 - (steps / longest) ** (requests / 3) for steps in range(longest))


def in_groups(requests, longest, width):
    groups = -(-requests // SLOTS)
    return served(requests, longest, width, groups * expected(longest, SLOTS), groups)


def in_slots(requests, longest, width):
    """Return the cost if all slots are in use until `longest` / 2 steps before the end. A
    simulation gave this number."""
    steps = requests * expected(longest, 1) / SLOTS + longest / 2
    return served(requests, longest, width, steps, admissions=requests / 2)


@compare(
    baseline=static,
    optimized=[continuous],
    inputs=inputs,
    reference=reference,
    sizes=[{"requests": 64, "longest": 64, "width": 512}],
    cpu_sizes=[{"requests": 64, "longest": 16, "width": 32}],
    # Fewer requests than slots, one request left over, and requests of one step.
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
    costs={static: in_groups, continuous: in_slots},
    at_least={"sm90": 1.6, "cpu": 1.2},
)
def test_continuous_batching(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
