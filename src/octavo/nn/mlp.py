"""The MLP of a transformer as one autograd function: two or three linear layers and the activation between them.

    gated   y = (f(x W_gate^T) * x W_up^T) W_down^T          plain   y = f(x W_up^T) W_down^T

The activation is computed in the pass that quantises it, and again in backward, in the pass that quantises its
gradients for the two GEMMs that read them. What lies between forward and backward is x in FP8 and the inputs of the
activation, the outputs of gate and up; the hidden activation is never stored. Those inputs are about half of what a
Llama keeps for backward. They may be kept in FP8 too: then y stays what it is, to the bit, and the gradients are those
of inputs that were rounded once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.kernels import Target
from octavo.kernels.activation import INPUTS, activation, activation_and_inputs, activation_backward
from octavo.nn.functional import (
    dgrad,
    dgrad_of,
    folds,
    fprop,
    fprop_of,
    read_gradient,
    read_input,
    read_kept_input,
    scale_of,
    target_of,
    unstack,
    wgrad,
)
from octavo.nn.own_codes import without_scale
from octavo.nn.wanted import wanted
from octavo.numerics import Quantized
from octavo.recipes import Recipe, reused_from

ActivationInputs = Literal["bf16", "fp8"]
"""What the inputs of an MLP's activation are kept in for backward: `bf16` as they are, `fp8` as codes."""


