"""Quantise with one scale per 32 values of a row (MXFP8), untransposed and transposed.

For the emulation of MXFP8 only: a transpose reads x column by column, uncoalesced and slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.kernels.quantize import triton as quantize
from octavo.kernels.triton.codes import amax, scale_of, to_codes
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Shape
from octavo.numerics import NARROW, GROUP_1x32, Quantized

GROUP: tl.constexpr = tl.constexpr(32)
TILE = Shape(32, 4 * GROUP.value, warps=4)


def unsupported_reason(*targets: QuantSpec | None) -> str | None:
    """Return why these kernels cannot produce the targets, or None."""
    if narrow := next((target.format for target in targets if target is not None and target.format in NARROW), None):
        return f"only the reference rounds to {narrow.upper()}"
    return quantize.unsupported_reason(
        *(target for target in targets if target is not None and target.tile != GROUP_1x32)
    )


def quantize_pair(
    sources: Sequence[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.quantize.quantize_pair`."""
    x = sources[0] if len(sources) == 1 else torch.cat(list(sources), dim=1)
    made = [
        None if target is None else _quantize(view, target, fold)
        for view, target, fold in (
            (x, rows, row_fold),
            (x.t(), columns, None if column_fold is None else column_fold.t()),
        )
    ]
    return made[0], made[1]


def _quantize(x: Tensor, target: QuantSpec, fold: Tensor | None) -> Quantized:
    x = x if fold is None else x.float() * fold
    if target.tile != GROUP_1x32:
        result = quantize.quantize_pair([x.contiguous()], target, None)[0]
        assert result is not None
        return result
    rows, cols = x.shape
    out = empty(target, rows, cols, x.device)
    _groups_kernel[TILE.grid(rows, cols)](
        x, *x.stride(), rows, cols, out.codes, out.scale, out.scale.stride(0),
        SCALING=target.rule, **TILE.meta(),
    )  # fmt: skip
    return out


@Kernel
@triton.jit
def _groups_kernel(
    x_ptr, stride_r, stride_c, total_r, total_c, codes_ptr, scale_ptr, scale_stride, SCALING: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    GROUPS: tl.constexpr = WIDTH // GROUP
    rows = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    mask = (rows < total_r)[:, None] & (cols < total_c)[None, :]
    x_ptrs = x_ptr + rows[:, None] * stride_r + cols[None, :].to(tl.int64) * stride_c
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    parts = tl.reshape(x, (HEIGHT, GROUPS, GROUP))
    scale, inverse = scale_of(amax(parts, 2), FORMAT, SCALING)
    in_groups = (rows < total_r)[:, None] & (groups < tl.cdiv(total_c, GROUP))[None, :]
    tl.store(scale_ptr + rows[:, None] * scale_stride + groups[None, :], scale, mask=in_groups)
    y = tl.reshape(parts * inverse[:, :, None], (HEIGHT, WIDTH))
    tl.store(codes_ptr + rows[:, None] * total_c + cols[None, :], to_codes(y, FORMAT), mask=mask)
