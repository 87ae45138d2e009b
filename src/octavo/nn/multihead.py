"""`nn.MultiheadAttention` whose projections run in FP8.

PyTorch's forward multiplies by the packed weight of q, k and v itself, and reads the weight of `out_proj`. A converted
module computes the same from the same parameters in three steps:

    q, k, v = x W^T + b      W (3 E, E) = `in_proj_weight`, one set of GEMMs for neighbours that are the same tensor;
                             or, with `kdim` or `vdim`, a weight each, as layers that share an input if they do
    y = attention(q, k, v)   `scaled_dot_product_attention`, or with `need_weights` softmax(q k^T / sqrt(D) + mask) v
    out_proj(y)              a layer of its own in the plan

Parameters, names and state_dict are those of PyTorch's module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.runtime import ledger
from octavo.nn.adopted import Adopted, is_taken, own_class
from octavo.nn.attached_codes import attached_input
from octavo.nn.functional import Quantizer, compute_dtype, linears
from octavo.nn.telemetry_ops import StatsSlot, stats_buffer_of
from octavo.recipes import Recipe
from octavo.tensor import FP8Tensor

IN_PROJECTION = "in_proj"
"""Name of the GEMM with the weights of q, k and v, after the name of its module."""

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Parameters of a module that has no `in_proj_weight`: its keys or values are of other widths (`kdim`, `vdim`)."""


