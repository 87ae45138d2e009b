"""The three GEMMs of a linear layer by a recipe, in float64, sharing no code with Octavo: NumPy and ml_dtypes."""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo.recipes import Operand, Recipe

TWIN = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FOUR = np.full((4, 4), 0.5) - np.eye(4)


def rotate(x: np.ndarray, largest: int) -> np.ndarray:
    """Multiply blocks of columns by a regular Hadamard matrix: the largest power of four that divides them."""
    h = np.ones((1, 1))
    while 4 * len(h) <= largest and x.shape[1] % (4 * len(h)) == 0:
        h = np.kron(FOUR, h)
    return (x.reshape(len(x), -1, len(h)) @ h).reshape(x.shape)


def quantise(x: np.ndarray, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes' values and each element's scale, both (R, C) in float64."""
    largest = 127.0 if operand.format == "int8" else float(ml_dtypes.finfo(TWIN[operand.format]).max)
    x = rotate(x.astype(np.float64), operand.rotation).astype(np.float32)
    whole = {"tensor": x.shape, "row": (1, x.shape[1])}
    height, width = whole.get(operand.granularity) or map(int, operand.granularity.split("x"))
    codes, scales = np.empty(x.shape), np.empty(x.shape)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            tile = np.s_[top : top + height, left : left + width]
            ratio = float(np.abs(x[tile]).max()) / largest
            if operand.scaling == "power_of_two":
                mantissa, exponent = np.frexp(ratio)
                scale = inverse = np.ldexp(1.0, exponent - (mantissa == 0.5))
                inverse = 1 / scale
            else:
                scale, inverse = float(np.float32(ratio)), float(np.float32(1 / ratio))
            scaled = (x[tile] * np.float32(inverse)).clip(-largest, largest)
            rounded = np.rint(scaled) if operand.format == "int8" else scaled.astype(TWIN[operand.format])
            codes[tile], scales[tile] = rounded.astype(np.float64), scale
    return codes, scales


def product(a: np.ndarray, b: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a . b^T and |a| . |b|^T."""
    return torch.from_numpy(a @ b.T), torch.from_numpy(np.abs(a) @ np.abs(b).T)


def three_gemms(
    x_MK: torch.Tensor, w_NK: torch.Tensor, dy_MN: torch.Tensor, recipe: Recipe
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return (result, sum of magnitudes) of y, dx and dw: quantised as the recipe says, multiplied in float64."""
    x, w, dy = (t.detach().float().numpy() for t in (x_MK, w_NK, dy_MN))
    x8, sx = quantise(x, recipe.fprop.input)
    w8, sw = quantise(w, recipe.fprop.weight)
    y = product(x8 * sx, w8 * sw) if recipe.fprop.is_fp8 else product(x.astype(float), w.astype(float))

    if not recipe.dgrad.is_fp8:
        dx = product(dy.astype(float), w.T.astype(float))
    elif recipe.dgrad.weight.is_folded:
        w8, sw = quantise(w, replace(recipe.dgrad.weight, granularity="row"))
        g8, sg = quantise(dy * sw[:, 0].astype(np.float32), recipe.dgrad.grad_output)
        dx = product(g8 * sg, w8.T)
    else:
        g8, sg = quantise(dy, recipe.dgrad.grad_output)
        wt8, swt = quantise(w.T, recipe.dgrad.weight)
        dx = product(g8 * sg, wt8 * swt)

    if not recipe.wgrad.is_fp8:
        dw = product(dy.T.astype(float), x.T.astype(float))
    elif recipe.wgrad.input.is_folded:
        x8, sx = quantise(x, replace(recipe.wgrad.input, granularity="row"))
        h8, sh = quantise((dy * sx[:, :1].astype(np.float32)).T, recipe.wgrad.grad_output)
        dw = product(h8 * sh, x8.T)
    else:
        h8, sh = quantise(dy.T, recipe.wgrad.grad_output)
        xt8, sxt = quantise(x.T, recipe.wgrad.input)
        dw = product(h8 * sh, xt8 * sxt)
    return y, dx, dw


@pytest.fixture
def oracle() -> Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
    return three_gemms


class MLP(nn.Module):
    """Computed as one function where nobody looks in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def make_mlp() -> Callable[[], nn.Module]:
    """Make an MLP with gate, 32 to 64 features."""
    return MLP


@pytest.fixture
def recompiles() -> Callable[..., bool]:
    """Return what tells whether compiled code would be traced again for these arguments: a guard of it fails.

    So many changes are tried on code that is compiled once.
    """

    def would(run: Callable[..., object], *arguments: object) -> bool:
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                run(*arguments)
            except RuntimeError as error:
                if "recompile" not in str(error):
                    raise
                return True
        return False

    return would
