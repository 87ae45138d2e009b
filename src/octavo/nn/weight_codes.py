"""Weight codes: a weight as fprop and dgrad read it.

Codes are made in every forward from the current values of the weight, and backward reads those of forward. So no write
to a weight can be missed, however it is made. The cost is one read of the weight, about 1 % of a step of 8,192 tokens.
If weights do not change for many forwards, as in an evaluation or during gradient accumulation,
`octavo.nn.reuse_weight_codes` makes the codes once.

Layers that share an input are one layer whose weight is the stack of theirs: one launch makes the codes of all rows.
The codes of a weight that is an `FP8Tensor` are read as they are (`octavo.nn.fp8_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.nn.fp8_weights import codes_of
from octavo.numerics import Quantized
from octavo.tensor import FP8Tensor


class WeightCodes(NamedTuple):
    """The weights (N_i, K) of layers that are computed together, in FP8."""

    matrices: tuple[Quantized, ...]
    """One (sum of N_i, K), or one (N_i, K) per weight."""
    rows: tuple[int, ...]
    """N_i."""
    second: tuple[Tensor | None, Tensor] | None = None
    """Codes and scale of the stack for dgrad, if it reads a second set; codes None: they follow from the weights."""

    @property
    def stack(self) -> Quantized:
        """All rows as one matrix; a copy if there are several matrices."""
        return join_rows(self.matrices)

    def parts(self) -> list[Quantized] | None:
        """Return the rows of each weight; None if a tile of scales spans two of them."""
        return list(self.matrices) if len(self.matrices) > 1 else split_rows(self.matrices[0], self.rows)


def has_fp8_weight(weights: Sequence[Tensor]) -> bool:
    """Return whether any of these weights is an FP8 tensor."""
    for weight in weights:  # noqa: SIM110 - a generator is a call per weight, in each call of a layer
        if isinstance(weight, FP8Tensor):
            return True
    return False


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as the matrix (N, K) of its GEMM; that of a convolution, (N, C, *kernel), with channels last."""
    return weight if weight.dim() == 2 else weight.movedim(1, -1).flatten(1)


def codes_follow(weights: Sequence[Tensor], rows: QuantSpec) -> bool:
    """Return whether backward makes codes by row again from the weights and their scales, instead of saving them.

    With a power-of-two scale this takes as many launches as transposing codes. Of weights of two bytes per element it
    reads one byte per element more, and of wider ones too many.
    """
    if rows.scaling != "power_of_two":
        return False
    for weight in weights:  # noqa: SIM110 - see `has_fp8_weight`
        if weight.dim() != 2 or weight.element_size() != 2:
            return False
    return True


def quantize_weights(
    weights: Sequence[Tensor], target: QuantSpec, second: QuantSpec | None = None, *, keeps_second: bool = False
) -> WeightCodes:
    """Quantise weights (N_i, K) as one stack.

    Args:
        second: target of the second set, by row, if dgrad reads one.
        keeps_second: make the codes of the second set, also if they follow from the weights.

    Raises:
        UnsupportedError: an FP8 weight has codes of another kind.
    """
    if has_fp8_weight(weights):
        return WeightCodes(tuple([codes_of(w, target) for w in weights]), tuple([w.shape[0] for w in weights]))
    stack: list[Tensor] = []
    rows: tuple[int, ...] = ()
    for weight in weights:  # as in `has_fp8_weight`
        stack.append(weight.detach() if weight.dim() == 2 else as_matrix(weight.detach()))
        rows += (weight.shape[0],)
    if second is not None:
        keeps_codes = keeps_second or not codes_follow(weights, second)
        first, codes, scale = kernels.quantize_rows_twice(stack, target, second, keeps_codes, True)
        return WeightCodes((first,), rows, (codes, scale))
    if target.rounding == "nearest":
        return WeightCodes((kernels.quantize_stack(stack, target),), rows)
    return WeightCodes((kernels.quantize_matrix(torch.cat(stack), target),), rows)


def quantize_weights_transposed(weights: Sequence[Tensor], target: QuantSpec) -> Quantized:
    """Quantise the transpose (K, sum of N_i) of a stack by itself, if dgrad does not reuse the codes of fprop.

    Raises:
        UnsupportedError: an FP8 weight would be rounded a second time.
    """
    if has_fp8_weight(weights):
        return codes_of(next(w for w in weights if has_fp8_weight([w])), target, transposed=True)
    matrices = [as_matrix(weight.detach()) for weight in weights]
    return kernels.quantize_matrix((matrices[0] if len(matrices) == 1 else torch.cat(matrices)).t(), target)


def split_rows(stack: Quantized, rows: Sequence[int]) -> list[Quantized] | None:
    """Return the rows of each weight in a stack, views; None if a tile of scales spans two weights."""
    if len(rows) == 1:
        return [stack]
    if (scales := split_scale(stack.scale, stack.granularity.rows, rows)) is None:
        return None
    codes = stack.codes.split(list(rows))
    return [Quantized(c, s, stack.granularity) for c, s in zip(codes, scales, strict=True)]


def split_scale(scale: Tensor, height: int | None, rows: Sequence[int]) -> list[Tensor] | None:
    """Return the scales of each part of a matrix that is split by rows; None if a tile spans two parts.

    Args:
        height: rows of a tile; None: all rows, whose scale is that of each part.
        rows: number of rows of each part.
    """
    if height is None or len(rows) == 1:
        return [scale] * len(rows)
    if any(count % height for count in rows[:-1]):
        return None
    return list(scale.split([-(-count // height) for count in rows]))


def join_rows(parts: Sequence[Quantized]) -> Quantized:
    """Return matrices (R_i, C) as one, (R, C).

    No tile of scales may span two of them, unless all rows share one scale, which must be the same for all matrices.
    """
    if len(parts) == 1:
        return parts[0]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    shared = parts[0].granularity.rows is None
    return Quantized(codes, parts[0].scale if shared else torch.cat([p.scale for p in parts]), parts[0].granularity)


def multiply(x: Quantized, w: WeightCodes, dtype: torch.dtype, accumulate: str) -> list[Tensor]:
    """Return x W_i^T for each weight, (M, N_i)."""
    parts = w.parts()
    if parts is not None:
        return [kernels.gemm(x, part, dtype, accumulate) for part in parts]
    y = kernels.gemm(x, w.matrices[0], dtype, accumulate)  # a tile of scales spans two weights
    # Copies, also of one row: users may write to an output, and not to one of several views.
    return [part.clone(memory_format=torch.contiguous_format) for part in y.split(list(w.rows), dim=1)]
