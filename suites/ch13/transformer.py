"""The decoder that the training pages of this chapter share, and a training step in float64.

The decoder has RMS norm, rotary positions, causal attention and SwiGLU. Weights, gradients and
moments are bf16, unless a page says otherwise. AdamW starts with nonzero moments, as in the middle
of training. So an update is a smooth function of the gradient, and all moments exist and can be
compared with the reference.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

HEAD, VOCABULARY = 64, 256  # a small vocabulary, so that a small batch contains most tokens
# 1 - beta is exact in bf16, and large enough that bf16 moments move.
LR, BETAS, EPS, DECAY = 2**-10, (1 - 2**-3, 1 - 2**-4), 1e-8, 0.0
BEGUN = 64  # AdamW steps that count as already made


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        hidden = hidden_of(width)
        self.attention_norm = torch.nn.Parameter(torch.ones(width))
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.mlp_norm = torch.nn.Parameter(torch.ones(width))
        self.gate = torch.nn.Linear(width, hidden, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(normalized(x, self.attention_norm), cos, sin)
        y = normalized(x, self.mlp_norm)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x, cos, sin):
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(torch.nn.Module):
    def __init__(self, layers, width, length):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = torch.nn.Parameter(torch.ones(width))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        turns = torch.outer(torch.arange(length), 1e4 ** -torch.linspace(0, 1, HEAD // 2))
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def forward(self, tokens, labels, block=Block.forward):
        x = F.embedding(tokens, self.embedding)
        for each in self.blocks:
            x = block(each, x, self.cos, self.sin)
        logits = self.head(normalized(x, self.norm))
        # With bf16 logits, the mean over the batch would be computed in bf16 too.
        exact = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.flatten(0, 1).to(exact), labels.flatten())
        return loss.to(self.norm.dtype)


def hidden_of(width):
    return 8 * width // 3 // 32 * 32  # 8/3 as in Llama, as a multiple of 32


def normalized(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-5)  # the default eps depends on the type


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def weights_of(layers, width):
    """Return the number of weights in the matrices that each token is multiplied with."""
    return layers * (4 * width + 3 * hidden_of(width)) * width + VOCABULARY * width


def flops_of(layers, width, length, tokens):
    """Return the FLOPs of forward and backward pass. The causal mask halves attention."""
    return 6 * tokens * (weights_of(layers, width) + layers * width * length)


def model_of(device, layers, width, length, dtype=torch.bfloat16):
    with torch.device(device):  # draw the weights there: a CPU takes 1 s for 1e8 weights
        return Transformer(layers, width, length).to(dtype)


def training(device, layers, width, length, dtype=torch.bfloat16):
    """Return a namespace of a model and its AdamW, whose moments look like mid-training."""
    model = model_of(device, layers, width, length, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), LR, BETAS, EPS, DECAY, fused=True, capturable=device == "cuda"
    )
    for p in model.parameters():
        # These moments make all updates about LR, which is more than a weight's rounding error.
        scale = p.numel() ** -0.5
        optimizer.state[p] = {
            "step": torch.tensor(float(BEGUN), device=device),
            "exp_avg": torch.randn_like(p) * scale,
            "exp_avg_sq": (torch.rand_like(p) + 0.5) * scale**2,
        }
    return SimpleNamespace(model=model, optimizer=optimizer)


def batch(device, rows, length):
    """Return random tokens and random labels, each of shape (rows, length)."""
    shape = 2, rows, length
    return tuple(torch.randint(VOCABULARY, shape, device=device).unbind())


def reference_gradients(model, tokens, labels):
    """Store the float64 gradients of the mean loss in `.grad`. Return the loss."""
    loss = model.double()(tokens, labels)
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient
    return loss.detach()


def reference_step(state, tokens, labels):
    """Make one AdamW step in float64, written out as a formula. Return the loss."""
    loss = reference_gradients(state.model, tokens, labels)
    with torch.no_grad():
        for p in state.model.parameters():
            g, begun = p.grad, state.optimizer.state[p]
            t = begun["step"] + 1
            m = begun["exp_avg"].double().lerp(g, 1 - BETAS[0])
            v = begun["exp_avg_sq"].double().lerp(g.square(), 1 - BETAS[1])
            m_hat, v_hat = m / (1 - BETAS[0] ** t.double()), v / (1 - BETAS[1] ** t.double())
            p.mul_(1 - LR * DECAY).sub_(LR * m_hat / (v_hat.sqrt() + EPS))
            state.optimizer.state[p] = {"step": t, "exp_avg": m, "exp_avg_sq": v}
    return loss
