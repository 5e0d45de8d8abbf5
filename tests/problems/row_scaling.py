"""A diagonal matrix times a dense one, and a scalar."""

import torch
from torch import nn

rows = 3000
columns = 2000


class Model(nn.Module):
    def forward(self, d, a, scale):
        return scale * (torch.diag(d) @ a)


def get_inputs():
    return [torch.rand(rows), torch.rand(rows, columns), 1.7]


def get_init_inputs():
    return []
