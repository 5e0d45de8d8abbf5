"""The product of two lower triangular matrices."""

import torch
from torch import nn

n = 2048


class Model(nn.Module):
    def forward(self, a, b):
        return torch.tril(a @ b)


def get_inputs():
    return [torch.rand(n, n).tril(), torch.rand(n, n).tril()]


def get_init_inputs():
    return []
