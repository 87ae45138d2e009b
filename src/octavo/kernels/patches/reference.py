"""Reference of patches: one slice of the padded images per kernel tap."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.patches.window import Window
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair
from octavo.numerics import Quantized


def unfold(x: Tensor, window: Window) -> Tensor:
    """Return the patches (M, kh kw C) of x (B, H, W, C)."""
    padding = window.padding
    padded = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    patches = torch.stack([padded[index] for index in _taps(padded.shape, window)], dim=3)
    return patches.flatten(3).flatten(0, 2)


def quantize_patches(
    x: Tensor, window: Window, rows: QuantSpec | None, columns: QuantSpec | None, scale: Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.patches.quantize_patches`. `scale` is not read: it follows from the patches."""
    return quantize_pair([unfold(x, window)], rows, columns)


def fold(patches: Tensor, window: Window, size: tuple[int, int, int, int]) -> Tensor:
    """Return images (B, H, W, C), each pixel the sum over the patches (M, kh kw C) that contain it, in tap order."""
    (batch, height, width, channels), padding = size, window.padding
    shape = (batch, height + 2 * padding[0], width + 2 * padding[1], channels)
    padded = patches.new_zeros(shape, dtype=torch.float32)
    for tap, index in enumerate(_taps(padded.shape, window)):
        view = padded[index]
        view += patches[:, tap * channels : (tap + 1) * channels].reshape(view.shape)
    inner = padded[:, padding[0] : padding[0] + height, padding[1] : padding[1] + width]
    return inner.to(patches.dtype).contiguous()


def _taps(shape: torch.Size, window: Window) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the index into padded images (B, H, W, C) per kernel tap."""
    kernel, stride, _, dilation = window
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            down = _tap(i, shape[1], kernel[0], stride[0], dilation[0])
            yield slice(None), down, _tap(j, shape[2], kernel[1], stride[1], dilation[1])


def _tap(i: int, size: int, kernel: int, stride: int, dilation: int) -> slice:
    last = size - dilation * (kernel - 1)  # end of the range of patch starts
    return slice(i * dilation, max(i * dilation + last, i * dilation), stride)
