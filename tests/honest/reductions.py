"""Sums, norms, softmax, losses."""

import torch
import torch.nn.functional as F
from honest.common import honest, randn


def loop_sum(x):
    total = torch.zeros_like(x[:, 0])
    for column in range(x.shape[1]):
        total = total + x[:, column]
    return total


def row_sum(x):
    return x.sum(dim=1)


test_sum = honest(loop_sum, row_sum, inputs=randn(None, 200))
test_sum_bf16 = honest(
    row_sum,
    lambda x: x.float().sum(dim=1).bfloat16(),
    inputs=randn(None, 200, dtype=torch.bfloat16),
)


def two_pass_variance(x):
    return ((x - x.mean(dim=1, keepdim=True)) ** 2).mean(dim=1)


def variance(x):
    return x.var(dim=1, correction=0)


test_variance = honest(two_pass_variance, variance, inputs=randn(None, 200))


def plain_softmax(x):
    e = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return e / e.sum(dim=-1, keepdim=True)


def softmax(x):
    return torch.softmax(x, dim=-1)


test_softmax = honest(plain_softmax, softmax, inputs=randn(None, 128))
test_softmax_bf16 = honest(plain_softmax, softmax, inputs=randn(None, 128, dtype=torch.bfloat16))


def plain_logsumexp(x):
    m = x.amax(dim=-1)
    return m + torch.log(torch.exp(x - m[:, None]).sum(dim=-1))


def logsumexp(x):
    return torch.logsumexp(x, dim=-1)


test_logsumexp = honest(plain_logsumexp, logsumexp, inputs=randn(None, 128))


def layer_norm_by_hand(x):
    mean = x.mean(dim=-1, keepdim=True)
    var = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5)


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


test_layer_norm = honest(layer_norm_by_hand, layer_norm, inputs=randn(None, 96))


def rms_norm_by_hand(x):
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)


def rms_norm(x):
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


test_rms_norm = honest(rms_norm_by_hand, rms_norm, inputs=randn(None, 96))


def batch_norm_by_hand(x):
    mean, var = x.mean(dim=0), x.var(dim=0, correction=0)
    return (x - mean) / torch.sqrt(var + 1e-5)


def batch_norm(x):
    return F.batch_norm(x, None, None, training=True)


test_batch_norm = honest(batch_norm_by_hand, batch_norm, inputs=randn(None, 48), n=65)


def sigmoid_then_norm(x):
    return layer_norm_by_hand(torch.sigmoid(x))


def sigmoid_then_library_norm(x):
    return layer_norm(x.sigmoid())


test_sigmoid_before_a_norm = honest(
    sigmoid_then_norm, sigmoid_then_library_norm, inputs=randn(None, 96)
)


def labelled(dtype):
    def inputs(device, n):
        return torch.randn(n, 50, device=device).to(dtype), torch.randint(50, (n,), device=device)

    return inputs


def cross_entropy_by_hand(x, y):
    return (torch.logsumexp(x, dim=1) - x.gather(1, y[:, None])[:, 0]).mean()


test_cross_entropy = honest(cross_entropy_by_hand, F.cross_entropy, inputs=labelled(torch.float32))


def loss_in_fp32(x, y):
    return F.cross_entropy(x.float(), y)


def loss_by_hand_in_fp32(x, y):
    x = x.float()
    return (torch.logsumexp(x, dim=1) - x.gather(1, y[:, None])[:, 0]).mean()


test_fp32_loss_of_bf16_logits = honest(
    loss_in_fp32, loss_by_hand_in_fp32, inputs=labelled(torch.bfloat16)
)


def total(x):
    return x.sum()


def total_of_rows(x):
    return x.sum(dim=0).sum()


test_scalar_sum = honest(total, total_of_rows, inputs=randn(None, 200))


def mean_square(x):
    return x.square().mean()


def mean_of_row_means(x):
    return x.square().mean(dim=1).mean()


def nearly_constant(device, n):
    """Return inputs whose mean hardly depends on the draw."""
    return ((1 + 0.1 * torch.randn(n, 999, device=device)).bfloat16(),)


test_mean_that_hardly_varies = honest(mean_square, mean_of_row_means, inputs=nearly_constant)
