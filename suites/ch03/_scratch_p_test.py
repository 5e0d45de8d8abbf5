"""Scratch."""

from os import environ, kill, getpid
import torch
from pytest_aisp import Work, compare, fresh_process

MODE = environ.get("MODE", "")


def inputs(device, n):
    return torch.randn(n, n, device=device), torch.randn(n, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


@fresh_process(environment={"OMP_NUM_THREADS": "1"}, warmup=0 if MODE == "first" else 3)
def one(a, b):
    return a @ b


KEEP = {}


def body(a, b):
    fresh = environ.get("SCRATCH") == "1"
    if MODE == "wrong" and fresh:
        return torch.zeros_like(a)
    if MODE == "zeros":
        return torch.zeros_like(a)
    if MODE == "stale":
        return KEEP.setdefault(a.data_ptr(), a @ b).clone()
    if MODE == "fixed" and fresh:
        return KEEP.setdefault(0, a @ b)
    if MODE == "raise" and fresh:
        raise ValueError("no such thing")
    if MODE == "die" and fresh:
        kill(getpid(), 9)
    if MODE == "view":
        return a
    if MODE == "mutate" and fresh:
        y = a @ b
        a.zero_()
        return y
    return a @ b


def two(a, b):
    return body(a, b)


if MODE != "mixed":
    two = fresh_process(
        environment={"SCRATCH": "1", "OMP_NUM_THREADS": None}, warmup=0 if MODE == "first" else 3
    )(two)
if MODE == "mixed2":
    one = one.side
    one.__name__ = "one"


@compare(
    baseline=one,
    optimized=[two],
    inputs=inputs,
    reference=reference,
    sizes=[],
    check_sizes=[{"n": 33}],
    cpu_sizes=[{"n": 512}],
    work=lambda n: Work(terms=n),
    bound="issue",
    at_least={"cpu": 1.0},
)
def test_threads(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
