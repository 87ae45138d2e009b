"""Parts of an FP8 tensor, for FSDP2, DTensor and tensor parallelism. They are views, as for plain tensors.

PyTorch's operators give rows only, and those of a matrix with a single scale cannot be written. Columns have functions
of their own: they share the scales of their rows with other columns, and must be copied before they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.numerics import Quantized
from octavo.tensor.fp8_tensor import FP8Tensor, implements

aten = torch.ops.aten


def rows_of(matrix: Quantized, start: int, stop: int) -> Quantized:
    """Return rows start to stop of a matrix in FP8, a view.

    Raises:
        UnsupportedError: a cut would divide a tile of scales.
    """
    height, total = matrix.granularity.rows, matrix.codes.shape[0]
    codes = matrix.codes[start:stop]
    if height is None:
        return Quantized(codes, matrix.scale, matrix.granularity)
    if start % height or (stop % height and stop != total):
        raise UnsupportedError(
            f"rows {start} to {stop} of {total} cut tiles of {height} rows that share a scale: cut at multiples of "
            f"{height}, or quantise with one scale per row."
        )
    return Quantized(codes, matrix.scale[start // height : -(-stop // height)], matrix.granularity)


def columns_of(matrix: Quantized, start: int, stop: int) -> Quantized:
    """Return columns start to stop of a matrix in FP8, a view with the scales of the whole rows.

    Raises:
        UnsupportedError: a scale does not belong to whole rows.
    """
    if matrix.granularity.cols is not None:
        raise UnsupportedError(
            f"columns {start} to {stop} of a matrix with a scale per {matrix.granularity.name}: columns are cut where "
            "scales are of whole rows. Quantise with one scale per row."
        )
    return Quantized(matrix.codes[:, start:stop], matrix.scale, matrix.granularity)


@implements(aten.slice.Tensor)
def _slice(x: FP8Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> FP8Tensor:
    if dim != 0 or step != 1:
        raise UnsupportedError(f"a slice of dimension {dim} with step {step}: an FP8Tensor is cut along its rows.")
    first, last, _ = slice(start, end).indices(x.shape[0])
    part = FP8Tensor(*rows_of(x.quantized, first, max(first, last)), x.dtype, x.scaling)
    part.shares_scale = x.shares_scale or (x.granularity.rows is None and part.shape != x.shape)
    return part


@implements(aten.split.Tensor)
def _split(x: FP8Tensor, size: int, dim: int = 0) -> list[FP8Tensor]:
    return [_slice(x, dim, start, start + size) for start in range(0, max(x.shape[0], 1), max(size, 1))]


@implements(aten.new_zeros.default, aten.new_empty.default)
def _new(x: FP8Tensor, size: Sequence[int], device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Return zeros: a matrix of this kind, or for other numbers of dimensions, as of an empty shard, a plain tensor."""
    place, dtype = device or x.device, dtype or x.dtype
    if len(size) != 2:
        return torch.zeros(size, dtype=dtype, device=place)
    codes = torch.zeros(size, dtype=x.codes.dtype, device=place)
    scale = torch.ones(x.granularity.scale_shape(*size), dtype=torch.float32, device=place)
    return FP8Tensor(codes, scale, x.granularity, dtype, x.scaling)


@implements(aten.as_strided.default)
def _as_strided(x: FP8Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    if tuple(size) != tuple(x.shape) or tuple(stride) != tuple(x.stride()):
        raise UnsupportedError(
            f"an FP8Tensor of shape {tuple(x.shape)} cannot be seen as {tuple(size)} with strides {tuple(stride)}: its "
            "scales belong to its rows."
        )
    return x.detach()
