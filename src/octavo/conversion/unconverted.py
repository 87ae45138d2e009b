"""Weights that no layer of a plan reads: parameters multiplied outside of linear layers and convolutions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from octavo.nn import GroupedLinear
from octavo.nn.modules import full_name
from octavo.nn.multihead import unsupported_reason

IN_ONE_CALL = (
    "one call of PyTorch computes projections and attention, and neither a layer nor octavo.autocast is inside it. "
    "Projections that are layers, beside scaled_dot_product_attention, run in FP8"
)
"""Why the projections of an `nn.MultiheadAttention` that is not converted stay as they are, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unconverted:
    """A weight that stays unchanged, because no layer that can be converted reads it."""

    name: str
    shape: tuple[int, ...]
    reason: str
    active: float = 1.0
    """Share of it that one token is multiplied by; below 1 for experts."""

    @property
    def multiplied(self) -> float:
        """Number of its elements that one token is multiplied by."""
        return self.active * math.prod(self.shape)


def find_unconverted(
    model: nn.Module, known: Collection[int], smallest: int, roles: Mapping[int, str]
) -> Iterator[Unconverted]:
    """Yield the weights that no planned layer reads. Embedding tables are not multiplied and are left out.

    Args:
        known: `id` of planned modules, and of the weights that they read.
        smallest: weights with a dimension below this are left out, as layers are (`Policy.min_features`).
        roles: `id` of the weights of routers, and the reason (`octavo.conversion.roles`).
    """
    seen = set(known)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | GroupedLinear) or id(module) in known:
            continue
        packed = {k: b for k, b in module._buffers.items() if b is not None and not b.is_floating_point()}
        tensors = module._parameters if module._parameters else packed if _holds_codes(packed) else {}
        for own, tensor in tensors.items():
            if tensor is None or id(tensor) in seen or "embed" in own:
                continue
            shape = [size for size in tensor.shape if size != 1]
            if len(shape) < 2 or min(shape[-2:]) < smallest:
                continue
            seen.add(id(tensor))
            reason, active = _reason(module, tensor, len(shape))
            reason = roles.get(id(tensor), reason)
            yield Unconverted(name=full_name(name, own), shape=tuple(tensor.shape), reason=reason, active=active)


def _holds_codes(packed: dict[str, Tensor]) -> bool:
    return any(name in ("weight", "qweight", "weight_packed", "packed_weight") for name in packed)


def _reason(module: nn.Module, tensor: Tensor, dims: int) -> tuple[str, float]:
    """Return why a weight stays unchanged, and the share of it that one token is multiplied by."""
    kind = type(module).__name__
    if not tensor.is_floating_point():
        return f"{kind} holds quantised weights already", 1.0
    if isinstance(module, nn.MultiheadAttention):
        return f"{unsupported_reason(module)}: {IN_ONE_CALL}", 1.0
    if isinstance(module, ParametrizationList):
        return "a weight is computed from it, by a parametrization", 1.0
    if isinstance(module, nn.RNNBase):
        return f"{kind} multiplies by it itself, step by step", 1.0
    if dims == 3:
        reason = f"{kind} multiplies by its matrices itself, and is not recognised as experts: octavo.nn.GroupedLinear "
        return f"{reason}computes those in FP8", active_share(module, tensor.shape[0])
    return f"{kind} computes with its parameter itself, and only layers are converted: octavo.autocast reaches it", 1.0


def active_share(module: nn.Module, experts: int) -> float:
    """Return the share of its experts that a mixture sends one token to; 1 if the module does not say."""
    for owner in (module, getattr(module, "config", None)):
        for name in ("num_experts_per_tok", "top_k", "num_selected_experts"):
            count = getattr(owner, name, None)
            if isinstance(count, int) and 0 < count <= experts:
                return count / experts
    return 1.0
