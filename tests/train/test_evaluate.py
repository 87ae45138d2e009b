from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from octavo.train.config import OptimizerConfig
from octavo.train.evaluate import heldout_loss, perplexity
from octavo.train.lane import Lane


class MeanTarget(nn.Module):
    """Its loss is the mean of the targets, and what it saw of the mode and of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        return targets.float().mean() * self.weight.sum()


def test_every_token_weighs_the_same() -> None:
    lane = Lane("bf16", MeanTarget(), OptimizerConfig(), autocast=False)
    large, small = torch.full((3, 4), 1), torch.full((1, 4), 5)
    assert heldout_loss(lane, [(large, large), (small, small)]) == pytest.approx((12 * 1 + 4 * 5) / 16)


def test_it_leaves_the_model_in_training() -> None:
    model = MeanTarget()
    lane = Lane("bf16", model, OptimizerConfig(), autocast=False)
    heldout_loss(lane, [(torch.ones(1, 1), torch.ones(1, 1))])
    assert model.modes == [(False, False)]
    assert model.training
    assert model.weight.grad is None


def test_perplexity() -> None:
    assert perplexity(math.log(17)) == pytest.approx(17)
    assert perplexity(1e4) == math.inf
