"""The window of a convolution: how its kernel moves over an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]
"""Of height and width."""


class Window(NamedTuple):
    """How a convolution's kernel moves over an image: PyTorch's arguments, a pair each."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def is_pixel(self) -> bool:
        """Whether every pixel is a patch: the convolution is a linear layer."""
        return self == Window((1, 1), dilation=self.dilation)

    @property
    def taps(self) -> int:
        """Pixels of a patch."""
        return self.kernel[0] * self.kernel[1]

    def output(self, height: int, width: int) -> Pair:
        """Return the size of the result for an image of that size; 0 where the kernel does not fit."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        high, wide = ((size + 2 * pad - dil * (k - 1) - 1) // step + 1 for size, k, step, pad, dil in sizes)
        return max(high, 0), max(wide, 0)

    @property
    def flat(self) -> list[int]:
        """The numbers in order, as operators take them."""
        return [*self.kernel, *self.stride, *self.padding, *self.dilation]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Window:
        """Undo `flat`."""
        kh, kw, sh, sw, ph, pw, dh, dw = numbers
        return cls((kh, kw), (sh, sw), (ph, pw), (dh, dw))
