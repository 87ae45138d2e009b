"""Layout of padded token groups, for GEMMs that reduce over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 128
"""Granularity and minimum size of a padded group, in tokens: one K tile of a GEMM."""


def padded_length(tokens: int, experts: int) -> int:
    """Return the padded token capacity, sufficient for any distribution of tokens over experts."""
    return (tokens + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT + ALIGNMENT * experts


def padded_ends(ends: Tensor) -> Tensor:
    """Return the end offsets of the padded groups, int32 (E,), from those before padding, int32 (E,)."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return ((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).clamp(min=ALIGNMENT).cumsum(0, dtype=torch.int32)
