"""What each choice for a layer takes in time: measured on a GPU with the layer's own shapes, else predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.conversion.gain import predicted_ms
from octavo.nn import Linear
from octavo.nn.hooks import hooked
from octavo.sensitivity.choices import Choice
from octavo.sensitivity.loss import Loss
from octavo.sensitivity.switchboard import Layer, Switchboard, weight_of
from octavo.train.timing import milliseconds, warm_up

REPEATS = 20
"""Calls whose median counts."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer is called with in a forward pass."""

    shape: tuple[int, ...]
    """Of its input."""
    dtype: torch.dtype
    needs_gradient: bool
    """Whether there is anything before it to train."""
    rows: int
    """M of its GEMMs: tokens, or output pixels."""


def calls_of(
    board: Switchboard, batch: Any, loss: Loss, dtype: torch.dtype | None, tokens: int | None
) -> dict[str, Call]:
    """Return the first call of each layer in a forward pass; layers that are not called are left out.

    Args:
        dtype: autocast's while the model trains, None without it.
        tokens: rows of linear layers, in place of those that the batch has.
    """
    found: dict[str, Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: Layer, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            x, features = inputs[0], weight_of(layer).shape[0]
            found.setdefault(name, Call(tuple(x.shape), x.dtype, x.requires_grad, y.numel() // features))

        return hook

    hooks = (layer.register_forward_hook(note(name)) for name, layer in board.layers.items())
    with hooked(hooks), torch.enable_grad(), autocast(next(board.model.parameters()).device, dtype):
        loss(board.model, batch)
    if tokens is None:
        return found
    return {
        name: replace(call, shape=(tokens, call.shape[-1]), rows=tokens)
        if isinstance(board.layers[name], Linear)
        else call
        for name, call in found.items()
    }


def predicted(board: Switchboard, calls: Mapping[str, Call]) -> dict[str, dict[Choice, float]]:
    """Return for each layer and choice the milliseconds of its three GEMMs, as `octavo.conversion.gain` has them."""
    found = {}
    for name, call in calls.items():
        weight = weight_of(board.layers[name])
        taps = weight[0, 0].numel() if weight.dim() > 2 else 0
        shape = weight.shape[0], weight[0].numel(), call.rows, taps
        found[name] = {choice: predicted_ms(recipe, *shape) for choice, recipe in board.offered[name].items()}
    return found


def measured(
    board: Switchboard, calls: Mapping[str, Call], dtype: torch.dtype | None, report: Callable[[str], None]
) -> dict[str, dict[Choice, float]]:
    """Return for each layer and choice the milliseconds of forward and backward, the weight quantised or cast anew.

    A GPU's time alone: the host gets ahead first. Layers that are alike are measured once.

    Args:
        dtype: autocast's while the model trains, None without it.
    """
    known: dict[tuple[Any, ...], dict[Choice, float]] = {}
    found = {}
    for name, call in calls.items():
        layer = board.layers[name]
        weight = weight_of(layer)
        kind = type(layer), weight.shape, weight.dtype, weight.requires_grad, call, *_settings(layer)
        key = (*kind, *(recipe.name for recipe in board.offered[name].values()))
        if key not in known:
            report(f"time, {name}")
            known[key] = dict(_measure(board, name, call, dtype))
        found[name] = known[key]
    return found


def _settings(layer: Layer) -> Sequence[Any]:
    """Return what else decides a convolution's time."""
    return () if isinstance(layer, Linear) else (layer.stride, layer.padding, layer.dilation)


def _measure(board: Switchboard, name: str, call: Call, dtype: torch.dtype | None) -> Iterator[tuple[Choice, float]]:
    layer = board.layers[name]
    device = weight_of(layer).device
    x = torch.randn(call.shape, device=device, dtype=call.dtype).requires_grad_(call.needs_gradient)
    with autocast(device, dtype):
        dy = torch.randn_like(layer(x))

    def step() -> None:
        layer.forget_codes()  # every step has new weights
        with autocast(device, dtype):
            y = layer(x)
        if y.requires_grad:
            y.backward(dy)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    for choice in board.offered[name]:
        with board.using({name: choice}):
            warm_up(step, device.type, calls=3, seconds=0.05)
            yield choice, statistics.median(milliseconds(step, device.type, REPEATS, queued=True))


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Compute under PyTorch's autocast, or without it."""
    with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        yield
