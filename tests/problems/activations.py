"""A chain of activations, each of which bends differently."""

import torch
import torch.nn.functional as F
from torch import nn

rows = 4000
wide = 9000


class Model(nn.Module):
    def forward(self, x):
        return F.softplus(F.selu(x)), F.hardswish(4 * x), x / (1 + x.abs()), F.mish(x), F.elu(-x)


def get_inputs():
    return [torch.randn(rows, wide)]


def get_init_inputs():
    return []
