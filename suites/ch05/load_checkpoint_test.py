"""Load a checkpoint: map the file and copy only the weights that this rank needs.

Problem    A checkpoint holds the weights (width, width) of all experts of each layer, in bf16. One
           rank loads an eighth of each layer's experts to the GPU. The input gives the numbers of
           these experts. The file has just been written, so all sides read it from the page cache.
           Every call opens the file again, because a real process loads a checkpoint only once.
Baseline   whole: `torch.load` reads all weights into memory. Then the rank's weights are copied to
           the GPU.
Optimized  mapped: changes `whole`. With `mmap=True`, only the pages of the rank's weights are read.
           safetensors: changes `mapped`. The file is in the safetensors format, read by `safe_open`
           and `get_tensor`. The format contains no pickle. Without the library safetensors, the
           variant is skipped.
Bound      Host memory limits `whole`, which copies every byte of the file. `mapped` and
           `safetensors` read the list of all weights, touch new pages, and copy the rank's weights
           to the GPU one by one. The costs count only the copies to the GPU, because no rate of the
           host's work was measured. So all sides take longer than predicted.
Seen       On an H200 machine, `mapped` takes more than a fifth of the time of `whole`, although it
           reads only an eighth of the weights. `safetensors` takes about a third of `mapped`'s
           time, although it also copies the weights from a mapping. We did not measure which part
           of `torch.load` takes the time.
Use when   A process needs part of a large file, such as some experts or layers. For a whole file, a
           mapping still saves one copy in memory. From a disk, page faults read small pieces, so a
           mapping may load more slowly than one long read. Also use safetensors for files that you
           do not trust.
"""

import importlib.util
import io
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Cost, Variant, Work, compare

from .unnamed_files import path_of, unnamed

SHARE = 8  # a rank has 1 / SHARE of the experts
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None,
    reason="needs safetensors: pip install safetensors",
)


def state(device, layers, experts, width):
    weights = torch.randn(layers, experts, width, width).bfloat16()
    return SimpleNamespace(weights=weights, device=device)


def inputs(device, layers, experts, width):
    """Return the numbers of the rank's experts in each layer."""
    chosen = [torch.randperm(experts)[: experts // SHARE] for _ in range(layers)]
    return (torch.stack(chosen),)


def reference(state, chosen):
    layers = torch.arange(len(chosen))[:, None].expand_as(chosen)
    found = state.weights.double()[layers.flatten(), chosen.flatten()]
    return [weight.to(state.device) for weight in found]


def named(weights):
    """Return a dict from names to weights. Each weight is a tensor with its own memory."""
    return {
        f"layers.{layer}.experts.{expert}": weight.clone()
        for layer, experts in enumerate(weights)
        for expert, weight in enumerate(experts)
    }


def names_of(chosen):
    """Return the names of the rank's weights."""
    rows = enumerate(chosen.tolist())
    return [f"layers.{layer}.experts.{expert}" for layer, row in rows for expert in row]


def pickled(state):
    written = io.BytesIO()
    torch.save(named(state.weights), written)
    return unnamed(written.getvalue())


def whole(state, chosen):
    with pickled(state) as file:

        def load():
            weights = torch.load(path_of(file))
            return [weights[name].to(state.device, copy=True) for name in names_of(chosen)]

        yield load


def mapped(state, chosen):
    with pickled(state) as file:

        def load():
            weights = torch.load(path_of(file), mmap=True)
            return [weights[name].to(state.device, copy=True) for name in names_of(chosen)]

        yield load


def safetensors(state, chosen):
    from safetensors import safe_open
    from safetensors.torch import save

    with unnamed(save(named(state.weights))) as file:

        def load():
            with safe_open(path_of(file), "pt") as weights:
                tensors = map(weights.get_tensor, names_of(chosen))
                return [weight.to(state.device, copy=True) for weight in tensors]

        yield load


def part_cost(layers, experts, width):
    return layers * (experts // SHARE) * Cost(h2d=2 * width**2, launches=1, syncs=1)


@compare(
    baseline=whole,
    optimized=[mapped, Variant(safetensors, marks=[INSTALLED])],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 4, "experts": 32, "width": 1024}],
    check_sizes=[{"layers": 3, "experts": 17, "width": 15}],
    cpu_sizes=[{"layers": 2, "experts": 16, "width": 128}],
    work=lambda layers, experts, width: Work(wire=2 * layers * (experts // SHARE) * width**2),
    bound="host",
    costs=dict.fromkeys((whole, mapped, safetensors), part_cost),
    at_least={"cpu": "yardstick"},
)
def test_load_checkpoint(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
