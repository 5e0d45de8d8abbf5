"""A strided, padded convolution, a bias by channel and a leaky ReLU."""

import torch
import torch.nn.functional as F
from torch import nn

batch = 64
inner = 32
outer = 96
side = 160


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 5, stride=2, padding=2)
        self.shift = nn.Parameter(torch.randn(outer, 1, 1))

    def forward(self, x):
        return F.leaky_relu(self.conv(x) + self.shift, 0.1)


def get_inputs():
    return [torch.rand(batch, inner, side, side + 9)]


def get_init_inputs():
    return []
