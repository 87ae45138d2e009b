"""Linear layers in FP8: three GEMMs, one autograd function, everything decided by the recipe.

M: tokens, N: output features, K: input features.

    fprop   Y  = X W^T       dgrad   dX = dY W       wgrad   dW = dY^T X

Layers that read the same X are computed as one: X is quantised once, and W is the stack of their weights.

A folded operand brings the codes of fprop, transposed, with no scale that a GEMM could apply. With X = diag(sx) X8
and W = diag(sw) W8, dX = (dY diag(sw)) W8 and dW = (diag(sx) dY)^T X8: the scale moves into the gradient, which is
quantised after it. With power-of-two scales the move is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo import kernels
from octavo.kernels import Cell, Target
from octavo.nn import watched
from octavo.nn import weights as stacked
from octavo.nn.inputs import wgrad_of_input
from octavo.nn.own_codes import transpose_codes, values
from octavo.nn.wanted import wanted
from octavo.numerics import Quantized
from octavo.recipes import STATEFUL, Operand, Recipe, reused_from


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    recipe: Recipe,
    dtype: torch.dtype | None = None,
    ready: Quantized | None = None,
    cells: Tensor | None = None,
    keeps_input: bool = False,
    page: Tensor | None = None,
) -> Tensor:
    """Return x W^T + b with the three GEMMs of `recipe`, in `dtype`.

    Args:
        x: (..., K); the leading dimensions may be anything, empty included.
        weight_NK: (N, K), any floating-point dtype: the master weight. Or an `FP8Tensor` of the recipe's
            format and granularity, whose codes are read as they are.
        bias_N: (N,) or None; added in `dtype`.
        dtype: what every GEMM rounds its result to, and what a GEMM in high precision computes in; default the dtype
            of x. Quantisation starts from x as it is.
        ready: x as fprop reads it, (M, K), where whoever made x has quantised it too.
        cells: FP32 (2, 2), where scales that the recipe keeps from step to step lie (`octavo.nn.scales.Page.cells`).
            Without them every tensor is scaled by its own maximum, as in the first step of such a recipe.
        keeps_input: keep x itself for backward and quantise it again there, instead of keeping its codes. It must not
            have `cells` or be rounded stochastically.
        page: FP32 (1 + 2 n, WIDTH), where telemetry of n layers goes (`octavo.nn.watched`).
    """
    return linears(x, [weight_NK], [bias_N], recipe, dtype, ready, cells, keeps_input, page)[0]


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe,
    dtype: torch.dtype | None = None,
    ready: Quantized | None = None,
    cells: Tensor | None = None,
    keeps_input: bool = False,
    page: Tensor | None = None,
) -> list[Tensor]:
    """Return x W_i^T + b_i for layers that share their input: x is quantised once, dgrad and wgrad are one GEMM each.

    Args:
        weights: (N_i, K) each. Scales are those of the stack (sum of N_i, K).
    """
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    codes, scale = (None, None) if ready is None else (ready.codes, ready.scale)
    kept = cells, torch.is_grad_enabled(), keeps_input  # an evaluation leaves no trace in what training computes with
    outputs: tuple[Tensor, ...] = _Linears.apply(x_MK, codes, scale, *kept, page, recipe, dtype or x.dtype, *weights)  # type: ignore[no-untyped-call]
    shaped = [y_MN.reshape(*x.shape[:-1], y_MN.shape[1]) for y_MN in outputs]
    return [y if b is None else y + b.to(y.dtype) for y, b in zip(shaped, biases, strict=True)]


class _Linears(torch.autograd.Function):
    """Y_i = X W_i^T. Saves what the needed backward GEMMs read of X, in FP8 wherever they are, and the weights."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # All in one: torch.compile counts the parameters, and where there is one argument more, it leaves out ctx.
        x_MK, codes, scale, cells, observe, keeps_input, page, recipe, dtype, *weights = inputs
        ready = None if codes is None or scale is None else Quantized(codes, scale, recipe.fprop.input.tile)
        cell = cell_of(cells, recipe, "input", observe)
        x = read_input(x_MK, recipe, dtype, any(ctx.needs_input_grad[_WEIGHTS:]), ready, cell, keeps_input)
        ctx.save_for_backward(*x.kept, *(weights if ctx.needs_input_grad[0] else ()))
        ctx.recipe, ctx.kept, ctx.dtype, ctx.x_dtype = recipe, len(x.kept), dtype, x_MK.dtype
        ctx.cells, ctx.page = cells, page  # no saved tensors: backward writes to them, and hooks may give it copies
        ctx.parts = [(weight.shape[0], weight.dtype) for weight in weights]
        return tuple(fprop(x_MK, x.fprop, weights, recipe, dtype, page))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        recipe, saved = ctx.recipe, ctx.saved_tensors
        kept, weights = saved[: ctx.kept], saved[ctx.kept :]
        needs_x, needs_weight = wanted(ctx, _WEIGHTS)
        sources = [dy.to(ctx.dtype) for dy in dys]
        cell = cell_of(ctx.cells, recipe, "grad_output")
        g, h = read_gradient(sources, scale_of(kept), weights, recipe, needs_x, any(needs_weight), cell)
        dx = dgrad(sources, g, weights, recipe, ctx.dtype, ctx.page).to(ctx.x_dtype) if needs_x else None
        dws: list[Tensor | None] = [None] * len(needs_weight)
        if any(needs_weight):
            dw = wgrad(sources, h, read_kept_input(kept, recipe), recipe, ctx.dtype)
            dws = [part if needed else None for part, needed in zip(unstack(dw, ctx.parts), needs_weight, strict=True)]
        return dx, *(None,) * (_WEIGHTS - 1), *dws


