"""The quantise contract: codes and scales of a matrix, in the layout of the GEMM.

    quantize               one matrix
    quantize_pair          one matrix and its transpose, as the left operands of two GEMMs
    quantize_stack         several matrices, stacked by rows
    quantize_transposed    transpose of a matrix saved in high precision
    requantize_transposed  the same, with known scales
    quantize_rows_twice    a stack to two sets of codes by row: of fprop, and of the backward GEMMs
    quantize_normed        result of an RMS norm, from its input

On a GPU each is one or a few Triton launches, in eager mode and in compiled code. Elsewhere, the specification; also
for short rows in compiled code on a GPU, where the compiler fuses it into the kernel that computes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quant_spec import QuantSpec, empty, empty_scale, laid_out
from octavo.kernels.quantize import reference
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.dispatch import launches_on, on_gpu, run_kernel, runs_triton, uses_triton
from octavo.kernels.runtime.operator import call, define_packed
from octavo.kernels.transpose import transpose
from octavo.numerics import (
    PER_ROW,
    PER_TENSOR,
    Granularity,
    GROUP_1x32,
    Quantized,
    Rounding,
    Scaling,
    format_named,
    granularity_named,
    to_codes,
)
from octavo.numerics import quantize as specified

Norm = tuple[Tensor, Tensor]
"""An RMS norm: rstd per input row, FP32 (M,), and weight (D,)."""
LONGEST_NORM = 16384
"""Maximum row length of a program that holds one row."""
COMPILED_ROW = 1024
"""Maximum row length of Inductor's persistent reduction. Longer rows are read twice, slower than a separate launch."""


def quantize(
    x: Tensor,
    format: str,
    granularity: str,
    scaling: Scaling = "power_of_two",
    rounding: Rounding = "nearest",
    rotation: int = 0,
    seed: int | Tensor = 0,
) -> Quantized:
    """Quantise an (R, C) matrix. Codes are contiguous, also for a transposed view.

    Args:
        rotation: as for `numerics.quantize`.
        seed: of stochastic rounding.

    Raises:
        ConfigError: x is not a matrix, or an unknown name.
    """
    fmt, tile = format_named(format), granularity_named(granularity)
    if rounding == "nearest" and on_gpu(x) and x.dim() == 2 and not _is_fused_by_compiler(x, tile):
        target = QuantSpec(format, granularity, scaling, rotation=rotation)
        if x.stride(0) == 1 and x.stride(1) != 1:
            transposed = quantize_pair([x.t()], None, target)[1]
            assert transposed is not None
            return transposed
        result = quantize_pair([x], target, None)[0]
        assert result is not None
        return result
    return contiguous(specified(x, fmt, tile, scaling, rounding, seed, rotation))


def quantize_matrix(x: Tensor, target: QuantSpec) -> Quantized:
    """Quantise an (R, C) matrix to `target`, with fresh random bits for stochastic rounding.

    The seed is drawn per call from PyTorch's generator, so that a resumed run draws the same sequence.
    """
    stochastic = target.rounding == "stochastic"
    seed = torch.randint(2**62, (), device=x.device) if stochastic else 0
    return quantize(x, *target, seed)


def _is_fused_by_compiler(x: Tensor, tile: Granularity) -> bool:
    """Return whether the compiler fuses quantisation into the producer of x: no launch, and x is not stored."""
    return torch.compiler.is_compiling() and tile == PER_ROW and x.shape[1] <= COMPILED_ROW and x.stride(1) == 1


