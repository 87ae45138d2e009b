"""Time of each choice of a layer: measured on a GPU with the layer's shapes, else predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.conversion.gain import predicted_ms
from octavo.kernels.devices import H200
from octavo.nn import Linear
from octavo.nn.modules import hooked
from octavo.sensitivity.loss import Loss, ReportPasses
from octavo.sensitivity.precision_switch import Choice, Layer, PrecisionSwitch
from octavo.train.timing import milliseconds, warm_up

REPEATS = 20
"""Calls over which the median is taken."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a layer in a forward pass."""

    shape: tuple[int, ...]
    """Shape of its input."""
    dtype: torch.dtype
    needs_gradient: bool
    """True if something before it is trained."""
    rows: int
    """M of its GEMMs: tokens, or output pixels."""


def calls_of(
    switch: PrecisionSwitch, batch: Any, loss: Loss, dtype: torch.dtype | None, tokens: int | None
) -> dict[str, Call]:
    """Return the first call of each layer in a forward pass; layers that are not called are left out.

    Args:
        switch: the layers.
        batch, loss: input of the forward pass.
        dtype: autocast dtype of training, None without autocast.
        tokens: rows of linear layers, in place of those of the batch.
    """
    found: dict[str, Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: Layer, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            x, features = inputs[0], layer.weight.shape[0]
            found.setdefault(name, Call(tuple(x.shape), x.dtype, x.requires_grad, y.numel() // features))

        return hook

    hooks = (layer.register_forward_hook(note(name)) for name, layer in switch.layers.items())
    with hooked(hooks), torch.enable_grad(), autocast(next(switch.model.parameters()).device, dtype):
        loss(switch.model, batch)
    if tokens is None:
        return found
    return {
        name: replace(call, shape=(tokens, call.shape[-1]), rows=tokens)
        if isinstance(switch.layers[name], Linear)
        else call
        for name, call in found.items()
    }


def predicted(switch: PrecisionSwitch, calls: Mapping[str, Call]) -> dict[str, dict[Choice, float]]:
    """Return the milliseconds of the three GEMMs per layer and choice, predicted for an H200 (`conversion.gain`)."""
    found = {}
    for name, call in calls.items():
        weight = switch.layers[name].weight
        taps = weight[0, 0].numel() if weight.dim() > 2 else 0
        shape = weight.shape[0], weight[0].numel(), call.rows, taps
        found[name] = {
            choice: predicted_ms(recipe, *shape, rates=H200) for choice, recipe in switch.offered[name].items()
        }
    return found


def measured(
    switch: PrecisionSwitch, calls: Mapping[str, Call], dtype: torch.dtype | None, report: ReportPasses
) -> dict[str, dict[Choice, float]]:
    """Return the milliseconds of forward and backward per layer and choice, including weight quantisation or cast.

    This is GPU time: calls are queued ahead. Identical layers are measured once.

    Args:
        switch: the layers.
        calls: result of `calls_of`.
        dtype: autocast dtype of training, None without autocast.
        report: called before each measurement.
    """
    known: dict[tuple[Any, ...], dict[Choice, float]] = {}
    found = {}
    for name, call in calls.items():
        layer = switch.layers[name]
        weight = layer.weight
        how = () if isinstance(layer, Linear) else (layer.stride, layer.padding, layer.dilation)
        kind = type(layer), weight.shape, weight.dtype, weight.requires_grad, call, *how
        key = (*kind, *(recipe.name for recipe in switch.offered[name].values()))
        if key not in known:
            report(f"time, {name}", 1)
            known[key] = dict(_measure(switch, name, call, dtype))
        found[name] = known[key]
    return found


def _measure(
    switch: PrecisionSwitch, name: str, call: Call, dtype: torch.dtype | None
) -> Iterator[tuple[Choice, float]]:
    layer = switch.layers[name]
    device = layer.weight.device
    x = torch.randn(call.shape, device=device, dtype=call.dtype).requires_grad_(call.needs_gradient)
    with autocast(device, dtype):
        dy = torch.randn_like(layer(x))

    def step() -> None:
        with autocast(device, dtype):
            y = layer(x)
        if y.requires_grad:
            y.backward(dy)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    for choice in switch.offered[name]:
        with switch.using({name: choice}):
            warm_up(step, device.type, calls=3, seconds=0.05)
            yield choice, statistics.median(milliseconds(step, device.type, REPEATS, queued=True))


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return PyTorch's autocast, disabled without a dtype."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
