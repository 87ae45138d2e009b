"""Small models with layers and experts that may run in FP8, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
        return self.last(self.drop(torch.tanh(self.second(input=torch.tanh(self.first(self.scale * x))))))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each sequence."""
    x_BTK, y_BTN = batch
    found: Tensor = (model(x_BTK) - y_BTN).square().mean((1, 2))
    return found


class Experts(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        first = ("w1", "w3") if split else ("w13",)
        for name in first:
            self.register_parameter(name, nn.Parameter(torch.randn(4, 64 // len(first), 64) / 8))
        self.w2 = nn.Parameter(torch.randn(4, 64, 32) / 6)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(4):
            token, place = torch.where(ids == expert)
            if hasattr(self, "w13"):
                gate, up = F.linear(x[token], self.w13[expert]).chunk(2, -1)
            else:
                gate, up = F.linear(x[token], self.w1[expert]), F.linear(x[token], self.w3[expert])
            found = F.linear(F.silu(gate) * up, self.w2[expert]) * weights[token, place, None]
            y = y.index_add(0, token, found)
        return y


class Mixture(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(64, 64), nn.Linear(64, 4)
        self.experts, self.last = Experts(split), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        weights, ids = self.router(h).softmax(-1).topk(2, -1)
        return (self.last(self.experts(h, ids, weights)) - y).square().mean()


@pytest.fixture(params=[False, True], ids=["one stack", "two stacks"])
def mixture(request: pytest.FixtureRequest) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Return a mixture of experts, four batches of 32 tokens, and the loss."""
    torch.manual_seed(1)
    batches = [(torch.randn(32, 64), torch.randn(32, 64)) for _ in range(4)]
    return Mixture(request.param), batches, lambda model, batch: model(*batch)


@pytest.fixture
def case() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Callable[[nn.Module, Any], Tensor]]:
    """Return a model, four batches of three sequences, and the loss."""
    torch.manual_seed(1)
    batches = [(torch.randn(3, 8, 48), torch.randn(3, 8, 32)) for _ in range(4)]
    return Stack().train(), batches, loss
