"""The learning rate by step.

This module does not import torch: `octavo.lab.train.config` needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.lab.train.config import OptimizerConfig

WARM_UP = (0.01, 0.5)
"""Shares of a run between which warm-up raises no warning."""


def learning_rate(config: OptimizerConfig, step: int, steps: int, heldout: Sequence[float] = ()) -> float:
    """Return the learning rate of `step`, counted from 0, in a run of `steps` steps.

    It rises linearly over the first `warmup * steps` steps (starting above 0), then follows `lr_schedule` from `lr` to
    `min_lr * lr` at the last step; on a `plateau` it is halved, and never below that.

    Args:
        heldout: the held-out losses so far, for `plateau`.
    """
    peak, floor, rising = config.lr, config.min_lr, round(config.warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    if config.lr_schedule == "plateau":
        return peak * max(floor, 0.5 ** plateaus(heldout, config.patience))
    begin = max(rising, steps - 1 - round(config.decay * steps)) if config.lr_schedule == "wsd" else rising
    progress = min(1.0, max(0, step - begin) / max(1, steps - 1 - begin))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1 - progress
    return peak * (floor + (1 - floor) * left)


def plateaus(losses: Sequence[float], patience: int) -> int:
    """Return how often `patience` losses in a row were not 0.1 % below the lowest before."""
    least, since, found = math.inf, 0, 0
    for loss in losses:
        least, since = (loss, 0) if loss < least * (1 - 1e-3) else (least, since + 1)
        if since == patience:
            since, found = 0, found + 1
    return found


def warm_up_note(config: OptimizerConfig) -> str | None:
    """Return a note on an unusual share of warm-up, or None."""
    low, high = WARM_UP
    if config.warmup < low:
        return (
            f"optimizer.warmup is {config.warmup:g} of the run: the first updates of Adam are the largest, and"
            " scales from earlier steps know nothing yet. Take 0.06 to 0.08."
        )
    if config.warmup > high:
        return f"optimizer.warmup is {config.warmup:g} of the run, which then hardly trains at its learning rate."
    return None
