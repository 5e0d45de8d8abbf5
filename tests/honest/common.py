"""Everyday pages: two honest sides each, written as a stranger would from the docs alone."""

from __future__ import annotations

import functools

import torch

from pytest_aisp import Work, compare


def in_float64(side):
    """Return a reference that runs `side` on float64 copies of its floating point inputs."""

    @functools.wraps(side)
    def reference(*inputs):
        return side(*(as_float64(x) for x in inputs))

    return reference


def as_float64(x):
    if isinstance(x, torch.Tensor) and x.is_complex():
        return x.to(torch.complex128)
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.double() if floating else x


def honest(baseline, *optimized, inputs, reference=None, n=33, **page):
    """Return the test of a page whose sides are all honest."""

    def test(pair):
        pair.assert_equivalent()
        pair.assert_speedup()

    everyday = {
        "reference": reference or in_float64(baseline),
        "sizes": [{"n": 4 * n + 1}],
        "check_sizes": [{"n": n}],
        "work": lambda n: Work(read=4 * n, write=4 * n),
        "bound": "dram",
    }
    return compare(
        baseline=baseline, optimized=list(optimized), inputs=inputs, **{**everyday, **page}
    )(test)


def randn(*shape, dtype=torch.float32):
    """Return an `inputs` function: normal values of `shape`, in which None is n."""

    def inputs(device, n):
        return (torch.randn([n if d is None else d for d in shape], device=device).to(dtype),)

    return inputs
