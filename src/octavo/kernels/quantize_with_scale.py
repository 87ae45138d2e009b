"""Quantise a matrix with a scale that was known before it: the contract behind delayed, just-in-time and static scales.

A model keeps two FP32 values for a matrix that it sees in every step:

    [scale, amax]    what the codes are made with, 0 while it is not known; the largest magnitude seen since it was set

`quantize_with_scale` reads the scale and raises the amax, in memory that outlives the call. `octavo.nn.scaling_state`
makes the one out of the other once an optimizer step. Which scale is used is decided on the device: nothing waits for
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.dispatch import run_twin
from octavo.kernels.operator import call, define_packed
from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.numerics import Quantized


class ScaleRef(NamedTuple):
    """Location of the scale of one matrix of a layer, and how to use it."""

    scale_and_amax: Tensor
    """FP32 (n, 2), contiguous: [scale, amax] of each matrix of a layer."""
    row: int
    """Row of this matrix."""
    just_in_time: bool = False
    """A matrix that its scale would saturate is scaled by its own maximum."""
    update_amax: bool = True
    """Raise the amax to that of the matrix."""


def quantize_with_scale(
    sources: Sequence[Tensor], scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise the matrix X (R, C) that lies in `sources` side by side, with a stored scale.

    Its own maximum makes the scale, as in `quantize_pair`, where the stored one is 0 (not known yet), or where it
    is `just_in_time` and amax(X) > scale * largest value of the format. Otherwise what is larger saturates. NaN
    and infinities become NaN, and do not count for any maximum.

    Args:
        sources: matrices (R, C_i), FP32, BF16 or FP16, on the device of the scale.
        rows: what to make of X, or None. One scale per tensor, rounded to nearest.
        columns: what to make of X^T, or None. Of the same format and scaling, for it has the same scale.

    Returns:
        X as it lies, codes (R, C), and X^T, codes (C, R), both contiguous, with the scale that was used, (1, 1), in
        memory of its own.

    Raises:
        ConfigError: the sources are no matrices of as many rows, the targets differ, or the scale is on another device.
    """
    _check(sources, scale_ref, rows, columns)
    arguments = list(sources), scale_ref, rows, columns
    made = rows is not None, columns is not None, True
    codes, codes_t, scale = call("quantize_with_scale", _quantize, arguments, made)
    return (
        None if rows is None else Quantized(codes, scale, rows.tile),
        None if columns is None else Quantized(codes_t, scale, columns.tile),
    )


def _check(sources: Sequence[Tensor], scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None) -> None:
    if any(source.dim() != 2 or source.shape[0] != sources[0].shape[0] for source in sources):
        shapes = [tuple(source.shape) for source in sources]
        raise ConfigError(f"quantize_with_scale takes matrices of as many rows, got shapes {shapes}.")
    asked = {target for target in (rows, columns) if target is not None}
    if len(asked) != 1 or any((t.granularity, t.rounding) != ("tensor", "nearest") for t in asked):
        raise ConfigError(
            "quantize_with_scale makes codes with one scale per tensor, rounded to nearest, alike for both results, "
            f"got '{rows or ''}' and '{columns or ''}'."
        )
    if scale_ref.scale_and_amax.device != sources[0].device:
        raise ConfigError(
            f"a tensor on {sources[0].device} has its scale on {scale_ref.scale_and_amax.device}. Layers that keep "
            "scales lie on one device: move the model as a whole."
        )


def _quantize(
    sources: list[Tensor], scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> list[Tensor | None]:
    stored, row, just_in_time, update_amax = scale_ref
    # Without a version that autograd would count: a layer that runs twice before backward is no mistake.
    arguments = sources, stored.data[row], rows, columns, just_in_time, update_amax
    x = next((source for source in sources if source.numel()), sources[0])
    return _with_one_scale(*run_twin("quantize_with_scale.quantize_with_scale", x, arguments, "quantize_with_scale"))


def _with_one_scale(rows: Quantized | None, columns: Quantized | None) -> list[Tensor | None]:
    """Return the codes of both, and the scale that they share: results of an operator must not be the same tensor."""
    made = rows or columns
    assert made is not None
    return [rows and rows.codes, columns and columns.codes, made.scale]


def _shape(
    sources: list[Tensor], _scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> list[Tensor | None]:
    total_r, total_c, device = sources[0].shape[0], sum(source.shape[1] for source in sources), sources[0].device
    return _with_one_scale(
        rows and empty(rows, total_r, total_c, device), columns and empty(columns, total_c, total_r, device)
    )


# It writes an amax that its signature is silent about. Said there, a compiler would carry all scales of a model through
# its graphs as values that change. Unsaid, it must not copy what it gives: hence outside of the graphs it captures,
# whose inputs are copies.
define_packed("quantize_with_scale", _quantize, _shape, torch.Tag.cudagraph_unsafe)
