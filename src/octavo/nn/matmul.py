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

from octavo._util.autograd import first_order, tracked
from octavo.errors import ConfigError
from octavo.kernels.batch import Batch, batch_of, quantize_batch
from octavo.kernels.bmm import bmm
from octavo.kernels.product import product
from octavo.nn import functional
from octavo.nn.operands import check_dtypes
from octavo.recipes import LinearPlan, QuantSpec, Recipe, Transposed


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
    result: Tensor = _Matmul.apply(*tracked(a_BMK, b_BKN), recipe, dtype)  # type: ignore[no-untyped-call]
    return result


def quantize_batch_both_ways(
    x_BRC: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Batch | None, Batch | None]:
    """Quantise B matrices (R, C) separately: directly for `rows`, transposed for `columns`, from one read.

    Args:
        row_fold: FP32 (B, 1, C), multiplied in before `rows`.
        column_fold: FP32 (B, R, 1), multiplied in before `columns`.
    """
    if all(target is None or target.rounding == "nearest" for target in (rows, columns)):
        return quantize_batch(x_BRC, rows, columns, row_fold, column_fold)
    folds = [[None] * len(x_BRC) if fold is None else fold.unbind() for fold in (row_fold, column_fold)]
    matrices = zip(x_BRC.unbind(), *folds, strict=True)
    parts = [functional.quantize_both([x], rows, columns, *fold) for x, *fold in matrices]
    return batch_of([row for row, _ in parts]), batch_of([column for _, column in parts])


class _Matmul(torch.autograd.Function):
    """C = A B. Saves of each operand what the gradient of the other one needs, in FP8 if that GEMM is."""

    @staticmethod
    def forward(ctx: Any, a_BMK: Tensor, b_BKN: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        plan = recipe.plan
        x, for_b = _read(a_BMK, plan.x, plan.x_t, plan.x_back if needs_b else None, dtype)
        w, for_a = _read(b_BKN.transpose(1, 2), plan.w, plan.w_t, plan.w_back if needs_a else None, dtype)
        ctx.save_for_backward(*for_a, *for_b)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.dtype, ctx.split, ctx.dtypes = plan, dtype, len(for_a), (a_BMK.dtype, b_BKN.dtype)
        if x is None or w is None:
            return product(a_BMK.to(dtype), b_BKN.to(dtype))
        return bmm(x, w, dtype, plan.accumulate[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, dc_BMN: Tensor | None) -> tuple[Tensor | None, ...]:
        if dc_BMN is None:
            return (None,) * len(ctx.needs_input_grad)
        plan, dc_BMN = ctx.plan, dc_BMN.to(ctx.dtype)
        for_a, for_b = ctx.saved_tensors[: ctx.split], ctx.saved_tensors[ctx.split :]
        g, h = _read_gradient(dc_BMN, for_a, for_b, plan)
        da = db = None
        if for_a and g is None:
            da = product(dc_BMN, for_a[0])
        elif for_a and g is not None:
            da = bmm(g, _transposed(for_a, plan.w_t, plan.w_back), ctx.dtype, plan.accumulate[1])
        if for_b and h is None:
            db = product(dc_BMN.transpose(1, 2), for_b[0]).transpose(1, 2)
        elif for_b and h is not None:  # the transpose of dC^T A, in the layout of B
            db = bmm(_transposed(for_b, plan.x_t, plan.x_back), h, ctx.dtype, plan.accumulate[2])
        gradients = None if da is None else da.to(ctx.dtypes[0]), None if db is None else db.to(ctx.dtypes[1])
        return *gradients, None, None


def _read(
    x_BRC: Tensor, target: QuantSpec | None, target_t: QuantSpec, back: Transposed | None, dtype: torch.dtype
) -> tuple[Batch | None, tuple[Tensor, ...]]:
    """Return X as fprop reads it, None in BF16, and what a backward GEMM needs of it.

    The latter is (x,) in BF16, or codes and scale: those of fprop if they are reused, otherwise of X^T.

    Args:
        target, target_t: of X, and of X^T where it is quantised by itself.
        back: how the backward GEMM reads X^T; None if it does not run.
    """
    by_itself = target_t if back is Transposed.QUANTIZED else None
    x, x_t = quantize_batch_both_ways(x_BRC, target, by_itself) if target or by_itself else (None, None)
    if back is None:
        return x, ()
    kept = x_t or x
    if kept is None or back is Transposed.VALUES:
        return x, (x_BRC.to(dtype),)
    return x, (kept.codes, kept.scale)


def _read_gradient(
    dc_BMN: Tensor, for_a: tuple[Tensor, ...], for_b: tuple[Tensor, ...], plan: LinearPlan
) -> tuple[Batch | None, Batch | None]:
    """Return dC as dgrad reads it, and dC^T as wgrad does, with the scales of folded partners; None for BF16."""
    rows, columns = plan.dy if for_a else None, plan.dy_t if for_b else None
    if rows is None and columns is None:
        return None, None
    row_fold = for_a[1].transpose(1, 2) if rows is not None and plan.w_back is Transposed.FOLDED else None
    column_fold = for_b[1] if columns is not None and plan.x_back is Transposed.FOLDED else None
    return quantize_batch_both_ways(dc_BMN, rows, columns, row_fold, column_fold)


def _transposed(kept: tuple[Tensor, ...], target_t: QuantSpec, back: Transposed) -> Batch:
    """Return X^T (B, C, R) as a backward GEMM reads it, from what `_read` returned of X for it."""
    if back is Transposed.QUANTIZED:
        return Batch(kept[0], kept[1], target_t.tile)
    x_t = Batch(kept[0], kept[1], target_t.tile.transposed).transposed()
    return x_t.without_scale() if back is Transposed.FOLDED else x_t
