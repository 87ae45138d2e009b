"""The byte transpose of FP8 codes, (R, C) to (C, R), to reuse operands of fprop in backward GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.runtime.dispatch import run_kernel, runs_triton
from octavo.kernels.runtime.operator import call, define_packed
from octavo.numerics import PER_ROW, Quantized


def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the transpose (C, R), contiguous, of contiguous codes (R, C) of any one-byte dtype.

    Args:
        after: a tensor to order the transpose after. Without this dependency a compiler could move it into forward,
            and keep the result in memory until backward.
    """
    result: Tensor = call("transpose", _transpose, (codes, after), [True])[0]
    return result


def transpose_folded(codes: Tensor, after: Tensor) -> Quantized:
    """Return codes (R, C) transposed, with scale 1 per row: the scales are folded into the other operand.

    Args:
        after: the other operand, as for `transpose`.
    """
    codes_t, scale = call("transpose_folded", _transpose_folded, (codes, after), [True, True])
    return Quantized(codes_t, scale, PER_ROW)


def _transpose(codes: Tensor, after: Tensor | None) -> list[Tensor]:
    return [run_kernel("transpose.transpose", codes, (codes, after), "transpose")]


def _transpose_folded(codes: Tensor, after: Tensor) -> Sequence[Tensor]:
    results: Sequence[Tensor] = run_kernel("transpose.transpose_folded", codes, (codes, after), "transpose")
    return results


def _in_graph(codes: Tensor, after: Tensor | None) -> bool:
    return runs_triton(codes)


def _transpose_shape(codes: Tensor, after: Tensor | None) -> list[Tensor]:
    return [codes.new_empty(codes.shape[1], codes.shape[0])]


def _transpose_folded_shape(codes: Tensor, after: Tensor) -> list[Tensor]:
    return [*_transpose_shape(codes, after), codes.new_empty(codes.shape[1], 1, dtype=torch.float32)]


define_packed("transpose", _transpose, _transpose_shape, in_graph=_in_graph)
define_packed("transpose_folded", _transpose_folded, _transpose_folded_shape, in_graph=_in_graph)
