"""A layer norm over three axes and a GELU."""

import torch
import torch.nn.functional as F
from torch import nn

batch = 24
channels = 40
side = 200


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm((channels, side, side))

    def forward(self, x):
        return F.gelu(self.norm(x))


def get_inputs():
    return [torch.rand(batch, channels, side, side)]


def get_init_inputs():
    return []
