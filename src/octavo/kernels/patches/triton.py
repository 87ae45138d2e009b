"""Codes of patches directly from the pixels (unfold), and the sum of patches into pixels (fold).

A pixel is read once per patch that contains it, from the cache. The unfolded matrix exists in FP8 only.
"""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.patches.window import Window
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import POWER_OF_TWO, amax, emit_both, quads
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.output import Output, end_searches
from octavo.kernels.triton.shape import Shape, cdiv
from octavo.numerics import Quantized

WRITE = Shape(64, 64, warps=4)
FOLD = Shape(64, 64, warps=4)
PIXELS = Shape(16, 256, warps=4)


def quantize_patches(
    x: Tensor, window: Window, rows: QuantSpec | None, columns: QuantSpec | None, scale: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.patches.quantize_patches`."""
    exact = all(target is None or target.scaling == "power_of_two" for target in (rows, columns))
    known = scale if exact else None  # values are multiplied by its reciprocal, which is exact
    x = x.contiguous()
    batch, height, width, channels = x.shape
    out_h, out_w = window.output(height, width)
    m, k = batch * out_h * out_w, window.taps * channels
    outputs = [
        Output(rows, m, k, x.device, scale=known),
        Output(columns, m, k, x.device, transposed=True, scale=known),
    ]
    if any(output.searches for output in outputs):
        maxima = _patch_maxima(x, window)
        for output in outputs:
            if output.searches:
                found = output.arguments[-1]
                found.copy_(maxima if found.numel() == maxima.numel() else maxima.amax())
        end_searches(*outputs)
    across, down = WRITE.grid(m, k)
    if across * down:
        _patches_kernel[(across * down,)](
            x, height, width, channels, out_h, out_w, m, k, *outputs[0].arguments, *outputs[1].arguments,
            *window.flat[1:], ROW_MODE=outputs[0].mode, COLUMN_MODE=outputs[1].mode,
            ONE_TAP=channels % WRITE.width == 0, **WRITE.meta(),
        )  # fmt: skip
    return outputs[0].quantized, outputs[1].quantized


def _patch_maxima(x: Tensor, window: Window) -> Tensor:
    """Return the largest finite magnitude of each patch, FP32 (M,)."""
    batch, height, width, channels = x.shape
    pixels = torch.empty(batch, 1, height, width, dtype=torch.float32, device=x.device)
    _pixel_kernel[(cdiv(pixels.numel(), PIXELS.height),)](x, pixels, pixels.numel(), channels, **PIXELS.meta())
    (top, left), kernel = window.padding, window.kernel
    padded = F.pad(pixels, (left, left, top, top))
    return F.max_pool2d(padded, kernel, window.stride, dilation=window.dilation).reshape(-1)


def fold(patches: Tensor, window: Window, size: tuple[int, int, int, int]) -> Tensor:
    """See `octavo.kernels.patches.fold`."""
    batch, height, width, channels = size
    out_h, out_w = window.output(height, width)
    x = patches.new_empty(size)
    pixels = batch * height * width
    _fold_kernel[FOLD.grid(pixels, channels)](
        patches.contiguous(), x, pixels, height, width, channels, out_h, out_w, *window.flat[2:],
        KERNEL_H=window.kernel[0], KERNEL_W=window.kernel[1], **FOLD.meta(),
    )  # fmt: skip
    return x


@Kernel
@triton.jit
def _pixel_kernel(x_ptr, amax_ptr, pixels, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The largest finite magnitude of each pixel."""
    rows = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    largest = tl.zeros((HEIGHT,), tl.float32)
    for start in tl.range(0, channels, WIDTH):
        cols = start + tl.arange(0, WIDTH)
        x_ptrs = x_ptr + rows[:, None].to(tl.int64) * channels + cols[None, :]
        x = tl.load(x_ptrs, mask=(rows < pixels)[:, None] & (cols < channels)[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(largest, amax(x, 1))
    tl.store(amax_ptr + rows, largest, mask=rows < pixels)


@triton.jit
def _load_patches(x_ptr, rows, in_rows, taps_h, taps_w, channel, in_cols, sizes, steps):
    """Load elements of the unfolded matrix in FP32. taps_h, taps_w: offsets from a patch's top left corner.

    sizes: height, width and channels of an image, height and width of the output. steps: strides and padding.
    """
    height, width, channels, out_h, out_w = sizes
    stride_h, stride_w, pad_h, pad_w = steps
    image, pixel = rows // (out_h * out_w), rows % (out_h * out_w)
    h = (pixel // out_w * stride_h - pad_h)[:, None] + taps_h[None, :]
    w = (pixel % out_w * stride_w - pad_w)[:, None] + taps_w[None, :]
    mask = in_rows[:, None] & in_cols[None, :] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    image_row = (image.to(tl.int64) * height)[:, None] + h
    return tl.load(x_ptr + (image_row * width + w) * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@Kernel
@triton.jit
def _patches_kernel(
    x_ptr, height, width, channels, out_h, out_w, total_r, total_c,
    row_codes, row_scale, row_stride_r, row_stride_c, row_inverse,
    column_codes, column_scale, column_stride_r, column_stride_c, column_inverse,
    kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    ROW_MODE: tl.constexpr, COLUMN_MODE: tl.constexpr, ONE_TAP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of the unfolded matrix, untransposed and transposed. ONE_TAP: it has one pixel of each patch."""
    across = tl.cdiv(total_c, WIDTH)
    tile_r, tile_c = tl.program_id(0) // across, tl.program_id(0) % across
    cols = tile_c * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    if ONE_TAP:
        tap = tile_c * WIDTH // channels
        channel = cols - tap * channels
        taps = tl.full((WIDTH,), 0, tl.int32) + tap
    else:
        taps = cols // channels
        channel = cols % channels
    taps_h, taps_w = taps // kernel_w * dilation_h, taps % kernel_w * dilation_w
    rows, in_rows = quads(tile_r, total_r, HEIGHT, False)
    x, sizes, steps = (), (height, width, channels, out_h, out_w), (stride_h, stride_w, pad_h, pad_w)
    for i in tl.static_range(4):
        x += (_load_patches(x_ptr, rows[i], in_rows[i], taps_h, taps_w, channel, in_cols, sizes, steps),)
    row_out = row_codes, row_scale, row_stride_r, row_stride_c, row_inverse
    column_out = column_codes, column_scale, column_stride_r, column_stride_c, column_inverse
    emit_both(
        x, 1.0, None, row_out, column_out, (total_r, total_c), (rows, cols, in_rows, in_cols, tile_r, tile_c),
        ROW_MODE, POWER_OF_TWO, COLUMN_MODE, POWER_OF_TWO,
    )  # fmt: skip


@Kernel
@triton.jit
def _fold_kernel(
    patches_ptr, x_ptr, pixels, height, width, channels, out_h, out_w,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum over all patches that contain a tile of pixels, tap by tap."""
    rows = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols, in_rows = cols < channels, rows < pixels
    image, pixel = rows // (height * width), rows % (height * width)
    h, w = pixel // width + pad_h, pixel % width + pad_w
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for tap in tl.static_range(KERNEL_H * KERNEL_W):
        from_h, from_w = h - tap // KERNEL_W * dilation_h, w - tap % KERNEL_W * dilation_w
        patch_h, patch_w = from_h // stride_h, from_w // stride_w
        mask = in_rows & (from_h >= 0) & (from_h % stride_h == 0) & (patch_h < out_h)
        mask &= (from_w >= 0) & (from_w % stride_w == 0) & (patch_w < out_w)
        patch = (image.to(tl.int64) * out_h + patch_h) * out_w + patch_w
        patch_ptrs = patches_ptr + (patch * (KERNEL_H * KERNEL_W) + tap)[:, None] * channels + cols[None, :]
        total += tl.load(patch_ptrs, mask=mask[:, None] & in_cols[None, :], other=0.0).to(tl.float32)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * channels + cols[None, :]
    tl.store(x_ptrs, to_dtype(total, x_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])
