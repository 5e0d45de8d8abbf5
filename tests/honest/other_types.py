"""Integers, booleans, complex numbers, quantized values, given noise, scans, views, states."""

import torch
import torch.nn.functional as F
from honest.common import honest, randn

from pytest_aisp import Work


def integers(device, n):
    return (torch.randint(-100, 100, (n, 64), device=device, dtype=torch.int32),)


def int_loop_sum(x):
    total = torch.zeros_like(x[:, 0])
    for column in range(x.shape[1]):
        total = total + x[:, column]
    return total


def int_sum(x):
    return x.sum(dim=1, dtype=x.dtype)


test_integer_sum = honest(int_loop_sum, int_sum, inputs=integers)


def bytes_inputs(device, n):
    return (torch.randint(0, 256, (n, 64), device=device, dtype=torch.uint8),)


def popcount_by_bits(x):
    return sum(((x >> bit) & 1) for bit in range(8)).to(torch.uint8)


def popcount_by_table(x):
    table = torch.tensor(
        [bin(i).count("1") for i in range(256)], dtype=torch.uint8, device=x.device
    )
    return table[x.long()]


test_popcount = honest(popcount_by_bits, popcount_by_table, inputs=bytes_inputs)


def above(x):
    return x > 0.5


def not_below(x):
    return ~(x <= 0.5)


test_boolean_mask = honest(above, not_below, inputs=randn(None, 64))


def mask_inputs(device, n):
    return (torch.rand(n, 64, device=device) < 0.01,)


def any_row(m):
    return m.any(dim=1)


def any_by_sum(m):
    return m.sum(dim=1) > 0


test_any = honest(any_row, any_by_sum, inputs=mask_inputs)


def complex_inputs(device, n):
    return (torch.randn(n, 16, device=device, dtype=torch.complex64),)


def magnitude_squared(z):
    return z.real**2 + z.imag**2


def magnitude_by_abs(z):
    return z.abs() ** 2


test_complex_magnitude = honest(magnitude_squared, magnitude_by_abs, inputs=complex_inputs)


def fft_by_matrix(x):
    k = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)
    angles = -2 * torch.pi * torch.outer(k, k) / x.shape[1]
    table = torch.complex(angles.cos(), angles.sin())
    wide = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    return x.to(wide) @ table.to(wide)


def fft(x):
    return torch.fft.fft(x, dim=1)


test_fft = honest(fft_by_matrix, fft, inputs=randn(None, 32))


def quantize(x):
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return torch.round(x / scale).to(torch.int8), scale


def quantize_by_reciprocal(x):
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return torch.round(x / scale).clamp(-127, 127).to(torch.int8), scale


test_quantize = honest(quantize, quantize_by_reciprocal, inputs=randn(None, 64))


def dequantize_inputs(device, n):
    return (
        torch.randint(-127, 128, (n, 64), device=device, dtype=torch.int8),
        torch.rand(n, 1, device=device) + 0.1,
    )


def dequantize(q, scale):
    return q.to(scale.dtype) * scale


def dequantize_by_mul(q, scale):
    return torch.mul(q, scale)


test_dequantize = honest(dequantize, dequantize_by_mul, inputs=dequantize_inputs)


def fp8_inputs(device, n):
    return (torch.randn(n, 64, device=device),)


def to_fp8(x):
    scale = x.abs().amax().float() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale.to(torch.float32)


def to_fp8_reciprocal(x):
    scale = x.abs().amax().float() / 448
    return (x * scale.reciprocal()).to(torch.float8_e4m3fn), scale.to(torch.float32)


test_fp8_with_scale = honest(to_fp8, to_fp8_reciprocal, inputs=fp8_inputs)


def noise_inputs(device, n):
    return torch.randn(n, 64, device=device), torch.rand(n, 64, device=device)


def dropout_by_where(x, noise):
    return torch.where(noise < 0.9, x / 0.9, torch.zeros_like(x))


def dropout_by_mask(x, noise):
    return x * (noise < 0.9) / 0.9


test_dropout_with_given_noise = honest(dropout_by_where, dropout_by_mask, inputs=noise_inputs)


def gumbel_inputs(device, n):
    return torch.randn(n, 30, device=device), torch.rand(n, 30, device=device)


def gumbel_argmax(logits, noise):
    return (logits - torch.log(-torch.log(noise))).argmax(dim=1)


def exponential_argmin(logits, noise):
    return (torch.log(-torch.log(noise)) - logits).argmin(dim=1)


