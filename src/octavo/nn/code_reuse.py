"""Weight codes that are made once for a block of code in which no weight changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.fused import fusion_groups
from octavo.nn.grouped import GroupedLinear, quantize_experts
from octavo.nn.linear import LinearLayer
from octavo.nn.shared import brings_weight, quantize_together
from octavo.nn.weight_codes import WeightCodes


@contextmanager
def reuse_weight_codes(model: nn.Module) -> Iterator[None]:
    """Quantise the weights of a model once, and use those codes in every forward inside the block.

    For blocks in which no weight is written: an evaluation, generation, the micro-batches of one optimizer step. A
    write inside the block has no effect until its end. Not affected are layers and experts with weights that are
    sharded, stored in FP8 or brought by a hook in each call, layers with stochastic rounding, and the weights of q, k
    and v of `nn.MultiheadAttention`.
    """
    layers = [m for m in quantising_layers(model) if isinstance(m, LinearLayer)]
    experts = [m for m in quantising_layers(model) if isinstance(m, GroupedLinear)]
    before: list[tuple[Any, Any]] = []
    try:
        with torch.no_grad():
            for group in fusion_groups(model, layers):
                if (codes := _codes_to_reuse(group)) is not None:
                    before.append((group[0], group[0].weight_codes))
                    group[0].weight_codes = codes
            for each in experts:
                if _are_plain(each.parts):
                    before.append((each, each.weight_codes))
                    each.weight_codes = quantize_experts(each.weight, each.recipe)
        yield
    finally:
        for layer, codes in reversed(before):
            layer.weight_codes = codes


def quantising_layers(model: nn.Module) -> list[LinearLayer | GroupedLinear]:
    """Return the layers and experts of a model that quantise their weights in each forward."""
    return [m for m in model.modules() if isinstance(m, LinearLayer | GroupedLinear) and m.recipe.fprop.is_fp8]


def weights_of(layer: LinearLayer | GroupedLinear) -> list[Tensor]:
    """Return the parameters that the weight of a layer, or of experts, consists of."""
    return layer.parts if isinstance(layer, GroupedLinear) else [layer.weight]


def _codes_to_reuse(group: Sequence[LinearLayer]) -> WeightCodes | None:
    if any(map(brings_weight, group)):
        return None
    weights: list[Tensor] = [layer.matrix for layer in group]
    rounds_to_nearest = group[0].recipe.fprop.weight.rounding == "nearest"
    same = all(layer.recipe is group[0].recipe for layer in group)
    return quantize_together(group, weights) if _are_plain(weights) and same and rounds_to_nearest else None


def _are_plain(weights: Sequence[Tensor]) -> bool:
    # Sharded by PyTorch's FSDP1 or in ZeRO-3, a weight is flat or empty.
    return all(type(w) in (Tensor, nn.Parameter) and w.dim() > 1 and w.numel() and not w.is_meta for w in weights)
