"""Inputs whose order, ties, symmetry, range or norms a side may rely on."""

import torch
import torch.nn.functional as F
from honest.common import honest


def keys_and_payload(device, n):
    # Distinct keys: a rank is one place only if no key occurs twice.
    keys = torch.rand(n, 40, device=device).argsort(dim=1).float()
    return keys, torch.randn(n, 40, device=device)


def sorted_by_key(keys, payload):
    return payload.gather(1, torch.argsort(keys, dim=1))


def ranked_by_key(keys, payload):
    rank = (keys[:, :, None] > keys[:, None, :]).sum(dim=2)
    return torch.empty_like(payload).scatter_(1, rank, payload)


test_sort_by_key = honest(sorted_by_key, ranked_by_key, inputs=keys_and_payload)


def routed(device, n):
    return (
        torch.randn(n, 16, device=device),
        torch.randn(n, 8, device=device),
        torch.randn(8, 16, device=device),
    )


def top_two_of_experts(x, scores, experts):
    weights, chosen = torch.topk(torch.softmax(scores, dim=1), 2, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return sum(weights[:, k, None] * x * experts[chosen[:, k]] for k in range(2))


def masked_experts(x, scores, experts):
    second = torch.sort(scores, dim=1).values[:, -2:-1]
    weights = torch.softmax(scores.masked_fill(scores < second, -torch.inf), dim=1)
    return x * (weights @ experts)


test_mixture_of_experts = honest(top_two_of_experts, masked_experts, inputs=routed)


def codes(device, n):
    return torch.randn(n, 8, device=device), torch.randn(32, 8, device=device)


def nearest_code(x, codebook):
    return codebook[torch.cdist(x, codebook).argmin(dim=1)]


def nearest_code_by_product(x, codebook):
    return codebook[(x @ codebook.T - codebook.square().sum(dim=1) / 2).argmax(dim=1)]


test_vector_quantization = honest(nearest_code, nearest_code_by_product, inputs=codes)


def best_payload(keys, payload):
    return payload.gather(1, keys.argmax(dim=1, keepdim=True))


def best_payload_of_sorted(keys, payload):
    return payload.gather(1, torch.sort(keys, dim=1).indices[:, -1:])


test_payload_of_the_largest = honest(best_payload, best_payload_of_sorted, inputs=keys_and_payload)


def table_of_values(device, n):
    table = torch.sort(torch.rand(200, device=device)).values
    return table, torch.randn(200, device=device), torch.rand(n, device=device)


def interpolated(table, values, x):
    i = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    share = (x - table[i - 1]) / (table[i] - table[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def interpolated_by_count(table, values, x):
    i = (table < x[:, None]).sum(dim=1).clamp(1, len(table) - 1)
    left, right = table[i - 1], table[i]
    return torch.lerp(values[i - 1], values[i], (x - left) / (right - left))


test_interpolation = honest(interpolated, interpolated_by_count, inputs=table_of_values)


def permuted(device, n):
    return torch.randn(n, 16, device=device), torch.randperm(n, device=device)


def scatter_rows(x, order):
    out = torch.zeros_like(x)
    out[order] = x
    return out


def gather_rows(x, order):
    return x[torch.argsort(order)]


test_permutation = honest(scatter_rows, gather_rows, inputs=permuted)


def normalized(device, n):
    p = torch.rand(n, 20, device=device)
    q = torch.rand(n, 20, device=device)
    return p / p.sum(dim=1, keepdim=True), q / q.sum(dim=1, keepdim=True)


def divergence(p, q):
    return (p * (p.log() - q.log())).sum(dim=1)


def divergence_of_ratio(p, q):
    return (p * torch.log(p / q)).sum(dim=1)


test_divergence_of_probabilities = honest(divergence, divergence_of_ratio, inputs=normalized)


def median_of_rows(x, y):
    return y.gather(1, x.median(dim=1, keepdim=True).indices)


def middle_of_sorted(x, y):
    order = torch.argsort(x, dim=1)
    return y.gather(1, order[:, (x.shape[1] - 1) // 2, None])


test_payload_of_the_median = honest(median_of_rows, middle_of_sorted, inputs=keys_and_payload)


def fractions(device, n):
    return (torch.rand(n, 64, device=device),)


def saturated(x):
    return x.clamp(0, 1) * 2


def doubled(x):
    return x * 2


test_saturation_of_fractions = honest(saturated, doubled, inputs=fractions)


def image(device, n):
    return (torch.randint(256, (n, 64), device=device).float() / 255,)


def brightened(x):
    return torch.clamp(x + 0.5 * x, 0, 2)


def brightened_without_clamp(x):
    return x + 0.5 * x


test_brightness_of_an_image = honest(brightened, brightened_without_clamp, inputs=image)


def unit_rows(device, n):
    x, y = torch.randn(2, n, 16, device=device)
    return F.normalize(x, dim=1), F.normalize(y, dim=1)


def distance(x, y):
    return ((x - y) ** 2).sum(dim=1)


def distance_of_unit_rows(x, y):
    return 2 - 2 * (x * y).sum(dim=1)


test_distance_of_unit_rows = honest(distance, distance_of_unit_rows, inputs=unit_rows)


def probabilities(device, n):
    p = torch.rand(n, 16, device=device)
    return p / p.sum(dim=1, keepdim=True), torch.randn(n, 16, device=device)


def minus_mean(p, v):
    return (p * v).sum(dim=1, keepdim=True) - v * p.sum(dim=1, keepdim=True)


def minus_mean_of_probabilities(p, v):
    return (p * v).sum(dim=1, keepdim=True) - v


test_mean_of_probabilities = honest(minus_mean, minus_mean_of_probabilities, inputs=probabilities)


def one_hot_rows(device, n):
    labels = torch.randint(10, (n,), device=device)
    return F.one_hot(labels, 10).float(), torch.randn(10, 8, device=device)


def rows_by_product(hot, table):
    return hot @ table


def rows_by_index(hot, table):
    return table[hot.argmax(dim=1)]


test_rows_of_a_one_hot_table = honest(rows_by_product, rows_by_index, inputs=one_hot_rows)
