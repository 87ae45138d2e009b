"""`torch._scaled_mm` for tensor and row scales, `F.scaled_mm` for 1x128 and 128x128 blocks and for 1x32 groups.

`octavo.kernels.runtime.devices` says which device has which. 1x32 groups (MXFP8) are for Blackwell: the layout of their
scales is checked bit by bit on a CPU, the product was never run. Both operators multiply a (M, K) row-major by b^T, b
(N, K) row-major: both are contiguous along K. On a GPU, K and N must be multiples of 16 (128 for blocks): operands are
padded with zero codes and scale 1, which change no sum.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from octavo.kernels.runtime.devices import Mode
from octavo.kernels.runtime.dispatch import PLAIN, architecture
from octavo.numerics import PER_ROW, PER_TENSOR, BLOCK_128x128, GROUP_1x32, Quantized, TILE_1x128

_BY_ROW = (PER_ROW, PER_TENSOR)
_BLOCKS = {TILE_1x128: ScalingType.BlockWise1x128, BLOCK_128x128: ScalingType.BlockWise128x128}


def unsupported_reason_tensor(a: Quantized, b: Quantized) -> str | None:
    """Return why the tensor-scaled GEMM cannot take these operands, or None."""
    if torch.int8 in (a.codes.dtype, b.codes.dtype):
        return "its operands are INT8"
    if a.granularity != PER_TENSOR or b.granularity != PER_TENSOR:
        return "its operands have more than one scale"
    return _unsupported_reason_device(a.codes.device, "tensor")


def unsupported_reason_row(a: Quantized, b: Quantized) -> str | None:
    """Return why the row-scaled GEMM cannot take these operands, or None."""
    if torch.int8 in (a.codes.dtype, b.codes.dtype):
        return "its operands are INT8"
    if a.granularity not in _BY_ROW or b.granularity not in _BY_ROW:
        return "its operands are not scaled by row"
    if a.codes.is_cuda and torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype):
        return "row scales take E4M3 operands only"
    return _unsupported_reason_device(a.codes.device, "row")


def unsupported_reason_block(a: Quantized, b: Quantized) -> str | None:
    """Return why the block-scaled GEMM cannot take these operands, or None."""
    pair = (a.granularity, b.granularity)
    if not set(pair) <= set(_BLOCKS) or pair == (BLOCK_128x128, BLOCK_128x128):
        return "its operands are not 1x128 by 128x128, 128x128 by 1x128, or 1x128 by 1x128"
    if torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype):
        return "block scales take E4M3 operands only"
    return _unsupported_reason_device(a.codes.device, "block")


def unsupported_reason_mx(a: Quantized, b: Quantized) -> str | None:
    """Return why the MXFP8 GEMM cannot take these operands, or None."""
    if (a.granularity, b.granularity) != (GROUP_1x32, GROUP_1x32):
        return "its operands are not scaled by groups of 1x32"
    if torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype):
        return "Octavo's MXFP8 is E4M3 only"
    return _unsupported_reason_device(a.codes.device, "mx")


def scaled_mm_tensor(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T, one scale per operand.

    On a CPU the scales are expanded to one per row: with one scale each, PyTorch passes two E4M3 operands to oneDNN,
    whose only kernel for them on a processor with AMX is a reference loop, a thousand times slower.
    """
    if not a.codes.is_cuda:
        return scaled_mm_row(a, b, out_dtype, fast)
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    a_MK, b_NK = _pad(a.codes, 1, 16), _pad(b.codes, 16, 16)
    y_MN = torch._scaled_mm(
        a_MK,
        b_NK.t(),
        _aligned(a.scale.reshape(())),
        _aligned(b.scale.reshape(())),
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    return _cropped(y_MN, rows, cols)


def scaled_mm_row(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T, one scale per row of each operand; a single scale is expanded to all rows.

    On a GPU the result is rounded to BF16 first, whatever `out_dtype` is: cuBLAS has no other output for row scales.
    """
    (rows, depth), cols = a.codes.shape, b.codes.shape[0]
    if not a.codes.is_cuda:  # as_strided: Inductor may give a dimension of size 1 stride 0, which PyTorch refuses
        scale_a = a.scale.expand(rows, 1).contiguous().as_strided((rows, 1), (1, 1))
        scale_b = b.scale.expand(cols, 1).contiguous().as_strided((1, cols), (cols, 1))
        return torch._scaled_mm(a.codes, b.codes.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    scale_a, scale_b = _aligned(_of_rows(a.scale, rows)), _of_rows(b.scale, cols)
    a_MK, b_NK, missing = a.codes, b.codes, -cols % 16
    if missing or depth % 16:
        a_MK, b_NK = _pad(a_MK, 1, 16), _pad(b_NK, 16, 16)
        scale_b = F.pad(scale_b, (0, 0, 0, missing), value=1.0)
    scale_b = _aligned(scale_b).view(1, -1)
    y_MN = torch._scaled_mm(a_MK, b_NK.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return _cropped(y_MN, rows, cols).to(out_dtype)


def _of_rows(scale: Tensor, rows: int) -> Tensor:
    """Return the scale of each row (rows, 1), contiguous; a single scale is expanded to all rows."""
    return scale.contiguous() if scale.shape[0] == rows else scale.expand(rows, 1).contiguous()


def scaled_mm_block(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T for 1x128 and 128x128 scales. cuBLAS offers slow accumulation only; `fast` is ignored."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    a_MK, b_NK = _pad(a.codes, 128, 128), _pad(b.codes, 128, 128)
    y_MN = F.scaled_mm(
        a_MK,
        b_NK.t(),
        _block_scale(a, *a_MK.shape),
        _BLOCKS[a.granularity],
        _block_scale(b, *b_NK.shape),
        _BLOCKS[b.granularity],
        output_dtype=out_dtype,
    )
    return _cropped(y_MN, rows, cols)


def _block_scale(x: Quantized, rows: int, cols: int) -> Tensor:
    """Return the scales in cuBLAS's layout: 1x128 contiguous along rows, 128x128 along K, padded to four."""
    tiles = x.granularity.scale_shape(rows, cols)
    if x.granularity == BLOCK_128x128:
        tiles = (tiles[0], -(-tiles[1] // 4) * 4)
    missing = (0, tiles[1] - x.scale.shape[1], 0, tiles[0] - x.scale.shape[0])
    scale = F.pad(x.scale, missing, value=1.0) if any(missing) else x.scale
    if x.granularity == TILE_1x128:
        scale = scale.t()  # so that the result is (rows, K / 128), stride (1, rows)
    # else (K / 128 rounded up to 4, N / 128), stride (1, K / 128)
    return _aligned(scale.contiguous()).view(-1).view(scale.shape).t()  # views also set strides of size-1 dimensions


def scaled_mm_mx(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T for 1x32 scales, by tensor cores that read them (Blackwell). `fast` is ignored."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    a_MK, b_NK = _pad(a.codes, 16, 32), _pad(b.codes, 16, 32)
    y_MN = F.scaled_mm(
        a_MK,
        b_NK.t(),
        swizzled_mx_scale(a),
        ScalingType.BlockWise1x32,
        swizzled_mx_scale(b),
        ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16,
    )
    return _cropped(y_MN, rows, cols).to(out_dtype)


def swizzled_mx_scale(x: Quantized) -> Tensor:
    """Return the scales of 1x32 groups (rows, K / 32) as E8M0 in the order that Blackwell's tensor cores read.

    Tiles of 128 rows by 4 groups follow one another along K, then along the rows. Within a tile, the scale of row r and
    group g is at byte 16 (r % 32) + 4 (r // 32) + g: cuBLAS, "1D block scaling factors layout". Rows are padded to a
    multiple of 128, groups to one of 4, with scale 1; all scales are powers of two (`numerics.to_e8m0`).
    """
    scale = F.pad(x.scale, (0, -x.scale.shape[1] % 4, 0, -x.scale.shape[0] % 128), value=1.0)
    codes = (scale.view(torch.int32) >> 23).to(torch.uint8)  # exact for powers of two
    tiles = codes.view(codes.shape[0] // 128, 4, 32, codes.shape[1] // 4, 4)  # (tile, r // 32, r % 32, tile, group)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def _aligned(scale: Tensor) -> Tensor:
    """Return the scale 16-byte aligned, for cuBLAS: part of a batch may begin at any multiple of four bytes."""
    if not scale.is_cuda:
        return scale
    offset = scale.data_ptr() if type(scale) in PLAIN else 4 * scale.storage_offset()
    return scale if offset % 16 == 0 else scale.clone()


def _cropped(y_MN: Tensor, rows: int, cols: int) -> Tensor:
    """Return a product without padding. Detached: autograd refuses writes to a view that a Function returns."""
    return y_MN if y_MN.shape == (rows, cols) else y_MN[:rows, :cols].detach()


def _pad(codes: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    rows, cols = codes.shape
    missing_rows, missing_cols = -rows % row_multiple, -cols % col_multiple
    if not codes.is_cuda or not (missing_rows or missing_cols):
        return codes
    return F.pad(codes.view(torch.uint8), (0, missing_cols, 0, missing_rows)).view(codes.dtype)


def _unsupported_reason_device(device: torch.device, mode: Mode) -> str | None:
    how, why = architecture(device).support(mode)
    if how == "native" and device.type == "cpu":
        return cpu_unsupported_reason()
    return None if how == "native" else why


@cache
def cpu_unsupported_reason() -> str | None:
    """Return why this PyTorch cannot run the FP8 GEMM on a CPU, or None: PyTorch 2.11 takes one scale per operand only.

    Tries the smallest product with row scales, since no build of PyTorch reports what it supports. The device is
    explicit, as a model may be built under `torch.device("meta")`, which refuses nothing.
    """
    ones = torch.ones(16, 16, dtype=torch.float32, device="cpu")
    codes = ones.to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(codes, codes.t(), ones[:, :1].contiguous(), ones[:1], out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).splitlines()[0].rpartition("please report a bug to PyTorch. ")[2]  # it is not a bug
        return f"this PyTorch's _scaled_mm takes no row scales on a CPU ({first})"
    return None
