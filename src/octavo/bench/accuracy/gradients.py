"""How far an FP8 gradient points away from the BF16 gradient of the same weights on the same batch."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import strict
from octavo.conversion import Policy, convert
from octavo.numerics import cosine_of, inner_products
from octavo.train import checkpoint
from octavo.train.config import assemble
from octavo.train.setup import Batch, set_up
from octavo.train.train_state import TrainState

BEFORE = 2
"""Batches that a recipe sees before the one that counts: scales that have a history need one."""


def gradient_cosines(run: Path, recipes: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each recipe with the keys that its rows in a result of kind `parity` take.

    `cosine_start` and `cosine_end`: of all weights' gradients as one vector, at the weights that the BF16 run started
    from and at those it ended with; `cosine_layer_start`, `cosine_layer_end`: the lowest of a single matrix.

    Args:
        run: directory of a finished run in BF16.
    """
    config = assemble((str(run / "config.json"), strict.read_file(run / "config.json")))
    eager = dataclasses.replace(config.run, compile="off", twin=False)
    setup = set_up(dataclasses.replace(config, run=eager))
    [lane] = setup.states
    part = config.run.batch // config.run.accumulate
    batches = [(x[:part], y[:part]) for x, y in itertools.islice(setup.loader, BEFORE + 1)]
    policy = Policy(min_gain=config.run.min_gain)
    found: dict[str, dict[str, Any]] = {recipe: {} for recipe in recipes}
    for moment in ("start", "end"):
        if moment == "end":
            _load_last(lane, run)
        reference = _gradients(lane, batches[-1:])
        for recipe in recipes:
            model = copy.deepcopy(lane.model)
            convert(model, recipe, policy=policy)
            gradients = _gradients(TrainState("fp8", model, config.optimizer), batches)
            whole, worst = compare(gradients, reference)
            found[recipe] |= {f"cosine_{moment}": whole, f"cosine_layer_{moment}": worst}
    yield from found.items()


def compare(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the cosine of two gradients, each as one vector, and the lowest cosine of a matrix of them."""
    products = {name: inner_products(gradients[name], reference[name]) for name in reference}
    whole = cosine_of(torch.stack([*products.values()]).sum(0))
    return whole, min(cosine_of(products[name]) for name in reference if reference[name].dim() >= 2)


def _load_last(lane: TrainState, run: Path) -> None:
    path = checkpoint.find(run / "checkpoints")[-1]
    saved = checkpoint.load(path).tensors["bf16"]
    weights: dict[str, Any] = {n.removeprefix("model."): t for n, t in saved.items() if n.startswith("model.")}
    lane.model.load_state_dict(weights, strict=False)  # a tied weight is saved once


def _gradients(lane: TrainState, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the gradient of the last batch; those before it leave no more than what a recipe remembers of them."""
    model: nn.Module = lane.model.train()
    remember = torch.optim.SGD(model.parameters(), lr=0.0)  # kept scales roll on with an optimizer's step
    for inputs_BT, targets_BT in batches:
        model.zero_grad(set_to_none=True)
        lane.loss(inputs_BT.to(lane.device), targets_BT.to(lane.device)).backward()
        remember.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache() if lane.device.type == "cuda" else None
    return gradients
