"""Quantise with a stored scale: the contract of delayed, just-in-time and static scaling.

A model keeps two FP32 values per matrix that recurs in every step:

    [scale, amax]    scale of the codes, 0 if not known yet; largest magnitude since the scale was set

`quantize_with_scale` reads the scale and raises the amax, in persistent memory. `octavo.nn.scaling_state` updates the
scale from the amax once per optimizer step. The scale is selected on the device, without a synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Quantized


class ScaleRef(NamedTuple):
    """Location of the scale of one matrix of a layer, and options for its use."""

    scale_and_amax: Tensor
    """FP32 (n, 2), contiguous: [scale, amax] per matrix of a layer."""
    row: int
    """Row of this matrix."""
    just_in_time: bool = False
    """Scale by the current amax if the stored scale would saturate."""
    update_amax: bool = True
    """Raise the stored amax to that of the matrix."""


def quantize_with_scale(
    sources: Sequence[Tensor], scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise X (R, C), the concatenation of `sources` along columns, with a stored scale.

    The scale is computed from the current amax, as in `quantize_pair`, if the stored one is 0 (not known yet), or if
    `just_in_time` and amax(X) > scale * largest value of the format. Otherwise larger values saturate. NaN and
    infinities become NaN, and are excluded from every amax.

    Args:
        sources: matrices (R, C_i), FP32, BF16 or FP16, on the device of the scale.
        rows: target for X, or None. One scale per tensor, rounded to nearest.
        columns: target for X^T, or None. Same format and scaling as `rows`, since the scale is shared.

    Returns:
        X, codes (R, C), and X^T, codes (C, R), both contiguous, with a copy (1, 1) of the scale used.

    Raises:
        ConfigError: sources that are not matrices with equal row counts, different targets, or a scale on another
            device.
    """
    _check(sources, scale_ref, rows, columns)
    codes, codes_t, scale = _quantize(sources, scale_ref, rows, columns)
    return (
        None if rows is None or codes is None else Quantized(codes, scale, rows.tile),
        None if columns is None or codes_t is None else Quantized(codes_t, scale, columns.tile),
    )


def _check(sources: Sequence[Tensor], scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None) -> None:
    if any(source.dim() != 2 or source.shape[0] != sources[0].shape[0] for source in sources):
        shapes = [tuple(source.shape) for source in sources]
        raise ConfigError(f"quantize_with_scale takes matrices with equal row counts, got shapes {shapes}.")
    targets = {target for target in (rows, columns) if target is not None}
    if len(targets) != 1 or any((t.granularity, t.rounding) != ("tensor", "nearest") for t in targets):
        raise ConfigError(
            "quantize_with_scale takes targets with one scale per tensor, rounded to nearest, alike for both results, "
            f"got '{rows or ''}' and '{columns or ''}'."
        )
    if scale_ref.scale_and_amax.device != sources[0].device:
        raise ConfigError(
            f"a tensor on {sources[0].device} has its scale on {scale_ref.scale_and_amax.device}. Layers that keep "
            "scales must be on one device: move the model as a whole."
        )


def _with_one_scale(rows: Quantized | None, columns: Quantized | None) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return both codes and the shared scale once: operators must not return the same tensor twice."""
    quantized = rows or columns
    assert quantized is not None
    return rows and rows.codes, columns and columns.codes, quantized.scale


def _fake(
    sources: Sequence[Tensor], _scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    total_r, total_c, device = sources[0].shape[0], sum(source.shape[1] for source in sources), sources[0].device
    return _with_one_scale(
        rows and empty(rows, total_r, total_c, device), columns and empty(columns, total_c, total_r, device)
    )


# The amax is mutated, but not declared so in the schema: a compiler would otherwise functionalise all scales of a
# model in its graphs. Undeclared mutations need the original memory, hence no CUDA graphs, whose inputs are copies.
@operation(
    name="quantize_with_scale",
    fake=_fake,
    results=lambda _sources, _scale_ref, rows, columns: (rows is not None, columns is not None, True),
    tags=[torch.Tag.cudagraph_unsafe],
)
def _quantize(
    sources: Sequence[Tensor], scale_ref: ScaleRef, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    stored, row, just_in_time, update_amax = scale_ref
    # `data`: no autograd version bump, as a layer may run twice before backward.
    arguments = sources, stored.data[row], rows, columns, just_in_time, update_amax
    x = next((source for source in sources if source.numel()), sources[0])
    return _with_one_scale(*run_kernel("quantize_with_scale.quantize_with_scale", x, arguments, "quantize_with_scale"))
