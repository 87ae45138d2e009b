"""Rotations of the summed axis, which spread a row's outliers over their neighbours before they are quantised.

    Y = X W^T = (X R) (W R)^T        R = diag(H, H, ...), H symmetric and orthogonal, so R R = 1

The rounding error of an integer format is absolute: a step of amax / 127 for a whole row. So its variance relative to
the row's is that of the row's crest factor amax / rms, squared. A rotation by H of size `block` makes every value a sum
of `block` others with weights of equal magnitude: close to a normal distribution, whose maximum over a row of thousands
is about four standard deviations, whatever the row was. The error of a floating-point format is relative, value by
value, and does not change.

H is a *regular* Hadamard matrix: the Kronecker power of J / 2 - I, 4x4 with rows of equal sum (ConvRot, arXiv
2512.03673, section 3). Unlike Sylvester's, none of its rows is constant, so that a mean of the row spreads as well.
Sizes are powers of four; there is no regular Hadamard matrix of 128.

Sylvester's matrices, for which inference engines have kernels, have every power of two. Wherever a rotation is one
integer, it is the size of H, negative for Sylvester's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError

BLOCKS = (4, 16, 64, 256, 1024)
"""Sizes of regular H."""
SYLVESTER = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of Sylvester's H."""
SMALLEST_ROTATION = 16
"""Smallest block whose rotation spreads outliers enough for INT8. Narrower layers compute fprop in FP8."""


def block_for(cols: int, largest: int) -> int:
    """Return the size of H for rows of `cols` values: the largest that divides them, at most `largest`.

    1, no rotation, if 4 does not divide `cols`, or `largest` is 0. Negative for Sylvester's H, as `largest`.
    """
    sizes, sign = (BLOCKS, 1) if largest >= 0 else (SYLVESTER, -1)
    fitting = [block for block in sizes if block <= abs(largest) and cols % block == 0]
    return sign * max(fitting) if fitting else 1


def largest_block(block: int) -> str:
    """Return of which sizes a block is the largest that fits: 128 values are rotated by blocks of 64."""
    return f"the largest power of {4 if block > 0 else 2}"


def is_rotatable(cols: int) -> bool:
    """Return whether a block of `SMALLEST_ROTATION` divides rows of `cols` values."""
    return cols % SMALLEST_ROTATION == 0


def rotate(x: Tensor, block: int) -> Tensor:
    """Return X R in FP32, (R, C). Applied twice it returns X, up to rounding.

    One stage per factor of four, innermost first; a stage replaces each group of four values by half their sum, summed
    in pairs, less the value. Every addition is rounded to FP32, so that any implementation with these additions gives
    the same bits.

    Args:
        x: (R, C), FP32, BF16 or FP16.
        block: size of H, one of `BLOCKS`, or of `SYLVESTER` as a negative number, which divides C; or 1, which returns
            x in FP32.

    Raises:
        ConfigError: `block` is no such size, or does not divide C.
    """
    rows, cols = x.shape
    if block != 1 and ((block not in BLOCKS and -block not in SYLVESTER) or cols % block):
        raise ConfigError(
            f"a rotation by blocks of {block} does not fit rows of {cols}. Blocks: {BLOCKS}; Sylvester's, as negative "
            f"numbers: {SYLVESTER}."
        )
    y, stride = x.float(), 1
    if block < 0:
        return _rotate_by_sylvester(y, -block)
    while stride < block:
        pairs = y.reshape(rows, cols // (4 * stride), 2, 2, stride)
        y = pairs.sum(dim=3, keepdim=True).sum(dim=2, keepdim=True) * 0.5 - pairs
        stride *= 4
    return y.reshape(rows, cols)


def _rotate_by_sylvester(y: Tensor, block: int) -> Tensor:
    """Return Y R in FP32: a stage of sums and differences per factor of two, and a halving after every second.

    An odd stage is the last one, and is multiplied by the FP32 value of sqrt(1/2): no addition follows that product,
    so no compiler can fuse the two.
    """
    rows, cols = y.shape
    for stage in range(block.bit_length() - 1):
        first, second = y.reshape(rows, cols >> (stage + 1), 2, 1 << stage).unbind(2)
        y = torch.stack((first + second, first - second), dim=2)
        if stage % 2:
            y = y * 0.5
    is_odd = (block.bit_length() - 1) % 2
    return (y * 0.5**0.5 if is_odd else y).reshape(rows, cols)


def hadamard(block: int) -> Tensor:
    """Return H, float64 (|block|, |block|), from its definition; Sylvester's for a negative size."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    factor = torch.full((4, 4), 0.5, dtype=torch.float64) - torch.eye(4, dtype=torch.float64) if block > 0 else two
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < abs(block):
        h = torch.kron(factor, h)
    return h if block > 0 else h * abs(block) ** -0.5
