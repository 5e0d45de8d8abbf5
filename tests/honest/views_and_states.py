"""Inputs that are views, states that a call changes, complex arithmetic."""

import torch
import torch.nn.functional as F
from honest.common import honest


def scaled_rows(x):
    return x * x.amax(dim=1, keepdim=True)


def scaled_rows_by_max(x):
    return x.max(dim=1, keepdim=True).values.mul(x)


def sliced(device, n):
    return (torch.randn(n + 5, 70, device=device)[5:, 3:-3],)


def permuted(device, n):
    return (torch.randn(16, n, 4, device=device).permute(1, 0, 2).flatten(1),)


def expanded(device, n):
    return (torch.randn(n, 1, device=device).expand(n, 64),)


def diagonals(device, n):
    return (torch.randn(64, n, n, device=device).diagonal(dim1=1, dim2=2).T,)


def channels_last(device, n):
    return (torch.randn(n, 3, 8, 8, device=device).to(memory_format=torch.channels_last),)


def unfolded(device, n):
    return (torch.randn(n + 15, device=device).unfold(0, 16, 1),)


test_sliced_input = honest(scaled_rows, scaled_rows_by_max, inputs=sliced)
test_permuted_input = honest(scaled_rows, scaled_rows_by_max, inputs=permuted)
test_expanded_input = honest(scaled_rows, scaled_rows_by_max, inputs=expanded)
test_diagonal_input = honest(scaled_rows, scaled_rows_by_max, inputs=diagonals)
test_channels_last_input = honest(scaled_rows, scaled_rows_by_max, inputs=channels_last)
test_overlapping_input = honest(scaled_rows, scaled_rows_by_max, inputs=unfolded)


def query_and_cache(device, n):
    both = torch.randn(2, n, 3, 16, device=device)
    return both[0, :, 0], both[1, :, 1], both[1, :, 2]


def attention(q, k, v):
    return torch.softmax(q @ k.T / 4, dim=1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


test_slices_of_one_tensor = honest(attention, sdpa, inputs=query_and_cache)


def adam_state(device, n):
    names = ("w", "m", "v")
    return {name: torch.full((n,), 0.5, device=device) for name in names}


def gradient(device, n):
    return (torch.randn(n, device=device),)


def adam_by_hand(state, g):
    state["m"].copy_(0.9 * state["m"] + 0.1 * g)
    state["v"].copy_(0.99 * state["v"] + 0.01 * g * g)
    state["w"].copy_(state["w"] - 0.01 * state["m"] / (state["v"].sqrt() + 1e-8))


def adam_in_place(state, g):
    state["m"].lerp_(g, 0.1)
    state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
    state["w"].addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-0.01)


def adam_reference(state, g):
    g, m, v = g.double(), state["m"].double(), state["v"].double()
    state["m"], state["v"] = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    state["w"] = state["w"].double() - 0.01 * state["m"] / (state["v"].sqrt() + 1e-8)


test_adam = honest(
    adam_by_hand, adam_in_place, inputs=gradient, reference=adam_reference, state=adam_state
)


def running_mean(device, n):
    return {"mean": torch.zeros(16, device=device)}


def batch(device, n):
    return (torch.randn(n, 16, device=device) + torch.randn(16, device=device),)


def update_mean(state, x):
    state["mean"].copy_(0.9 * state["mean"] + 0.1 * x.mean(dim=0))
    return x - state["mean"]


def update_mean_by_lerp(state, x):
    state["mean"].lerp_(x.mean(dim=0), 0.1)
    return torch.sub(x, state["mean"])


def mean_reference(state, x):
    state["mean"] = 0.9 * state["mean"].double() + 0.1 * x.double().mean(dim=0)
    return x.double() - state["mean"]


test_running_mean = honest(
    update_mean, update_mean_by_lerp, inputs=batch, reference=mean_reference, state=running_mean
)


def linear_layer(device, n):
    return {"w": torch.randn(16, 8, device=device), "b": torch.randn(8, device=device)}


def linear(state, x):
    return x @ state["w"] + state["b"]


def addmm(state, x):
    return torch.addmm(state["b"], x, state["w"])


def linear_reference(state, x):
    return x.double() @ state["w"].double() + state["b"].double()


test_weights_in_the_state = honest(
    linear, addmm, inputs=batch, reference=linear_reference, state=linear_layer
)


def complex_matrices(device, n):
    return tuple(
        torch.randn(shape, device=device, dtype=torch.complex64) for shape in ((n, 24), (24, 16))
    )


def complex_by_parts(a, b):
    return torch.complex(
        a.real @ b.real - a.imag @ b.imag,
        a.real @ b.imag + a.imag @ b.real,
    )


def complex_matmul(a, b):
    return a @ b


test_complex_matmul = honest(complex_by_parts, complex_matmul, inputs=complex_matrices)


def phases(device, n):
    return torch.randn(n, 16, device=device), torch.rand(n, 16, device=device) * 6


def polar_by_parts(r, angle):
    return torch.complex(r * torch.cos(angle), r * torch.sin(angle))


def polar(r, angle):
    return torch.polar(r, angle)


test_complex_rotation = honest(polar_by_parts, polar, inputs=phases)


def power_by_parts(x):
    z = torch.fft.rfft(x, dim=1)
    return z.real**2 + z.imag**2


def power(x):
    z = torch.fft.rfft(x, dim=1)
    return (z * z.conj()).real


test_power_spectrum = honest(power_by_parts, power, inputs=lambda device, n: (torch.randn(n, 32),))


def images(device, n):
    return (torch.randn(n, 3, 9, 9, device=device) + torch.randn(1, 3, 1, 1, device=device),)


def batch_norm_of_images(x):
    mean = x.mean(dim=(0, 2, 3), keepdim=True)
    var = ((x - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5)


def library_batch_norm(x):
    return F.batch_norm(x, None, None, training=True)


test_batch_norm_of_images = honest(batch_norm_of_images, library_batch_norm, inputs=images, n=29)
