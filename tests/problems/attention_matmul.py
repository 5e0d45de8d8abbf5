"""A chain of batched products, the first with a transposed operand."""

import torch
from torch import nn

batch = 64
rows = 384
columns = 320
depth = 96


class Model(nn.Module):
    def forward(self, q, k, v):
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)) / depth, v)


def get_inputs():
    return [
        torch.rand(batch, rows, depth),
        torch.rand(batch, columns, depth),
        torch.rand(batch, columns, depth),
    ]


def get_init_inputs():
    return []
