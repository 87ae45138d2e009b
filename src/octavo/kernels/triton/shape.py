"""What a program of a kernel works on: chosen for an H200, by trying."""

from __future__ import annotations

from typing import Any, NamedTuple


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up; Triton's own takes the host ten times as long."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


class Shape(NamedTuple):
    """The tile of a program, its warps, how many tiles it takes, one under the other, and how many it loads ahead."""

    height: int
    width: int
    warps: int
    steps: int = 1
    stages: int = 1
    registers: int | None = None
    """The most that a thread may use, where fewer programs at a time cost more than some spilling."""

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return how many programs cover a matrix, (across, down)."""
        return cdiv(cols, self.width), cdiv(rows, self.height * self.steps)

    def meta(self) -> dict[str, Any]:
        """Return the tile and the warps as a kernel takes them.

        Multiplications and additions are not contracted into one rounding: what two kernels, or a kernel and its twin,
        compute by the same formula is equal to the bit.
        """
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"HEIGHT": self.height, "WIDTH": self.width, "num_warps": self.warps, "enable_fp_fusion": False, **limit}

    def strip(self, rows: int, cols: int) -> dict[str, Any]:
        """Return what a kernel takes that walks down `steps` tiles; `EVEN`: they cover a matrix without a rest."""
        even = cols % self.width == 0 and rows % (self.height * self.steps) == 0
        return {**self.meta(), "STEPS": self.steps, "STAGES": self.stages, "EVEN": even}


class Rows(NamedTuple):
    """Programs that hold whole rows: at least so many elements, and of these a thread so many."""

    elements: int
    a_thread: int

    def tile(self, cols: int) -> tuple[int, int]:
        """Return how many rows a program holds at once, and their padded length."""
        size = max(next_power_of_2(cols), 128)
        return max(self.elements // size, 1), size

    def meta(self, rows: int, cols: int) -> dict[str, Any]:
        """Return what a kernel takes; `EVEN`: its programs cover a matrix without a rest."""
        height, size = self.tile(cols)
        warps = min(max(height * size // (32 * self.a_thread), 1), 16)
        return {"ROWS": height, "SIZE": size, "EVEN": cols == size and rows % height == 0, "num_warps": warps}


def row_warps(size: int) -> int:
    """Return the warps of a program that holds a row of `size` elements: one for each 1024."""
    return min(max(size // 1024, 1), 16)