class MultiheadAttention(Adopted, nn.MultiheadAttention):
    """An `nn.MultiheadAttention` whose in-projection is computed by a recipe. `out_proj` is converted by itself."""

    parent = nn.MultiheadAttention
    parent_forward = nn.MultiheadAttention.forward
    fields = ("recipe", "enabled", "stats_slot")
    recipe: Recipe
    enabled: bool
    """False: compute as PyTorch does, for an evaluation in high precision."""
    stats_slot: StatsSlot | None = None
    """Telemetry buffer of the in-projection, while telemetry is on (`octavo.nn.telemetry`). If query, key and value are
    not the same tensor, it has the statistics of the last product, and the amax and the non-finite values of all."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `need_weights`, the attention weights, as `nn.MultiheadAttention` does.

        PyTorch's own forward runs while FP8 is off (`octavo.disabled`), and for arguments that it alone takes, or
        refuses: nested tensors, masks and shapes that do not fit. In evaluation too these steps run, never PyTorch's
        fused kernel.

        Args:
            query: (L, N, E), with `batch_first` (N, L, E), or (L, E).
            key: (S, N, E), (N, S, E) or (S, E).
            value: as key.
            key_padding_mask: (N, S) or (S,): True, or minus infinity, for keys that are ignored.
            attn_mask: (L, S) or (N H, L, S), boolean or added to the scores.
            average_attn_weights: whether the weights are the mean over the heads.
            is_causal: a hint that `attn_mask`, which must be there, is the causal mask.
        """
        masks = key_padding_mask, attn_mask
        is_as_pytorch = not self.enabled and not isinstance(self.out_proj.weight, FP8Tensor)  # which it cannot read
        if is_as_pytorch or not self._takes(query, key, value, *masks, is_causal):
            theirs: tuple[Tensor, Tensor | None] = type(self).parent.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
            return theirs
        is_batched, batch = query.dim() == 3, 0 if self.batch_first else 1
        projected = self._project(query, key, value)
        q, k, v = (self._heads(each if is_batched else each.unsqueeze(batch)) for each in projected)
        is_causal = is_causal and key_padding_mask is None and not need_weights
        k, v, mask = self._extend(k, v, _joined(*masks, q) if not is_causal else None)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            y, weights = _attend(q, k, v, mask, dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        else:
            y, weights = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
        y = y.permute(0, 2, 1, 3) if self.batch_first else y.permute(2, 0, 1, 3)
        y = self.out_proj(y.flatten(2))
        return y if is_batched else y.squeeze(batch), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return q, k and v, (..., H, D) each: one set of GEMMs for neighbours that are the same tensor."""
        inputs: list[tuple[Tensor, int]] = []
        for x in (query, key, value):
            if inputs and inputs[-1][0] is x:
                inputs[-1] = x, inputs[-1][1] + 1
            else:
                inputs.append((x, 1))
        is_packed, counts = self.in_proj_weight is not None, [count for _, count in inputs]
        sizes = counts if is_packed else [1] * len(PROJECTIONS)  # projections per weight
        weights = cast(Sequence[Tensor], _split(self.in_proj_weight, sizes)) if is_packed else projection_weights(self)
        biases = _split(self.in_proj_bias, sizes)
        found: list[Tensor] = []
        at = 0
        for x, count in inputs:
            end = at + (1 if is_packed else count)
            projected = self._multiply(x, weights[at:end], biases[at:end])
            heads = self.num_heads, self.head_dim
            if is_packed:  # one view and its parts: few operators, whose gradients are put together by one
                found += projected[0].unflatten(-1, (count, *heads)).unbind(-3)
            else:
                found += [y.unflatten(-1, heads) for y in projected]
            at = end
        return found

    def _multiply(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
        if not self.enabled:
            return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        quantizer = Quantizer(self.recipe, compute_dtype(x), stats_buffer=stats_buffer_of([self]))
        return linears(x, weights, biases, quantizer, attached_input(x, self.recipe))

    def _heads(self, x: Tensor) -> Tensor:
        """Return a projection, (N, L, H, D) or (L, N, H, D), as (N, H, L, D)."""
        return x.permute(0, 2, 1, 3) if self.batch_first else x.permute(1, 2, 0, 3)

    def _extend(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the keys and values that every query sees: the learned ones of `add_bias_kv`, and zeros."""
        shape = (1, self.num_heads, 1, self.head_dim)
        learned = self.bias_k, self.bias_v
        added = [] if learned[0] is None or learned[1] is None else [(learned[0].view(shape), learned[1].view(shape))]
        added += [(k.new_zeros(shape), v.new_zeros(shape))] if self.add_zero_attn else []
        for more_k, more_v in added:
            k = torch.cat([k, more_k.to(k.dtype).expand(len(k), -1, -1, -1)], dim=2)
            v = torch.cat([v, more_v.to(v.dtype).expand(len(v), -1, -1, -1)], dim=2)
        return k, v, mask if mask is None else F.pad(mask, (0, len(added)))

    def _takes(self, query: Tensor, key: Tensor, value: Tensor, padding: Any, mask: Any, is_causal: bool) -> bool:
        """Return whether these are arguments that PyTorch's forward takes outside of its fused kernel; note others."""
        reason = self._unsupported_reason(query, key, value, padding, mask, is_causal)
        if reason:
            ledger.fall_back(f"nn.MultiheadAttention computed in high precision, by PyTorch's own forward: {reason}")
        return not reason

    def _unsupported_reason(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Any, mask: Any, is_causal: bool
    ) -> str:
        """Return why PyTorch's own forward has to run, empty if it does not."""
        tensors = (query, key, value)
        if type(self).parent.forward is not type(self).parent_forward:
            return f"{type(self).parent.__name__}.forward has changed since octavo.convert"
        if query.is_nested or key.is_nested or value.is_nested:
            return "its inputs are nested tensors"
        for x, width in zip(tensors, widths_of(self), strict=True):  # no generators: they are calls, in each call
            if x.dim() != query.dim() or x.shape[-1] != width:
                return f"its inputs are {', '.join([str(tuple(each.shape)) for each in tensors])}"
        batch = 0 if self.batch_first else 1
        is_batched = query.dim() == 3
        size = query.shape[batch] if is_batched else 1
        tokens = 1 - batch if is_batched else 0
        length, source = query.shape[tokens], key.shape[tokens]
        fits = query.dim() in (2, 3) and key.shape[:-1] == value.shape[:-1]
        fits &= not is_batched or key.shape[batch] == size
        fits &= padding is None or padding.shape == ((size, source) if is_batched else (source,))
        fits &= mask is None or mask.shape in ((length, source), (size * self.num_heads, length, source))
        if not fits or (is_causal and mask is None):
            return "its shapes or its masks do not fit"
        kinds = [each.dtype for each in (padding, mask) if each is not None]
        wrong = [kind for kind in kinds if kind is not torch.bool and not kind.is_floating_point]
        return f"a mask is {kinds}" if wrong else ""


def adopt(module: nn.Module, recipe: Recipe) -> None:
    """Let a module compute its in-projection by a recipe, in place."""
    MultiheadAttention.take(module, recipe=recipe, enabled=True)


def unsupported_reason(module: nn.MultiheadAttention) -> str | None:
    """Return why a module cannot be converted because of what it is, or None."""
    kind = own_class(module).parent if is_taken(module) else own_class(module)
    if kind.forward is not nn.MultiheadAttention.forward:
        return f"{kind.__name__}, a subclass of nn.MultiheadAttention, has a forward of its own"
    return None


def projection_weights(module: nn.MultiheadAttention) -> list[Tensor]:
    """Return the weights of the in-projection: the packed one (3 E, E), or those of q, k and v, (E, K_i) each."""
    packed = module.in_proj_weight
    return [getattr(module, name) for name in PROJECTIONS] if packed is None else [packed]


def widths_of(module: nn.MultiheadAttention) -> tuple[int, int, int]:
    """Return the features of query, key and value."""
    return module.embed_dim, cast(int, module.kdim), cast(int, module.vdim)


def unsupported_reason_recipe(recipe: Recipe) -> str | None:
    """Return why an in-projection cannot run by a recipe, or None."""
    if recipe.has_stored_scales:
        return (
            f"recipe '{recipe.name}' stores scales, and q, k and v may read three inputs: take one with current scales"
        )
    return None


def _split(packed: Tensor | None, counts: Sequence[int]) -> Sequence[Tensor | None]:
    """Return the rows of that many of the three projections each, of their weight or bias; None for each if it is."""
    if packed is None or len(counts) == 1:  # whole, the parameter: backward would copy the gradient of a view
        return [packed] * len(counts)
    rows = len(packed) // sum(counts)
    parts: Sequence[Tensor] = packed.split([count * rows for count in counts])
    return parts


def _joined(padding: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the sum of both masks, which broadcasts to (N, H, L, S), in the dtype that they are added in.

    Args:
        padding: (N, S) or (S,).
        mask: (L, S) or (N H, L, S).
        like: (N, H, L, D).
    """
    size, heads = like.shape[:2]
    parts = []
    if mask is not None:
        added = _added(mask, like.dtype)
        parts.append(added[None, None] if mask.dim() == 2 else added.unflatten(0, (size, heads)))
    if padding is not None:
        parts.append(_added(padding, like.dtype).view(size, 1, 1, -1))
    return sum(parts[1:], start=parts[0]) if parts else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as it is added to scores: minus infinity where a boolean one is True."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Return attention (N, H, L, D) and its weights (N, H, L, S), after dropout, as PyTorch's are."""
    size, heads, length, width = q.shape
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    q = q * math.sqrt(1.0 / width)
    if mask is None:
        scores = torch.bmm(q, k.mT)
    else:
        scores = torch.baddbmm(mask.expand(size, heads, length, -1).flatten(0, 1), q, k.mT)
    weights = scores.softmax(dim=-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return torch.bmm(weights, v).unflatten(0, (size, heads)), weights.unflatten(0, (size, heads))
