"""Memory traffic of a recipe: passes of a layer over its matrices; bytes that a layer and a block save for backward.

Counted as `octavo.nn.functional` works, in bytes: inputs and gradients are BF16, weights FP32, codes one byte, scales
FP32. Reads are the fewest that the scales allow. The amax of a row, or of a tile of up to 128 x 128, is known to the
program that quantises it; that of columns or a whole matrix takes a prior read, unless the scale is known from earlier
steps. A norm or an activation that quantises its output saves the read of the input.

M: tokens, N: output features, K: input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from octavo.conversion import Policy
from octavo.lab.models.config import ModelConfig
from octavo.numerics import PER_ROW, Granularity
from octavo.recipes.spec import OPERANDS, Operand, Recipe

When = Literal["forward", "backward"]
HIGH_PRECISION = {"input": 2, "weight": 4, "grad_output": 2}
"""Bytes per element before quantisation, by matrix."""
BF16, CODE, SCALE = 2, 1, 4
"""Bytes per element."""
_SIDE = 128


class Shape(NamedTuple):
    """The sizes of a linear layer."""

    m: int
    n: int
    k: int

    def of(self, matrix: str) -> tuple[int, int]:
        """Return the shape of `input` (M, K), `weight` (N, K) or `grad_output` (M, N)."""
        return {"input": (self.m, self.k), "weight": (self.n, self.k), "grad_output": (self.m, self.n)}[matrix]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A pass over a matrix that makes operands."""

    matrix: str
    """`input`, `weight` or `grad_output`."""
    made: tuple[str, ...]
    """Operands, such as `fprop.input`."""
    how: Literal["quantise", "transpose", "cast"]
    when: When
    read: int
    """Bytes read."""
    written: tuple[int, ...]
    """Bytes written per operand in `made`, its scales included."""


def passes(recipe: Recipe, shape: Shape) -> list[Pass]:
    """Return all passes over matrices in one forward and one backward of a linear layer, for its GEMMs."""
    return [*_input_passes(recipe, shape), *_weight_passes(recipe, shape), *_gradient_passes(recipe, shape)]


def kept_bytes(recipe: Recipe, shape: Shape) -> int:
    """Return the bytes of its input that a layer saves for backward."""
    if not recipe.wgrad.is_fp8:
        return BF16 * shape.m * shape.k
    if recipe.reuses("wgrad.input") or recipe.second("input"):
        return quantised_bytes(recipe.folded_rows("input"), *shape.of("input"))
    return quantised_bytes(recipe.wgrad.input, shape.k, shape.m)


def kept_weight_bytes(recipe: Recipe, shape: Shape) -> int:
    """Return the bytes of weight codes that a layer saves for backward, besides the weight itself.

    They are the codes of fprop or the second set if dgrad reads them; otherwise backward reads the weight again.
    """
    kept = recipe.reuses("dgrad.weight") or recipe.second("weight")
    return quantised_bytes(recipe.folded_rows("weight"), *shape.of("weight")) if kept else 0


def quantised_bytes(operand: Operand, rows: int, cols: int) -> int:
    """Return the bytes of a quantised (rows, cols) matrix: its codes and its scales."""
    return CODE * rows * cols + SCALE * prod(operand.tile.scale_shape(rows, cols))


def _input_passes(recipe: Recipe, shape: Shape) -> Iterator[Pass]:
    made = ["fprop.input"] if recipe.fprop.is_fp8 else []
    reuses = recipe.reuses("wgrad.input")
    if recipe.wgrad.is_fp8 and not reuses:
        made.append("wgrad.input")
    yield from _quantise(recipe, "input", made, "forward", shape)
    if reuses or recipe.second("input"):
        yield _transpose(recipe, "wgrad.input", "fprop.input", shape)


def _weight_passes(recipe: Recipe, shape: Shape) -> Iterator[Pass]:
    if recipe.second("weight"):
        yield from _quantise(recipe, "weight", ["fprop.weight", "dgrad.weight"], "forward", shape)
        yield _transpose(recipe, "dgrad.weight", "fprop.weight", shape)
        return
    used: tuple[tuple[str, When], ...] = (("fprop", "forward"), ("dgrad", "backward"))
    for gemm, when in used:
        name = f"{gemm}.weight"
        if not recipe.gemm(gemm).is_fp8:
            yield _cast(name, when, shape)
        elif recipe.reuses(f"{gemm}.weight"):
            yield _transpose(recipe, name, "fprop.weight", shape)
        else:
            yield from _quantise(recipe, "weight", [name], when, shape)


def _gradient_passes(recipe: Recipe, shape: Shape) -> Iterator[Pass]:
    made = [f"{gemm}.grad_output" for gemm in ("dgrad", "wgrad") if recipe.gemm(gemm).is_fp8]
    yield from _quantise(recipe, "grad_output", made, "backward", shape)


