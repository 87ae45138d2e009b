"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank updates of frozen linear layers, whose weights may be FP8 codes.

A layer keeps its class and name: the update is its child `lora`, added to the output by a hook. So plans, fused groups,
exports and FP8 weights work unchanged. Code that reads the weight, and does not call the layer, computes without the
update. PEFT wraps layers instead, which renames their parameters, and merges by adding to `weight.data`, which FP8
codes cannot: the sum must be quantised, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from octavo.errors import ConfigError
from octavo.nn.linear import is_transposed
from octavo.nn.modules import full_name
from octavo.nn.operands import autocast_dtype
from octavo.nn.weight_notes import WeightNotes
from octavo.tensor import FP8Tensor


class LoRA(nn.Module):
    """The update `alpha / rank * B A` of a weight (N, K), in FP32; initially zero."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(layer.in_features)  # as nn.Linear
        a = torch.empty(rank, layer.in_features, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        device = layer.weight.device
        self.A = nn.Parameter(a.to(device))
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=torch.float32, device=device))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the update's output (..., N) for x (..., K), in autocast's dtype or in FP32."""
        if autocast_dtype(x.device.type) is None:
            x = x.to(self.A.dtype)
        return F.linear(F.linear(x, self.A), self.B) * self.scale

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return the update of the weight, FP32 (N, K)."""
        return self.scale * (self.B @ self.A)


_UPDATED = WeightNotes("_octavo_has_update")
"""Notes on the weights of layers with an update."""


def has_update(weight: Tensor) -> bool:
    """Return whether a weight is that of a layer with an update, which only a call of the layer adds."""
    return _UPDATED.of(weight) is not None


def add_lora(model: nn.Module, rank: int, alpha: float, layers: str = "*", seed: int = 0) -> list[str]:
    """Freeze a model and give its linear layers trainable updates; return the names of these layers.

    Args:
        model: converted or not.
        rank: rank of the updates.
        alpha: the updates are multiplied by `alpha / rank`.
        layers: pattern of names; `*` matches anything.
        seed: seed of A.

    Raises:
        ConfigError: no linear layer has such a name; or the model has updates already, or such a layer is never
            called, or its weight is shared or computed. Nothing has been changed.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and fnmatchcase(name, layers)}
    if not found:
        raise ConfigError(f"lora.layers: '{layers}' matches no linear layer.")
    _check(model, found)
    model.requires_grad_(False)
    for layer in found.values():
        layer.lora = LoRA(layer, rank, alpha, generator)
        _UPDATED.put(layer, "LoRA")
        layer.register_forward_hook(_add, with_kwargs=True)
    return list(found)


def _check(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Check that updates of these layers would be trained, and could be merged into their weights."""
    owners: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():  # a layer used in two places is one layer
        if isinstance(module, LoRA):
            raise ConfigError(f"'{module_name}' is a LoRA update already: call merge_lora(model) first.")
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append(full_name(module_name, name))
    for name, layer in layers.items():
        weight = full_name(name, "weight")
        if "weight" not in layer._parameters:
            reason = f"{weight} is computed, by a parametrization for example, so that no update can be merged into it"
        elif others := [owner for owner in owners[id(layer.weight)] if owner != weight]:
            reason = f"{weight} is {others[0]} too, which the update would change when it is merged"
        elif isinstance(layer, NonDynamicallyQuantizableLinear):
            reason = f"nn.MultiheadAttention reads {weight} and never calls '{name}', so that no update is trained"
        else:
            continue
        raise ConfigError(f"lora.layers: {reason}. Give a pattern without '{name}'.")


@torch.no_grad()
def merge_lora(model: nn.Module) -> int:
    """Add all updates to the weights of their layers and remove them; return their number.

    Sums are computed in FP32 and rounded once: to the dtype of the weight, or to FP8 with new scales.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "lora", None), LoRA)]
    for layer in layers:
        weight, update = layer.weight, layer.lora
        assert isinstance(weight, Tensor) and isinstance(update, LoRA)
        values = weight.dequantize(torch.float32) if isinstance(weight, FP8Tensor) else weight.float()
        weight.copy_(values + (update.delta().t() if is_transposed(layer) else update.delta()))
        hooks = layer._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is _add]:
            del hooks[key]
            layer._forward_hooks_with_kwargs.pop(key, None)
        del layer.lora
        _UPDATED.put(layer, None)
    return len(layers)


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor], output: Tensor) -> Tensor:
    """Add the update to a layer's output: a hook that copies of the layer share."""
    x = inputs[0] if inputs else next(iter(named.values()))
    update: Tensor = layer.lora(x)  # type: ignore[operator]
    return output + update.to(output.dtype)
