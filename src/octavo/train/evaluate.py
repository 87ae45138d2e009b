"""The loss on held-out text: the same batches for every model, whatever its precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.train.lane import Lane


@torch.no_grad()
def heldout_loss(lane: Lane, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss in nats a token of `(inputs_BT, targets_BT)` batches."""
    lane.model.eval()
    total = torch.zeros((), dtype=torch.float64, device=lane.device)
    tokens = 0
    for inputs_BT, targets_BT in batches:
        loss = lane.loss(inputs_BT.to(lane.device), targets_BT.to(lane.device))
        total += loss.double() * targets_BT.numel()
        tokens += targets_BT.numel()
    lane.model.train()
    return float(total) / tokens


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, the number of equally likely tokens as hard to guess; infinite past 700 nats."""
    return math.exp(loss) if loss < 700 else math.inf
