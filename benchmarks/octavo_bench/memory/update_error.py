"""How far an optimizer's updates are from FP64's: a small problem with known gradients, the same for every storage.

Gradients are a signal that stays and four times as much noise; the sizes of rows and columns are log-normal. FP64 sees
them as they are, an optimizer in the dtype that it has them in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from octavo.optim import Optimizer
from octavo.tensor import FP8Tensor

SHAPE, STEPS = (64, 256), 50
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_NOISE, _SPREAD = 4.0, 1.0
"""Noise to signal, and the standard deviation of the logarithms of rows' and columns' sizes."""


def start(device: str) -> Tensor:
    """Return the weights that are stepped, FP32."""
    return 0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)


def update_error_db(
    weight: nn.Parameter, make: Callable[[nn.Parameter], torch.optim.Optimizer], gradient: torch.dtype
) -> float:
    """Return |w - w64| / |w64 - w0| in dB: the error of all updates together, relative to them.

    w is the master where the optimizer has one, w64 the weight after as many steps of AdamW in FP64.

    Args:
        weight: made of `start`, in whatever dtype.
        make: the optimizer of that parameter, with `LR`, `BETAS`, `EPS` and `WEIGHT_DECAY`.
        gradient: the dtype in which backward makes gradients.
    """
    before = _value(weight)
    exact = before.clone()
    first, second = torch.zeros_like(exact), torch.zeros_like(exact)
    optimizer = make(weight)
    for step, g in enumerate(_gradients(weight.device), start=1):
        weight.grad = g.to(gradient)
        optimizer.step()
        optimizer.zero_grad()
        g = g.double()
        first += (g - first) * (1 - BETAS[0])
        second += (g.square() - second) * (1 - BETAS[1])
        root = (second / (1 - BETAS[1] ** step)).sqrt()
        exact = exact * (1 - LR * WEIGHT_DECAY) - LR * first / (1 - BETAS[0] ** step) / (root + EPS)
    after = optimizer.master_weights()[0].double() if isinstance(optimizer, Optimizer) else _value(weight)
    error = float((after - exact).norm() / (exact - before).norm())
    return round(20 * math.log10(error), 2)


def _gradients(device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, cols = (torch.randn(n, generator=generator).mul(_SPREAD).exp() for n in SHAPE)
    size = 1e-4 * rows[:, None] * cols
    signal = torch.randn(SHAPE, generator=generator)
    for _ in range(STEPS):
        yield (size * (signal + _NOISE * torch.randn(SHAPE, generator=generator))).to(device)


def _value(weight: nn.Parameter) -> Tensor:
    value = weight.dequantize(torch.float32) if isinstance(weight, FP8Tensor) else weight
    return value.detach().double()
