"""The patches contract: a convolution as a GEMM (im2col). Images are channels-last, x (B, H, W, C).

    unfold             the patch matrix (M, K), one row per output pixel: M = B H_out W_out, K = kh kw C
    quantize_patches   `quantize_pair` of that matrix; with scales per row or per tensor it is not materialised in high
                       precision: the amax of a patch is the maximum over the amax of its pixels
    fold               transpose of unfold: sum per pixel over all patches that contain it, in FP32

Columns are ordered (kh, kw, C), so that a channels-last weight (N, C, kh, kw) is the matrix (N, K) without a copy.
Padding is zero. The last two are custom operators: Triton on a GPU, `reference.py` elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.patches import reference
from octavo.kernels.patches.window import Window
from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.kernels.quantize import quantize_pair
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Quantized


def unfold(x: Tensor, window: Window) -> Tensor:
    """Return the patches (M, kh kw C) of x (B, H, W, C); a reshape of x if every pixel is a patch."""
    return x.reshape(-1, x.shape[-1]) if window.is_pixel else reference.unfold(x, window)


def unfold_rows(x: Tensor, window: Window, rows: Tensor) -> Tensor:
    """Return rows, int64 (n,), of `unfold(x, window)` as (n, kh kw C), without computing the others."""
    high, wide = window.output(x.shape[1], x.shape[2])
    image, down, across = rows // (high * wide), rows // wide % high, rows % wide
    coordinates = []
    for pos, taps, step, pad, dil in zip((down, across), window.kernel, *window[1:], strict=True):
        coordinates.append(pos[:, None] * step - pad + torch.arange(taps, device=x.device) * dil)  # (n, kh), (n, kw)
    (i, height), (j, width) = zip(coordinates, x.shape[1:3], strict=True)
    mask = ((i >= 0) & (i < height))[:, :, None] & ((j >= 0) & (j < width))[:, None]
    i, j = i.clamp(0, height - 1), j.clamp(0, width - 1)
    pixels = x[image[:, None, None], i[:, :, None], j[:, None]]
    return torch.where(mask[..., None], pixels, 0).flatten(1)


def quantize_patches(
    x: Tensor, window: Window, rows: QuantSpec | None, columns: QuantSpec | None, scale: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Return `quantize_pair([unfold(x, window)], rows, columns)`.

    Args:
        x: (B, H, W, C), contiguous, FP32, BF16 or FP16.
        scale: FP32 (M, 1), scales of the patches if known from an earlier call, to skip the amax pass.
    """
    if window.is_pixel and scale is None:
        return quantize_pair([unfold(x, window)], rows, columns)
    return _quantize_patches(x, window, rows, columns, scale)


def makes_directly(granularity: str, *, transposed: bool) -> bool:
    """Return whether patch scales follow from the amax per pixel, so that codes need no unfolded matrix."""
    return granularity in ("tensor", "column" if transposed else "row")


def fold(patches: Tensor, window: Window, size: tuple[int, int, int, int]) -> Tensor:
    """Return images of `size` (B, H, W, C), each pixel the sum over the patches (M, kh kw C) that contain it.

    Accumulated in FP32, in tap order, and rounded once to the dtype of the patches.
    """
    return patches.reshape(size) if window.is_pixel else _fold_patches(patches, window, size)


def _quantize_fake(
    x: Tensor, window: Window, rows: QuantSpec | None, columns: QuantSpec | None, _scale: Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    high, wide = window.output(x.shape[1], x.shape[2])
    m, k = x.shape[0] * high * wide, window.taps * x.shape[3]
    return rows and empty(rows, m, k, x.device), columns and empty(columns, k, m, x.device)


@operation(fake=_quantize_fake, results=lambda _x, _window, rows, columns, _scale: (rows, columns))
def _quantize_patches(
    x: Tensor, window: Window, rows: QuantSpec | None, columns: QuantSpec | None, scale: Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    arguments = x, window, rows, columns, scale
    for target, transposed in ((rows, False), (columns, True)):
        if target is not None and not makes_directly(target.granularity, transposed=transposed):
            return reference.quantize_patches(*arguments)
    row, column = run_kernel("patches.quantize_patches", x, arguments, "patches")
    return row, column


@operation(reference=reference.fold, ledger="fold", fake=lambda patches, _window, size: patches.new_empty(size))
def _fold_patches(patches: Tensor, window: Window, size: tuple[int, int, int, int]) -> Tensor: ...
