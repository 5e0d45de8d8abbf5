"""Elementwise math, activations, products."""

import torch
import torch.nn.functional as F
from honest.common import honest, randn


def gelu_by_erf(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def one_plus_erf(x):
    return 1 + torch.erf(x / 2**0.5)


def erfc_of_minus(x):
    return torch.erfc(-x / 2**0.5)


test_gelu = honest(gelu_by_erf, F.gelu, inputs=randn(None, 64))
test_one_plus_erf = honest(one_plus_erf, erfc_of_minus, inputs=randn(None, 64))


def silu_by_hand(x):
    return x * torch.sigmoid(x)


test_silu = honest(silu_by_hand, F.silu, inputs=randn(None, 64))
test_silu_bf16 = honest(silu_by_hand, F.silu, inputs=randn(None, 64, dtype=torch.bfloat16))


def shifted(x):
    return x - 0.7


def shifted_in_place(x):
    return x.clone().sub_(0.7)


test_shift = honest(shifted, shifted_in_place, inputs=randn(None, 64))


def affine_loop(x):
    for _ in range(20):
        x = x * 1.01 + 0.1
    return x


def affine_loop_in_place(x):
    x = x.clone()
    for _ in range(20):
        x.mul_(1.01).add_(0.1)
    return x


test_affine_loop = honest(affine_loop, affine_loop_in_place, inputs=randn(None, 64))


def moving_average(x):
    average = x[:, 0]
    for step in range(1, 64):
        average = 0.9 * average + 0.1 * x[:, step]
    return average


def moving_average_by_lerp(x):
    average = x[:, 0]
    for step in range(1, 64):
        average = torch.lerp(average, x[:, step], 0.1)
    return average


def positive(device, n):
    return (torch.rand(n, 64, device=device) + 1,)


test_moving_average = honest(moving_average, moving_average_by_lerp, inputs=positive)


def decay(x):
    for _ in range(100):
        x = x * 0.99
    return x


def decay_in_one_product(x):
    return x * 0.99**100


test_decay = honest(decay, decay_in_one_product, inputs=randn(None, 64))


def powers(x):
    return x**3 - 2 * x**2 + x - 1


def horner(x):
    return ((x - 2) * x + 1) * x - 1


test_polynomial = honest(powers, horner, inputs=randn(None, 64))


def log_of_exp(x):
    return torch.log1p(torch.exp(x))


test_softplus = honest(log_of_exp, F.softplus, inputs=randn(None, 64))


def clamped(x):
    return x.clamp(-1, 1)


def by_minimum(x):
    return torch.minimum(torch.maximum(x, x.new_tensor(-1.0)), x.new_tensor(1.0))


test_clamp = honest(clamped, by_minimum, inputs=randn(None, 64))


def where_positive(x):
    return torch.where(x > 0, x, 0.01 * x)


test_leaky_relu = honest(where_positive, F.leaky_relu, inputs=randn(None, 64))


def multiplied_up(x):
    total = torch.ones_like(x[:, 0])
    for column in range(x.shape[1]):
        total = total * x[:, column]
    return total


def product(x):
    return x.prod(dim=1)


test_product = honest(multiplied_up, product, inputs=randn(None, 8))


def sequential_cumprod(x):
    columns = [x[:, 0]]
    for column in range(1, x.shape[1]):
        columns.append(columns[-1] * x[:, column])
    return torch.stack(columns, dim=1)


def cumprod(x):
    return torch.cumprod(x, dim=1)


test_cumulative_product = honest(sequential_cumprod, cumprod, inputs=randn(None, 12))


def addcmul_inputs(device, n):
    return tuple(torch.randn(n, 64, device=device) for _ in range(3))


def multiply_add(a, b, c):
    return a * b + c


def addcmul(a, b, c):
    return torch.addcmul(c, a, b)


test_addcmul = honest(multiply_add, addcmul, inputs=addcmul_inputs)
