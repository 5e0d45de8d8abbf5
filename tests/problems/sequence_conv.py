"""A dilated, strided 1D convolution, tanh and a sum over time."""

import torch
from torch import nn

batch = 48
inner = 40
outer = 80
length = 30000


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(inner, outer, 5, stride=3, dilation=4)

    def forward(self, x):
        return torch.tanh(self.conv(x)).sum(dim=2)


def get_inputs():
    return [torch.rand(batch, inner, length)]


def get_init_inputs():
    return []
