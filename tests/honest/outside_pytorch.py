"""References whose values leave PyTorch: Python loops over scalars, lists, NumPy."""

import math

import numpy as np
import torch
from honest.common import honest, randn


def row_sum(x):
    return x.sum(dim=1)


def loop_sum(x):
    total = torch.zeros_like(x[:, 0])
    for column in range(x.shape[1]):
        total = total + x[:, column]
    return total


def sum_of_items(x):
    sums = []
    for row in x.double():
        total = 0.0
        for value in row:
            total += value.item()
        sums.append(total)
    return torch.tensor(sums, dtype=torch.float64)


def sum_of_floats(x):
    sums = [sum(float(v) ** 2 for v in row) for row in x.double()]
    return torch.tensor(sums, dtype=torch.float64)


def sum_of_lists(x):
    return torch.tensor([math.fsum(row) for row in x.double().tolist()], dtype=torch.float64)


def numpy_sum(x):
    return torch.from_numpy(x.double().numpy().sum(axis=1))


def positive(device, n):
    return (100 + torch.randn(n, 60, device=device),)


test_sum_of_items = honest(row_sum, loop_sum, inputs=randn(None, 60), reference=sum_of_items, n=9)
test_sum_of_positive_items = honest(row_sum, loop_sum, inputs=positive, reference=sum_of_items, n=9)
test_sum_of_lists = honest(row_sum, loop_sum, inputs=randn(None, 60), reference=sum_of_lists)
test_numpy_sum = honest(row_sum, loop_sum, inputs=randn(None, 200), reference=numpy_sum)


def squares(x):
    return (x * x).sum(dim=1)


def dot_with_itself(x):
    return torch.einsum("ij,ij->i", x, x)


test_sum_of_floats = honest(
    squares, dot_with_itself, inputs=randn(None, 60), reference=sum_of_floats, n=9
)


def running_sum(x):
    return x.cumsum(dim=1)


def loop_of_sums(x):
    sums = [x[:, 0]]
    for column in range(1, x.shape[1]):
        sums.append(sums[-1] + x[:, column])
    return torch.stack(sums, dim=1)


def running_sum_of_items(x):
    sums = torch.empty_like(x, dtype=torch.float64)
    for i in range(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            total += x[i, j].item()
            sums[i, j] = total
    return sums


test_running_sum_of_items = honest(
    running_sum, loop_of_sums, inputs=randn(None, 60), reference=running_sum_of_items, n=9
)


def long_sum(x):
    return x.sum(dim=0, keepdim=True)


def sum_of_blocks(x):
    total = x.new_zeros(1)
    for block in x.view(-1, 32):
        total = total + block.sum()
    return total


def numpy_long_sum(x):
    return torch.from_numpy(x.double().numpy().sum(axis=0, keepdims=True))


test_numpy_long_sum = honest(
    long_sum,
    sum_of_blocks,
    inputs=lambda device, n: (torch.rand(32768, device=device),),
    reference=numpy_long_sum,
)


def softmax(x):
    return torch.softmax(x, dim=1)


def plain_softmax(x):
    e = torch.exp(x - x.amax(dim=1, keepdim=True))
    return e / e.sum(dim=1, keepdim=True)


def numpy_softmax(x):
    x = x.double().numpy()
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return torch.from_numpy(e / e.sum(axis=1, keepdims=True))


test_numpy_softmax = honest(
    softmax, plain_softmax, inputs=randn(None, 128), reference=numpy_softmax
)


def pieces(device, n):
    lengths = 1 + torch.randperm(n, device=device)
    return torch.randn(n * (n + 1) // 2, device=device), lengths


def sums_of_pieces(x, lengths):
    ends = lengths.cumsum(0)
    sums = torch.cat([x.new_zeros(1, dtype=torch.float64), x.double().cumsum(0)])
    return (sums[ends] - sums[ends - lengths]).float()


def split_sums(x, lengths):
    return torch.stack([piece.sum() for piece in x.split(lengths.tolist())])


def split_sums_in_float64(x, lengths):
    return split_sums(x.double(), lengths)


test_lengths_in_a_list = honest(
    split_sums, sums_of_pieces, inputs=pieces, reference=split_sums_in_float64
)


def over_largest(x):
    return x / x.abs().amax()


def over_item(x):
    return x / x.abs().max().item()


test_one_item = honest(over_largest, over_item, inputs=randn(None, 60))
