"""Losses on held-out text: the same batches for every model and precision."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.kernels.transfers import upload
from octavo.train.train_state import TrainState


def heldout_losses(state: TrainState, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean loss in nats per token of each sequence in `(inputs_BT, targets_BT)` batches; float64 on the CPU.

    All sequences have the same length: the mean of the result is the held-out loss. On several ranks all call it; each
    computes its part of each batch and gets all losses.
    """
    return _by_sequence(state, batches, by_sequence=True)


def heldout_scores(state: TrainState, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return per sequence the loss and the share of targets predicted as most likely: (S, 2). One process only."""
    return _by_sequence(state, batches, hits=True)


@torch.no_grad()
def _by_sequence(state: TrainState, batches: Iterable[tuple[Tensor, Tensor]], **options: bool) -> Tensor:
    state.make_room()
    state.model.eval()
    own, sizes = [], []
    for inputs_BT, targets_BT in batches:  # before any collective, so that pipeline ranks overlap
        rows = state.ranks.own_rows(len(inputs_BT))
        own.append(state.loss(upload(inputs_BT[rows], state.device), upload(targets_BT[rows], state.device), **options))
        sizes.append(len(inputs_BT))
    state.model.train()
    return torch.cat([state.ranks.gather_rows(x.double(), size) for x, size in zip(own, sizes, strict=True)]).cpu()


def heldout_loss(state: TrainState, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean of `heldout_losses`."""
    return float(heldout_losses(state, batches).mean())


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean of independent values; 0 for a single value."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def perplexity(loss: float) -> float:
    """Return `exp(loss)`; infinite above 700 nats."""
    return math.exp(loss) if loss < 700 else math.inf
