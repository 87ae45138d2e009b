"""The quantise contract: what one pass over a matrix produces, in the layout that the GEMM reads.

    quantize        one matrix, as it lies
    quantize_pair   one matrix, as the left operand of two GEMMs: as it lies, and transposed

On a GPU both are one custom operator, in eager mode and in compiled code: a compiler that fuses a quantisation with the
pass before it was measured slower than the two passes. Elsewhere `quantize` is the specification itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.dispatch import launches_on, on_gpu, uses_triton
from octavo.kernels.operator import define, flat
from octavo.kernels.reference import quantize as reference
from octavo.kernels.target import Target, empty, laid_out, target_of
from octavo.kernels.transpose import transpose
from octavo.numerics import GROUP_1x32, Quantized, Rounding, Scaling, format_named, granularity_named
from octavo.numerics import quantize as specified


def quantize(
    x: Tensor,
    format: str,
    granularity: str,
    scaling: Scaling = "power_of_two",
    rounding: Rounding = "nearest",
    seed: int | Tensor = 0,
) -> Quantized:
    """Quantise an (R, C) matrix. The codes come out contiguous, also those of a transposed view.

    Raises:
        ConfigError: x is not a matrix, or a name is unknown.
    """
    fmt, tile = format_named(format), granularity_named(granularity)
    if rounding == "nearest" and on_gpu(x) and x.dim() == 2:
        target = Target(format, granularity, scaling)
        if x.stride(0) == 1 and x.stride(1) != 1:
            transposed = quantize_pair([x.t()], None, target)[1]
            assert transposed is not None
            return transposed
        result = quantize_pair([x], target, None)[0]
        assert result is not None
        return result
    return contiguous(specified(x, fmt, tile, scaling, rounding, seed))


def quantize_pair(
    sources: Sequence[Tensor],
    rows: Target | None,
    columns: Target | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise the matrix X (R, C) that lies in `sources` side by side, as two GEMMs read it.

    Args:
        sources: matrices (R, C_i), FP32, BF16 or FP16.
        rows: how to quantise X * row_fold, or None for not at all.
        columns: how to quantise (X * column_fold)^T, or None. Its granularity is named as the transpose has it.
        row_fold: FP32 (1, C), the scales of a folded partner.
        column_fold: FP32 (R, 1).

    Returns:
        X as it lies, codes (R, C), and X^T, codes (C, R), both contiguous.

    Raises:
        ConfigError: a source is not a matrix, or their rows differ.
    """
    if any(source.dim() != 2 or source.shape[0] != sources[0].shape[0] for source in sources):
        shapes = [tuple(source.shape) for source in sources]
        raise ConfigError(f"quantize_pair takes matrices of as many rows, got shapes {shapes}.")
    codes, scale, codes_t, scale_t = torch.ops.octavo.quantize_pair(
        list(sources), str(rows or ""), str(columns or ""), row_fold, column_fold
    )
    return (
        None if rows is None else Quantized(codes, scale, rows.tile),
        None if columns is None else Quantized(codes_t, scale_t, columns.tile),
    )


def contiguous(quantized: Quantized) -> Quantized:
    """Return the same matrix with contiguous codes, by a byte transpose if need be, and scales as GEMMs read them."""
    codes = quantized.codes
    if not codes.is_contiguous() and codes.t().is_contiguous():
        codes = transpose(codes.t())
    return laid_out(quantized._replace(codes=codes))


def _quantize_pair(
    sources: list[Tensor], rows: str, columns: str, row_fold: Tensor | None, column_fold: Tensor | None
) -> tuple[Tensor, ...]:
    targets = target_of(rows), target_of(columns)
    if 0 not in (sources[0].shape[0], sum(s.shape[1] for s in sources)) and sources[0].is_cuda:
        fast = _triton_twin(*targets)
        if uses_triton(sources[0], "quantize", fast.refuses(*targets)):
            with launches_on(sources[0].device):
                made: tuple[Quantized | None, Quantized | None]
                made = fast.quantize_pair(sources, *targets, row_fold, column_fold)
            return flat(*made, like=sources[0])
    return flat(*reference.quantize_pair(sources, *targets, row_fold, column_fold), like=sources[0])


def _triton_twin(*targets: Target | None) -> Any:
    """Return the module that makes these targets, or says why not; that for groups makes all others beside them."""
    if any(target is not None and target.tile == GROUP_1x32 for target in targets):
        from octavo.kernels.triton import groups

        return groups
    from octavo.kernels.triton import quantize

    return quantize


def _quantize_pair_shape(
    sources: list[Tensor], rows: str, columns: str, row_fold: Tensor | None, column_fold: Tensor | None
) -> tuple[Tensor, ...]:
    total_r, total_c = sources[0].shape[0], sum(source.shape[1] for source in sources)
    row, column, device = target_of(rows), target_of(columns), sources[0].device
    made = row and empty(row, total_r, total_c, device), column and empty(column, total_c, total_r, device)
    return flat(*made, like=sources[0])


define(
    "quantize_pair(Tensor[] sources, str rows, str columns, Tensor? row_fold, Tensor? column_fold) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_pair,
    _quantize_pair_shape,
)