_WEIGHTS = 9
"""Which argument of `_Linears.apply` is the first weight."""


class Input(NamedTuple):
    """The input of linear layers as their GEMMs read it."""

    fprop: Quantized | None
    """(M, K); None where fprop is in BF16."""
    kept: tuple[Tensor, ...]
    """What backward needs of it: (x,) or (x, scale of fprop) as it is, (codes (M, K), scale) of fprop, (codes (K, M),
    scale) of wgrad's own; or ()."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return A B for two matrices. `octavo.autocast` takes `A @ B` for a user's product, and not this."""
    result: Tensor = torch.ops.aten.mm.default(a, b)
    return result


def target_of(operand: Operand) -> Target:
    """Return what a kernel is asked to make for an operand of a recipe."""
    return Target(operand.format, operand.granularity, operand.scaling, operand.rounding)


def cell_of(cells: Tensor | None, recipe: Recipe, role: str, observe: bool = True) -> Cell | None:
    """Return where a layer's `input` or `grad_output` has its scale, None if it is made of its own maximum.

    Args:
        cells: as for `linear`.
        observe: whether the maximum of this tensor counts for the scale of later steps.
    """
    operand = recipe.kept_scale(role)
    if cells is None or operand is None:
        return None
    return Cell(cells, STATEFUL.index(role), operand.scale_from == "just_in_time", observe)


def quantize_operand(x: Tensor, operand: Operand, fold: Tensor | None = None) -> Quantized:
    """Quantise a matrix as a recipe's operand says, after multiplying `fold` into its columns.

    Args:
        x: (R, C).
        fold: FP32 (1, C), the scales of a folded partner, or None.
    """
    return stacked.quantize_matrix(x if fold is None else x.float() * fold, target_of(operand))


