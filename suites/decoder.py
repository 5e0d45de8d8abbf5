"""The decoder that the serving pages of chapters 15, 16, 17 and 20 share.

Like Llama, it has RMS norm, rotary positions, attention with grouped queries and a KV cache, and
SwiGLU. Weights come from a seed. Pages import it by its absolute name, `suites.decoder`:

    from suites.decoder import Cache, Config, Decoder

    config = Config(layers=4, width=1024, heads=16, kv_heads=4, hidden=2816, length=2048)
    model = Decoder(config, seed=1, device="cuda")
    cache = Cache(config, rows=8, length=2048, device="cuda")
    logits = model.prefill(tokens, cache)  # tokens: (rows, n); logits of the last one: (rows, v)
    logits = model.step(tokens, positions, cache)  # one token per row, at its own position

A row is a sequence. A token at position p attends to positions 0 to p of its row and ignores later
cache entries, so a new request may reuse the row of an old request. No shape in `step` depends on
the positions, and `step` never waits for the GPU, so a CUDA graph can capture `step`.

The cache object stores keys and values and computes attention. A page about another kind of cache,
such as a paged cache, defines a class with `plan`, `append` and `attend`.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

EPS = 1e-5


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder. `length` is the number of positions."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    length: int
    vocabulary: int = 256

    @property
    def head(self):
        """Return the dimension of a head."""
        return self.width // self.heads


class Cache:
    """Keys and values of `rows` sequences, with room for `length` tokens each.

    Attributes:
        keys, values: tensors of shape (layers, rows, kv_heads, length, head).
    """

    def __init__(self, config, rows, length, device="cpu", dtype=torch.bfloat16):
        shape = config.layers, rows, config.kv_heads, length, config.head
        # Zeros, because even a masked key must not be NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def rows(self, begin, end):
        """Return a cache of the rows `begin` to `end - 1`, in the same memory."""
        part = object.__new__(type(self))
        part.keys, part.values = self.keys[:, begin:end], self.values[:, begin:end]
        return part

    def plan(self, positions, n, device):
        """Return the indices, the end and the mask that `append` and `attend` need in every layer.

        Args:
            positions: the position of the first token as an integer, if all rows have the same
            position. If not, the position of each token, of shape (rows, n).
            n: the number of tokens of each row.
            device: the device of the tokens.
        """
        length = self.keys.shape[3]
        if not isinstance(positions, int):
            row = torch.arange(len(positions), device=device)[:, None]
            return (row, positions), length, self.mask(positions, length)
        end = positions + n
        if end > length:
            raise ValueError(f"{end} tokens do not fit in a cache of {length}")
        # At position 0, attention is causal and needs no mask.
        at = torch.arange(positions, end, device=device)[None]
        return (slice(None), slice(positions, end)), end, self.mask(at, end) if positions else None

    def mask(self, positions, length):
        """Return a mask to add to scores: 0 for keys up to a position, -inf for later ones."""
        hidden = visible(positions, length).logical_not_()
        return torch.zeros_like(hidden, dtype=self.keys.dtype).masked_fill_(hidden, -torch.inf)

    def append(self, layer, k, v, plan):
        """Store keys and values of shape (rows, kv_heads, n, head)."""
        where, _, _ = plan
        self.keys[layer].transpose(1, 2)[where] = k.transpose(1, 2)
        self.values[layer].transpose(1, 2)[where] = v.transpose(1, 2)

    def attend(self, layer, q, plan):
        """Return causal attention of queries of shape (rows, heads, n, head) over the cache."""
        _, end, mask = plan
        keys, values = self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
        if mask is None:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return grouped_attention(q, keys, values, mask)


def visible(positions, length):
    """Return a boolean mask of the keys up to each position, of shape (rows, 1, n, length)."""
    return (torch.arange(length, device=positions.device) <= positions[..., None])[:, None]


def grouped_attention(q, keys, values, mask):
    """Return masked attention. Query heads that share a key head become rows of one product.

    PyTorch's fused kernels accept a mask or grouped query heads, but not both.

    Args:
        q: queries of shape (rows, heads, n, head).
        keys, values: of shape (rows, kv_heads, length, head).
        mask: a boolean mask, or values to add to the scores, of shape (rows, 1, n, length).
    """
    groups = q.shape[1] // keys.shape[1]
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3)
    mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return out.unflatten(2, (groups, -1)).flatten(1, 2)


class Block(torch.nn.Module):
    """One transformer layer. No linear layer has a bias."""

    def __init__(self, config):
        super().__init__()
        kv = config.kv_heads * config.head
        self.head = config.head
        self.sizes = config.width, kv, kv
        self.attention_norm = weight(config.width)
        self.qkv = weight(config.width + 2 * kv, config.width)
        self.out = weight(config.width, config.width)
        self.mlp_norm = weight(config.width)
        self.gate_up = weight(2 * config.hidden, config.width)
        self.down = weight(config.width, config.hidden)

    def forward(self, x, cos, sin, layer, plan, cache):
        parts = F.linear(normalized(x, self.attention_norm), self.qkv).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in parts)
        cache.append(layer, rotated(k, cos, sin), v, plan)
        y = cache.attend(layer, rotated(q, cos, sin), plan)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.out)
        gate, up = F.linear(normalized(x, self.mlp_norm), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Decoder(torch.nn.Module):
    """A decoder with random weights from `seed`. If `seed` is None, torch's generator is used."""

    def __init__(self, config, seed=None, device="cpu", dtype=torch.bfloat16):
        super().__init__()
        self.config = config
        with torch.device(device):
            self.embedding = weight(config.vocabulary, config.width)
            self.blocks = torch.nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = weight(config.width)
            self.lm_head = weight(config.vocabulary, config.width)
            frequencies = 1e4 ** -torch.linspace(0, 1, config.head // 2)
            turns = torch.outer(torch.arange(config.length), frequencies)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())
        generator = None
        if seed is not None:
            generator = torch.Generator(device).manual_seed(seed)
        for p in self.parameters():  # weights of norms stay ones
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5, generator=generator)
        self.embedding.mul_(config.width**0.5)
        self.to(dtype)

    def forward(self, tokens, positions, cache):
        """Return the logits of all tokens.

        Args:
            tokens: of shape (rows, n).
            positions: as in `Cache.plan`.
            cache: a `Cache`, or an object with the same methods.
        """
        return self.logits(self.states(tokens, positions, cache))

    def states(self, tokens, positions, cache):
        """Return the output of the last block, of shape (rows, n, width)."""
        plan = cache.plan(positions, tokens.shape[1], tokens.device)
        at = positions
        if isinstance(positions, int):
            at = torch.arange(positions, positions + tokens.shape[1], device=tokens.device)[None]
        cos, sin = (F.embedding(at, table)[:, None] for table in (self.cos, self.sin))
        x = F.embedding(tokens, self.embedding)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, layer, plan, cache)
        return x

    def logits(self, states):
        return F.linear(normalized(states, self.norm), self.lm_head)

    def prefill(self, tokens, cache, start=0):
        """Compute tokens (rows, n) from position `start` on. Return the last token's logits."""
        return self.logits(self.states(tokens, start, cache)[:, -1])

    def step(self, tokens, positions, cache):
        """Compute one token per row at its position, both of shape (rows,). Return logits."""
        return self.logits(self.states(tokens[:, None], positions[:, None], cache)[:, 0])


