"""A transposed 3D convolution, its minimum over channels, and a log-sum-exp."""

import torch
from torch import nn

batch = 32
inner = 16
outer = 24
depth = 12
side = 24


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose3d(inner, outer, 3, stride=2, padding=1, output_padding=1)
        self.gain = nn.Parameter(torch.ones(outer, 1, 1, 1))

    def forward(self, x):
        x = self.gain * self.conv(x)
        return x.amin(dim=1), torch.logsumexp(x, dim=1)


def get_inputs():
    return [torch.rand(batch, inner, depth, side, side)]


def get_init_inputs():
    return []
