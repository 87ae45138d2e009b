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
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError

BLOCKS = (4, 16, 64, 256, 1024)
"""Sizes of H."""


def block_for(cols: int, largest: int) -> int:
    """Return the size of H for rows of `cols` values: the largest of `BLOCKS` that divides them, at most `largest`.

    1, no rotation, if 4 does not divide `cols`, or `largest` is 0.
    """
    return max((block for block in BLOCKS if block <= largest and cols % block == 0), default=1)


def rotate(x: Tensor, block: int) -> Tensor:
    """Return X R in FP32, (R, C). Applied twice it returns X, up to rounding.

    One stage per factor of four, innermost first; a stage replaces each group of four values by half their sum, summed
    in pairs, less the value. Every addition is rounded to FP32, so that any implementation with these additions gives
    the same bits.

    Args:
        x: (R, C), FP32, BF16 or FP16.
        block: size of H, one of `BLOCKS`, which divides C; or 1, which returns x in FP32.

    Raises:
        ConfigError: `block` is no such size, or does not divide C.
    """
    rows, cols = x.shape
    if block != 1 and (block not in BLOCKS or cols % block):
        raise ConfigError(f"a rotation by blocks of {block} does not fit rows of {cols}. Blocks: {BLOCKS}.")
    y, stride = x.float(), 1
    while stride < block:
        pairs = y.reshape(rows, cols // (4 * stride), 2, 2, stride)
        y = pairs.sum(dim=3, keepdim=True).sum(dim=2, keepdim=True) * 0.5 - pairs
        stride *= 4
    return y.reshape(rows, cols)


def hadamard(block: int) -> Tensor:
    """Return H, float64 (block, block), from its definition."""
    four = torch.full((4, 4), 0.5, dtype=torch.float64) - torch.eye(4, dtype=torch.float64)
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < block:
        h = torch.kron(four, h)
    return h
