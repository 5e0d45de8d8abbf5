"""A depthwise convolution along one axis, then a pointwise one."""

import torch
from torch import nn

batch = 32
inner = 48
outer = 64
side = 200


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(inner, inner, (7, 1), padding=(3, 0), groups=inner, bias=False)
        self.pointwise = nn.Conv2d(inner, outer, 1, bias=False)

    def forward(self, x):
        return self.pointwise(self.depthwise(x))


def get_inputs():
    return [torch.rand(batch, inner, side, side)]


def get_init_inputs():
    return []
