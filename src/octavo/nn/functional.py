"""The linear layer in FP8: three GEMMs, one autograd function, everything decided by the recipe.

M: tokens, N: output features, K: input features.

    fprop   Y  = X W^T       dgrad   dX = dY W       wgrad   dW = dY^T X

A folded operand brings the codes of fprop, transposed, with no scale that a GEMM could apply. With X = diag(sx) X8
and W = diag(sw) W8, dX = (dY diag(sw)) W8 and dW = (diag(sx) dY)^T X8: the scale moves into the gradient, which is
quantised after it. With power-of-two scales the move is exact.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import kernels
from octavo.numerics import PER_TENSOR, Quantized
from octavo.recipes import Operand, Recipe, reused_from


class WeightCodes(NamedTuple):
    """A weight as the GEMMs of one recipe read it."""

    fprop: Quantized | None
    """(N, K); None where fprop is in BF16."""
    dgrad: Quantized | None
    """(K, N), with scale 1 where it is folded; None where dgrad is in BF16."""


def quantize_operand(x: Tensor, operand: Operand, fold: Tensor | None = None) -> Quantized:
    """Quantise a matrix as a recipe's operand says, after multiplying `fold` into its columns.

    Args:
        x: (R, C).
        fold: FP32 (1, C), the scales of a folded partner, or None.
    """
    if fold is not None:
        x = x.float() * fold
    # A seed of its own for every call, from PyTorch's generator: a resumed run draws the same ones again.
    stochastic = operand.rounding == "stochastic"
    seed = torch.randint(2**62, (), device=x.device) if stochastic else 0
    return kernels.quantize(x, operand.format, operand.granularity, operand.scaling, operand.rounding, seed)


def transpose_codes(source: Quantized, operand: Operand) -> Quantized:
    """Return fprop's matrix as a backward GEMM reads it: its codes transposed, its scale 1 if the operand is folded."""
    transposed = source.t()
    if operand.is_folded:
        transposed = Quantized(transposed.codes, source.scale.new_ones(1, 1), PER_TENSOR)
    return kernels.contiguous(transposed)


