"""How much each layer's forward product in FP8 changes the loss.

The change is small and its noise is not: over a sequence s it is g_s . d + r_s, where d is what FP8 changes in the
layer's output and g_s the gradient of the loss there. The first term is of random sign and most of the noise, yet one
backward pass has it for all layers, on as many tokens as there are. The rest, of second order, is steady, and comes
from switching one layer at a time on few tokens. Together they estimate the change itself, without bias, as a control
variate does (Owen, Monte Carlo theory, methods and examples, section 8.9).

It is steady in FP32. BF16 rounds everything behind a layer that changes anew, and that noise is as large as the first
term, without a gradient that knows it. The first term is no difference of losses, and may be computed in BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.hooks import hooked
from octavo.recipes import Recipe
from octavo.sensitivity.choices import Choice
from octavo.sensitivity.switchboard import Layer, Switchboard
from octavo.train.evaluate import standard_error

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the loss in nats a token: one of the batch, or one of each sequence, (B,)."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the loss, in nats a token."""

    mean: float
    error: float
    """Standard error of the mean over sequences; 0 where there is one only."""
    second_order: float
    """What of it is of second order: it stays while the weights move on, and the rest changes its sign."""


@torch.no_grad()
def losses(model: nn.Module, batches: Sequence[Any], loss: Loss) -> Tensor:
    """Return the loss of every sequence, or of every batch where that is all there is: float64 (S,) on the CPU."""
    return torch.cat([loss(model, batch).double().reshape(-1) for batch in batches]).cpu()


def loss_changes(
    board: Switchboard,
    batches: Sequence[Any],
    few: int,
    loss: Loss,
    report: Callable[[str], None],
    quick: AbstractContextManager[object],
) -> tuple[float, dict[str, Change]]:
    """Return the loss in high precision, and for each layer with fprop in FP8 alone how much that changes it.

    Args:
        batches: all of them are seen by the pass for all layers at once.
        few: how many batches, the first ones, each layer is switched on.
        report: called with what is done next, once a layer.
        quick: the precision of the pass over all batches.
    """
    with quick:
        whole, many = first_order(board, batches, loss, report)
    _, first = first_order(board, batches[:few], loss, report)
    before = losses(board.model, batches[:few], loss)
    found = {}
    for name, choice in forward_choices(board).items():
        report(f"loss, {name}")
        with board.using({name: choice}):
            change = losses(board.model, batches[:few], loss) - before
        found[name] = _together(many[name], change - first[name])
    return float(whole.mean()), found


def forward_choices(board: Switchboard) -> dict[str, Choice]:
    """Return for each layer with fprop in FP8 the choice of that alone."""
    return {name: ("fprop",) for name, offered in board.offered.items() if ("fprop",) in offered}


def _together(first: Tensor, rest: Tensor) -> Change:
    """Return the change whose first term and whose rest these are, each of its own sequences."""
    error = math.hypot(standard_error(first), standard_error(rest))
    return Change(float(first.mean() + rest.mean()), error, float(rest.mean()))


def first_order(
    board: Switchboard, batches: Sequence[Any], loss: Loss, report: Callable[[str], None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of every sequence, float64 (S,), and for every layer g_s . d of each, from one backward a batch.

    A layer that no gradient reaches has zeros.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in board.layers}
    seen: list[Tensor] = []
    for number, batch in enumerate(batches):
        report(f"gradient, batch {number + 1} of {len(batches)}")
        with _products(board) as products, torch.enable_grad():
            of_batch = loss(board.model, batch).reshape(-1)
            of_batch.sum().backward()
        board.model.zero_grad(set_to_none=True)
        seen.append(of_batch.detach().double().cpu())
        for name, parts in found.items():
            parts.append(_by_sequence(products[name], len(of_batch)))
    return torch.cat(seen), {name: torch.cat(parts) for name, parts in found.items()}


@contextmanager
def _products(board: Switchboard) -> Iterator[dict[str, list[Tensor]]]:
    """Collect g * d of each call of each layer while forward and backward run, summed over features, float32."""
    products: dict[str, list[Tensor]] = {name: [] for name in board.layers}
    hooks = (
        board.layers[name].register_forward_hook(_hook(board, name, choice, products[name]))
        for name, choice in forward_choices(board).items()
    )
    with hooked(hooks):
        yield products


def _hook(board: Switchboard, name: str, choice: Choice, products: list[Tensor]) -> Callable[..., None]:
    recipe = board.offered[name][choice]

    def hook(layer: Layer, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        if not y.requires_grad:
            return
        change = _in_fp8(layer, recipe, inputs[0].detach()) - y.detach()
        y.register_hook(lambda gradient: products.append((gradient.float() * change.float()).flatten(1).sum(1)))

    return hook


@torch.no_grad()
def _in_fp8(layer: Layer, recipe: Recipe, x: Tensor) -> Tensor:
    before = layer.recipe
    layer.recipe, layer.enabled = recipe, True
    try:
        return layer.forward(x)
    finally:
        layer.recipe, layer.enabled = before, False


def _by_sequence(products: Sequence[Tensor], sequences: int) -> Tensor:
    """Return the sum over calls for each sequence: rows that share one lie side by side; float64 (S,) on the CPU."""
    total = torch.zeros(sequences, dtype=torch.float64)
    for product in products:
        rows = product.double().cpu()
        total += rows.reshape(sequences, -1).sum(1) if len(rows) % sequences == 0 else rows.sum() / sequences
    return total
