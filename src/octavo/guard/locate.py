"""Where something was not finite first: the layer, the role and the token. One forward and backward with hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.nn.conv import AnyConvolution
from octavo.nn.hooks import hooked

SEEN = (nn.Linear, nn.Embedding, AnyConvolution)
"""Modules that are looked at: those with a weight of their own to multiply with, in FP8 or not."""


class Fault(NamedTuple):
    """The first tensor that was not finite."""

    layer: str
    """Full name of the module."""
    role: str
    """`input`, `weight`, `output` or `grad_output`."""
    place: tuple[int, ...]
    """Where in the tensor its first such element lies, without the last dimension: of an input (sequence, token)."""
    elements: int
    """How many elements of it were not finite."""

    def __str__(self) -> str:
        names = ("sequence", "token") if self.role != "weight" and len(self.place) == 2 else ("row",) * len(self.place)
        where = ", ".join(f"{name} {i}" for name, i in zip(names, self.place, strict=True))
        return f"{self.layer} {self.role}{f', {where}' if where else ''} ({self.elements} elements)"


def locate(model: nn.Module, run: Callable[[], Any]) -> Fault | None:
    """Return what is not finite first while `run` computes a forward and, if it wants, a backward; None for nothing.

    Compiled code runs eagerly meanwhile, and an MLP that is else computed as one, layer by layer. Waits for the device.
    """
    found: list[Fault] = []
    hooks = (
        module.register_forward_hook(_watcher(name, found), prepend=True)
        for name, module in model.named_modules()
        if isinstance(module, SEEN)
    )
    with hooked(hooks), torch.compiler.set_stance("force_eager"):
        run()
    return found[0] if found else None


def _watcher(name: str, found: list[Fault]) -> Callable[..., None]:
    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if found:
            return
        for role, tensor in (("input", args[0] if args else None), ("weight", module.weight), ("output", output)):
            if not found:
                _note(name, role, tensor, found)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: _note(name, "grad_output", grad, found) if not found else None)

    return look


def _note(name: str, role: str, tensor: Any, found: list[Fault]) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.element_size() == 1:
        return
    bad = ~torch.isfinite(tensor.detach())
    count = int(bad.sum())
    if count:
        first = torch.nonzero(bad)[0].tolist()
        found.append(Fault(name, role, tuple(first[:-1]), count))
