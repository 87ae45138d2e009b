"""`torch._scaled_grouped_mm` of two batches: one launch for all products, row scales, E4M3, Hopper (compute 9.0)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.batch import Batch
from octavo.kernels.dispatch import architecture
from octavo.numerics import PER_ROW, PER_TENSOR, Granularity

_ALIGNED = 16  # elements: 16 bytes of codes


def unsupported_reason(a: Batch, b: Batch) -> str | None:
    """Return why the grouped GEMM cannot take these operands, (B, M, K) and (B, N, K), or None."""
    formats = ["e4m3" if x.codes.dtype == torch.float8_e4m3fn else "e5m2" for x in (a, b)]
    reason = unsupported_reason_kind(a.codes.device, formats, (a.granularity, b.granularity))
    if reason is None and (a.codes.shape[2] % _ALIGNED or b.codes.shape[1] % _ALIGNED):
        reason = f"N = {b.codes.shape[1]} or K = {a.codes.shape[2]} is not a multiple of {_ALIGNED}"
    return reason


def unsupported_reason_kind(
    device: torch.device, formats: Sequence[str], granularities: Sequence[Granularity]
) -> str | None:
    """Return why the grouped GEMM cannot take operands of these formats and granularities on a device, or None."""
    if device.type != "cuda":
        return f"no grouped FP8 GEMM for {device.type}"
    if not set(granularities) <= {PER_TENSOR, PER_ROW}:
        return "the grouped FP8 GEMM takes row scales only"
    if "e5m2" in formats:
        return "the grouped FP8 GEMM takes E4M3 only"
    found = architecture(device)
    return None if found.grouped else f"the grouped FP8 GEMM is Hopper's, this is {found.name}"


def grouped_bmm(a: Batch, b: Batch, fast: bool) -> Tensor:
    """Return a_i . b_i^T, BF16 (B, M, N). An operand with one scale a matrix has it spread over the rows."""
    y_BMN: Tensor = torch._scaled_grouped_mm(
        a.codes,
        b.codes.transpose(1, 2),
        _row_scale(a),
        _row_scale(b),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return y_BMN


def _row_scale(x: Batch) -> Tensor:
    batch, rows = x.codes.shape[:2]
    return x.scale.expand(batch, rows, 1).reshape(batch, rows).contiguous()
