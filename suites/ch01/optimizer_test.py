"""AdamW over many small parameters: update all of them with a few launches.

Problem    One AdamW step of `count` parameters of (n, n), fp32. The gradients arrive in one bucket
           of which every `.grad` is a view, as from data-parallel training.
Baseline   looped: `foreach=False`, 8 launches a parameter, 512 for 64 parameters.
Optimized  foreach: the same 8 operations, each on lists of tensors, in some 30 launches.
           fused: the whole update in one kernel over lists of tensors, in some 7 launches.
Bound      Launch: 512 x 5 us = 2.6 ms. The others are left with the host's work on lists of 64:
           some 0.4 ms for foreach (7x), 0.2 ms for fused (16x). The 7 MB move in 2 us.
"""

from types import SimpleNamespace

import torch

from pytest_aisp import Variant, Work, compare

# 1 - beta is exact in fp32. With the usual 0.999 it is not, and the fused kernel, which subtracts
# in fp32, has second moments that are off by 1.3e-5: the price of that default, not of fusing.
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
    foreach.state = fused.state = looped.state  # one set of moments, whoever makes the first step
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
    # 8 roundings in a row in a step. A window is up to 16 steps over two gradients in turn: the
    # update repeats, and so its rounding errors point in one direction.
    work=lambda count, n: Work(read=16 * count * n * n, write=12 * count * n * n, roundings=8 * 16),
    bound="launch",
)
def test_optimizer(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
