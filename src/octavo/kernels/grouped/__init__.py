"""The grouped contract: GEMMs of tokens sorted by expert, one weight per group.

T: tokens. E: experts. N: output features. K: input features. `ends`, int32 (E,): end offset of each expert's tokens,
the last one T; an expert may have none.

    grouped_gemm       y[t] = a[t] . b[e(t)]^T                    fprop, and dgrad with the transposed weights
    grouped_wgrad      dW[e] = sum over its tokens of a[t]^T b[t]
    quantize_groups    `quantize_pair` per group: one scale per token; transposed, one scale per column and expert
    transpose_groups   byte transpose per group
    grouped_mm         the first two in high precision

Operands of wgrad are transposed, with tokens along K, and *padded*: every group starts at a multiple of 128 and has at
least 128 tokens, padding being zero codes, so that no K tile straddles two groups. Group sizes are known on the device
only, so buffers are sized for the worst case, without a synchronisation.

Operands of fprop may be INT8: their sums are exact (`octavo.kernels.gemm.integer`). All others are FP8.

All are custom operators: Triton on a GPU, and PyTorch's grouped GEMM in high precision; `reference.py` elsewhere.
Inside `gemm_by` the eight-bit ones are one GEMM per expert, by its accumulator.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.gemm import accumulator_in_use, gemm, integer
from octavo.kernels.grouped import reference, vendor
from octavo.kernels.grouped.padding import padded_length
from octavo.kernels.grouped_gemm import reference as by_expert
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.dispatch import architecture, run_kernel, triton_unsupported_reason
from octavo.kernels.runtime.operation import operation
from octavo.numerics import PER_ROW, Quantized

ALIGNED = 16
"""Required alignment of the features of both operands: 16 bytes of codes."""


class ExpertCodes(NamedTuple):
    """Weights of experts in eight bits, in the layout of a grouped GEMM."""

    codes: Tensor
    """(E, R, C), last dimension contiguous."""
    scale: Tensor | None
    """FP32 (E, R); None for 1, if folded into the other operand."""


class Padded(NamedTuple):
    """A matrix (T, C) in the layout of wgrad: transposed, each group padded."""

    codes: Tensor
    """(C, P), P = `padded_length(T, E)`."""
    scale: Tensor | None
    """FP32 (E, C), one per expert and column; None for 1, if folded into the other operand."""


def _wgrad_fake(a: Padded, b: Padded, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    return ends.new_empty(ends.shape[0], a.codes.shape[0], b.codes.shape[0], dtype=out_dtype)


@operation(fake=_wgrad_fake, tags=[torch.Tag.needs_fixed_stride_order])
def grouped_wgrad(a: Padded, b: Padded, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return the sum of a[t]^T b[t] over the tokens of each expert, (E, N, K).

    Args:
        a: a padded (T, N), with scales.
        b: a padded (T, K).
        ends: int32 (E,), of the groups before padding.
    """
    scale = a.scale
    assert scale is not None
    if 0 in (a.codes.shape[0], b.codes.shape[0], ends.shape[0]):
        return scale.new_zeros(ends.shape[0], a.codes.shape[0], b.codes.shape[0], dtype=out_dtype)
    operands = a.codes, scale, *b, ends, out_dtype
    if accumulator_in_use().kernel is not None:
        return by_expert.grouped_wgrad(*operands, gemm)
    return _run("grouped_gemm.grouped_wgrad", operands)


def _transpose_fake(codes: Tensor, ends: Tensor, source: Tensor | None) -> Tensor:
    tokens = (codes if source is None else source).shape[0]
    return codes.new_empty(codes.shape[1], padded_length(tokens, ends.shape[0]))


@operation(fake=_transpose_fake)
def transpose_groups(codes: Tensor, ends: Tensor, source: Tensor | None = None) -> Tensor:
    """Return codes (T, C) in the layout of wgrad, (C, P). `source`: as for `quantize_groups`."""
    first, arguments = codes if len(ends) else ends, (codes, ends, source)
    made: Tensor = run_kernel("grouped.transpose_groups", first, arguments, "transpose_groups")
    return made


def _mm_fake(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[1]))