def quantize_both(
    sources: Sequence[Tensor],
    rows: Operand | None,
    columns: Operand | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
    cell: Cell | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise the matrix (R, C) that lies in `sources` side by side: as it is for `rows`, transposed for `columns`.

    Args:
        row_fold: FP32 (1, C), multiplied in before `rows`.
        column_fold: FP32 (R, 1), multiplied in before `columns`.
        cell: where its scale is, if it is kept from step to step: then there are no folds.
    """
    if cell is not None:
        targets = [None if operand is None else target_of(operand) for operand in (rows, columns)]
        return kernels.quantize_at(sources, cell, targets[0], targets[1])
    if all(operand is None or operand.rounding == "nearest" for operand in (rows, columns)):
        targets = [None if operand is None else target_of(operand) for operand in (rows, columns)]
        return kernels.quantize_pair(sources, targets[0], targets[1], row_fold, column_fold)
    x = sources[0] if len(sources) == 1 else torch.cat(list(sources), dim=1)
    fold_t = None if column_fold is None else column_fold.t()
    return (
        None if rows is None else quantize_operand(x, rows, row_fold),
        None if columns is None else quantize_operand(x.t(), columns, fold_t),
    )


def read_input(
    x_MK: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    needs_weight: bool,
    ready: Quantized | None = None,
    cell: Cell | None = None,
    keeps_input: bool = False,
) -> Input:
    """Quantise an input for fprop, and keep what wgrad will need of it.

    Args:
        ready: fprop's codes if they are there; left alone with `keeps_input`.
        cell: where its scale is, if it is kept from step to step.
        keeps_input: keep it as it is, and let wgrad quantise it again.
    """
    forward = recipe.fprop.input if recipe.fprop.is_fp8 else None
    # Codes made elsewhere may be of x before it was rounded: backward could not make the same ones again.
    ready = ready if forward and not keeps_input else None
    if not needs_weight or not recipe.wgrad.is_fp8:
        x = (ready or _quantize_input(x_MK, forward, cell)) if forward else None
        return Input(x, (x_MK.to(dtype),) if needs_weight else ())
    if keeps_input:
        x = _quantize_input(x_MK, forward, cell) if forward else None
        return Input(x, (x_MK, x.scale) if x is not None and recipe.wgrad.input.is_folded else (x_MK,))
    if forward and reused_from(recipe, "wgrad", "input"):
        x = ready or _quantize_input(x_MK, forward, cell)
        return Input(x, (x.codes, x.scale))
    x, transposed = quantize_both([x_MK], None if ready else forward, recipe.wgrad.input, cell=cell)
    assert transposed is not None
    return Input(ready or x, (transposed.codes, transposed.scale))


def _quantize_input(x_MK: Tensor, operand: Operand, cell: Cell | None) -> Quantized:
    x = quantize_operand(x_MK, operand) if cell is None else quantize_both([x_MK], operand, None, cell=cell)[0]
    assert x is not None
    return x


def read_kept_input(kept: tuple[Tensor, ...], recipe: Recipe) -> Quantized | Tensor:
    """Return what `read_input` kept as wgrad reads it: (K, M) in FP8, or (M, K) as it is."""
    if kept[0].element_size() > 1:
        return kept[0]
    codes, scale = kept
    operand = recipe.wgrad.input
    if reused_from(recipe, "wgrad", "input"):
        return transpose_codes(Quantized(codes, scale, recipe.fprop.input.tile), operand.is_folded)
    return Quantized(codes, scale, operand.tile)


def scale_of(kept: tuple[Tensor, ...]) -> Tensor | None:
    """Return the scale that `read_input` kept, if it did."""
    return kept[1] if len(kept) == 2 else None


def folds(
    input_scale: Tensor | None, weights: Sequence[Tensor], recipe: Recipe, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales that move into the gradient: of the weights (1, N) for dgrad, of the input (M, 1) for wgrad.

    Args:
        input_scale: that of fprop's codes of the input; read where wgrad is folded.
    """
    row_fold = column_fold = None
    if needs_x and recipe.dgrad.is_fp8 and recipe.dgrad.weight.is_folded:
        row_fold = stacked.weight_scale(weights, target_of(recipe.fprop.weight)).t()
    if needs_weight and recipe.wgrad.is_fp8 and recipe.wgrad.input.is_folded:
        column_fold = input_scale
    return row_fold, column_fold


def read_gradient(
    dys: Sequence[Tensor],
    input_scale: Tensor | None,
    weights: Sequence[Tensor],
    recipe: Recipe,
    needs_x: bool,
    needs_weight: bool,
    cell: Cell | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Return dY as dgrad reads it, (M, N), and as wgrad reads it, (N, M), quantised from one read; None for BF16.

    `input_scale`: as for `folds`. `cell`: as for `quantize_both`.
    """
    rows = recipe.dgrad.grad_output if needs_x and recipe.dgrad.is_fp8 else None
    columns = recipe.wgrad.grad_output if needs_weight and recipe.wgrad.is_fp8 else None
    if rows is None and columns is None:
        return None, None
    return quantize_both(dys, rows, columns, *folds(input_scale, weights, recipe, needs_x, needs_weight), cell)


def fprop(
    x_MK: Tensor,
    x: Quantized | None,
    weights: Sequence[Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
    page: Tensor | None = None,
) -> list[Tensor]:
    """Return X W_i^T for each weight."""
    if x is None:
        return [product(x_MK.to(dtype), values(weight_NK, dtype).t()) for weight_NK in weights]
    return fprop_of([x_MK], x, weights, recipe, dtype, page)


def fprop_of(
    tensors: Sequence[Tensor],
    x: Quantized,
    weights: Sequence[Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
    page: Tensor | None,
    kind: str = "",
) -> list[Tensor]:
    """Return X W_i^T for each weight, and let telemetry look where there is a page.

    `tensors`, `kind`: where X came from, as `octavo.nn.watched.Source` has it.
    """
    target, accumulate = target_of(recipe.fprop.weight), recipe.fprop.accumulate
    if page is None:
        return stacked.fprop(x, weights, target, dtype, accumulate)
    operand = recipe.fprop.input
    source = watched.Source(tensors, target_of(operand), not operand.keeps_scale, kind)
    return watched.fprop(x, weights, target, dtype, accumulate, source, page)


def dgrad(
    dys: Sequence[Tensor],
    g: Quantized | None,
    weights: Sequence[Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
    page: Tensor | None = None,
) -> Tensor:
    """Return dX (M, K), the sum over the weights of dY_i W_i."""
    if g is None:
        pairs = zip(dys, weights, strict=True)
        parts = [product(dy_MN, values(weight_NK, dtype)) for dy_MN, weight_NK in pairs]
        return sum(parts[1:], start=parts[0])
    return dgrad_of(dys, g, weights, recipe, dtype, page)


def dgrad_of(
    tensors: Sequence[Tensor],
    g: Quantized,
    weights: Sequence[Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
    page: Tensor | None,
    kind: str = "",
) -> Tensor:
    """Return the sum over the weights of G_i W_i, and let telemetry look where there is a page.

    `tensors`, `kind`: where G came from, as `octavo.nn.watched.Source` has it.
    """
    targets, accumulate = dgrad_weight(recipe), recipe.dgrad.accumulate
    if page is None:
        return stacked.dgrad(g, weights, *targets, dtype, accumulate)
    operand, (fold, _) = recipe.dgrad.grad_output, folds(None, weights, recipe, True, False)
    source = watched.Source(tensors, target_of(operand), not operand.keeps_scale, kind, fold)
    return watched.dgrad(g, weights, *targets, dtype, accumulate, source, page)


def dgrad_weight(recipe: Recipe) -> tuple[Target, Target | None]:
    """Return how dgrad wants the transposed weight, and how fprop quantises it where dgrad takes those codes."""
    reuses = reused_from(recipe, "dgrad", "weight") is not None
    return target_of(recipe.dgrad.weight), target_of(recipe.fprop.weight) if reuses else None


def wgrad(
    dys: Sequence[Tensor], h: Quantized | None, x: Quantized | Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Return dW (N, K) of the stack."""
    if isinstance(x, Quantized):
        assert h is not None
        return kernels.gemm(h, x, dtype, recipe.wgrad.accumulate)
    if h is not None:
        return wgrad_of_input(h, x, target_of(recipe.wgrad.input), dtype, recipe.wgrad.accumulate)
    return torch.cat([product(dy_MN.t(), x) for dy_MN in dys])


def unstack(dw: Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Cut the gradient of a stack into those of its weights, each given by its rows and dtype."""
    cut = dw.split([rows for rows, _ in parts])
    return [dw_NK.to(dtype) for dw_NK, (_, dtype) in zip(cut, parts, strict=True)]
