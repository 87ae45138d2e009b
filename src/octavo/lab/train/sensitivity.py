"""What FP8 costs the loss in each linear layer, measured during a run, and which layers leave FP8 for it.

Rounding moves the output y_m of a layer at token m by d_m, about zero on average and independently at each token. So
the loss rises by its second-order part, here with the empirical Fisher matrix in place of the Hessian (LeCun et al.,
Optimal Brain Damage, takes the diagonal of one; Kunstner et al., arXiv 1905.12558, says how the two differ):

    cost = 1/2 * mean over tokens of (g_m . d_m)^2      nats per token

g_m is the gradient of the summed loss at y_m, so that later tokens count too. One forward and backward measures all
layers: each is computed beside it in both precisions. `octavo.localize` switches layers one by one, which takes hours
and sees interactions; this ranks them within a step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.lab.train.config import SensitivityConfig
from octavo.nn.functional import linear
from octavo.nn.modules import hooked, input_of
from octavo.recipes import Recipe

STAYS = 1.5
"""Factor on the cost of a layer that is in BF16 already, so that layers of about the same cost do not change places."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer in a measurement."""

    loss: float
    """Cost of its fprop in FP8, nats per token."""
    flops: float
    """FLOPs of its fprop; the three GEMMs have three times as many."""


@dataclass(slots=True)
class _Tally:
    """What the calls of a layer add up to."""

    flops: float = 0.0
    tokens: int = 0
    squares: list[Tensor] = field(default_factory=list)
    """Per call the sum of (g . d)^2 over its tokens, FP32 ()."""

    def cost(self) -> LayerCost:
        total = float(torch.stack(self.squares).double().sum()) if self.squares else 0.0
        return LayerCost(0.5 * self.tokens * total, self.flops)


def layer_costs(layers: Mapping[str, tuple[nn.Linear, Recipe]], compute: Callable[[], object]) -> dict[str, LayerCost]:
    """Return the cost of FP8 in each layer, whether it is in FP8 or not; a layer that is not called has none.

    Compiled code and fused MLPs run eagerly, layer by layer. The difference of the two outputs is kept from forward to
    backward, as large as the outputs. Waits for the device.

    Args:
        layers: by name, with the recipe of each in FP8.
        compute: runs forward and backward from the mean loss of a batch, in nats per token.
    """
    with _tallied(layers) as tallies:
        compute()
    return {name: tally.cost() for name, tally in tallies.items() if tally.tokens}


@contextmanager
def _tallied(layers: Mapping[str, tuple[nn.Linear, Recipe]]) -> Iterator[dict[str, _Tally]]:
    tallies = {name: _Tally() for name in layers}
    hooks = (
        layer.register_forward_hook(partial(_count, tallies[name], recipe), with_kwargs=True)
        for name, (layer, recipe) in layers.items()
    )
    with hooked(hooks), torch.compiler.set_stance("force_eager"):
        yield tallies


def _count(
    tally: _Tally, recipe: Recipe, layer: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
) -> None:
    """Add a call and what FP8 costs in it, once its gradient is there: a recomputed output has none."""
    if not y.requires_grad:
        return
    x, weight = input_of(args, kwargs).detach(), layer.weight.detach()
    with torch.no_grad():
        d = linear(x, weight, None, recipe, y.dtype) - F.linear(x.to(y.dtype), weight.to(y.dtype))

    def add(g: Tensor) -> None:
        tokens = d.numel() // d.shape[-1]
        tally.tokens += tokens
        tally.flops += 2.0 * tokens * weight.numel()
        tally.squares.append((g.float() * d.float()).sum(-1).square().sum())

    y.register_hook(add)


def choose(costs: Mapping[str, LayerCost], in_bf16: Collection[str], config: SensitivityConfig) -> list[str]:
    """Return the layers that are to be in BF16: those of the largest cost per FLOP, the largest first.

    A layer is taken if its cost per FLOP is above `config.above` times the mean of all, and if it fits in what is left
    of `config.share` of all FLOPs. One that is in BF16 counts `STAYS` times.

    Args:
        costs: by layer, finite.
        in_bf16: the layers that are in BF16 now.
        config: threshold and budget.
    """
    standing = {name: times_the_mean(costs, name) * (STAYS if name in in_bf16 else 1.0) for name in costs}
    chosen, room = [], config.share * sum(cost.flops for cost in costs.values())
    for name in sorted(standing, key=lambda name: -standing[name]):
        if standing[name] > config.above and costs[name].flops <= room:
            chosen.append(name)
            room -= costs[name].flops
    return chosen


def times_the_mean(costs: Mapping[str, LayerCost], name: str) -> float:
    """Return the cost per FLOP of a layer in units of the mean over all layers."""
    flops, loss = sum(cost.flops for cost in costs.values()), sum(cost.loss for cost in costs.values())
    return costs[name].loss / costs[name].flops / (loss / flops) if loss else 0.0
