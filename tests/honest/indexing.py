"""Sorting, searching, gathering, scattering, ragged data."""

import torch
import torch.nn.functional as F
from honest.common import honest, randn


def sort_rows(x):
    return torch.sort(x, dim=1).values


def topk_all(x):
    return torch.topk(x, x.shape[1], dim=1, largest=False).values


test_sort = honest(sort_rows, topk_all, inputs=randn(None, 40))


def stable_sort(x):
    values, order = torch.sort(x, dim=1, stable=True)
    return values, order


def argsort_then_gather(x):
    order = torch.argsort(x, dim=1, stable=True)
    return x.gather(1, order), order


test_stable_sort = honest(stable_sort, argsort_then_gather, inputs=randn(None, 40))


def top_five(x):
    values, where = torch.topk(x, 5, dim=1)
    return values, where


def five_of_sorted(x):
    values, where = torch.sort(x, dim=1, descending=True)
    return values[:, :5].clone(), where[:, :5].clone()


test_topk = honest(top_five, five_of_sorted, inputs=randn(None, 40))


def argmax(x):
    return x.argmax(dim=1)


def argmax_by_max(x):
    return x.max(dim=1).indices


test_argmax = honest(argmax, argmax_by_max, inputs=randn(None, 40))


def table_and_queries(device, n):
    return torch.sort(torch.randn(200, device=device)).values, torch.randn(n, device=device)


def searchsorted(table, queries):
    return torch.searchsorted(table, queries)


def count_smaller(table, queries):
    return (table[None, :] < queries[:, None]).sum(dim=1)


test_searchsorted = honest(searchsorted, count_smaller, inputs=table_and_queries)


def embedding_inputs(device, n):
    return torch.randn(1000, 16, device=device), torch.randint(1000, (n,), device=device)


def lookup(table, ids):
    return F.embedding(ids, table)


def index_select(table, ids):
    return table.index_select(0, ids)


test_embedding = honest(lookup, index_select, inputs=embedding_inputs)


def segments(device, n):
    return torch.randn(n, 8, device=device), torch.randint(10, (n,), device=device)


def segment_loop(x, ids):
    return torch.stack([x[ids == k].sum(dim=0) for k in range(10)])


def segment_add(x, ids):
    return torch.zeros(10, x.shape[1], dtype=x.dtype, device=x.device).index_add(0, ids, x)


def segment_one_hot(x, ids):
    return F.one_hot(ids, 10).to(x.dtype).T @ x


test_segment_sum = honest(segment_loop, segment_add, segment_one_hot, inputs=segments)


def bincount(ids):
    return torch.bincount(ids, minlength=32)


def count_equal(ids):
    return (ids[:, None] == torch.arange(32, device=ids.device)).sum(dim=0)


def ids_only(device, n):
    return (torch.randint(32, (n,), device=device),)


test_histogram = honest(bincount, count_equal, inputs=ids_only, n=200)


def unique_values(ids):
    return torch.unique(ids)


def unique_of_sorted(ids):
    values = torch.sort(ids).values
    return values[torch.cat([values.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]])]


def many_ids(device, n):
    return (torch.randint(1000, (n,), device=device),)


test_unique = honest(unique_values, unique_of_sorted, inputs=many_ids, n=200)


def masked(x):
    return x[x > 0]


def masked_select(x):
    return torch.masked_select(x, x > 0)


test_masked_select = honest(masked, masked_select, inputs=randn(None, 16))


def nonzero_inputs(device, n):
    return (torch.randint(2, (n, 16), device=device),)


def nonzero(x):
    return torch.nonzero(x)


def nonzero_tuple(x):
    return torch.stack(torch.nonzero(x, as_tuple=True), dim=1)


test_nonzero = honest(nonzero, nonzero_tuple, inputs=nonzero_inputs)


def ragged(device, n):
    lengths = 1 + 7 * torch.arange(n) % 20
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(device)
    return torch.randn(int(lengths.sum()), device=device), offsets


def ragged_means(values, offsets):
    parts = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.stack([values[a:b].mean() for a, b in parts])


def segment_reduce(values, offsets):
    return torch.segment_reduce(values, "mean", offsets=offsets)


test_ragged_means = honest(ragged_means, segment_reduce, inputs=ragged)
