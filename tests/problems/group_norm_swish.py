"""A linear layer, a group norm and x sigmoid(x)."""

import torch
from torch import nn

batch = 1024
wide = 2048
out = 2048
groups = 128


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(wide, out)
        self.norm = nn.GroupNorm(groups, out)

    def forward(self, x):
        x = self.norm(self.linear(x))
        return x * torch.sigmoid(x)


def get_inputs():
    return [torch.rand(batch, wide)]


def get_init_inputs():
    return []
