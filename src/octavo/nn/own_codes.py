"""Weights that are FP8 tensors: every GEMM reads the codes that they have. Nothing is quantised, and nothing is kept.

Here are the operators of `octavo.nn.weights` for lists with such a weight in them. A compiler traces these functions:
codes and scales are inputs of compiled code, like any other parameter. A plain weight that shares an input with an FP8
one is quantised in every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedError
from octavo.kernels import Target
from octavo.kernels.operator import define
from octavo.kernels.target import target_of
from octavo.numerics import PER_COLUMN, PER_TENSOR, Quantized, granularity_named
from octavo.recipes import Operand, Recipe, load, names, reused_from
from octavo.tensor import FP8Tensor


def has_codes(weights: Sequence[Tensor]) -> bool:
    """Return whether any of these weights is an FP8 tensor."""
    return any(isinstance(weight, FP8Tensor) for weight in weights)


def values(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight as a GEMM in high precision reads it. That of an FP8 weight can be differentiated too."""
    return weight.dequantize(dtype) if isinstance(weight, FP8Tensor) else weight.to(dtype)


def codes_of(weight: Tensor, target: Target, transposed: bool = False) -> Quantized:
    """Return the codes that an FP8 weight has, and those of a plain one made now.

    Raises:
        UnsupportedError: an FP8 weight has codes of another kind, or its transpose is to be quantised by itself.
    """
    if not isinstance(weight, FP8Tensor):
        return kernels.quantize(weight.detach(), *target)
    has = Target(weight.format, weight.granularity.name, weight.scaling)
    if transposed or has != target:
        wanted = f"{target}, transposed" if transposed else str(target)
        raise UnsupportedError(
            f"an FP8 weight holds the codes of {has}, and its recipe wants those of {wanted}: it would be rounded a "
            "second time. Use a recipe that reads the codes it has, such as 'folded', or give the layer a plain weight "
            "(octavo.revert) before it is converted."
        )
    return weight.quantized


def stack_of(weights: Sequence[Tensor], target: Target, transposed: bool = False) -> Quantized:
    """Return the codes of all weights (N_i, K) as one matrix (N, K): a copy where there are several."""
    return joined([codes_of(weight, target, transposed) for weight in weights])


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Return matrices (R_i, C) as one, (R, C).

    No tile of scales may reach from one into the next; or all rows share one scale, which is that of every part.
    """
    if len(parts) == 1:
        return parts[0]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    shared = parts[0].granularity.rows is None
    return Quantized(codes, parts[0].scale if shared else torch.cat([p.scale for p in parts]), parts[0].granularity)


def transpose_codes(source: Quantized, folded: bool) -> Quantized:
    """Return a matrix of fprop as a backward GEMM reads it: its codes transposed, its scale 1 if it is folded."""
    transposed = source.t()
    return kernels.contiguous(without_scale(transposed) if folded else transposed)


def without_scale(folded: Quantized) -> Quantized:
    """Return an operand whose scales have gone into its partner, as the GEMM is to see it: codes, and one scale 1."""
    return Quantized(folded.codes, folded.scale.new_ones(1, 1), PER_TENSOR)


def fprop(
    x: Tensor, x_scale: Tensor, x_granularity: str, weights: list[Tensor], target: str, dtype: torch.dtype,
    accumulate: str,
) -> list[Tensor]:  # fmt: skip
    """Compute `octavo::fprop`: a GEMM for each weight."""
    left, goal = Quantized(x, x_scale, granularity_named(x_granularity)), _named(target)
    return [kernels.gemm(left, codes_of(weight, goal), dtype, accumulate) for weight in weights]


def dgrad(
    g: Tensor, g_scale: Tensor, g_granularity: str, weights: list[Tensor], target: str, source: str,
    dtype: torch.dtype, accumulate: str,
) -> Tensor:  # fmt: skip
    """Compute `octavo::dgrad`: one GEMM with the transposed codes of all weights."""
    parts = dgrad_parts(weights, target, source)
    result: Tensor = torch.ops.octavo.dgrad_of_codes(g, g_scale, g_granularity, *parts, dtype, accumulate)
    return result


def dgrad_parts(weights: list[Tensor], target: str, source: str) -> tuple[list[Tensor], list[Tensor], str, bool]:
    """Return codes, scales, granularity and `folded` of weights, as `octavo::dgrad_of_codes` takes them."""
    goal, of_fprop = _named(target), target_of(source)
    parts = [codes_of(weight, of_fprop or goal, transposed=of_fprop is None) for weight in weights]
    codes, scales = [part.codes for part in parts], [part.scale for part in parts]
    return codes, scales, parts[0].granularity.name, goal.tile == PER_COLUMN


def weight_scale(weights: list[Tensor], target: str) -> Tensor:
    """Compute `octavo::weight_scale`."""
    return torch.cat([codes_of(weight, _named(target)).scale for weight in weights])


def _named(text: str) -> Target:
    target = target_of(text)
    assert target is not None
    return target


def _dgrad_of_codes(
    g: Tensor, g_scale: Tensor, g_granularity: str, codes: list[Tensor], scales: list[Tensor], granularity: str,
    folded: bool, dtype: torch.dtype, accumulate: str,
) -> Tensor:  # fmt: skip
    tile = granularity_named(granularity)
    stack = joined([Quantized(*part, tile) for part in zip(codes, scales, strict=True)])
    left = Quantized(g, g_scale, granularity_named(g_granularity))
    return kernels.gemm(left, transpose_codes(stack, folded), dtype, accumulate)


def _dgrad_of_codes_shape(
    g: Tensor, g_scale: Tensor, g_granularity: str, codes: list[Tensor], scales: list[Tensor], granularity: str,
    folded: bool, dtype: torch.dtype, accumulate: str,
) -> Tensor:  # fmt: skip
    return g.new_empty(g.shape[0], codes[0].shape[1], dtype=dtype)


# It takes the gradient: so a compiler cannot move the transposition into the forward and keep what that makes.
define(
    "dgrad_of_codes(Tensor g, Tensor g_scale, str g_granularity, Tensor[] codes, Tensor[] scales, str granularity, "
    "bool folded, ScalarType dtype, str accumulate) -> Tensor",
    _dgrad_of_codes,
    _dgrad_of_codes_shape,
)


def refuses_own_codes(recipe: Recipe) -> str | None:
    """Return why a recipe cannot compute with an FP8 weight, E4M3 with a power-of-two scale a row, or None."""
    if not recipe.fprop.is_fp8:
        return "its fprop is in BF16"
    if recipe.fprop.weight != Operand(granularity="row"):
        return f"its fprop reads a weight that is {recipe.fprop.weight}, not E4M3 with a power-of-two scale a row"
    if recipe.dgrad.is_fp8 and reused_from(recipe, "dgrad", "weight") is None:
        return "its dgrad quantises the transposed weight by itself, which would be a second rounding"
    return None


def reads_own_codes() -> list[str]:
    """Return the names of the recipes that compute with FP8 weights."""
    return [name for name in names() if refuses_own_codes(load(name)) is None]