def quantize_weight(weight_NK: Tensor, recipe: Recipe, needs_dgrad: bool = True) -> WeightCodes:
    """Quantise a weight for fprop and, if needed, for dgrad."""
    weight_NK = weight_NK.detach()
    fprop = quantize_operand(weight_NK, recipe.fprop.weight) if recipe.fprop.is_fp8 else None
    if not (needs_dgrad and recipe.dgrad.is_fp8):
        return WeightCodes(fprop, None)
    operand = recipe.dgrad.weight
    if fprop is not None and reused_from(recipe, "dgrad", "weight"):
        return WeightCodes(fprop, transpose_codes(fprop, operand))
    return WeightCodes(fprop, quantize_operand(weight_NK.t(), operand))


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    recipe: Recipe,
    codes: WeightCodes | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T + b with the three GEMMs of `recipe`, in `dtype`.

    Args:
        x: (..., K); the leading dimensions may be anything, empty included.
        weight_NK: (N, K), any floating-point dtype: the master weight.
        bias_N: (N,) or None; added in `dtype`.
        codes: the quantised weight, where it is already there.
        dtype: what every GEMM rounds its result to, and what a GEMM in high precision computes in; default the dtype
            of x. Quantisation starts from x as it is.
    """
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if codes is None:
        codes = quantize_weight(weight_NK, recipe, needs_dgrad=x.requires_grad and torch.is_grad_enabled())
    y_MN: Tensor = _Linear.apply(x_MK, weight_NK, recipe, codes, dtype or x.dtype)  # type: ignore[no-untyped-call]
    y = y_MN.reshape(*x.shape[:-1], weight_NK.shape[0])
    return y if bias_N is None else y + bias_N.to(y.dtype)


class _Linear(torch.autograd.Function):
    """Y = X W^T. Saves only what the needed backward GEMMs read, in FP8 wherever they are."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, recipe: Recipe, codes: WeightCodes, dtype: torch.dtype
    ) -> Tensor:
        x_fprop = quantize_operand(x_MK, recipe.fprop.input) if recipe.fprop.is_fp8 else None
        if x_fprop is not None and codes.fprop is not None:
            y_MN = kernels.gemm(x_fprop, codes.fprop, dtype, recipe.fprop.accumulate)
        else:
            y_MN = x_MK.to(dtype) @ weight_NK.to(dtype).t()
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept_x = _keep_input(x_MK, x_fprop, recipe, dtype) if needs_weight else ()
        kept_weight = _keep_weight(weight_NK, codes, recipe) if needs_x else ()
        ctx.save_for_backward(*kept_x, *kept_weight)
        ctx.recipe, ctx.kept_x = recipe, len(kept_x)
        ctx.dtype, ctx.weight_dtype, ctx.x_dtype = dtype, weight_NK.dtype, x_MK.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        recipe, kept = ctx.recipe, ctx.saved_tensors
        kept_x, kept_weight = kept[: ctx.kept_x], kept[ctx.kept_x :]
        dy_MN = grad_outputs[0].to(ctx.dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        reuses = reused_from(recipe, "wgrad", "grad_output") is not None
        g = None
        if recipe.dgrad.is_fp8 and (needs_x or (reuses and needs_weight)):
            fold = kept_weight[2] if recipe.dgrad.weight.is_folded else None
            g = quantize_operand(dy_MN, recipe.dgrad.grad_output, fold)
        dx = _dgrad(dy_MN, g, kept_weight, recipe).to(ctx.x_dtype) if needs_x else None
        h = transpose_codes(g, recipe.wgrad.grad_output) if g is not None and reuses and needs_weight else None
        dw = _wgrad(dy_MN, h, kept_x, recipe).to(ctx.weight_dtype) if needs_weight else None
        return dx, dw, None, None, None


def _keep_input(x_MK: Tensor, x_fprop: Quantized | None, recipe: Recipe, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return what wgrad needs of the input: (x,) in BF16, (codes (M, K), scale) of fprop, or (codes (K, M), scale)."""
    if not recipe.wgrad.is_fp8:
        return (x_MK.to(dtype),)
    if x_fprop is not None and reused_from(recipe, "wgrad", "input"):
        return x_fprop.codes, x_fprop.scale
    return quantize_operand(x_MK.t(), recipe.wgrad.input)[:2]


def _keep_weight(weight_NK: Tensor, codes: WeightCodes, recipe: Recipe) -> tuple[Tensor, ...]:
    """Return what dgrad needs: (weight,) in BF16, or the weight's (codes (K, N), scale), and (1, N) scales to fold."""
    if codes.dgrad is None:
        return (weight_NK,)
    kept = (codes.dgrad.codes, codes.dgrad.scale)
    return (*kept, codes.fprop.scale.t()) if codes.fprop is not None and recipe.dgrad.weight.is_folded else kept


def _dgrad(dy_MN: Tensor, g: Quantized | None, kept: tuple[Tensor, ...], recipe: Recipe) -> Tensor:
    """Return dX (M, K) = dY W."""
    if g is None:
        return dy_MN @ kept[0].to(dy_MN.dtype)
    operand = recipe.dgrad.weight
    weight_KN = Quantized(kept[0], kept[1], PER_TENSOR if operand.is_folded else operand.tile)
    return kernels.gemm(g, weight_KN, dy_MN.dtype, recipe.dgrad.accumulate)


def _wgrad(dy_MN: Tensor, h: Quantized | None, kept: tuple[Tensor, ...], recipe: Recipe) -> Tensor:
    """Return dW (N, K) = dY^T X. `h` is dY^T where it is already quantised."""
    if not recipe.wgrad.is_fp8:
        return dy_MN.t() @ kept[0]
    codes, scale = kept
    operand = recipe.wgrad.input
    if h is None:
        h = quantize_operand(dy_MN.t(), recipe.wgrad.grad_output, scale.t() if operand.is_folded else None)
    if reused_from(recipe, "wgrad", "input"):
        x_KM = transpose_codes(Quantized(codes, scale, recipe.fprop.input.tile), operand)
    else:
        x_KM = Quantized(codes, scale, operand.tile)
    return kernels.gemm(h, x_KM, dy_MN.dtype, recipe.wgrad.accumulate)
