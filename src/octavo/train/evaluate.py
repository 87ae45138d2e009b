"""The loss on held-out text: the same batches for every model, whatever its precision."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.kernels.uploads import upload
from octavo.train.lane import Lane


def heldout_losses(lane: Lane, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean loss in nats a token of every sequence in `(inputs_BT, targets_BT)` batches, float64 on the CPU.

    All sequences have the same length, so that the mean of the result is the held-out loss. On several ranks all call
    it; each takes its part of each batch, and has the losses of all.
    """
    return _of_sequences(lane, batches, by_sequence=True)


def heldout_scores(lane: Lane, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return for every sequence the loss of `heldout_losses`, and the share of its targets that were likeliest: (S, 2).

    Of a model in one process.
    """
    return _of_sequences(lane, batches, hits=True)


@torch.no_grad()
def _of_sequences(lane: Lane, batches: Iterable[tuple[Tensor, Tensor]], **options: bool) -> Tensor:
    lane.make_room()
    lane.model.eval()
    own, sizes = [], []
    for inputs_BT, targets_BT in batches:  # all before ranks wait for each other: in a pipeline they work at once
        rows = lane.ranks.own_rows(len(inputs_BT))
        own.append(lane.loss(upload(inputs_BT[rows], lane.device), upload(targets_BT[rows], lane.device), **options))
        sizes.append(len(inputs_BT))
    lane.model.train()
    return torch.cat([lane.ranks.all_rows(x.double(), size) for x, size in zip(own, sizes, strict=True)]).cpu()


def heldout_loss(lane: Lane, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean of `heldout_losses`."""
    return float(heldout_losses(lane, batches).mean())


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean of independent values, one of each sequence; 0 where there is one only."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, the number of equally likely tokens as hard to guess; infinite past 700 nats."""
    return math.exp(loss) if loss < 700 else math.inf
