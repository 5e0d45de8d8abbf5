"""A running product, which soon underflows."""

import torch
from torch import nn

rows = 6000
length = 5000


class Model(nn.Module):
    def forward(self, x):
        return x.cumprod(dim=1)


def get_inputs():
    return [torch.rand(rows, length)]


def get_init_inputs():
    return []