@operation(fake=_mm_fake)
def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return grouped products in the dtype of a and b, as `torch.nn.functional.grouped_mm`.

    Args:
        a: (T, C); or (N, T), to reduce over the tokens of each expert.
        b: (E, C, R); or (T, K).

    Returns:
        a[t] b[e(t)], (T, R); or (E, N, K).
    """
    _check_ends(ends, a.shape[1] if b.dim() == 2 else a.shape[0])
    refused = vendor.unsupported_reason(a, b)
    if refused is None:
        return vendor.grouped_mm(a, b, ends)
    if a.is_cuda:
        ledger.fall_back(f"grouped mm ran as reference: {refused}")
    return reference.grouped_mm(a, b, ends)


def _gemm_fake(a: Quantized, b: ExpertCodes, _ends: Tensor, out_dtype: torch.dtype, _accumulate: str) -> Tensor:
    return a.scale.new_empty(a.codes.shape[0], b.codes.shape[1], dtype=out_dtype)


@operation(fake=_gemm_fake, tags=[torch.Tag.needs_fixed_stride_order])
def grouped_gemm(
    a: Quantized, b: ExpertCodes, ends: Tensor, out_dtype: torch.dtype, accumulate: str = "slow"
) -> Tensor:
    """Return a[t] . b[e(t)]^T for every token, (T, R).

    Args:
        a: (T, C), one scale per row.
        b: (E, R, C).
        ends: int32 (E,).
        accumulate: `slow` or `fast`.
    """
    _check_ends(ends, a.codes.shape[0])
    if 0 in (*a.codes.shape, *b.codes.shape):
        return a.scale.new_zeros(a.codes.shape[0], b.codes.shape[1], dtype=out_dtype)
    override = accumulator_in_use()
    fast = accumulate == "fast" if override.fast is None else override.fast
    operands = a.codes, a.scale, *b, ends, out_dtype, fast
    if override.kernel is not None:
        return by_expert.grouped_gemm(*operands, partial(gemm, accumulate="fast" if fast else "slow"))
    return _run("grouped_gemm.grouped_gemm", operands)


def _unsupported_reason(a: Tensor, b: Tensor) -> str | None:
    """Return why this GPU has no grouped GEMM for codes a (.., C) and b (.., C), or None."""
    if a.dtype == torch.int8:
        if a.shape[-1] > integer.LONGEST:
            return f"sums over more than {integer.LONGEST:,} products may exceed INT32"
        if reason := integer.unsupported_reason_device(a.device, grouped=True):
            return reason
    elif not (arch := architecture(a.device)).grouped:
        return f"the grouped FP8 GEMM is Hopper's, this is {arch.name}"
    if torch.float8_e5m2 in (a.dtype, b.dtype):
        return "row scales take E4M3 operands only"
    if a.shape[-1] % ALIGNED or b.shape[-2] % ALIGNED:
        return f"{a.shape[-1]} columns or {b.shape[-2]} rows are not a multiple of {ALIGNED}"
    return None


def _run(name: str, operands: tuple[Any, ...]) -> Tensor:
    """Run a grouped GEMM and record it in the ledger."""
    codes = operands[0]
    refused = _unsupported_reason(codes, operands[2]) if codes.is_cuda else None
    reason = triton_unsupported_reason(codes.device) or refused
    ledger.count("reference" if reason else "grouped_gemm")
    result: Tensor = run_kernel(name, codes, operands, "grouped gemm", refused)
    return result


def _groups_fake(
    x: Tensor, ends: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, *others: Tensor | None
) -> list[Quantized | None]:
    source = others[2]
    t, c, e = (x if source is None else source).shape[0], x.shape[1], ends.shape[0]
    shapes = (rows, (t, c), (t, 1)), (columns, (c, padded_length(t, e)), (e, c))
    return [
        spec and Quantized(x.new_empty(codes, dtype=spec.fmt.dtype), x.new_empty(scale, dtype=torch.float32), PER_ROW)
        for spec, codes, scale in shapes
    ]


@operation(fake=_groups_fake, results=lambda _x, _ends, rows, columns, *_: (rows, columns and Padded))
def quantize_groups(
    x: Tensor,
    ends: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
    source: Tensor | None = None,
) -> tuple[Quantized | None, Padded | None]:
    """Quantise a matrix (T, C) per group, as by `quantize_pair`: row-major, and transposed.

    Args:
        rows: target with one scale per row, or None.
        columns: target with one scale per row of the transpose, or None.
        row_fold: FP32 (E, C), factors of each expert's tokens, applied before `rows`.
        column_fold: FP32 (T, 1), factors applied before `columns`.
        source: int32 (T,), row of x to gather per token; None if x is (T, C) already.
    """
    _check_ends(ends, len(x if source is None else source))
    arguments, first = (x, ends, rows, columns, row_fold, column_fold, source), x if len(ends) else ends
    row, column = run_kernel("grouped.quantize_groups", first, arguments, "quantize_groups")
    return row and Quantized(row[0], row[1], PER_ROW), column and Padded(column[0], column[1])


def _check_ends(ends: Tensor, tokens: int) -> None:
    """Raise if the groups do not cover the tokens; on a GPU by an asynchronous device-side assertion."""
    if not ends.shape[0]:
        return
    if ends.is_cuda:
        message = "grouped: the last of `ends` is not the number of tokens, or a token's expert does not exist"
        torch._assert_async(ends[-1] == tokens, message)
        return
    offsets = ends.tolist()
    if offsets[-1] != tokens:
        raise ConfigError(
            f"the last of `ends` must be the number of tokens, {tokens}, got {offsets[-1]}. If they come from the "
            "expert ids of a router, an id is out of range."
        )
    if offsets != sorted(offsets) or offsets[0] < 0:
        raise ConfigError(
            f"`ends` are the end offsets of the groups: they start at 0 or above and must not decrease; got {offsets}."
        )