def _quantise(recipe: Recipe, matrix: str, made: Sequence[str], when: When, shape: Shape) -> Iterator[Pass]:
    """Yield the pass that makes these operands of a matrix, or one per operand if one is rounded stochastically."""
    operands = [operand_of(recipe, name) for name in made]
    if len(made) > 1 and any(operand.rounding == "stochastic" for operand in operands):
        for name in made:
            yield from _quantise(recipe, matrix, [name], when, shape)
    elif made:
        tiles = [_tile_in(name, operand) for name, operand in zip(made, operands, strict=True)]
        known = all(operand.scale_from in ("delayed", "static") for operand in operands)
        reads = 1 if known or _is_single_read(tiles) else 2
        written = [_bytes_made(name, operand, shape) for name, operand in zip(made, operands, strict=True)]
        read = reads * HIGH_PRECISION[matrix] * prod(shape.of(matrix))
        yield Pass(matrix=matrix, made=tuple(made), how="quantise", when=when, read=read, written=tuple(written))


def _transpose(recipe: Recipe, name: str, source: str, shape: Shape) -> Pass:
    """Return the byte transpose of existing codes. A folded operand has a single scale of 1 instead of its own."""
    matrix, operand = source.split(".")[1], operand_of(recipe, name)
    read = quantised_bytes(operand_of(recipe, source), *shape.of(matrix))
    written = CODE * prod(shape.of(matrix)) + SCALE if operand.is_folded else _bytes_made(name, operand, shape)
    return Pass(matrix=matrix, made=(name,), how="transpose", when="backward", read=read, written=(written,))


def _cast(name: str, when: When, shape: Shape) -> Pass:
    """Return the cast of a weight for a GEMM in BF16."""
    elements = prod(shape.of("weight"))
    read = HIGH_PRECISION["weight"] * elements
    return Pass(matrix="weight", made=(name,), how="cast", when=when, read=read, written=(BF16 * elements,))


def operand_of(recipe: Recipe, name: str) -> Operand:
    """Return the operand of a name such as `wgrad.input`."""
    gemm, role = name.split(".")
    operand = getattr(recipe.gemm(gemm), role)
    assert isinstance(operand, Operand)
    return operand


def is_transposed(name: str) -> bool:
    """Return whether an operand is the transpose of its source matrix."""
    return name in ("dgrad.weight", "wgrad.grad_output", "wgrad.input")


def operand_names() -> tuple[str, ...]:
    """Return the names of all operands, GEMM by GEMM."""
    return tuple(f"{gemm}.{role}" for gemm, roles in OPERANDS.items() for role in roles)


def _tile_in(name: str, operand: Operand) -> Granularity:
    """Return the tile of an operand's scales, in the orientation of its source matrix."""
    return operand.tile.transposed if is_transposed(name) else operand.tile


def _is_single_read(tiles: Sequence[Granularity]) -> bool:
    """Return whether a single read gives the amax of each tile before its codes are written."""
    if all(tile == PER_ROW for tile in tiles):
        return True
    return all(tile.rows and tile.cols and max(tile.rows, tile.cols) <= _SIDE for tile in tiles)


def _bytes_made(name: str, operand: Operand, shape: Shape) -> int:
    rows, cols = shape.of(name.split(".")[1])
    return quantised_bytes(operand, cols, rows) if is_transposed(name) else quantised_bytes(operand, rows, cols)


def block_kept(config: ModelConfig, policy: Policy | None = None, *, compiled: bool = False) -> dict[str, int]:
    """Return the bytes per token that a block of a converted Llama saves for backward, by content.

    A test compares them with the storages that a block saves. The recipe has a scale per token, as `folded` does;
    layers share inputs and MLPs are fused. The row scales of the block's weights are not counted.

    Args:
        compiled: readers of norms recompute their codes from the norm's input, if that is saved in BF16.
    """
    saved = (policy or Policy()).saved
    dim, ffn, keys = config.dim, config.ffn_dim, config.head_dim * config.key_value_heads
    by_row, by_tile = CODE * dim + SCALE, {width: CODE * width + SCALE * -(-width // _SIDE) for width in (dim, ffn)}
    recomputes = compiled and saved.norm_inputs == "bf16"
    return {
        "inputs of the norms": 2 * ((by_tile[dim] if saved.norm_inputs == "fp8" else BF16 * dim) + SCALE),
        "codes that layers read": 2 * (SCALE if recomputes else by_row) + by_row * (saved.attention_output == "fp8"),
        "queries, keys, values": BF16 * (dim + 2 * keys),
        "attention's output": 0 if saved.attention_output == "fp8" else BF16 * dim + SCALE,
        "logsumexp": SCALE * config.heads,
        "gate and up": 2 * (by_tile[ffn] if saved.activation_inputs == "fp8" else BF16 * ffn),
        "scale of the hidden activation": SCALE,
    }


def recomputed(config: ModelConfig, keep: float) -> tuple[int, float]:
    """Return the bytes per token of a recomputed block, and the share of its forward FLOPs that run again.

    Args:
        keep: FLOPs per byte from which on a result is kept; infinite: none.
    """
    dim, ffn, keys = config.dim, config.ffn_dim, config.head_dim * config.key_value_heads
    results = [  # reduction length, elements per token, other bytes kept with it
        (dim, dim + 2 * keys, 0),
        (config.sequence, dim, SCALE * config.heads),
        (dim, dim, 0),
        (dim, 2 * ffn, 0),
        (ffn, dim, 0),
    ]
    size = BF16 * dim + sum(BF16 * elements + more for length, elements, more in results if length >= keep)
    flops = sum(length * elements for length, elements, _ in results)
    return size, sum(length * elements for length, elements, _ in results if length < keep) / flops
