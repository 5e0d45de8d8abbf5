"""AdamW on many small parameters: update all of them with a few launches.

Problem    Take one AdamW step for `count` fp32 parameters of (n, n). The gradients arrive in one
           bucket, as in data-parallel training, and every `.grad` is a view of the bucket.
Baseline   looped: `foreach=False`, 8 launches per parameter. On a GPU, torch's default is foreach.
Optimized  foreach: changes `looped`. Each of the 8 operations applies to lists of tensors, in 10
           launches.
           fused: changes `foreach`. One kernel makes the whole update, in 3 launches.
Bound      The host on every side, because the parameters are small. Launches limit `looped`. Python
           code limits `foreach` and `fused`.
Seen       `foreach` and `fused` take longer than predicted. The cost counts calls to torch, but not
           the Python loops of `torch.optim` over the parameters. These loops explain the
           difference. In a test on a CPU with parameters of one element, we replaced the update's
           kernels (except the square roots of `foreach`) with functions that do nothing. There,
           `fused` took as long as 140 to 220 calls of `Tensor.view`, and `foreach` took as long as
           500 calls. At the rate of `host_step`, these calls plus the launches take about the
           measured times.
Use when   A model has many small parameters. To see what fused would gain in your code, compare it
           with `foreach`, which is the default. With a few large parameters, DRAM is the limit, but
           `fused` still reads and writes each value fewer times than `foreach`.
"""

from types import SimpleNamespace

import torch

from pytest_aisp import Cost, Variant, Work, compare

# With these betas, 1 - beta is exact in fp32. With the usual 0.999 it is not exact. The fused
# kernel subtracts in fp32, so its second moments would be off by 1.3e-5. The page avoids this
# error, because it is not caused by fusing.
LR, BETAS, EPS, DECAY = 1e-3, (1 - 2**-3, 1 - 2**-10), 1e-8, 1e-2


def state(device, count, n):
    weights = torch.randn(count, n, n, device=device) / n**0.5
    bucket = torch.zeros_like(weights)
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for parameter, gradient in zip(parameters, bucket, strict=True):
        parameter.grad = gradient

    def adamw(**kind):
        return torch.optim.AdamW(parameters, LR, BETAS, EPS, DECAY, **kind)

    looped, foreach, fused = adamw(foreach=False), adamw(foreach=True), adamw(fused=True)
    foreach.state = fused.state = looped.state  # all three optimizers share the moments
    return SimpleNamespace(
        parameters=parameters, bucket=bucket, looped=looped, foreach=foreach, fused=fused
    )


def inputs(device, count, n):
    return (torch.randn(count, n, n, device=device),)


def reference(state, gradients):
    state.bucket.copy_(gradients)
    p = torch.stack(tuple(state.parameters)).detach().double()
    g = gradients.double()
    t, m, v = getattr(state, "moments", (0, torch.zeros_like(p), torch.zeros_like(p)))
    t, m, v = t + 1, m.lerp(g, 1 - BETAS[0]), v.lerp(g.square(), 1 - BETAS[1])
    m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
    state.parameters = list(p * (1 - LR * DECAY) - LR * m_hat / (v_hat.sqrt() + EPS))
    state.moments = t, m, v
    for key, first, second in zip(state.looped.param_groups[0]["params"], m, v, strict=True):
        state.looped.state[key] = {"exp_avg": first, "exp_avg_sq": second}


def looped(state, gradients):
    state.bucket.copy_(gradients)
    state.looped.step()


def foreach(state, gradients):
    state.bucket.copy_(gradients)
    state.foreach.step()


def fused(state, gradients):
    state.bucket.copy_(gradients)
    state.fused.step()


def update(count, n, launches, host_steps):
    """Return the cost of copying the gradients and of one update. All data stays in the L2."""
    return Cost(
        read=16 * count * n * n,
        write=12 * count * n * n,
        launches=launches + 1,
        host_steps=host_steps,
    )


@compare(
    baseline=looped,
    optimized=[
        Variant(foreach, at_least={"sm90": 5.0, "cpu": 1.2}),
        Variant(fused, at_least={"sm90": 9.0, "cpu": 3.0}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 64, "n": 64}],
    check_sizes=[{"count": 3, "n": 33}],
    cpu_sizes=[{"count": 100, "n": 16}],
    # A step has 8 roundings in a row. A timed window has up to 16 steps that alternate between two
    # gradients, so the updates repeat and their rounding errors add up in one direction.
    work=lambda count, n: Work(read=16 * count * n * n, write=12 * count * n * n, roundings=8 * 16),
    bound="launch",
    costs={
        # Host steps per parameter: add 1 to its step counter on the CPU, read the counter, create
        # two results.
        looped: lambda count, n: update(count, n, launches=8 * count, host_steps=4 * count),
        # One launch handles 64 pairs of tensors, but only 48 triples. Host steps per parameter: add
        # 1 to its step counter on the CPU, read the counter twice, create one result.
        foreach: lambda count, n: update(
            count, n, launches=6 + 2 * -(-count // 48), host_steps=4 * count
        ),
        # One launch handles 36 parameters.
        fused: lambda count, n: update(count, n, launches=1 + -(-count // 36), host_steps=0),
    },
)
def test_optimizer(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
