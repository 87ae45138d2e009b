"""The MLP of a transformer as one autograd function: two or three linear layers and the activation between them.

    gated   y = (f(x W_gate^T) * x W_up^T) W_down^T          plain   y = f(x W_up^T) W_down^T

The activation is computed in the pass that quantises it, and again in backward, in the pass that quantises its
gradients for the two GEMMs that read them. What lies between forward and backward is x in FP8 and the outputs of gate
and up; the hidden activation, the widest tensor of a transformer, is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.kernels import Target
from octavo.kernels.activation import activation, activation_backward
from octavo.nn import weights as stacked
from octavo.nn.functional import (
    dgrad,
    folds,
    fprop,
    read_gradient,
    read_input,
    read_kept_input,
    scale_of,
    target_of,
    unstack,
    wgrad,
)
from octavo.numerics import Quantized
from octavo.recipes import Recipe, reused_from


def refuses(inner: Recipe, outer: Recipe) -> str | None:
    """Return why an MLP cannot be computed as one, or None. `inner`: of gate and up, `outer`: of down."""
    for recipe in (inner, outer):
        operands = [operand for _, *pair in recipe.gemms() for operand in pair]
        if len(operands) < 6:
            return f"recipe '{recipe.name}' leaves a GEMM in BF16"
        if any(operand.rounding != "nearest" for operand in operands):
            return f"recipe '{recipe.name}' rounds stochastically"
    return None


def mlp(
    x: Tensor,
    inner_weights: Sequence[Tensor],
    down_weight: Tensor,
    down_bias: Tensor | None,
    kind: str,
    inner: Recipe,
    outer: Recipe,
    dtype: torch.dtype,
    ready: Quantized | None = None,
) -> Tensor:
    """Return the output (..., D) of an MLP for x (..., D), computed in `dtype`.

    Args:
        inner_weights: (gate, up), or (up,) of an MLP without a gate, each (F, D).
        down_weight: (D, F).
        kind: the activation, as `kernels.activation` names it.
        inner: the recipe of gate and up.
        outer: the recipe of down.
        ready: x as the first GEMM reads it, (M, D), where whoever made x has quantised it too.
    """
    x_MD = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    codes, scale = (None, None) if ready is None else (ready.codes, ready.scale)
    y_MD: Tensor = _MLP.apply(x_MD, codes, scale, kind, inner, outer, dtype, *inner_weights, down_weight)  # type: ignore[no-untyped-call]
    y = y_MD.reshape(*x.shape[:-1], y_MD.shape[1])
    return y if down_bias is None else y + down_bias.to(y.dtype)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        codes: Tensor | None,
        scale: Tensor | None,
        kind: str,
        inner: Recipe,
        outer: Recipe,
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> Tensor:
        ready = None if codes is None or scale is None else Quantized(codes, scale, inner.fprop.input.tile)
        x = read_input(x_MD, inner, dtype, any(ctx.needs_input_grad[7:-1]), ready)
        before = fprop(x_MD, x.fprop, weights[:-1], inner, dtype)
        hidden = activation(kind, before[0], before[1] if len(before) > 1 else None, target_of(outer.fprop.input))
        ctx.save_for_backward(*x.kept, hidden.scale, *before, *weights)
        ctx.kept, ctx.kind, ctx.inner, ctx.outer, ctx.dtype = len(x.kept), kind, inner, outer, dtype
        ctx.x_dtype = x_MD.dtype
        return stacked.fprop(hidden, weights[-1:], target_of(outer.fprop.weight), dtype, outer.fprop.accumulate)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inner, outer, dtype, saved = ctx.inner, ctx.outer, ctx.dtype, ctx.saved_tensors
        kept, hidden_scale, rest = saved[: ctx.kept], saved[ctx.kept], saved[ctx.kept + 1 :]
        before, weights = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        needs_x, (*needs_inner, needs_down) = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]

        dy = [grad_outputs[0].to(dtype)]
        g, h = read_gradient(dy, hidden_scale, weights[-1:], outer, True, needs_down)
        d_hidden = dgrad(dy, g, weights[-1:], outer, dtype)
        row_fold, column_fold = folds(scale_of(kept), weights[:-1], inner, needs_x, any(needs_inner))
        gradients = activation_backward(
            ctx.kind,
            d_hidden,
            before[0],
            before[1] if len(before) > 1 else None,
            rows=target_of(inner.dgrad.grad_output) if needs_x else None,
            columns=target_of(inner.wgrad.grad_output) if any(needs_inner) else None,
            hidden=_hidden_target(outer) if needs_down else None,
            hidden_scale=hidden_scale if needs_down and _scale_tells_codes(outer) else None,
            row_fold=row_fold,
            column_fold=column_fold,
        )
        dx = dgrad(dy, gradients.rows, weights[:-1], inner, dtype).to(ctx.x_dtype) if needs_x else None
        dws: list[Tensor | None] = [None] * len(weights)
        if any(needs_inner):
            dw = wgrad(dy, gradients.columns, read_kept_input(kept, inner), inner, dtype)
            parts = unstack(dw, [(weight.shape[0], weight.dtype) for weight in weights[:-1]])
            dws[:-1] = [part if needed else None for part, needed in zip(parts, needs_inner, strict=True)]
        if needs_down:
            assert gradients.hidden is not None
            hidden = gradients.hidden
            hidden = stacked.without_scale(hidden) if outer.wgrad.input.is_folded else hidden
            dws[-1] = wgrad(dy, h, hidden, outer, dtype).to(weights[-1].dtype)
        return dx, None, None, None, None, None, None, *dws


def _hidden_target(outer: Recipe) -> Target:
    """Return what the hidden activation, transposed, is quantised to for wgrad."""
    if reused_from(outer, "wgrad", "input"):
        forward = target_of(outer.fprop.input)
        return forward._replace(granularity=forward.tile.transposed.name)
    return target_of(outer.wgrad.input)


def _scale_tells_codes(outer: Recipe) -> bool:
    """Whether the codes of fprop follow from its scales: with a power-of-two scale a row nothing is searched again."""
    operand = outer.fprop.input
    reused = reused_from(outer, "wgrad", "input") is not None
    return reused and (operand.granularity, operand.scaling) == ("row", "power_of_two")
