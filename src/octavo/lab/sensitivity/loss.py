"""Change of the loss caused by each layer's forward GEMM in FP8.

The change is small and noisy: over a sequence s it is g_s . d + r_s, where d is the change of the layer's output in FP8
and g_s the gradient of the loss there. The first-order term has random sign and is most of the noise, but one backward
pass computes it for all layers on many tokens. The second-order remainder is steady, and is measured by switching one
layer at a time on few tokens. Together they are an unbiased estimate: a control variate (Owen, Monte Carlo theory,
methods and examples, section 8.9).

The remainder needs FP32: in BF16 everything after the changed layer is rounded differently, which adds noise as large
as the first-order term. That term is no difference of losses and may be computed in BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.lab.sensitivity.precision_switch import Choice, PrecisionSwitch
from octavo.lab.train.evaluate import standard_error
from octavo.nn.conv import Convolution
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import hooked, input_of

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> loss in nats per token, of the batch or per sequence (B,)."""
FORWARD_BACKWARD = 3
"""Time of forward and backward, in forward passes."""


ReportPasses = Callable[[str, float], None]
"""Called before each measurement with its description and its work, in forward passes over a batch."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the loss, in nats per token."""

    mean: float
    error: float | None
    """Standard error of the mean over sequences; None for a single one."""
    second_order: float
    """Its second-order part, which persists as weights change; the first-order part changes sign."""


UNCHANGED = Change(0.0, 0.0, 0.0)


@torch.no_grad()
def losses(model: nn.Module, batches: Sequence[Any], loss: Loss) -> Tensor:
    """Return the loss per sequence, or per batch if `loss` returns one value: float64 (S,) on the CPU."""
    return torch.cat([loss(model, batch).double().reshape(-1) for batch in batches]).cpu()


def loss_changes(
    switch: PrecisionSwitch,
    batches: Sequence[Any],
    few: int,
    loss: Loss,
    report: ReportPasses,
    quick: AbstractContextManager[object],
) -> tuple[float, dict[str, Change]]:
    """Return the loss in high precision, and per layer its change with only that layer's fprop in FP8.

    Args:
        switch: the layers.
        batches: all are used for the first-order pass.
        few: number of leading batches on which each layer is switched.
        loss: see `Loss`.
        report: called before each measurement.
        quick: context (autocast) of the pass over all batches.
    """
    _, first = first_order(switch, batches[:few], loss, report)
    with quick:
        whole, many = first_order(switch, batches, loss, report)
    report("loss, high precision", few)
    before = losses(switch.model, batches[:few], loss)
    found = {}
    for name, choice in switch.only("fprop").items():
        report(f"loss, {name}", few)
        with switch.using({name: choice}):
            change = losses(switch.model, batches[:few], loss) - before
        found[name] = _together(many[name], change - first[name])
    return float(whole.mean()), found


def _together(first: Tensor, rest: Tensor) -> Change:
    """Return the change from its first-order part and remainder, each with sequences of its own."""
    errors = [error for error in (standard_error(first), standard_error(rest)) if error is not None]
    error = math.hypot(*errors) if len(errors) == 2 else None
    return Change(float(first.mean() + rest.mean()), error, float(rest.mean()))


def first_order(
    switch: PrecisionSwitch, batches: Sequence[Any], loss: Loss, report: ReportPasses
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss per sequence, float64 (S,), and per layer g_s . d of each, with one backward pass per batch.

    A layer that no gradient reaches has zeros.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in switch.layers}
    seen: list[Tensor] = []
    for number, batch in enumerate(batches):
        report(f"gradient, batch {number + 1} of {len(batches)}", FORWARD_BACKWARD)
        with _products(switch) as products, torch.enable_grad():
            of_batch = loss(switch.model, batch).reshape(-1)
            of_batch.sum().backward()
        switch.model.zero_grad(set_to_none=True)
        seen.append(of_batch.detach().double().cpu())
        for name, parts in found.items():
            parts.append(_by_sequence(products[name], len(of_batch)))
    return torch.cat(seen), {name: torch.cat(parts) for name, parts in found.items()}


@contextmanager
def _products(switch: PrecisionSwitch) -> Iterator[dict[str, list[Tensor]]]:
    """Collect g * d per call of each layer during forward and backward, summed over features, float32."""
    products: dict[str, list[Tensor]] = {name: [] for name in switch.layers}
    hooks = (
        switch.layers[name].register_forward_hook(_hook(switch, {name: choice}, products[name]), with_kwargs=True)
        for name, choice in switch.only("fprop").items()
    )
    with hooked(hooks):
        yield products


def _hook(switch: PrecisionSwitch, fprop: Mapping[str, Choice], products: list[Tensor]) -> Callable[..., None]:
    """Return a forward hook that appends g * d of each call; d is the change of the output by `fprop` in FP8."""

    def hook(layer: LinearLayer | Convolution, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        if not y.requires_grad:
            return
        with switch.using(fprop), torch.no_grad():
            change = layer.forward(input_of(args, kwargs).detach()) - y
        y.register_hook(lambda gradient: products.append((gradient.float() * change.float()).flatten(1).sum(1)))

    return hook


def _by_sequence(products: Sequence[Tensor], sequences: int) -> Tensor:
    """Return the sum over calls per sequence, float64 (S,) on the CPU; rows of a sequence are contiguous."""
    total = torch.zeros(sequences, dtype=torch.float64)
    for product in products:
        rows = product.double().cpu()
        total += rows.reshape(sequences, -1).sum(1) if len(rows) % sequences == 0 else rows.sum() / sequences
    return total
