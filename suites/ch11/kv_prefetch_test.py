"""KV prefetch: fetch the next layer's cache from the host while this layer computes.

Problem    Compute one decoding step of `layers` bf16 layers for `batch` sequences. The GPU has no
           room for their keys and values, which are in pinned host memory. A layer projects x to
           queries, attends to the `tokens` tokens of its cache, and projects back. An MLP follows.
           Attention and MLP each add their result to x. All query heads share 2 heads of keys and
           values. The page times a curve over the number of tokens.
Baseline   on_demand: a layer's cache is copied when the layer attends to it, on the same stream.
Optimized  prefetched: changes `on_demand`. A second stream copies the next layer's cache into a
           second buffer while this layer computes. The cases only show a curve, so the page claims
           no speedup for them.
Bound      PCIe or DRAM, whichever takes longer. A layer reads the same weights from DRAM for any
           number of tokens, but with more tokens, there is more cache to copy. If a copy takes less
           time than a layer, prefetched hides every copy except the first. If a copy takes much
           longer than a layer, only a small part of the copy is hidden, and the gain is small
           again. The gain is largest if copy and layer take the same time, and is never more than
           twofold.
Seen       On an H200, `on_demand` takes longer than predicted: even without the copy, a layer takes
           about twice as long. The prediction counts the weights of the layer and the starts of its
           kernels. The extra time grows with the number of tokens. We did not measure which kernels
           take this time. Because layers take longer, the largest gain needs more tokens than
           predicted. With 1024 tokens or more, PCIe is the limit, and `prefetched` takes as long as
           predicted.
Use when   Caches have to stay in host memory for a while, and the copy of a layer's cache does not
           take much longer than the layer. For longer caches, move fewer bytes: keep part of each
           cache on the GPU, or store the cache in 8 bits. Capture the step as a CUDA graph. Without
           a graph, the host's launches are the limit. `../ch13/kv_cache_test.py` shows caches that
           stay on the GPU.
"""

from dataclasses import replace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Sweep, Work, compare

KV_HEADS, HEAD = 2, 64
GROWTH = 4  # the MLP's hidden width is this many times the width of x
KERNELS = 10  # per layer on an H200, including a memset, for costs


def inputs(device, layers, batch, width, tokens):
    x = torch.randn(batch, width, device=device).bfloat16()
    shapes = (width, width), (width, width), (GROWTH * width, width), (width, GROWTH * width)
    weights = tuple(
        torch.randn(layers, *shape, device=device).mul_(shape[1] ** -0.5).bfloat16()
        for shape in shapes
    )
    pinned = {"dtype": torch.bfloat16, "pin_memory": device == "cuda"}
    cache = torch.empty(layers, 2, batch, KV_HEADS, tokens, HEAD, **pinned)
    return x, weights, cache.copy_(torch.randn(cache.shape))


def reference(x, weights, cache):
    x = x.double()
    for to_query, back, up, down, layer in zip(*weights, cache, strict=True):
        keys, values = layer.to(x.device).double()
        queries = (x @ to_query.double().T).unflatten(1, (KV_HEADS, -1, HEAD))
        shares = (queries @ keys.mT * HEAD**-0.5).softmax(-1)
        x = x + (shares @ values).flatten(1) @ back.double().T
        x = x + F.silu(x @ up.double().T) @ down.double().T
    return x


def decoded(x, to_query, back, up, down, layer):
    """Return x after one layer, whose keys and values are in `layer`."""
    keys, values = layer
    queries = F.linear(x, to_query).unflatten(1, (KV_HEADS, -1, HEAD))
    attended = F.scaled_dot_product_attention(queries, keys, values)
    x = x + F.linear(attended.flatten(1), back)
    return x + F.linear(F.silu(F.linear(x, up)), down)


def on_demand(x, weights, cache):
    buffer = torch.empty(cache.shape[1:], dtype=cache.dtype, device=x.device)
    for *parts, there in zip(*weights, cache, strict=True):
        buffer.copy_(there, non_blocking=True)
        x = decoded(x, *parts, buffer)
    return x


def prefetched(x, weights, cache):
    gpu = torch.get_device_module(x.device)
    # High-priority streams have their own pool, so this is never the current stream.
    main, copies = gpu.current_stream(), gpu.Stream(priority=-1)
    buffers = [torch.empty(cache.shape[1:], dtype=cache.dtype, device=x.device) for _ in range(2)]
    copies.wait_stream(main)  # earlier work may still be using the buffers' memory
    drained = []

    def fetch(k):
        with gpu.stream(copies):
            if k >= 2:
                copies.wait_event(drained[k - 2])
            buffers[k % 2].copy_(cache[k], non_blocking=True)
            return copies.record_event()

    filled = fetch(0)
    for k, parts in enumerate(zip(*weights, strict=True)):
        main.wait_event(filled)
        if k + 1 < len(cache):
            filled = fetch(k + 1)
        x = decoded(x, *parts, buffers[k % 2])
        drained.append(main.record_event())
    return x


def cache_bytes(batch, tokens):
    """Return the bytes of one layer's keys and values."""
    return 2 * 2 * batch * KV_HEADS * tokens * HEAD


def fetched(batch, tokens):
    return Cost(h2d=cache_bytes(batch, tokens), launches=1)


def computed(batch, width, tokens):
    """Return the cost of a layer. The copy may leave the cache in the L2, so `l2` includes it."""
    weights = (2 + 2 * GROWTH) * width**2
    attention = 4 * batch * width * tokens
    return Cost(
        read=2 * weights,
        l2=cache_bytes(batch, tokens),
        ops={"bf16": 2 * batch * weights + attention},
        launches=KERNELS,
    )


def in_turn(layers, batch, width, tokens):
    return layers * (fetched(batch, tokens) + computed(batch, width, tokens)) + Cost(
        read=2 * batch * width, write=2 * batch * width
    )


def at_once(layers, batch, width, tokens):
    layer, first = computed(batch, width, tokens), fetched(batch, tokens)
    ends = Cost(read=2 * batch * width, write=2 * batch * width)
    if layers == 1:
        return first + layer + ends
    both = replace(layer, h2d=first.h2d, launches=layer.launches + 1)
    return first + (layers - 1) * both + layer + ends


def work(layers, batch, width, tokens):
    weights = (2 + 2 * GROWTH) * width**2
    return Work(
        wire=layers * cache_bytes(batch, tokens),
        read=2 * (layers * weights + batch * width),
        write=2 * batch * width,
        flops={"bf16": layers * (2 * batch * weights + 4 * batch * width * tokens)},
        terms=max(GROWTH * width, tokens),
    )


@compare(
    baseline=on_demand,
    optimized=[prefetched],
    inputs=inputs,
    reference=reference,
    sizes=[
        {"layers": 8, "batch": 8, "width": 2048, "tokens": tokens}
        for tokens in (128, 256, 512, 1024, 2048)
    ],
    check_sizes=[
        {"layers": 3, "batch": 2, "width": 128, "tokens": 9},
        {"layers": 1, "batch": 1, "width": 128, "tokens": 2},
    ],
    work=work,
    bound="pcie",
    costs={on_demand: in_turn, prefetched: at_once},
    at_least="yardstick",
    sweep=Sweep("tokens"),
)
def test_kv_prefetch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