test_sampling_with_given_noise = honest(gumbel_argmax, exponential_argmin, inputs=gumbel_inputs)


def running_sum(x):
    columns = [x[:, 0]]
    for column in range(1, x.shape[1]):
        columns.append(columns[-1] + x[:, column])
    return torch.stack(columns, dim=1)


def cumsum(x):
    return torch.cumsum(x, dim=1)


test_prefix_sum = honest(running_sum, cumsum, inputs=randn(None, 80))


def running_max(x):
    columns = [x[:, 0]]
    for column in range(1, x.shape[1]):
        columns.append(torch.maximum(columns[-1], x[:, column]))
    return torch.stack(columns, dim=1)


def cummax(x):
    return torch.cummax(x, dim=1).values


test_running_max = honest(running_max, cummax, inputs=randn(None, 80))


def recurrence_inputs(device, n):
    return torch.rand(n, 40, device=device) * 0.9, torch.randn(n, 40, device=device)


def recurrence(a, b):
    state, states = torch.zeros_like(b[:, 0]), []
    for t in range(a.shape[1]):
        state = a[:, t] * state + b[:, t]
        states.append(state)
    return torch.stack(states, dim=1)


def doubling_scan(a, b):
    step = 1
    while step < a.shape[1]:
        b = torch.cat([b[:, :step], b[:, step:] + a[:, step:] * b[:, :-step]], dim=1)
        a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], dim=1)
        step *= 2
    return b


def scan_work(n):
    # The scan also multiplies the coefficients, so it rounds more often than the loop.
    return Work(read=4 * n, write=4 * n, roundings=320)


test_linear_recurrence = honest(recurrence, doubling_scan, inputs=recurrence_inputs, work=scan_work)


def view_inputs(device, n):
    return (torch.randn(64, n, device=device).T,)


def doubled(x):
    return x + x


def times_two(x):
    return 2 * x


test_transposed_input = honest(doubled, times_two, inputs=view_inputs)


def strided_inputs(device, n):
    return (torch.randn(n, 128, device=device)[:, ::2],)


test_strided_input = honest(doubled, times_two, inputs=strided_inputs)


def moments(device, n):
    return {"w": torch.randn(n, device=device), "m": torch.zeros(n, device=device)}


def gradient(device, n):
    return (torch.randn(n, device=device),)


def momentum_by_hand(state, g):
    state["m"].copy_(0.9 * state["m"] + g)
    state["w"].copy_(state["w"] - 0.1 * state["m"])


def momentum_in_place(state, g):
    state["m"].mul_(0.9).add_(g)
    state["w"].sub_(state["m"], alpha=0.1)


def momentum_reference(state, g):
    state["m"] = 0.9 * state["m"].double() + g.double()
    state["w"] = state["w"].double() - 0.1 * state["m"]


test_momentum = honest(
    momentum_by_hand,
    momentum_in_place,
    inputs=gradient,
    reference=momentum_reference,
    state=moments,
)


def cache(device, n):
    return {"k": torch.zeros(4, n, 8, device=device), "v": torch.zeros(4, n, 8, device=device)}


def token(device, n):
    k, v = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    return k, v, torch.randint(n, (1,), device=device)


def append_reference(cache, k, v, at):
    for name, new in (("k", k), ("v", v)):
        cache[name] = cache[name].double()
        cache[name][:, at] = new[:, None].double()


def append_by_mask(cache, k, v, at):
    for name, new in (("k", k), ("v", v)):
        here = torch.arange(cache[name].shape[1], device=at.device) == at
        cache[name].copy_(torch.where(here[:, None], new[:, None], cache[name]))


def append_in_place(cache, k, v, at):
    cache["k"].index_copy_(1, at, k[:, None])
    cache["v"].index_copy_(1, at, v[:, None])


test_kv_cache_append = honest(
    append_by_mask, append_in_place, inputs=token, reference=append_reference, state=cache
)


def interpolate_inputs(device, n):
    return (torch.randn(1, 3, n, n, device=device),)


def nearest(x):
    return F.interpolate(x, scale_factor=2, mode="nearest")


def repeat_twice(x):
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


test_upsample = honest(nearest, repeat_twice, inputs=interpolate_inputs, n=9)


def pooled(x):
    return F.max_pool1d(x[None], 2)[0]


def max_of_pairs(x):
    return x.unflatten(1, (-1, 2)).amax(dim=2)


test_max_pool = honest(pooled, max_of_pairs, inputs=randn(None, 64))
