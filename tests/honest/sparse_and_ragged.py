"""Sparse matrices built from dense inputs, graphs, rows of different lengths, padding."""

import itertools

import torch
import torch.nn.functional as F
from honest.common import honest


def sparse_and_dense(device, n):
    keep = torch.rand(n, 40, device=device) < 0.1
    return torch.randn(n, 40, device=device) * keep, torch.randn(40, device=device)


def dense_times_vector(a, v):
    return a @ v


def coo_times_vector(a, v):
    return torch.sparse.mm(a.to_sparse_coo(), v[:, None])[:, 0]


def nonzeros_times_vector(a, v):
    row, column = torch.nonzero(a, as_tuple=True)
    return torch.zeros_like(a[:, 0]).index_add(0, row, a[row, column] * v[column])


test_sparse_matrix_vector = honest(
    dense_times_vector, coo_times_vector, nonzeros_times_vector, inputs=sparse_and_dense
)


def edges(device, n):
    return (
        torch.randn(n, 16, device=device),
        torch.randint(n, (5 * n,), device=device),
        torch.randint(n, (5 * n,), device=device),
    )


def neighbors_by_matrix(x, source, target):
    adjacency = torch.zeros(len(x), len(x), dtype=x.dtype, device=x.device)
    adjacency.index_put_((target, source), torch.ones_like(source, dtype=x.dtype), accumulate=True)
    return adjacency @ x


def neighbors_by_scatter(x, source, target):
    return torch.zeros_like(x).index_add(0, target, x[source])


def neighbors_by_sorted_edges(x, source, target):
    order = torch.argsort(target, stable=True)
    lengths = torch.bincount(target, minlength=len(x))
    return torch.segment_reduce(x[source[order]], "sum", lengths=lengths, unsafe=True, initial=0)


test_graph_sum = honest(
    neighbors_by_matrix, neighbors_by_scatter, neighbors_by_sorted_edges, inputs=edges
)


def largest_neighbor(x, source, target):
    rows = [x[source[target == node]] for node in range(len(x))]
    return torch.stack([F.pad(r, (0, 0, 0, 1), value=-9.0).amax(dim=0) for r in rows])


def largest_by_scatter(x, source, target):
    index = target[:, None].expand(-1, x.shape[1])
    return torch.full_like(x, -9.0).scatter_reduce(0, index, x[source], "amax")


test_graph_maximum = honest(largest_neighbor, largest_by_scatter, inputs=edges)


def padded(device, n):
    lengths = 1 + torch.arange(n, device=device) * 7 % 20
    return torch.randn(n, 20, device=device), lengths


def softmax_of_each_row(x, lengths):
    out = torch.zeros_like(x)
    for row, length in enumerate(lengths.tolist()):
        out[row, :length] = torch.softmax(x[row, :length], dim=0)
    return out


def masked_softmax(x, lengths):
    mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return torch.softmax(x.masked_fill(~mask, -torch.inf), dim=1)


test_softmax_of_padded_rows = honest(softmax_of_each_row, masked_softmax, inputs=padded)


def packed(device, n):
    lengths = 1 + torch.arange(n) * 7 % 20
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(device)
    return torch.randn(int(lengths.sum()), 8, device=device), offsets


def pad_by_loop(values, offsets):
    bounds = offsets.tolist()
    out = values.new_zeros(len(bounds) - 1, 20, values.shape[1])
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        out[row, : end - start] = values[start:end]
    return out


def pad_by_index(values, offsets):
    lengths = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    column = torch.arange(len(values), device=values.device) - offsets[:-1][row]
    out = values.new_zeros(len(lengths), 20, values.shape[1])
    out[row, column] = values
    return out


def pad_by_nested_tensor(values, offsets):
    parts = torch.tensor_split(values, offsets[1:-1].cpu())
    return F.pad(
        torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True),
        (0, 0, 0, 20 - int(offsets.diff().max())),
    )


test_padding = honest(pad_by_loop, pad_by_index, pad_by_nested_tensor, inputs=packed)


def bag_inputs(device, n):
    return torch.randn(50, 16, device=device), torch.randint(50, (n, 6), device=device)


def bag_by_gather(table, ids):
    return table[ids].sum(dim=1)


def embedding_bag(table, ids):
    return F.embedding_bag(ids, table, mode="sum")


test_embedding_bag = honest(bag_by_gather, embedding_bag, inputs=bag_inputs)
