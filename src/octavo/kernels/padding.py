"""Where the groups of tokens lie once padded, for GEMMs that sum over them."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 128
"""Tokens of which a padded group has a multiple, and at the least: as many as a step of a GEMM's sum reads."""


def padded_length(tokens: int, experts: int) -> int:
    """Return the tokens that groups have room for when padded, however they are divided among the experts."""
    return (tokens + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT + ALIGNMENT * experts


def padded_ends(ends: Tensor) -> Tensor:
    """Return where groups that end at `ends`, int32 (E,), end once padded."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return ((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).clamp(min=ALIGNMENT).cumsum(0, dtype=torch.int32)
