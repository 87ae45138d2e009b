"""Launch shapes of kernels, tuned by trial on an H200."""

from __future__ import annotations

from typing import Any, NamedTuple


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up; `triton.cdiv` takes ten times the host time."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


class Shape(NamedTuple):
    """Tile of a program, its warps, vertically adjacent tiles per program, and pipeline stages of their loads."""

    height: int
    width: int
    warps: int
    steps: int = 1
    stages: int = 1
    registers: int | None = None
    """Limit per thread, if lower occupancy costs more than some spilling."""

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the grid that covers a matrix, (across, down)."""
        return cdiv(cols, self.width), cdiv(rows, self.height * self.steps)

    def meta(self) -> dict[str, Any]:
        """Return the meta-parameters for tile and warps.

        FMA contraction is off: kernels and references that compute the same formula agree bit for bit.
        """
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"HEIGHT": self.height, "WIDTH": self.width, "num_warps": self.warps, "enable_fp_fusion": False, **limit}

    def strip(self, rows: int, cols: int) -> dict[str, Any]:
        """Return the meta-parameters of a kernel that loops over `steps` tiles; `EVEN`: no tile is partial."""
        even = cols % self.width == 0 and rows % (self.height * self.steps) == 0
        return {**self.meta(), "STEPS": self.steps, "STAGES": self.stages, "EVEN": even}


class Rows(NamedTuple):
    """Programs that hold whole rows: least elements per program, and elements per thread."""

    elements: int
    per_thread: int

    def tile(self, cols: int) -> tuple[int, int]:
        """Return the rows that a program holds at once, and their padded length."""
        size = max(next_power_of_2(cols), 128)
        return max(self.elements // size, 1), size

    def meta(self, rows: int, cols: int) -> dict[str, Any]:
        """Return the meta-parameters; `EVEN`: no tile is partial."""
        height, size = self.tile(cols)
        warps = min(max(height * size // (32 * self.per_thread), 1), 16)
        return {"ROWS": height, "SIZE": size, "EVEN": cols == size and rows % height == 0, "num_warps": warps}


def row_warps(size: int, is_rotated: bool = False) -> int:
    """Return the warps of a program that holds a row of `size` elements: one per 1024, 1 to 16.

    One per 2048 of a rotated row of up to 8192: a warp has the same overhead for twice as many elements.
    """
    return min(max(size // (2048 if is_rotated and size <= 8192 else 1024), 1), 16)
