"""bf16 arithmetic whose results are returned in fp32."""

import torch
import torch.nn.functional as F
from honest.common import honest

from pytest_aisp import Variant

HEADS, DIM = 3, 64


def matrices(device, n):
    a, b = torch.randn(n, 96, device=device), torch.randn(96, 40, device=device)
    return a.bfloat16(), b.bfloat16()


def product(a, b):
    return a.double() @ b.double()


def widened(a, b):
    return (a @ b).float()


def multiplied_in_fp32(a, b):
    return a.float() @ b.float()


test_declared_bf16_matmul_returned_in_fp32 = honest(
    Variant(widened, precision="bf16"),
    multiplied_in_fp32,
    inputs=matrices,
    reference=product,
)


def logits(device, n):
    x = torch.randn(n, 50, device=device).bfloat16()
    return x, torch.randint(50, (n,), device=device)


def loss(x, y):
    return F.cross_entropy(x.double(), y)


def bf16_loss(x, y):
    return F.cross_entropy(x, y).float()


def rows_in_bf16(x, y):
    return F.cross_entropy(x, y, reduction="none").float().mean()


def fp32_loss(x, y):
    return F.cross_entropy(x.float(), y)


test_declared_bf16_loss_returned_in_fp32 = honest(
    Variant(bf16_loss, precision="bf16"),
    Variant(rows_in_bf16, precision="bf16"),
    fp32_loss,
    inputs=logits,
    reference=loss,
)


def queries(device, n):
    return tuple(torch.randn(HEADS, n, DIM, device=device).bfloat16() for _ in range(3))


def scores(q, k):
    return q @ k.transpose(1, 2) / DIM**0.5


def attention(q, k, v):
    s = scores(q.double(), k.double())
    return torch.softmax(s, dim=-1) @ v.double(), torch.logsumexp(s, dim=-1)


def attention_of_bf16_scores(q, k, v):
    s = scores(q, k).float()
    return torch.softmax(s, dim=-1).bfloat16() @ v, torch.logsumexp(s, dim=-1)


def attention_in_blocks(q, k, v):
    """Online softmax over blocks of keys, with fp32 statistics, as flash attention does."""
    top = torch.full(q.shape[:2], -torch.inf, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros(q.shape, device=q.device)
    for at in range(0, k.shape[1], 16):
        s = scores(q, k[:, at : at + 16]).float()
        new = torch.maximum(top, s.amax(dim=-1))
        p, kept = torch.exp(s - new[..., None]), torch.exp(top - new)
        out = out * kept[..., None] + (p.bfloat16() @ v[:, at : at + 16]).float()
        total, top = total * kept + p.sum(dim=-1), new
    return (out / total[..., None]).bfloat16(), top + torch.log(total)


test_bf16_attention_with_fp32_logsumexp = honest(
    attention_of_bf16_scores, attention_in_blocks, inputs=queries, reference=attention
)
test_declared_bf16_attention_with_fp32_logsumexp = honest(
    Variant(attention_of_bf16_scores, precision="bf16"),
    Variant(attention_in_blocks, precision="bf16"),
    inputs=queries,
    reference=attention,
)