def quantize_pair(
    sources: Sequence[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise X (R, C), the concatenation of `sources` along columns, and its transpose, for two GEMMs.

    Args:
        sources: matrices (R, C_i), FP32, BF16 or FP16.
        rows: target for X * row_fold, or None to skip it.
        columns: target for (X * column_fold)^T, or None. Its granularity refers to the transpose.
        row_fold: FP32 (1, C), scales folded in from the other operand.
        column_fold: FP32 (R, 1), likewise.

    Returns:
        X, codes (R, C), and X^T, codes (C, R), both contiguous.

    Raises:
        ConfigError: a source is not a matrix, or row counts differ.
    """
    if sources[0].dim() != 2 or (len(sources) > 1 and any(_rows_differ(source, sources[0]) for source in sources)):
        shapes = [tuple(source.shape) for source in sources]
        raise ConfigError(f"quantize_pair takes matrices with equal row counts, got shapes {shapes}.")
    arguments = list(sources), rows, columns, row_fold, column_fold
    row, column = call("quantize_pair", _quantize_pair, arguments, (rows, columns))
    return row, column


def _rows_differ(source: Tensor, first: Tensor) -> bool:
    return source.dim() != 2 or source.shape[0] != first.shape[0]


def quantize_stack(weights: Sequence[Tensor], target: QuantSpec) -> Quantized:
    """Quantise matrices (N_i, K) stacked by rows into one (sum of N_i, K).

    With row scales on a GPU, up to three matrices of one dtype take one launch and no copy.

    Args:
        weights: FP32, BF16 or FP16.
        target: with rounding to nearest.
    """
    weights = [weight.detach() for weight in weights]
    result: Quantized = call("quantize_stack", _quantize_stack, (weights, target), [target])[0]
    return result


class Twice(NamedTuple):
    """Two sets of codes of a matrix (R, C), by row."""

    first: Quantized
    codes: Tensor | None
    """Codes of the second set; None if they are made again from the matrix and `scale`."""
    scale: Tensor
    """FP32 (R, 1), scales of the second set."""


def quantize_rows_twice(
    matrices: Sequence[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool, weights: bool = False
) -> Twice:
    """Quantise matrices (R_i, C) stacked by rows to two targets with one scale per row, from one read.

    Args:
        matrices: FP32, BF16 or FP16.
        first, second: with rounding to nearest; `second` without a rotation.
        keeps_codes: whether to write the codes of the second set, or its scales alone.
        weights: whether these are weights, which the ledger counts.
    """
    matrices = [matrix.detach() for matrix in matrices]
    arguments = matrices, first, second, keeps_codes, weights
    results = call("quantize_rows_twice", _quantize_rows_twice, arguments, (first, keeps_codes, True))
    return Twice(*results)


def quantize_normed(
    x: Tensor, norm: Norm, target: QuantSpec, second: QuantSpec | None = None
) -> tuple[Quantized, Tensor | None]:
    """Quantise the rows of `x * rstd * weight`, the result of an RMS norm, without storing it.

    Args:
        x: (M, D), input of the norm, FP32, BF16 or FP16.
        target: one scale per row.
        second: target of a second set of codes by row, which backward makes from x and their scales.

    Returns:
        The codes, and the scales of the second set, FP32 (M, 1).
    """
    arguments = x.detach(), norm, target, second
    codes, scale = call("quantize_normed", _quantize_normed, arguments, (target, second is not None))
    return codes, scale


def requantize_transposed(
    weights: Sequence[Tensor], scale: Tensor, target: QuantSpec, after: Tensor, norm: Norm | None = None
) -> Quantized:
    """Quantise a stack of weights for dgrad of a folded recipe: transposed, with scale 1 per row.

    Codes equal those of `quantize_stack(weights, target)`, transposed, without an amax pass and without saving codes.

    Args:
        weights: (N_i, K), FP32, BF16 or FP16, unchanged since `quantize_stack`.
        scale: scales of the stack, FP32 (sum of N_i, 1), powers of two.
        target: one scale per row.
        after: the other operand of the product, as for `octavo.kernels.transpose`.
        norm: RMS norm of a single matrix; codes then equal those of `quantize_normed`.

    Returns:
        Codes (K, sum of N_i).
    """
    weights = [weight.detach() for weight in weights]
    result = call("requantize_transposed", _requantize_transposed, (weights, scale, target, after, norm), (target,))
    codes_t, ones, _ = result[0]
    return Quantized(codes_t, ones, PER_ROW)


def quantize_transposed(x: Tensor, target: QuantSpec, after: Tensor) -> Quantized:
    """Quantise the transpose of a matrix (R, C) saved in high precision, rounded to nearest, as by `quantize_pair`.

    Args:
        after: the other operand of the product. As a dependency, it keeps a compiler from moving the call into forward
            and saving the result.
    """
    result: Quantized = call("quantize_transposed", _quantize_transposed, (x, target, after), (target,))[0]
    return result


def contiguous(quantized: Quantized) -> Quantized:
    """Return the same matrix with contiguous codes, by a byte transpose if needed, and scales in GEMM layout."""
    codes = quantized.codes
    if not codes.is_contiguous() and codes.t().is_contiguous():
        codes = transpose(codes.t())
    return laid_out(quantized._replace(codes=codes))


def transpose_quantized(source: Quantized, after: Tensor) -> Quantized:
    """Return the transpose, with contiguous codes and scales in GEMM layout, without requantisation.

    Args:
        after: the other operand of the product, as for `octavo.kernels.transpose`.
    """
    codes = transpose(source.codes, after)
    return laid_out(Quantized(codes, source.scale.t(), source.granularity.transposed))


def without_scale(folded: Quantized) -> Quantized:
    """Return the codes with a single scale of 1, for an operand whose scales are folded into the other one."""
    return Quantized(folded.codes, folded.scale.new_ones(1, 1), PER_TENSOR)


def _quantize_transposed(x: Tensor, target: QuantSpec, after: Tensor) -> list[Quantized | None]:
    return [quantize_pair([x], None, target)[1]]


def _quantize_transposed_shape(x: Tensor, target: QuantSpec, after: Tensor) -> list[Quantized]:
    return [empty(target, x.shape[1], x.shape[0], x.device)]


def _quantize_normed(
    x: Tensor, norm: Norm, target: QuantSpec, second: QuantSpec | None
) -> tuple[Quantized, Tensor | None]:
    cols = x.shape[1]
    refused = f"rows of {cols} elements are longer than {LONGEST_NORM}" if cols > LONGEST_NORM else None
    result: tuple[Quantized, Tensor | None] = run_kernel(
        "quantize.quantize_normed", x, (x, norm, target, second), "quantize", refused
    )
    return result


def _quantize_normed_shape(
    x: Tensor, norm: Norm, target: QuantSpec, second: QuantSpec | None
) -> tuple[Quantized, Tensor | None]:
    rows, cols = x.shape
    return empty(target, rows, cols, x.device), second and empty_scale(second, rows, cols, x.device)


def _normed_in_graph(x: Tensor, *_: object) -> bool:
    return x.shape[1] <= LONGEST_NORM and runs_triton(x)


def _requantize_transposed(
    weights: list[Tensor], scale: Tensor, target: QuantSpec, after: Tensor, norm: Norm | None
) -> tuple[Quantized, ...]:
    x = weights[0]
    if x.is_cuda and x.shape[1] and len(scale) and uses_triton(x, "quantize"):
        from octavo.kernels.quantize.triton_weights import requantize_transposed as fast

        with launches_on(x.device):
            return (fast(weights, scale, target, after, norm),)
    values = torch.cat(weights).float() if norm is None else reference.normed(x, norm)
    codes = to_codes(values * scale.reciprocal(), target.fmt)
    return (Quantized(codes.t().contiguous(), scale.new_ones(x.shape[1], 1), PER_ROW),)


def _requantize_transposed_shape(
    weights: list[Tensor], scale: Tensor, target: QuantSpec, *_: object
) -> tuple[Quantized, ...]:
    return (empty(target, weights[0].shape[1], scale.shape[0], scale.device),)


def _requantize_in_graph(weights: list[Tensor], *_: object) -> bool:
    return runs_triton(weights[0])


def _quantize_pair(
    sources: list[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None,
    column_fold: Tensor | None,
) -> tuple[Quantized | None, Quantized | None]:
    x = sources[0]
    if x.is_cuda and x.shape[0] and (x.shape[1] or any(source.shape[1] for source in sources)):
        fast, refused = _triton_kernel(rows, columns, _whole_row(sources, rows))
        if uses_triton(x, "quantize", refused):
            result: tuple[Quantized | None, Quantized | None]
            with launches_on(x.device):
                result = fast.quantize_pair(sources, rows, columns, row_fold, column_fold)
            return result
    return reference.quantize_pair(sources, rows, columns, row_fold, column_fold)


def _pair_in_graph(sources: list[Tensor], rows: QuantSpec | None, columns: QuantSpec | None, *_: Tensor | None) -> bool:
    if not runs_triton(sources[0]):
        return False
    from octavo.kernels.quantize import triton as fast

    return _triton_kernel(rows, columns, _whole_row(sources, rows)) == (fast, None) and not fast.limits_registers(
        rows, columns
    )


def _quantize_stack(weights: list[Tensor], target: QuantSpec) -> list[Quantized]:
    ledger.count_weights(len(weights))
    if len(weights) == 1:
        return [quantize(weights[0], *target)]
    if _stacks_rows(weights, target) and uses_triton(weights[0], "quantize"):
        from octavo.kernels.quantize.triton_weights import quantize_rows_of

        with launches_on(weights[0].device):
            return [quantize_rows_of(weights, target)[0]]
    return [quantize(torch.cat(weights), *target)]


def _quantize_rows_twice(
    matrices: list[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool, weights: bool
) -> tuple[Quantized, Tensor | None, Tensor]:
    ledger.count_weights(len(matrices) if weights else 0)
    x = matrices[0]
    if x.numel() and x.is_cuda and uses_triton(x, "quantize", _refuses_twice(matrices)):
        from octavo.kernels.quantize.triton_weights import STACKED, quantize_rows_of

        with launches_on(x.device):
            stack = matrices if len(matrices) <= STACKED else [torch.cat(matrices)]
            return quantize_rows_of(stack, first, second, keeps_codes)
    x = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    rows = reference.quantize_pair([x], second, None)[0]
    made = reference.quantize_pair([x], first, None)[0]
    assert rows is not None and made is not None
    return made, rows.codes if keeps_codes else None, rows.scale


def _refuses_twice(matrices: list[Tensor]) -> str | None:
    from octavo.kernels.quantize.triton_weights import unsupported_reason

    return unsupported_reason(matrices)


def _quantize_rows_twice_shape(
    matrices: list[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool, weights: bool
) -> tuple[Quantized, Tensor | None, Tensor]:
    rows, cols, device = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1], matrices[0].device
    codes, scale, _ = empty(second, rows, cols, device)
    return empty(first, rows, cols, device), codes if keeps_codes else None, scale


def _twice_in_graph(matrices: list[Tensor], *_: object) -> bool:
    return runs_triton(matrices[0]) and not _refuses_twice(matrices)


def _stacks_rows(weights: list[Tensor], target: QuantSpec) -> bool:
    """Return whether one launch can quantise the rows of all matrices."""
    if not weights[0].is_cuda or target.granularity != "row":
        return False
    from octavo.kernels.quantize.triton_weights import STACKED, unsupported_reason

    return len(weights) <= STACKED and unsupported_reason(weights) is None


def _stack_in_graph(weights: list[Tensor], target: QuantSpec) -> bool:
    if len(weights) == 1:
        return weights[0].stride(-1) == 1 and _pair_in_graph(weights, target, None)
    return _stacks_rows(weights, target) and runs_triton(weights[0])


def _quantize_stack_shape(weights: list[Tensor], target: QuantSpec) -> list[Quantized]:
    return [empty(target, sum(weight.shape[0] for weight in weights), weights[0].shape[1], weights[0].device)]


def _whole_row(sources: Sequence[Tensor], rows: QuantSpec | None) -> int:
    """Return the length of a row that one program must hold; 0 if none must."""
    is_whole = rows is not None and rows.needs_whole_rows
    return sum(source.shape[1] for source in sources) if is_whole else 0


@cache
def _triton_kernel(rows: QuantSpec | None, columns: QuantSpec | None, cols: int) -> tuple[Any, str | None]:
    """Return the Triton module for these targets, and its reason against them or None; `groups` if any is 1x32."""
    if any(target is not None and target.tile == GROUP_1x32 for target in (rows, columns)):
        from octavo.kernels.quantize import triton_groups as groups

        return groups, groups.unsupported_reason(rows, columns)
    from octavo.kernels.quantize import triton as fast

    return fast, fast.unsupported_reason(rows, columns, cols=cols)


def _quantize_pair_shape(
    sources: list[Tensor], rows: QuantSpec | None, columns: QuantSpec | None, *_: Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    total_r, total_c, device = sources[0].shape[0], sum(source.shape[1] for source in sources), sources[0].device
    return rows and empty(rows, total_r, total_c, device), columns and empty(columns, total_c, total_r, device)


define_packed("quantize_pair", _quantize_pair, _quantize_pair_shape, in_graph=_pair_in_graph)
define_packed("quantize_stack", _quantize_stack, _quantize_stack_shape, in_graph=_stack_in_graph)
define_packed("quantize_rows_twice", _quantize_rows_twice, _quantize_rows_twice_shape, in_graph=_twice_in_graph)
define_packed("quantize_normed", _quantize_normed, _quantize_normed_shape, in_graph=_normed_in_graph)
define_packed("quantize_transposed", _quantize_transposed, _quantize_transposed_shape)
define_packed(
    "requantize_transposed", _requantize_transposed, _requantize_transposed_shape, in_graph=_requantize_in_graph
)
