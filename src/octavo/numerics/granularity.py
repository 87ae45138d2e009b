"""Granularity: which elements of a matrix share a scale. A granularity is a tile, and the matrix is covered by tiles.

| name      | tile (rows x columns) | scales of an (R, C) matrix    |
|-----------|-----------------------|-------------------------------|
| `tensor`  | all x all             | (1, 1)                        |
| `row`     | 1 x all               | (R, 1)                        |
| `column`  | all x 1               | (1, C)                        |
| `1x128`   | 1 x 128               | (R, ceil(C / 128))            |
| `128x128` | 128 x 128             | (ceil(R / 128), ceil(C / 128)) |
| `1x32`    | 1 x 32                | (R, ceil(C / 32))             |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Granularity:
    """A tile of `rows` x `cols` elements that share a scale; `None` is the whole extent."""

    rows: int | None
    cols: int | None

    @property
    def name(self) -> str:
        """The name read by `granularity_named`."""
        return _NAMED.get(self) or f"{self.rows or 'all'}x{self.cols or 'all'}"

    @property
    def transposed(self) -> Granularity:
        """The granularity of the transposed matrix."""
        return Granularity(self.cols, self.rows)

    def tile(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the tile's size in a (rows, cols) matrix."""
        return self.rows or max(rows, 1), self.cols or max(cols, 1)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the scales of a (rows, cols) matrix. A ragged last tile has a scale too."""
        tile_rows, tile_cols = self.tile(rows, cols)
        # Not -(-rows // tile): torch.compile cannot split loops by that if sizes are dynamic.
        tiled_rows = 1 if self.rows is None else (rows + tile_rows - 1) // tile_rows
        tiled_cols = 1 if self.cols is None else (cols + tile_cols - 1) // tile_cols
        return tiled_rows, tiled_cols

    def tiles(self, x: Tensor) -> Tensor:
        """View an (R, C) matrix as (R', tile rows, C', tile cols), with ragged edges zero-padded."""
        rows, cols = x.shape
        tile_rows, tile_cols = self.tile(rows, cols)
        tiled_rows, tiled_cols = self.scale_shape(rows, cols)
        missing_rows, missing_cols = tiled_rows * tile_rows - rows, tiled_cols * tile_cols - cols
        if missing_rows or missing_cols:
            x = F.pad(x, (0, missing_cols, 0, missing_rows))
        return x.reshape(tiled_rows, tile_rows, tiled_cols, tile_cols)

    def untile(self, tiles: Tensor, rows: int, cols: int) -> Tensor:
        """Undo `tiles`: return the (rows, cols) matrix without its padding."""
        return tiles.flatten(2).flatten(0, 1)[:rows, :cols]

    def expand(self, scale: Tensor, rows: int, cols: int) -> Tensor:
        """Return the (rows, cols) matrix of the scale of each element."""
        tile_rows, tile_cols = self.tile(rows, cols)
        spread = scale[:, None, :, None].expand(-1, tile_rows, -1, tile_cols)
        return self.untile(spread, rows, cols)


PER_TENSOR = Granularity(None, None)
PER_ROW = Granularity(1, None)
PER_COLUMN = Granularity(None, 1)
TILE_1x128 = Granularity(1, 128)
BLOCK_128x128 = Granularity(128, 128)
GROUP_1x32 = Granularity(1, 32)

_NAMED = {PER_TENSOR: "tensor", PER_ROW: "row", PER_COLUMN: "column"}
_WHOLE = {name: granularity for granularity, name in _NAMED.items()}
_COMMON = _WHOLE | {
    name: Granularity(*map(int, name.split("x"))) for name in ("1x128", "128x1", "128x128", "1x32", "32x1")
}
"""Granularities by name, without parsing it."""
NAMES = ("tensor", "row", "column", "1x128", "128x128", "1x32")


def granularity_named(name: str) -> Granularity:
    """Return the granularity of a name such as `row`, `1x128` or `128x1`.

    Raises:
        ConfigError: the name is not a granularity.
    """
    if name in _COMMON:
        return _COMMON[name]
    if size := re.fullmatch(r"([1-9]\d*|all)x([1-9]\d*|all)", name):
        return Granularity(*(None if extent == "all" else int(extent) for extent in size.groups()))
    raise ConfigError(
        f"unknown granularity '{name}'.{did_you_mean(name, NAMES)} "
        f"Granularities: {', '.join(NAMES)}, or any ROWSxCOLUMNS."
    )


def tile_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest finite magnitude of each tile, FP32, in the shape of the scales.

    NaN and infinities are ignored: their codes do not depend on the scale, so they must not decide that of others.

    Args:
        x: (R, C), any floating-point dtype.
    """
    magnitude = x.float().abs()
    magnitude = torch.where(magnitude < torch.inf, magnitude, 0.0)
    if x.numel() == 0:
        return magnitude.new_zeros(granularity.scale_shape(*x.shape))
    return granularity.tiles(magnitude).amax(dim=(1, 3))
