"""Two linear layers with a sigmoid between them, and a log of a sum of exponentials."""

import torch
from torch import nn

batch = 4000
wide = 1500
hidden = 2000
out = 800


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(wide, hidden)
        self.second = nn.Linear(hidden, out)

    def forward(self, x):
        return torch.logsumexp(self.second(torch.sigmoid(self.first(x))), dim=1)


def get_inputs():
    return [torch.rand(batch, wide)]


def get_init_inputs():
    return []
