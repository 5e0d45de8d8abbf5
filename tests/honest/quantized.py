"""Integer arithmetic, packed bits, and matrix products with quantized weights."""

import torch
from honest.common import honest


def weights_in_8_bits(device, n):
    return (
        torch.randn(n, 64, device=device),
        torch.randint(-127, 128, (64, 32), device=device, dtype=torch.int8),
        torch.rand(32, device=device) / 50 + 0.01,
    )


def dequantize_then_multiply(x, q, scale):
    return x @ (q.to(x.dtype) * scale)


def multiply_then_scale(x, q, scale):
    return (x @ q.to(x.dtype)) * scale


test_weights_in_8_bits = honest(
    dequantize_then_multiply, multiply_then_scale, inputs=weights_in_8_bits
)


def groups_of_4_bits(device, n):
    return (
        torch.randn(n, 64, device=device),
        torch.randint(0, 256, (32, 32), device=device, dtype=torch.uint8),
        torch.rand(4, 32, device=device) / 10 + 0.01,
    )


def unpacked(q):
    return torch.stack([q & 15, q >> 4], dim=1).flatten(0, 1).to(torch.int8) - 8


def dequantized_groups(x, q, scale):
    w = unpacked(q).to(x.dtype).unflatten(0, (4, 16)) * scale[:, None]
    return x @ w.flatten(0, 1)


def groups_one_by_one(x, q, scale):
    w = unpacked(q).to(x.dtype)
    parts = range(len(scale))
    return sum(x[:, 16 * g : 16 * g + 16] @ w[16 * g : 16 * g + 16] * scale[g] for g in parts)


test_weights_in_4_bits = honest(dequantized_groups, groups_one_by_one, inputs=groups_of_4_bits)


def two_in_8_bits(device, n):
    return tuple(
        torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
        for shape in ((n, 64), (64, 32))
    )


def product_in_int32(a, b):
    return (a.int()[:, :, None] * b.int()).sum(dim=1, dtype=torch.int32)


def product_in_float64(a, b):
    return (a.double() @ b.double()).to(torch.int32)


test_integer_matmul = honest(product_in_int32, product_in_float64, inputs=two_in_8_bits)


def two_integers(device, n):
    a = torch.randint(-1000, 1000, (n, 16), device=device)
    return a, torch.randint(1, 50, (n, 16), device=device)


def remainder(a, b):
    return a % b, a // b


def remainder_of_quotient(a, b):
    quotient = torch.div(a, b, rounding_mode="floor")
    return a - quotient * b, quotient


test_integer_division = honest(remainder, remainder_of_quotient, inputs=two_integers)


def greatest_common_divisor(a, b):
    a = a.abs()
    for _ in range(12):
        a, b = torch.where(b > 0, b, a), torch.where(b > 0, a % b.clamp_min(1), b)
    return a


test_greatest_common_divisor = honest(greatest_common_divisor, torch.gcd, inputs=two_integers)


def bits(device, n):
    return tuple(torch.rand(n, 64, device=device) < 0.5 for _ in range(2))


def differing(a, b):
    return (a & ~b) | (~a & b), (a != b).sum(dim=1)


def exclusive_or(a, b):
    return torch.logical_xor(a, b), (a ^ b).sum(dim=1)


test_boolean_difference = honest(differing, exclusive_or, inputs=bits)


def pack_by_sum(a, b):
    powers = 2 ** torch.arange(8, device=a.device)
    return ((a ^ b).unflatten(1, (8, 8)) * powers).sum(dim=2).to(torch.uint8)


def pack_by_shift(a, b):
    groups = (a ^ b).unflatten(1, (8, 8)).to(torch.uint8)
    out = torch.zeros_like(groups[..., 0])
    for bit in range(8):
        out |= groups[..., bit] << bit
    return out


test_packed_bits = honest(pack_by_sum, pack_by_shift, inputs=bits)


def counters(device, n):
    return (torch.randint(0, 5, (n, 80), device=device),)


def running_count(x):
    columns = [x[:, 0]]
    for column in range(1, x.shape[1]):
        columns.append(columns[-1] + x[:, column])
    return torch.stack(columns, dim=1)


def integer_cumsum(x):
    return torch.cumsum(x, dim=1)


test_integer_prefix_sum = honest(running_count, integer_cumsum, inputs=counters)
