"""A transposed convolution with groups, dilation and a clamp."""

import torch
from torch import nn

batch = 32
inner = 32
outer = 48
side = 96
stride = (2, 1)
padding = (1, 2)
dilation = (1, 2)
groups = 4


class Model(nn.Module):
    def __init__(self, inner, outer, kernel, *more):
        super().__init__()
        self.conv = nn.ConvTranspose2d(inner, outer, kernel, *more, dilation=dilation)

    def forward(self, x):
        return self.conv(x).clamp(-0.2, 0.2)


def get_inputs():
    return [torch.rand(batch, inner, side, side)]


def get_init_inputs():
    return [inner, outer, (3, 5), stride, padding, 0, groups]
