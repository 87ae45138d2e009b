"""The network that the tests of the optimizers train."""

import torch
from torch import nn


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96)).to(dtype)


def backward(net, seed, scale=1.0):
    """Return the loss, its gradients made."""
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(seed)).to(next(net.parameters()).dtype)
    loss = (net(x) - x).float().square().mean() * scale
    loss.backward()
    return loss.detach()
