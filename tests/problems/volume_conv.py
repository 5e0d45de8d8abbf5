"""A 3D convolution, a softmax over channels and two poolings."""

import torch
from torch import nn

batch = 64
outer = 24
depth = 20
side = 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, outer, 3)
        self.pool = nn.MaxPool3d(2)

    def forward(self, x):
        return self.pool(self.pool(torch.softmax(self.conv(x), dim=1)))


def get_inputs():
    return [torch.rand(batch, 3, depth, side, side)]


def get_init_inputs():
    return []
