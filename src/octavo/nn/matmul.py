"""Products of two activations in FP8: neither operand is a weight, so both are quantised in every call.

    C = A B      A (B, M, K), B (B, K, N): a batch of B products

This is a linear layer with the input A and the weight B^T (N, K), so a recipe describes it completely:

    fprop  C = A B        dgrad  dA = dC B^T        wgrad  dB^T = dC^T A

Folding works as in a linear layer: the scales of B^T move into dC before dA, those of A before dB.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo._util.autograd import first_order
from octavo.errors import ConfigError
from octavo.kernels.batch import Batch, batch_of, quantize_batch
from octavo.kernels.bmm import bmm
from octavo.kernels.product import product
from octavo.kernels.quant_spec import spec_of
from octavo.nn import functional
from octavo.nn.operands import check_dtypes
from octavo.recipes import Operand, Recipe


def matmul(a: Tensor, b: Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> Tensor:
    """Return a b with the three GEMMs of `recipe`, in `dtype`. Leading dimensions broadcast as in `torch.matmul`.

    Args:
        a: (..., M, K), any floating-point dtype; also (K,) if b is a matrix.
        b: (..., K, N).
        dtype: dtype of every GEMM's result, and in which a GEMM in high precision computes; default that of a.

    Raises:
        ConfigError: an operand is an integer or complex, or the shapes do not fit.
    """
    check_dtypes(a, b)
    if b.dim() < 2 or a.dim() < (1 if b.dim() == 2 else 2) or a.shape[-1] != b.shape[-2]:
        raise ConfigError(
            f"matmul takes a (..., M, K) and b (..., K, N), got {tuple(a.shape)} and {tuple(b.shape)}. "
            "Make a matrix of a vector: b[:, None]."
        )
    dtype = dtype or a.dtype
    if b.dim() == 2:
        a_BMK, b_BKN = a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1]), b[None]
        return _multiply(a_BMK, b_BKN, recipe, dtype).reshape(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a_BMK, b_BKN = (x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (a, b))
    return _multiply(a_BMK, b_BKN, recipe, dtype).reshape(*batch, a.shape[-2], b.shape[-1])


def _multiply(a_BMK: Tensor, b_BKN: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    if 0 in (*a_BMK.shape, *b_BKN.shape):
        return product(a_BMK.to(dtype), b_BKN.to(dtype))
    result: Tensor = _Matmul.apply(a_BMK, b_BKN, recipe, dtype)  # type: ignore[no-untyped-call]
    return result


def quantize_batch_both_ways(
    x_BRC: Tensor,
    rows: Operand | None,
    columns: Operand | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Batch | None, Batch | None]:
    """Quantise B matrices (R, C) separately: directly for `rows`, transposed for `columns`, from one read.

    Args:
        row_fold: FP32 (B, 1, C), multiplied in before `rows`.
        column_fold: FP32 (B, R, 1), multiplied in before `columns`.
    """
    if all(operand is None or operand.rounding == "nearest" for operand in (rows, columns)):
        targets = [None if operand is None else spec_of(operand) for operand in (rows, columns)]
        return quantize_batch(x_BRC, targets[0], targets[1], row_fold, column_fold)
    folds = [[None] * len(x_BRC) if fold is None else fold.unbind() for fold in (row_fold, column_fold)]
    matrices = zip(x_BRC.unbind(), *folds, strict=True)
    parts = [functional.quantize_both([x], rows, columns, *fold) for x, *fold in matrices]
    return batch_of([row for row, _ in parts]), batch_of([column for _, column in parts])


class _Matmul(torch.autograd.Function):
    """C = A B. Saves of each operand what the gradient of the other one needs, in FP8 if that GEMM is."""

    @staticmethod
    def forward(ctx: Any, a_BMK: Tensor, b_BKN: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        x, for_b = _read(a_BMK, recipe, "wgrad", "input", needs_b, dtype)
        w, for_a = _read(b_BKN.transpose(1, 2), recipe, "dgrad", "weight", needs_a, dtype)
        ctx.save_for_backward(*for_a, *for_b)
        ctx.set_materialize_grads(False)
        ctx.recipe, ctx.dtype, ctx.split, ctx.dtypes = recipe, dtype, len(for_a), (a_BMK.dtype, b_BKN.dtype)
        if x is None or w is None:
            return product(a_BMK.to(dtype), b_BKN.to(dtype))
        return bmm(x, w, dtype, recipe.fprop.accumulate)

    @staticmethod
    @first_order
    def backward(ctx: Any, dc_BMN: Tensor | None) -> tuple[Tensor | None, ...]:
        if dc_BMN is None:
            return (None,) * len(ctx.needs_input_grad)
        recipe, dc_BMN = ctx.recipe, dc_BMN.to(ctx.dtype)
        for_a, for_b = ctx.saved_tensors[: ctx.split], ctx.saved_tensors[ctx.split :]
        g, h = _read_gradient(dc_BMN, for_a, for_b, recipe)
        da = db = None
        if for_a:
            da = _gradient(dc_BMN, g, for_a, recipe, "dgrad", "weight").to(ctx.dtypes[0])
        if for_b:
            db = _gradient(dc_BMN.transpose(1, 2), h, for_b, recipe, "wgrad", "input").to(ctx.dtypes[1])
        return da, db, None, None


def _read(
    x_BRC: Tensor, recipe: Recipe, gemm: str, role: str, needed: bool, dtype: torch.dtype
) -> tuple[Batch | None, tuple[Tensor, ...]]:
    """Return X as fprop reads it, None in BF16, and what a backward GEMM needs of it, if it is needed.

    The latter is (x,) in BF16, or codes and scale: those of fprop if they are reused, otherwise of X^T.
    """
    forward: Operand | None = getattr(recipe.fprop, role) if recipe.fprop.is_fp8 else None
    own: Operand | None = None
    if needed and recipe.gemm(gemm).is_fp8 and not recipe.reuses(f"{gemm}.{role}"):
        own = getattr(recipe.gemm(gemm), role)
    x, turned = quantize_batch_both_ways(x_BRC, forward, own) if forward or own else (None, None)
    if not needed:
        return x, ()
    kept = turned or x
    if kept is None or not recipe.gemm(gemm).is_fp8:
        return x, (x_BRC.to(dtype),)
    return x, (kept.codes, kept.scale)


def _read_gradient(
    dc_BMN: Tensor, for_a: tuple[Tensor, ...], for_b: tuple[Tensor, ...], recipe: Recipe
) -> tuple[Batch | None, Batch | None]:
    """Return dC as dgrad reads it, and dC^T as wgrad does, with the scales of folded partners; None for BF16."""
    rows, columns = recipe.grad_outputs(len(for_a) > 0, len(for_b) > 0)
    if rows is None and columns is None:
        return None, None
    row_fold = for_a[1].transpose(1, 2) if rows is not None and recipe.folds("dgrad.weight") else None
    column_fold = for_b[1] if columns is not None and recipe.folds("wgrad.input") else None
    return quantize_batch_both_ways(dc_BMN, rows, columns, row_fold, column_fold)


def _gradient(
    dc_BRS: Tensor, dc: Batch | None, kept: tuple[Tensor, ...], recipe: Recipe, gemm: str, role: str
) -> Tensor:
    """Return dC X for what was saved of X (B, S, C), as (B, R, C); for wgrad its transpose, in the layout of B."""
    if dc is None:
        result = product(dc_BRS, kept[0])
        return result.transpose(1, 2) if gemm == "wgrad" else result
    operand: Operand = getattr(recipe.gemm(gemm), role)
    if recipe.reuses(f"{gemm}.{role}"):
        x = Batch(kept[0], kept[1], operand.tile.transposed).transposed()
    else:
        x = Batch(kept[0], kept[1], operand.tile)
    x = x.without_scale() if recipe.folds(f"{gemm}.{role}") else x
    left, right = (x, dc) if gemm == "wgrad" else (dc, x)
    return bmm(left, right, dc_BRS.dtype, recipe.gemm(gemm).accumulate)
