"""Time of each choice of a layer: measured on a GPU with the layer's shapes, else predicted."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.conversion.gain import predicted_ms
from octavo.kernels.runtime.devices import H200
from octavo.lab.sensitivity.loss import Loss, ReportPasses
from octavo.lab.sensitivity.precision_switch import Choice, Layer, PrecisionSwitch
from octavo.lab.train.timing import milliseconds, warm_up
from octavo.nn.conv import Convolution
from octavo.nn.experts import ExpertLinear
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import hooked, input_of

REPEATS = 20
"""Calls over which the median is taken."""
_GROUPED = H200._replace(row=H200.grouped)
"""Rates of the GEMMs of experts, whose scales are per row."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a layer in a forward pass."""

    shape: tuple[int, ...]
    """Shape of its input."""
    dtype: torch.dtype
    needs_gradient: bool
    """True if something before it is trained."""
    rows: int
    """M of its GEMMs: tokens, or output pixels; of experts the rows of all of them."""


def calls_of(
    switch: PrecisionSwitch, batches: Sequence[Any], loss: Loss, dtype: torch.dtype | None, tokens: int | None
) -> dict[str, Call]:
    """Return the first call of each layer in forward passes; layers that are not called are left out.

    Args:
        switch: the layers.
        batches: inputs of the forward passes; the last ones are not used once every layer was called.
        loss: see `Loss`.
        dtype: autocast dtype of training, None without autocast.
        tokens: rows of linear layers, in place of those of a batch; the rows of experts grow by the same factor.
    """
    found: dict[str, Call] = {}
    with ExitStack() as stack:
        for name, layer in switch.layers.items():
            stack.enter_context(_noted(name, layer, found))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(autocast(next(switch.model.parameters()).device, dtype))
        for batch in batches:
            loss(switch.model, batch)
            if len(found) == len(switch.layers):
                break
    return found if tokens is None else _with_tokens(switch, found, tokens)


@contextmanager
def _noted(name: str, layer: Layer, found: dict[str, Call]) -> Iterator[None]:
    """Record the first call of a layer inside the block."""

    def note(x: Tensor, rows: int) -> None:
        found.setdefault(name, Call(tuple(x.shape), x.dtype, x.requires_grad, rows))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        features = layer.weight.shape[0] if isinstance(layer, Convolution) else y.shape[-1]
        note(input_of(args, kwargs), y.numel() // features)

    def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        note(x, len(x))
        return ExpertLinear.multiply(cast(ExpertLinear, layer), x, weight, ends)

    if not isinstance(layer, ExpertLinear):
        with hooked([layer.register_forward_hook(hook, with_kwargs=True)]):
            yield
        return
    vars(layer)["multiply"] = multiply  # experts are not called: their module multiplies
    try:
        yield
    finally:
        del vars(layer)["multiply"]


def _with_tokens(switch: PrecisionSwitch, found: Mapping[str, Call], tokens: int) -> dict[str, Call]:
    """Return calls with that many rows in linear layers, and proportionally many in experts; others are unchanged."""
    linear = [call.rows for name, call in found.items() if isinstance(switch.layers[name], LinearLayer)]
    of_batch = max(linear, default=0)

    def grown(name: str, call: Call) -> Call:
        layer, rows = switch.layers[name], tokens
        if isinstance(layer, Convolution) or not of_batch:
            return call
        if isinstance(layer, ExpertLinear):
            rows = call.rows * tokens // of_batch
        return replace(call, shape=(rows, call.shape[-1]), rows=rows)

    return {name: grown(name, call) for name, call in found.items()}


def predicted(switch: PrecisionSwitch, calls: Mapping[str, Call]) -> dict[str, dict[Choice, float]]:
    """Return the milliseconds of the three GEMMs per layer and choice, predicted for an H200 (`conversion.gain`).

    Each expert counts as a layer of its own, with its share of the rows.
    """
    found = {}
    for name, call in calls.items():
        layer, row = switch.layers[name], switch.rows[name]
        taps = layer.weight[0, 0].numel() if isinstance(layer, Convolution) else 0
        rates = _GROUPED if isinstance(layer, ExpertLinear) else H200
        shape = *row.shape, -(-call.rows // row.count), taps
        found[name] = {
            choice: row.count * predicted_ms(recipe, *shape, rates=rates)
            for choice, recipe in switch.offered[name].items()
        }
    return found


def measured(
    switch: PrecisionSwitch, calls: Mapping[str, Call], dtype: torch.dtype | None, report: ReportPasses
) -> dict[str, dict[Choice, float]]:
    """Return the milliseconds of forward and backward per layer and choice, including weight quantisation or cast.

    This is GPU time: calls are queued ahead. Identical layers are measured once, experts with equal numbers of rows.

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
        how = (layer.stride, layer.padding, layer.dilation) if isinstance(layer, Convolution) else ()
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
    weight = layer.weight
    device, owner = weight.device, cast(nn.Module, layer)
    given: list[Tensor] = []
    if isinstance(layer, ExpertLinear):  # its weights are parameters of its owner
        owner, given = layer.owner, [balanced(call.rows, len(weight)).to(device)]
    x = torch.randn(call.shape, device=device, dtype=call.dtype).requires_grad_(call.needs_gradient)
    with autocast(device, dtype):
        dy = torch.randn_like(layer(x, *given))

    def step() -> None:
        with autocast(device, dtype):
            y = layer(x, *given)
        if y.requires_grad:
            y.backward(dy)
        owner.zero_grad(set_to_none=True)
        x.grad = None

    for choice in switch.offered[name]:
        with switch.using({name: choice}):
            warm_up(step, device.type, calls=3, seconds=0.05)
            yield choice, statistics.median(milliseconds(step, device.type, REPEATS, queued=True))


def balanced(rows: int, experts: int) -> Tensor:
    """Return the end of each expert's rows, int32 (E,), if they are spread evenly."""
    return (torch.arange(1, experts + 1) * rows // experts).to(torch.int32)


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return PyTorch's autocast, disabled without a dtype."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
