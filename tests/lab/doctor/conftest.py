"""A small model in FP8 that can make a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.lab.doctor.subjects import Trial

Try = Callable[..., Trial]


def small(wrong: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """Return three linear layers; `wrong` is done to what the second reads."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            return self.third(torch.relu(self.second(h if wrong is None else wrong(h))))

    return Model()


@pytest.fixture
def attempt() -> Try:
    """Return what makes a trial: of the model that `small` makes, and of what is done to its input, output or loss."""

    def make(
        *,
        recipe: str = "folded",
        wrong: Callable[[Tensor], Tensor] | None = None,
        loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(),
        device: str = "cpu",
    ) -> Trial:
        torch.manual_seed(0)
        model = small(wrong).to(device)
        octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0.0))
        x = torch.randn(96, 64, device=device)

        def compute() -> Tensor:
            return loss(model(x))

        def step() -> None:
            compute().backward()
            model.zero_grad()

        return Trial(model, compute, step)

    return make
