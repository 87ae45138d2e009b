"""Quantise a matrix with a scale that was known before it: the contract behind delayed, just-in-time and static scales.

A *cell* is two FP32 values that a model keeps for a matrix it sees in every step:

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
from octavo.kernels.dispatch import launches_on, uses_triton
from octavo.kernels.operator import define, is_direct
from octavo.kernels.quant_spec import QuantSpec, empty, parse_spec
from octavo.kernels.reference import quantize_with_scale as reference
from octavo.numerics import Quantized


class ScaleRef(NamedTuple):
    """Where one matrix of a layer has its scale, and how to use it."""

    memory: Tensor
    """FP32 (n, 2), contiguous: the cells of a layer, each [scale, amax]."""
    row: int
    """Which of them."""
    at_once: bool = False
    """Just in time: a matrix that its scale would saturate is scaled by its own maximum."""
    observe: bool = True
    """Whether to raise the amax of the cell."""


def quantize_with_scale(
    sources: Sequence[Tensor], cell: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise the matrix X (R, C) that lies in `sources` side by side, with the scale of a cell.

    Its own maximum makes the scale, as in `quantize_pair`, where that of the cell is 0 (not known yet), or where the
    cell is `at_once` and amax(X) > scale * largest value of the format. Otherwise what is larger saturates. NaN and
    infinities become NaN, and do not count for any maximum.

    Args:
        sources: matrices (R, C_i), FP32, BF16 or FP16, on the device of the cell.
        rows: what to make of X, or None. One scale a tensor, rounded to nearest.
        columns: what to make of X^T, or None. Of the same format and scaling, for it has the same scale.

    Returns:
        X as it lies, codes (R, C), and X^T, codes (C, R), both contiguous, with the scale that was used, (1, 1), in
        memory of its own.

    Raises:
        ConfigError: the sources are no matrices of as many rows, the targets differ, or the cell is on another device.
    """
    _check(sources, cell, rows, columns)
    memory, row, at_once, observe = cell
    run = _quantize_at if is_direct(sources[0]) else torch.ops.octavo.quantize_with_scale
    codes, codes_t, scale = run(list(sources), memory, row, str(rows or ""), str(columns or ""), at_once, observe)
    return (
        None if rows is None else Quantized(codes, scale, rows.tile),
        None if columns is None else Quantized(codes_t, scale, columns.tile),
    )


def _check(sources: Sequence[Tensor], cell: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None) -> None:
    if any(source.dim() != 2 or source.shape[0] != sources[0].shape[0] for source in sources):
        shapes = [tuple(source.shape) for source in sources]
        raise ConfigError(f"quantize_with_scale takes matrices of as many rows, got shapes {shapes}.")
    asked = {target for target in (rows, columns) if target is not None}
    if len(asked) != 1 or any((t.granularity, t.rounding) != ("tensor", "nearest") for t in asked):
        raise ConfigError(
            f"quantize_with_scale makes codes with one scale a tensor, rounded to nearest, alike for both results, got "
            f"'{rows or ''}' and '{columns or ''}'."
        )
    if cell.memory.device != sources[0].device:
        raise ConfigError(
            f"a tensor on {sources[0].device} has its scale on {cell.memory.device}. Layers that keep scales lie on "
            "one device: move the model as a whole."
        )


def _quantize_at(
    sources: list[Tensor], cells: Tensor, row: int, rows: str, columns: str, at_once: bool, observe: bool
) -> tuple[Tensor, Tensor, Tensor]:
    targets = parse_spec(rows), parse_spec(columns)
    # Without a version that autograd would count: a layer that runs twice before backward is no mistake.
    cell = cells.data[row]
    is_empty = 0 in (sources[0].shape[0], sum(source.shape[1] for source in sources))
    if not is_empty and uses_triton(sources[0], "quantize_with_scale"):
        from octavo.kernels.triton.quantize_with_scale import quantize_with_scale as fast

        with launches_on(sources[0].device):
            made, made_t = fast(sources, cell, *targets, at_once, observe)
    else:
        made, made_t = reference.quantize_with_scale(sources, cell, *targets, at_once, observe)
    return _flat(made, made_t, sources[0])


def _flat(rows: Quantized | None, columns: Quantized | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = rows or columns
    assert made is not None
    nothing = like.new_empty(0), like.new_empty(0)
    return rows.codes if rows else nothing[0], columns.codes if columns else nothing[1], made.scale


def _quantize_at_shape(
    sources: list[Tensor], cells: Tensor, row: int, rows: str, columns: str, at_once: bool, observe: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total_r, total_c, device = sources[0].shape[0], sum(source.shape[1] for source in sources), sources[0].device
    made, made_t = parse_spec(rows), parse_spec(columns)
    return _flat(
        made and empty(made, total_r, total_c, device), made_t and empty(made_t, total_c, total_r, device), sources[0]
    )


# It writes an amax that its signature is silent about. Said there, a compiler would carry all cells of a model through
# its graphs as values that change. Unsaid, it must not copy what it gives: hence outside of the graphs it captures,
# whose inputs are copies.
define(
    "quantize_with_scale(Tensor[] sources, Tensor cells, int row, str rows, str columns, bool at_once, bool observe) "
    "-> (Tensor, Tensor, Tensor)",
    _quantize_at,
    _quantize_at_shape,
    torch.Tag.cudagraph_unsafe,
)
