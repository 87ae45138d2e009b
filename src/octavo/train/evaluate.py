"""The loss on held-out text: the same batches for every model, whatever its precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.train.lane import Lane


@torch.no_grad()
def heldout_losses(lane: Lane, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean loss in nats a token of every sequence in `(inputs_BT, targets_BT)` batches, float64 on the CPU.

    All sequences have the same length, so that the mean of the result is the held-out loss. On several ranks all call
    it; each takes its part of each batch, and has the losses of all.
    """
    lane.make_room()
    lane.model.eval()
    own = []
    for inputs_BT, targets_BT in batches:  # all before ranks wait for each other: in a pipeline they work at once
        rows = lane.ranks.own_rows(len(inputs_BT))
        own.append(lane.loss(inputs_BT[rows].to(lane.device), targets_BT[rows].to(lane.device), by_sequence=True))
    lane.model.train()
    sizes = [len(inputs_BT) for inputs_BT, _ in batches]
    return torch.cat([lane.ranks.all_rows(x.double(), size) for x, size in zip(own, sizes, strict=True)]).cpu()


def heldout_loss(lane: Lane, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean of `heldout_losses`."""
    return float(heldout_losses(lane, batches).mean())


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, the number of equally likely tokens as hard to guess; infinite past 700 nats."""
    return math.exp(loss) if loss < 700 else math.inf
