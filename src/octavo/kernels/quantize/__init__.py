"""The quantise contract: codes and scales of a matrix, in the layout of the GEMM.

    quantize               one matrix
    quantize_pair          one matrix and its transpose, as the left operands of two GEMMs
    quantize_stack         several matrices, stacked by rows
    quantize_transposed    transpose of a matrix saved in high precision
    requantize_transposed  the same, with known scales
    quantize_rows_twice    a stack to two sets of codes by row: of fprop, and of the backward GEMMs
    quantize_normed        result of an RMS norm, from its input

On a GPU each is one or a few Triton launches, in eager mode and in compiled code. Elsewhere, the specification, one
node of the graph in compiled code. For short rows in compiled code on a GPU the compiler traces the specification, and
fuses it into the kernel that computes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quant_spec import QuantSpec, empty, empty_scale, laid_out
from octavo.kernels.quantize import reference
from octavo.kernels.runtime import host_state, ledger
from octavo.kernels.runtime.dispatch import (
    implementation,
    launches_on,
    run_kernel,
    runs_triton,
)
from octavo.kernels.runtime.operation import operation
from octavo.kernels.transpose import transpose
from octavo.numerics import (
    PER_ROW,
    PER_TENSOR,
    Granularity,
    GROUP_1x32,
    Quantized,
    Rounding,
    Scaling,
    TILE_1x128,
    format_named,
    granularity_named,
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
    if rounding == "nearest" and x.dim() == 2 and _is_one_call(x, tile):
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


def _is_one_call(x: Tensor, tile: Granularity) -> bool:
    """Return whether an operation quantises x: a launch on a GPU, and one node in a compiler's graph elsewhere.

    On a GPU a compiler fuses the specification into the producer of short rows: no launch, and x is not stored.
    """
    is_traced = torch.compiler.is_compiling()
    if not (x.is_cuda or host_state.now.fake):
        return is_traced
    return not (is_traced and tile == PER_ROW and x.shape[1] <= COMPILED_ROW and x.stride(1) == 1)


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
    return _quantize_pair(sources, rows, columns, row_fold, column_fold)


def _rows_differ(source: Tensor, first: Tensor) -> bool:
    return source.dim() != 2 or source.shape[0] != first.shape[0]


class Twice(NamedTuple):
    """Two sets of codes of a matrix (R, C), by row."""

    first: Quantized
    codes: Tensor | None
    """Codes of the second set; None if they are made again from the matrix and `scale`."""
    scale: Tensor
    """FP32 (R, 1), scales of the second set."""


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
    return _quantize_normed(x.detach(), norm, target, second)


def _transposed_fake(x: Tensor, target: QuantSpec, _after: Tensor) -> Quantized:
    return empty(target, x.shape[1], x.shape[0], x.device)


@operation(fake=_transposed_fake, results=lambda _x, target, _after: [target])
def quantize_transposed(x: Tensor, target: QuantSpec, after: Tensor) -> Quantized:
    """Quantise the transpose of a matrix (R, C) saved in high precision, rounded to nearest, as by `quantize_pair`.

    Args:
        after: the other operand of the GEMM. As a dependency, it keeps a compiler from moving the call into forward
            and saving the result.
    """
    made = quantize_pair([x], None, target)[1]
    assert made is not None
    return made


def contiguous(quantized: Quantized) -> Quantized:
    """Return the same matrix with contiguous codes, by a byte transpose if needed, and scales in GEMM layout."""
    codes, scale, tile = quantized
    if codes.is_contiguous() and scale.is_contiguous() and tile != TILE_1x128:
        return quantized
    if not codes.is_contiguous() and codes.t().is_contiguous():
        codes = transpose(codes.t())
    return laid_out(Quantized(codes, scale, tile))


def transpose_quantized(source: Quantized, after: Tensor) -> Quantized:
    """Return the transpose, with contiguous codes and scales in GEMM layout, without requantisation.

    Args:
        after: the other operand of the GEMM, as for `octavo.kernels.transpose`.
    """
    codes = transpose(source.codes, after)
    return laid_out(Quantized(codes, source.scale.t(), source.granularity.transposed))


def without_scale(folded: Quantized) -> Quantized:
    """Return the codes with a single scale of 1, for an operand whose scales are folded into the other one."""
    return Quantized(folded.codes, folded.scale.new_ones(1, 1), PER_TENSOR)


def _normed_fake(
    x: Tensor, _norm: Norm, target: QuantSpec, second: QuantSpec | None
) -> tuple[Quantized, Tensor | None]:
    rows, cols = x.shape
    return empty(target, rows, cols, x.device), second and empty_scale(second, rows, cols, x.device)


def _normed_unsupported_reason(x: Tensor, *_: object) -> str | None:
    cols = x.shape[1]
    return f"rows of {cols} elements are longer than {LONGEST_NORM}" if cols > LONGEST_NORM else None


@operation(
    reference=reference.quantize_normed,
    unsupported=_normed_unsupported_reason,
    ledger="quantize",
    fake=_normed_fake,
    results=lambda _x, _norm, target, second: (target, second is not None),
    in_graph=lambda x, *_: runs_triton(x) and not _normed_unsupported_reason(x),
)
def _quantize_normed(
    x: Tensor, norm: Norm, target: QuantSpec, second: QuantSpec | None
) -> tuple[Quantized, Tensor | None]: ...


def _requantized_fake(weights: Sequence[Tensor], scale: Tensor, target: QuantSpec, *_: object) -> Quantized:
    return empty(target, weights[0].shape[1], scale.shape[0], scale.device)


@operation(
    fake=_requantized_fake,
    results=lambda _weights, _scale, target, *_: [target],
    in_graph=lambda weights, *_: runs_triton(weights[0]),
)
def requantize_transposed(
    weights: Sequence[Tensor], scale: Tensor, target: QuantSpec, after: Tensor, norm: Norm | None = None
) -> Quantized:
    """Quantise a stack of weights for dgrad of a folded recipe: transposed, with scale 1 per row.

    Codes equal those of `quantize_stack(weights, target)`, transposed, without an amax pass and without saving codes.

    Args:
        weights: (N_i, K), FP32, BF16 or FP16, unchanged since `quantize_stack`.
        scale: scales of the stack, FP32 (sum of N_i, 1), powers of two.
        target: one scale per row.
        after: the other operand of the GEMM, as for `octavo.kernels.transpose`.
        norm: RMS norm of a single matrix; codes then equal those of `quantize_normed`.

    Returns:
        Codes (K, sum of N_i).
    """
    weights = [weight.detach() for weight in weights]
    arguments, x = (weights, scale, target, after, norm), scale if weights[0].shape[1] else weights[0]
    made: Quantized = run_kernel("quantize.requantize_transposed", x, arguments, "quantize", triton="triton_weights")
    return made


def _whole_row(sources: Sequence[Tensor], rows: QuantSpec | None) -> int:
    """Return the length of a row that one program must hold; 0 if none must."""
    is_whole = rows is not None and rows.needs_whole_rows
    return sum(source.shape[1] for source in sources) if is_whole else 0


@cache
def _triton_kernel(rows: QuantSpec | None, columns: QuantSpec | None, cols: int) -> tuple[str, str | None]:
    """Return the file of Triton kernels for these targets, and its reason against them or None."""
    is_group = any(target is not None and target.tile == GROUP_1x32 for target in (rows, columns))
    file, options = ("triton_groups", {}) if is_group else ("triton", {"cols": cols})
    return file, implementation(file, "quantize").unsupported_reason(rows, columns, **options)


def _pair_fake(
    sources: Sequence[Tensor], rows: QuantSpec | None, columns: QuantSpec | None, *_: Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    total_r, total_c, device = sources[0].shape[0], sum(source.shape[1] for source in sources), sources[0].device
    return rows and empty(rows, total_r, total_c, device), columns and empty(columns, total_c, total_r, device)


def _pair_in_graph(sources: Sequence[Tensor], rows: QuantSpec | None, columns: QuantSpec | None, *_: object) -> bool:
    if not runs_triton(sources[0]) or _triton_kernel(rows, columns, _whole_row(sources, rows)) != ("triton", None):
        return False
    return not implementation("triton", "quantize").limits_registers(rows, columns)


@operation(fake=_pair_fake, results=lambda _sources, rows, columns, *_: (rows, columns), in_graph=_pair_in_graph)
def _quantize_pair(
    sources: Sequence[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None,
    column_fold: Tensor | None,
) -> tuple[Quantized | None, Quantized | None]:
    x = sources[0] if sources[0].numel() else next((source for source in sources if source.numel()), sources[0])
    if not x.is_cuda:
        return reference.quantize_pair(sources, rows, columns, row_fold, column_fold)
    file, refused = _triton_kernel(rows, columns, _whole_row(sources, rows)) if runs_triton(x) else ("triton", None)
    arguments = sources, rows, columns, row_fold, column_fold
    made: tuple[Quantized | None, Quantized | None] = run_kernel(
        "quantize.quantize_pair", x, arguments, "quantize", refused, file
    )
    return made


def _stacks_rows(weights: Sequence[Tensor], target: QuantSpec) -> bool:
    """Return whether one launch can quantise the rows of all matrices."""
    if not runs_triton(weights[0]) or target.granularity != "row":
        return False
    fast = implementation("triton_weights", "quantize")
    return len(weights) <= fast.STACKED and fast.unsupported_reason(weights) is None


def _stack_fake(weights: Sequence[Tensor], target: QuantSpec) -> Quantized:
    return empty(target, sum(weight.shape[0] for weight in weights), weights[0].shape[1], weights[0].device)


def _stack_in_graph(weights: Sequence[Tensor], target: QuantSpec) -> bool:
    if len(weights) == 1:
        return weights[0].stride(-1) == 1 and _pair_in_graph(weights, target, None)
    return _stacks_rows(weights, target)


@operation(fake=_stack_fake, results=lambda _weights, target: [target], in_graph=_stack_in_graph)
def quantize_stack(weights: Sequence[Tensor], target: QuantSpec) -> Quantized:
    """Quantise matrices (N_i, K) stacked by rows into one (sum of N_i, K).

    With row scales on a GPU, up to three matrices of one dtype take one launch and no copy.

    Args:
        weights: FP32, BF16 or FP16, detached.
        target: with rounding to nearest.
    """
    if host_state.now.ledgers:
        ledger.count_weights(len(weights))
    if len(weights) == 1:
        return quantize(weights[0], *target)
    if not _stacks_rows(weights, target):
        return quantize(torch.cat(list(weights)), *target)
    made: Quantized
    with launches_on(weights[0].device):
        made = implementation("triton_weights", "quantize").quantize_rows_of(weights, target)[0]
    return made


def _twice_unsupported_reason(matrices: Sequence[Tensor]) -> str | None:
    reason: str | None = implementation("triton_weights", "quantize").unsupported_reason(matrices)
    return reason


def _twice_fake(
    matrices: Sequence[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool, weights: bool
) -> Twice:
    rows, cols, device = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1], matrices[0].device
    codes, scale, _ = empty(second, rows, cols, device)
    return Twice(empty(first, rows, cols, device), codes if keeps_codes else None, scale)


@operation(
    fake=_twice_fake,
    results=lambda _matrices, first, _second, keeps_codes, _weights: (first, keeps_codes, True),
    in_graph=lambda matrices, *_: runs_triton(matrices[0]) and not _twice_unsupported_reason(matrices),
)
def quantize_rows_twice(
    matrices: Sequence[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool, weights: bool = False
) -> Twice:
    """Quantise matrices (R_i, C) stacked by rows to two targets with one scale per row, from one read.

    Args:
        matrices: FP32, BF16 or FP16, detached.
        first, second: with rounding to nearest; `second` without a rotation.
        keeps_codes: whether to write the codes of the second set, or its scales alone.
        weights: whether these are weights, which the ledger counts.
    """
    if weights and host_state.now.ledgers:
        ledger.count_weights(len(matrices))
    x, arguments = matrices[0], (matrices, first, second, keeps_codes)
    refused = _twice_unsupported_reason(matrices) if runs_triton(x) else None
    return Twice(*run_kernel("quantize.quantize_rows_twice", x, arguments, "quantize", refused, "triton_weights"))
