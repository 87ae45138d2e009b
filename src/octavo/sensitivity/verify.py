"""Verify predictions: apply maps on other data and compare the measured change of the loss with the predicted one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from octavo._util.terminal import Report, silent
from octavo.conversion.policy import Policy
from octavo.sensitivity.localisation import products
from octavo.sensitivity.loss import Loss, losses
from octavo.sensitivity.precision_switch import Choice, switchable
from octavo.sensitivity.result import Localisation
from octavo.train.evaluate import standard_error

SINGLE, RANDOM = "single layers", "random maps"


def verify(
    model: nn.Module,
    found: Localisation,
    batches: Sequence[Any],
    loss: Loss,
    *,
    maps: int,
    policy: Policy | None = None,
    scales: str | None = None,
    report: Report = silent,
) -> list[dict[str, Any]]:
    """Return a row for single layers and a row for random maps, as in the result kind `localize`.

    Predicted changes are summed over the layers with fprop in FP8; measured is the loss of the model on `batches` minus
    that in high precision. Random maps have any number of layers with equal probability.

    Everything else is in the model's own precision, with TF32 on a GPU: in BF16, rounding after each changed layer
    would require four times the tokens.

    Args:
        model, policy, scales: as for `octavo.localize`.
        found: the localisation.
        batches: data not used for `found`.
        loss: see `Loss`.
        maps: number of single layers, drawn at random, and of random maps.
        report: called before each measurement, with the share that is done.
    """
    names = [layer.name for layer in found.layers if ("fprop",) in layer.recipes]
    predicted = {layer.name: layer.change.mean for layer in found.layers}
    groups = {SINGLE: _some(names, maps), RANDOM: list(random_maps(names, maps))}
    rows = []
    on_gpu = next(model.parameters()).is_cuda
    with switchable(model, found.recipe, policy, 8192, scales) as switch, products("high" if on_gpu else "highest"):
        before = losses(model, batches, loss)
        done, total = 1, 1 + sum(map(len, groups.values()))  # forward passes over the batches
        for title, group in groups.items():
            measured, errors = [], []
            for number, inside in enumerate(group):
                report(f"verify, {title} {number + 1} of {len(group)}", done / total)
                done += 1
                chosen: dict[str, Choice] = dict.fromkeys(inside, ("fprop",))
                with switch.using(chosen):
                    change = losses(model, batches, loss) - before
                measured.append(float(change.mean()))
                errors.append(standard_error(change))
            sums = [sum(predicted[name] for name in inside) for inside in group]
            rows.append(_row(title, group, sums, measured, errors))
    return rows


def _some(names: Sequence[str], count: int) -> list[list[str]]:
    """Return `count` random single layers, in the order of the model."""
    picked = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [[names[place]] for place in sorted(picked)]


def random_maps(names: Sequence[str], count: int) -> Iterator[list[str]]:
    """Yield random maps with a uniformly distributed number of layers, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        size = int(torch.randint(1, len(names) + 1, (), generator=generator))
        picked = torch.randperm(len(names), generator=generator)[:size].tolist()
        yield [names[place] for place in sorted(picked)]


def _row(
    title: str, group: Sequence[Sequence[str]], predicted: list[float], measured: list[float], errors: list[float]
) -> dict[str, Any]:
    return {
        "maps": title,
        "layers": max(map(len, group), default=0) if title == RANDOM else len(group),
        "predicted": predicted,
        "measured": measured,
        "error": float(np.mean(errors)),
        "rank_correlation": rank_correlation(predicted, measured),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; 0 if either does not vary."""
    ranks = np.array([_ranks(a), _ranks(b)])
    centred = ranks - ranks.mean(1, keepdims=True)
    spread = np.sqrt((centred**2).sum(1)).prod()
    return float((centred[0] * centred[1]).sum() / spread) if spread else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    x = np.asarray(values, dtype=np.float64)
    below, same = (x[:, None] > x).sum(1), (x[:, None] == x).sum(1)
    ranks: np.ndarray[Any, Any] = below + (same - 1) / 2
    return ranks
