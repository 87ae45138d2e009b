"""INT8 GEMM: exact integer sums, times the scales of rows and columns.

    y[m, n] = (sum over k of a[m, k] b[n, k]) * a_scale[m] * b_scale[n]

Integer sums are exact in any order, so that every device gives the same bits (`reference.py` has the roundings).
On Hopper and Ada Octavo's own Triton kernel; on a CPU the reference. It loads tiles by TMA, in place of which Triton
compiles plain loads for Ada.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.gemm.reference import gemm as reference_gemm
from octavo.kernels.runtime.dispatch import (
    architecture,
    implementation,
    is_planning,
    launches_on,
    on_gpu,
    triton_unsupported_reason,
)
from octavo.numerics import INT8, PER_ROW, PER_TENSOR, Quantized

LONGEST = (2**31 - 1) // int(INT8.max) ** 2
"""Largest K whose sums fit INT32."""


def unsupported_reason_device(device: torch.device, *, grouped: bool = False) -> str | None:
    """Return why this GEMM, or its grouped form, does not run on a device, or None."""
    if not on_gpu(device):
        return None
    if device.type == "cuda" and not is_planning() and (reason := triton_unsupported_reason(device)):
        return reason
    arch = architecture(device)
    if arch.integer and (arch.grouped or not grouped):
        return None
    return f"Octavo's {'grouped ' if grouped else ''}INT8 GEMM does not run on this GPU ({arch.name})"


def untried_reason(device: torch.device) -> str | None:
    """Return why no recipe may use this GEMM by default on a device, or None: it cannot run there, or never did."""
    if reason := unsupported_reason_device(device):
        return reason
    arch = architecture(device)
    return f"Octavo's INT8 GEMM compiles for {arch.name}, but was not run there" if not arch.measured else None


def unsupported_reason(a: Quantized, b: Quantized) -> str | None:
    """Return why this GEMM cannot take these operands, or None."""
    if not is_integer(a) or not is_integer(b):
        return "its operands are not INT8"
    if not {a.granularity, b.granularity} <= {PER_ROW, PER_TENSOR}:
        return "its operands are not scaled by row"
    if a.codes.shape[1] > LONGEST:
        return f"sums over more than {LONGEST:,} products may exceed INT32"
    return unsupported_reason_device(a.codes.device)


def is_integer(x: Quantized) -> bool:
    """Return whether the codes are INT8."""
    return x.codes.dtype == torch.int8


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T as (M, N) of `out_dtype`, for operands with no `unsupported_reason`.

    The same kernel multiplies E4M3 by row: `octavo bench gemm` times it beside the vendor's, which is the default.

    Args:
        fast: of E4M3; sums of INT8 are exact in either case.
    """
    if not a.codes.is_cuda:
        return reference_gemm(a, b, out_dtype)
    (rows, depth), cols = a.codes.shape, b.codes.shape[0]
    a_scale, b_scale = _by_row(a.scale, rows), _by_row(b.scale, cols)
    kernels = implementation("triton", "gemm")
    aligned = kernels.ALIGNED
    a_MK, b_NK = a.codes, b.codes
    if depth % aligned or cols % aligned:
        a_MK, b_NK = F.pad(a_MK, (0, -depth % aligned)), F.pad(b_NK, (0, -depth % aligned, 0, -cols % aligned))
        b_scale = F.pad(b_scale, (0, 0, 0, -cols % aligned))
    y_MN: Tensor
    with launches_on(a.codes.device):
        y_MN = kernels.scaled_gemm(a_MK.contiguous(), a_scale, b_NK.contiguous(), b_scale, out_dtype, fast=fast)
    return y_MN[:, :cols].contiguous() if y_MN.shape[1] != cols else y_MN


def _by_row(scale: Tensor, rows: int) -> Tensor:
    """Return the scale of each row, (rows, 1), contiguous."""
    return scale.expand(rows, 1).contiguous()
