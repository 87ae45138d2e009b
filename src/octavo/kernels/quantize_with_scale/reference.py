"""Reference `quantize_with_scale`: compute the amax, select the scale, quantise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import PER_TENSOR, Quantized, scale_from_amax, tile_amax
from octavo.numerics.quantize import to_codes


def quantize_with_scale(
    sources: Sequence[Tensor],
    scale_and_amax: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    just_in_time: bool,
    update_amax: bool,
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.quantize_with_scale.quantize_with_scale`. scale_and_amax: (2,)."""
    target = rows or columns
    assert target is not None
    x = torch.cat(list(sources), dim=1).float()
    amax = tile_amax(x, PER_TENSOR)
    scale, inverse = _select_scale(scale_and_amax[0], amax, target, just_in_time)
    if update_amax:
        scale_and_amax[1].copy_(torch.maximum(scale_and_amax[1], amax.view(())))
    codes = to_codes(x * inverse, target.fmt)
    return (
        None if rows is None else Quantized(codes, scale, rows.tile),
        None if columns is None else Quantized(codes.t().contiguous(), scale, columns.tile),
    )


def _select_scale(stored: Tensor, amax: Tensor, target: QuantSpec, just_in_time: bool) -> tuple[Tensor, Tensor]:
    """Return (scale, inverse), (1, 1) each: the stored scale if usable, else that of the current amax."""
    current, current_inverse = scale_from_amax(amax, target.fmt, target.scaling)
    is_usable = stored > 0
    if just_in_time:
        is_usable = is_usable & (amax <= stored * target.fmt.max)
    stored_inverse = (1 / stored.double()).float()  # rounded once from FP64, as in `scale_from_amax`
    return torch.where(is_usable, stored, current), torch.where(is_usable, stored_inverse, current_inverse)
