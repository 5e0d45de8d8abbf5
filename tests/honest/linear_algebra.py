"""Matrix products, factorizations, convolutions, attention."""

import torch
import torch.nn.functional as F
from honest.common import honest


def two_matrices(dtype=torch.float32, k=96):
    def inputs(device, n):
        return (
            torch.randn(n, k, device=device).to(dtype),
            torch.randn(k, 40, device=device).to(dtype),
        )

    return inputs


def matmul(a, b):
    return a @ b


def sum_of_products(a, b):
    return (a[:, :, None] * b).sum(dim=1)


def einsum(a, b):
    return torch.einsum("nk,km->nm", a, b)


test_matmul = honest(matmul, sum_of_products, einsum, inputs=two_matrices())
test_matmul_bf16 = honest(matmul, einsum, inputs=two_matrices(torch.bfloat16))


def transposed_product(a, b):
    return (b.T @ a.T).T


test_transposed_output = honest(matmul, transposed_product, inputs=two_matrices())


def linear_relu(a, b):
    return F.relu(a @ b)


def linear_clamp(a, b):
    return (a @ b).clamp_min(0)


test_linear_relu = honest(linear_relu, linear_clamp, inputs=two_matrices())


def spd(device, n):
    a = torch.randn(n, n, device=device)
    return (a @ a.T / n + torch.eye(n, device=device),)


def cholesky(a):
    return torch.linalg.cholesky(a)


def cholesky_ex(a):
    return torch.linalg.cholesky_ex(a).L


test_cholesky = honest(cholesky, cholesky_ex, inputs=spd)


def system(device, n):
    a = torch.randn(n, n, device=device)
    return a @ a.T / n + torch.eye(n, device=device), torch.randn(n, 3, device=device)


def by_inverse(a, b):
    return torch.linalg.inv(a) @ b


def solved(a, b):
    return torch.linalg.solve(a, b)


test_solve = honest(by_inverse, solved, inputs=system)


def triangular_inputs(device, n):
    return (
        torch.tril(torch.randn(n, n, device=device), -1) / n + 2 * torch.eye(n, device=device),
        torch.randn(n, 3, device=device),
    )


def forward_substitution(a, b):
    rows = []
    for i in range(a.shape[0]):
        known = sum((a[i, j] * rows[j] for j in range(i)), torch.zeros_like(b[0]))
        rows.append((b[i] - known) / a[i, i])
    return torch.stack(rows)


def triangular(a, b):
    return torch.linalg.solve_triangular(a, b, upper=False)


test_triangular_solve = honest(forward_substitution, triangular, inputs=triangular_inputs, n=17)


def symmetric(device, n):
    a = torch.randn(n, n, device=device)
    return (a + a.T,)


def eigenvalues(a):
    return torch.linalg.eigvalsh(a)


def eigenvalues_of_eigh(a):
    return torch.linalg.eigh(a).eigenvalues


test_symmetric_eigenvalues = honest(eigenvalues, eigenvalues_of_eigh, inputs=symmetric)


def determinant_inputs(device, n):
    return (torch.randn(n, 4, 4, device=device),)


def logdet(a):
    return torch.linalg.slogdet(a).logabsdet


def log_of_det(a):
    return torch.linalg.det(a).abs().log()


test_log_determinant = honest(logdet, log_of_det, inputs=determinant_inputs)


def image(device, n):
    return torch.randn(n, 3, 9, 9, device=device), torch.randn(4, 3, 3, 3, device=device)


def conv(x, w):
    return F.conv2d(x, w)


def conv_by_unfold(x, w):
    columns = F.unfold(x, 3)
    return (w.flatten(1) @ columns).reshape(len(x), 4, 7, 7)


def conv_channels_last(x, w):
    return F.conv2d(x.to(memory_format=torch.channels_last), w)


test_convolution = honest(conv, conv_by_unfold, inputs=image, n=5)
test_channels_last_output = honest(conv, conv_channels_last, inputs=image, n=5)


def qkv(dtype=torch.float32):
    def inputs(device, n):
        return tuple(torch.randn(2, 2, n, 16, device=device).to(dtype) for _ in range(3))

    return inputs


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 4.0, dim=-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


test_attention = honest(attention, sdpa, inputs=qkv())
test_attention_bf16 = honest(attention, sdpa, inputs=qkv(torch.bfloat16))


def rope_inputs(device, n):
    angles = torch.outer(torch.arange(n).float(), 10000 ** (-torch.arange(8).float() / 8))
    angles = torch.cat([angles, angles], dim=-1).to(device)
    return torch.randn(n, 16, device=device), angles.cos(), angles.sin()


def rotate_half(x, cos, sin):
    half = torch.cat([-x[:, 8:], x[:, :8]], dim=-1)
    return x * cos + half * sin


def rotate_as_complex(x, cos, sin):
    z = torch.complex(x[:, :8], x[:, 8:]) * torch.complex(cos[:, :8], sin[:, :8])
    return torch.cat([z.real, z.imag], dim=-1)


test_rope = honest(rotate_half, rotate_as_complex, inputs=rope_inputs)


def distances_inputs(device, n):
    return torch.randn(n, 8, device=device), torch.randn(20, 8, device=device)


def distances(a, b):
    return ((a[:, None] - b[None]) ** 2).sum(dim=-1).sqrt()


test_distances = honest(distances, torch.cdist, inputs=distances_inputs)


def sparse_inputs(device, n):
    keep = torch.rand(n, 30, device=device) < 0.2
    return torch.randn(n, 30, device=device) * keep, torch.randn(30, 8, device=device)


def dense_product(a, b):
    return a @ b


def sparse_product(a, b):
    return a.to_sparse_csr() @ b


test_sparse_product = honest(dense_product, sparse_product, inputs=sparse_inputs)
