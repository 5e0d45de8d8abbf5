"""A linear layer, a learned scale and a batch norm in training mode."""

import torch
from torch import nn

batch = 2048
wide = 1536
out = 1024


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(wide, out)
        self.scale = nn.Parameter(torch.randn(out))
        self.norm = nn.BatchNorm1d(out)

    def forward(self, x):
        return self.norm(self.linear(x) * self.scale)


def get_inputs():
    return [torch.rand(batch, wide)]


def get_init_inputs():
    return []