def weight(*shape):
    return torch.nn.Parameter(torch.ones(shape), requires_grad=False)


def normalized(x, scale):
    return F.rms_norm(x, x.shape[-1:], scale, eps=EPS)  # the default eps depends on the type


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def exact_logits(model, tokens):
    """Return the logits of all tokens, of shape (rows, n, vocabulary), in float64.

    This computation uses the decoder's weights and tables of cosines and sines, but no cache and
    none of the decoder's code. The model is not changed.
    """
    config = model.config
    groups, n = config.heads // config.kv_heads, tokens.shape[1]
    turns = torch.complex(model.cos[:n].double(), model.sin[:n].double())
    future = torch.ones(n, n, dtype=torch.bool, device=tokens.device).triu(1)
    x = model.embedding.double()[tokens]
    for block in model.blocks:
        y = exact_norm(x, block.attention_norm.double()) @ block.qkv.double().t()
        q, k, v = (
            t.unflatten(-1, (-1, config.head)).transpose(1, 2) for t in y.split(block.sizes, -1)
        )
        k, v = (t.repeat_interleave(groups, 1) for t in (turned(k, turns), v))
        scores = turned(q, turns) @ k.transpose(2, 3) / config.head**0.5
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(2) @ block.out.double().t()
        y = exact_norm(x, block.mlp_norm.double()) @ block.gate_up.double().t()
        gate, up = y.chunk(2, -1)
        x = x + (F.silu(gate) * up) @ block.down.double().t()
    return exact_norm(x, model.norm.double()) @ model.lm_head.double().t()


def exact_norm(x, scale):
    return x * scale / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turned(x, turns):
    """Return `x` rotated: each pair of numbers is a complex number, multiplied by a turn."""
    numbers = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat((numbers.real, numbers.imag), -1)


def matrix_weights(config):
    """Return the number of weights in all matrix products, including the LM head."""
    kv = config.kv_heads * config.head
    layer = (2 * config.width + 2 * kv + 3 * config.hidden) * config.width
    return config.layers * layer + config.vocabulary * config.width


def cached_numbers(config):
    """Return how many numbers the cache holds per token."""
    return 2 * config.layers * config.kv_heads * config.head
