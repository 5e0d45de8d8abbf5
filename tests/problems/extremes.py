"""The place of the maximum, the minimum, and a mean, of a middle axis."""

import torch
from torch import nn

batch = 64
length = 1000
wide = 900


class Model(nn.Module):
    def forward(self, x):
        return x.argmax(dim=1), x.amin(dim=1), x.mean(dim=1)


def get_inputs():
    return [torch.rand(batch, length, wide)]


def get_init_inputs():
    return []
