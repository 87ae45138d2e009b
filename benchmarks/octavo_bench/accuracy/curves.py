"""Training curves side by side: how many tokens a recipe needs for the loss that another reaches, and how much time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

SMOOTHED = 0.05
"""Share of a run that one point of a smoothed curve averages over: single batches differ far more than recipes do."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The smoothed training loss of one run."""

    tokens: tuple[float, ...]
    """Trained on, at each point: the middle of what it averages over."""
    loss: tuple[float, ...]
    """In nats a token."""


@dataclass(frozen=True, slots=True)
class EqualLoss:
    """Two runs where their losses are equal: at the final loss of the one that ended higher."""

    loss: float
    tokens_ratio: float
    """Tokens that the recipe needs for it, in units of what the reference needs; below 1, it learns from fewer."""


def read_curve(metrics: Sequence[Mapping[str, Any]], lane: str) -> Curve:
    """Return the curve of `lane` from the lines of `metrics.jsonl`, each point the mean of its neighbourhood."""
    logged = [(line["tokens"], line[f"loss_{lane}"]) for line in metrics if line.get(f"loss_{lane}") is not None]
    width = max(1, round(SMOOTHED * len(logged)))
    windows = [logged[start : start + width] for start in range(len(logged) - width + 1)]
    return Curve(
        tuple(fmean(tokens for tokens, _ in window) for window in windows),
        tuple(fmean(loss for _, loss in window) for window in windows),
    )


def tokens_to(curve: Curve, loss: float) -> float:
    """Return the tokens after which `curve` is at `loss` or below for good, between points in a straight line."""
    above = [i for i, value in enumerate(curve.loss) if value > loss]
    if not above:
        return curve.tokens[0]
    i = above[-1]
    if i + 1 == len(curve.loss):
        return curve.tokens[i]
    share = (curve.loss[i] - loss) / (curve.loss[i] - curve.loss[i + 1])
    return curve.tokens[i] + share * (curve.tokens[i + 1] - curve.tokens[i])


def equal_loss(curve: Curve, reference: Curve) -> EqualLoss:
    """Compare two runs at the final loss of the one that ended higher, which both have reached."""
    loss = max(curve.loss[-1], reference.loss[-1])
    return EqualLoss(loss, tokens_to(curve, loss) / tokens_to(reference, loss))