def refuses(inner: Recipe, outer: Recipe) -> str | None:
    """Return why an MLP cannot be computed as one, or None. `inner`: of gate and up, `outer`: of down."""
    for recipe in (inner, outer):
        operands = [operand for _, *pair in recipe.gemms() for operand in pair]
        if len(operands) < 6:
            return f"recipe '{recipe.name}' leaves a GEMM in BF16"
        if any(operand.rounding != "nearest" for operand in operands):
            return f"recipe '{recipe.name}' rounds stochastically"
        if recipe.is_emulated:
            return f"recipe '{recipe.name}' is emulated: no kernel makes 1x32 scales while it computes"
        if recipe.keeps_scales:
            return f"recipe '{recipe.name}' keeps scales from step to step, which belong to single layers"
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
    activation_inputs: ActivationInputs = "bf16",
    keeps_input: bool = False,
    pages: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the output (..., D) of an MLP for x (..., D), computed in `dtype`.

    Args:
        inner_weights: (gate, up), or (up,) of an MLP without a gate, each (F, D).
        down_weight: (D, F).
        kind: the activation, as `kernels.activation` names it.
        inner: the recipe of gate and up.
        outer: the recipe of down.
        ready: x as the first GEMM reads it, (M, D), where whoever made x has quantised it too.
        activation_inputs: what gate and up are kept in for backward: `bf16`, in `dtype` as they are, or `fp8`, E4M3
            codes with a power-of-two scale for 128 columns of a token.
        keeps_input: keep x itself for backward and quantise it again there, instead of keeping its codes.
        pages: where telemetry of gate and up, and of down, goes (`octavo.nn.watched`).
    """
    keeps_codes = activation_inputs == "fp8" and torch.is_grad_enabled()
    x_MD = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    codes, scale = (None, None) if ready is None else (ready.codes, ready.scale)
    y_MD: Tensor = _MLP.apply(  # type: ignore[no-untyped-call]
        x_MD, codes, scale, kind, inner, outer, dtype, keeps_codes, keeps_input, *pages, *inner_weights, down_weight
    )
    y = y_MD.reshape(*x.shape[:-1], y_MD.shape[1])
    return y if down_bias is None else y + down_bias.to(y.dtype)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x_MD, codes, scale, kind, inner, outer, dtype, keeps_codes, keeps_input, *rest = arguments  # see `_Linears`
        page, down_page, *weights = rest
        ready = None if codes is None or scale is None else Quantized(codes, scale, inner.fprop.input.tile)
        x = read_input(x_MD, inner, dtype, any(ctx.needs_input_grad[_WEIGHTS:-1]), ready, keeps_input=keeps_input)
        before = fprop(x_MD, x.fprop, weights[:-1], inner, dtype, page)
        hidden, inputs = _activate(kind, before, target_of(outer.fprop.input), keeps_codes)
        ctx.save_for_backward(*x.kept, hidden.scale, *inputs, *weights)
        ctx.kept, ctx.kind, ctx.inner, ctx.outer, ctx.dtype = len(x.kept), kind, inner, outer, dtype
        ctx.x_dtype, ctx.keeps_codes, ctx.pages = x_MD.dtype, keeps_codes, (page, down_page)
        return fprop_of(before, hidden, weights[-1:], outer, dtype, down_page, kind)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inner, outer, dtype, saved = ctx.inner, ctx.outer, ctx.dtype, ctx.saved_tensors
        kept, hidden_scale, rest = saved[: ctx.kept], saved[ctx.kept], saved[ctx.kept + 1 :]
        needs_x, (*needs_inner, needs_down) = wanted(ctx, _WEIGHTS)
        inputs, weights = rest[: -len(needs_inner) - 1], rest[-len(needs_inner) - 1 :]

        dy = [grad_outputs[0].to(dtype)]
        g, h = read_gradient(dy, hidden_scale, weights[-1:], outer, True, needs_down)
        page, down_page = ctx.pages
        d_hidden = dgrad(dy, g, weights[-1:], outer, dtype, down_page)
        row_fold, column_fold = folds(scale_of(kept), weights[:-1], inner, needs_x, any(needs_inner))
        gradients = activation_backward(
            ctx.kind,
            d_hidden,
            *_gate_and_up(inputs, ctx.keeps_codes),
            rows=target_of(inner.dgrad.grad_output) if needs_x else None,
            columns=target_of(inner.wgrad.grad_output) if any(needs_inner) else None,
            hidden=_hidden_target(outer) if needs_down else None,
            hidden_scale=hidden_scale if needs_down and _scale_tells_codes(outer) else None,
            row_fold=row_fold,
            column_fold=column_fold,
        )
        dx = None
        if needs_x:
            assert gradients.rows is not None
            before = (d_hidden, *inputs)
            dx = dgrad_of(before, gradients.rows, weights[:-1], inner, dtype, page, ctx.kind).to(ctx.x_dtype)
        dws: list[Tensor | None] = [None] * len(weights)
        if any(needs_inner):
            dw = wgrad(dy, gradients.columns, read_kept_input(kept, inner), inner, dtype)
            parts = unstack(dw, [(weight.shape[0], weight.dtype) for weight in weights[:-1]])
            dws[:-1] = [part if needed else None for part, needed in zip(parts, needs_inner, strict=True)]
        if needs_down:
            assert gradients.hidden is not None
            hidden = gradients.hidden
            hidden = without_scale(hidden) if outer.wgrad.input.is_folded else hidden
            dws[-1] = wgrad(dy, h, hidden, outer, dtype).to(weights[-1].dtype)
        return dx, *(None,) * (_WEIGHTS - 1), *dws


_WEIGHTS = 11
"""Which argument of `_MLP.apply` is the first weight."""


def _activate(
    kind: str, before: Sequence[Tensor], target: Target, keeps_codes: bool
) -> tuple[Quantized, Sequence[Tensor]]:
    """Return h, and what backward reads of gate and up: themselves, or their codes and scales."""
    gate, up = before[0], before[1] if len(before) > 1 else None
    if not keeps_codes:
        return activation(kind, gate, up, target), before
    hidden, inputs = activation_and_inputs(kind, gate, up, target)
    return hidden, [tensor for quantized in inputs for tensor in quantized[:2]]


def _gate_and_up(inputs: Sequence[Tensor], as_codes: bool) -> tuple[Tensor | Quantized, Tensor | Quantized | None]:
    """Return gate and up, if there is one, from what `_activate` gave."""
    found: list[Tensor | Quantized] = list(inputs)
    if as_codes:
        found = [Quantized(*pair, INPUTS.tile) for pair in zip(inputs[::2], inputs[1::2], strict=True)]
    return found[0], found[1] if len(found) > 1 else None


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
