"""A convolution, an instance norm, and a maximum over channels."""

import torch
from torch import nn

batch = 64
inner = 16
outer = 48
side = 128


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 3)
        self.norm = nn.InstanceNorm2d(outer, affine=True)

    def forward(self, x):
        return self.norm(self.conv(x)).amax(dim=1)


def get_inputs():
    return [torch.rand(batch, inner, side, side)]


def get_init_inputs():
    return []
