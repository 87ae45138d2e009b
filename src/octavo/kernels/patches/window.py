"""The sliding window of a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]
"""(height, width)."""


class Window(NamedTuple):
    """Sliding window of a convolution: PyTorch's arguments, one pair each."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def is_pixel(self) -> bool:
        """Whether every pixel is a patch (1x1, stride 1), so that the convolution is a linear layer."""
        return self == Window((1, 1), dilation=self.dilation)

    @property
    def taps(self) -> int:
        """Pixels per patch."""
        return self.kernel[0] * self.kernel[1]

    def output(self, height: int, width: int) -> Pair:
        """Return the output size for an image size; 0 if the kernel does not fit."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        high, wide = ((size + 2 * pad - dil * (k - 1) - 1) // step + 1 for size, k, step, pad, dil in sizes)
        return max(high, 0), max(wide, 0)

    @property
    def flat(self) -> list[int]:
        """All integers as a flat list, for operators."""
        return [*self.kernel, *self.stride, *self.padding, *self.dilation]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Window:
        """Undo `flat`."""
        kh, kw, sh, sw, ph, pw, dh, dw = numbers
        return cls((kh, kw), (sh, sw), (ph, pw), (dh, dw))
