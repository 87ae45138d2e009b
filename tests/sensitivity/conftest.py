"""A small model with three layers that may run in FP8, and data for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48))
        self.first = nn.Linear(48, 64, bias=False)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 32, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.second(torch.tanh(self.first(self.scale * x))))))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each sequence."""
    x_BTK, y_BTN = batch
    found: Tensor = (model(x_BTK) - y_BTN).square().mean((1, 2))
    return found


@pytest.fixture
def case() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Callable[[nn.Module, Any], Tensor]]:
    """Return a model, four batches of three sequences, and the loss."""
    torch.manual_seed(1)
    batches = [(torch.randn(3, 8, 48), torch.randn(3, 8, 32)) for _ in range(4)]
    return Stack().train(), batches, loss
