"""What the linear layers of a model read, batch after batch: hooks that count magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.layers import Wanted
from octavo.calibration.spectrum import Spectrum
from octavo.conversion import disabled
from octavo.nn.calibration import full_name
from octavo.nn.hooks import hooked


@contextmanager
def watched(model: nn.Module, wanted: Mapping[str, Wanted]) -> Iterator[dict[str, Spectrum]]:
    """Count, inside the block, the magnitudes of the inputs of layers and of the gradients of their outputs.

    The model computes in its own precision there, eagerly. What is yielded has an entry, `<layer>.<role>`, for each
    tensor that was met, in that order.
    """
    seen: dict[str, Spectrum] = {}
    roles: dict[str, set[str]] = {}
    for one in wanted.values():
        roles.setdefault(one.layer, set()).add(one.role)
    hooks = (
        model.get_submodule(layer).register_forward_hook(_hook(layer, own, seen), prepend=True, with_kwargs=True)
        for layer, own in roles.items()
    )
    with hooked(hooks), disabled(model), torch.compiler.set_stance("force_eager"):
        yield seen


def _hook(layer: str, roles: Collection[str], seen: dict[str, Spectrum]) -> Callable[..., None]:
    def count(role: str, x: Tensor) -> None:
        seen.setdefault(full_name(layer, role), Spectrum()).add(x)

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        if "input" in roles:
            count("input", args[0] if args else kwargs["input"])
        if "grad_output" in roles and y.requires_grad:
            y.register_hook(lambda dy: count("grad_output", dy))

    return watch
