"""Locate faults in tensors: the first non-finite tensor of a step, and weight elements that no update can explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._util.terminal import quantity
from octavo.nn.conv import AnyConvolution
from octavo.nn.fp8_weights import values
from octavo.nn.modules import hooked, input_of

_INSPECTED = (nn.Linear, nn.Embedding, AnyConvolution)
"""Modules with a weight matrix, in FP8 or not."""


class NonFinite(NamedTuple):
    """The first tensor that was not finite."""

    layer: str
    """Full name of the module."""
    role: str
    """`input`, `weight`, `output` or `grad_output`."""
    place: tuple[int, ...]
    """Index of the first such element without the last dimension; (sequence, token) for an input."""
    elements: int
    """Number of non-finite elements."""
    rank: int | None = None
    """Rank that it was found on, in a run on several."""

    def __str__(self) -> str:
        names = ("sequence", "token") if self.role != "weight" and len(self.place) == 2 else ("row",) * len(self.place)
        where = ", ".join(f"{name} {i}" for name, i in zip(names, self.place, strict=True))
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.layer} {self.role}{f', {where}' if where else ''} ({quantity(self.elements, 'element')}){rank}"


def weight_diff(before: Tensor, now: Tensor, reach: float) -> str:
    """Describe the elements of a weight (N, ...) that changed by more than `reach` or are not finite; empty for none.

    Args:
        before: the weight in a snapshot.
        now: the current weight, on any device.
        reach: largest possible change of an element by the steps since then.
    """
    old = values(before.detach(), torch.float32).reshape(len(before), -1)
    new = values(now.detach(), torch.float32).reshape(old.shape).to(old.device)
    places = torch.nonzero(~((new - old).abs() <= reach))
    rows = places[:, 0].unique().tolist()
    if len(places) == 1:
        return f"one element, row {rows[0]}, column {int(places[0, 1])}, as a flipped bit leaves it"
    if len(rows) <= 1:
        return f"{quantity(len(places), 'element')} of row {rows[0]}" if rows else ""
    return f"{quantity(len(places), 'element')} of {len(rows)} rows, the first in row {rows[0]}"


def locate_nonfinite(model: nn.Module, run: Callable[[], Any]) -> NonFinite | None:
    """Return the first non-finite tensor while `run` computes forward and, optionally, backward; None for none.

    Compiled code and fused MLPs run eagerly, layer by layer. Waits for the device.
    """
    found: list[NonFinite] = []
    hooks = (
        module.register_forward_hook(partial(_inspect, name, found), prepend=True, with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, _INSPECTED)
    )
    with hooked(hooks), torch.compiler.set_stance("force_eager"):
        run()
    return found[0] if found else None


def clip(parameters: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Clip gradients by their norm; one that is not finite scales none of them: it would make all of them NaN."""
    nn.utils.clip_grads_with_norm_(parameters, limit, torch.where(torch.isfinite(norm), norm, 0.0))


def _inspect(
    name: str, found: list[NonFinite], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if found:
        return
    for role, tensor in (("input", input_of(args, kwargs)), ("weight", module.weight), ("output", output)):
        _check(name, role, tensor, found)
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda grad: _check(name, "grad_output", grad, found))


def _check(name: str, role: str, tensor: Any, found: list[NonFinite]) -> None:
    if found or not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.element_size() == 1:
        return
    bad = ~torch.isfinite(values(tensor.detach(), tensor.dtype))
    count = int(bad.sum())
    if count:
        first = torch.nonzero(bad)[0].tolist()
        found.append(NonFinite(name, role, tuple(first[:-1]), count))
