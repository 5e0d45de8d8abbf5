"""Overlapping maxima minus averages of the same windows."""

import torch
import torch.nn.functional as F
from torch import nn

batch = 32
channels = 48
side = 300


class Model(nn.Module):
    def forward(self, x):
        return F.max_pool2d(x, 4, 1, 1) - F.avg_pool2d(x, 4, 1, 1)


def get_inputs():
    return [torch.rand(batch, channels, side, side)]


def get_init_inputs():
    return []
