"""A small model, text that it can learn, and a loop with guardrails over both; telemetry of two layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo import Policy, convert
from octavo.kernels.sample import STATS
from octavo.lab.guard import GuardConfig, GuardEvent, Loop
from octavo.optim import AdamW

WIDTH, TOKENS = 64, 32


class MLP(nn.Module):
    """Two layers in FP8 between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs, and what a fixed network makes of them."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5
    while True:
        x = torch.randn(TOKENS, WIDTH, generator=draw)
        yield x, torch.tanh(x @ truth)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


def make_loop(
    recipe: str = "folded", data: Any = None, lr: float = 3e-3, **config: Any
) -> tuple[Loop, list[GuardEvent]]:
    """Return a loop, and the list of what its guardrails say."""
    torch.manual_seed(0)
    model = MLP()
    plan = convert(model, recipe, policy=Policy(min_gain=0))
    optimizer = AdamW(model.parameters(), lr=lr, states="fp32")
    events: list[GuardEvent] = []
    settings = {
        "mode": "act",
        "snapshot_every": 10,
        "shadow_every": 0,
        "flushed": 0.5,
        "flushed_gradient": 0.9,
        **config,
    }
    loop = Loop(
        model, optimizer, loss_of, batches() if data is None else data,
        plan=plan, config=GuardConfig(**settings), on_event=events.append,
    )  # fmt: skip
    return loop, events


ROWS = [(layer, role) for layer in ("a", "b") for role in ("input", "weight", "grad_output")]


def telemetry(**changed: float) -> np.ndarray:
    """Return telemetry where nothing is wrong, but for `b_weight_amax=3.0` and the like."""
    table = np.zeros((len(ROWS), len(STATS)), dtype=np.float32)
    table[:, STATS.index("amax")] = 1.0
    for name, value in changed.items():
        layer, role, stat = name.split("_", 1)[0], name.split("_", 1)[1].rsplit("_", 1)[0], name.rsplit("_", 1)[1]
        table[ROWS.index((layer, role)), STATS.index(stat)] = value
    return table
