"""The byte transpose: FP8 codes (R, C) to (C, R). What a backward GEMM reads is what fprop read, moved."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.dispatch import launches_on, triton_unsupported_reason, uses_triton
from octavo.kernels.operator import define, is_direct
from octavo.numerics import PER_ROW, Quantized


def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the transpose (C, R), contiguous, of contiguous codes (R, C) of any one-byte dtype.

    Args:
        after: a tensor that a compiler must not transpose before: in forward, the result of what backward reads would
            be kept in memory until then.
    """
    result: Tensor = (_transpose if is_direct(codes) else torch.ops.octavo.transpose)(codes, after)
    return result


def transpose_folded(codes: Tensor, after: Tensor) -> Quantized:
    """Return codes (R, C) transposed, with a scale of 1 per row: their scales have moved into the other operand.

    Args:
        after: the other operand, see `transpose`.
    """
    run = _transpose_folded if is_direct(codes) else torch.ops.octavo.transpose_folded
    codes_t, scale = run(codes, after)
    return Quantized(codes_t, scale, PER_ROW)


def _transpose(codes: Tensor, after: Tensor | None) -> Tensor:
    if codes.is_cuda and codes.numel() and uses_triton(codes, "transpose"):
        from octavo.kernels.triton.transpose import transpose as fast

        with launches_on(codes.device):
            return fast(codes, after)
    return codes.t().contiguous()


def _transpose_folded(codes: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    if codes.is_cuda and codes.numel() and uses_triton(codes, "transpose"):
        from octavo.kernels.triton.transpose import transpose_folded as fast

        with launches_on(codes.device):
            return fast(codes, after)
    return codes.t().contiguous(), torch.ones(codes.shape[1], 1, device=codes.device, dtype=torch.float32)


def _in_graph(codes: Tensor, after: Tensor | None) -> bool:
    return codes.is_cuda and triton_unsupported_reason(codes.device) is None


def _transpose_shape(codes: Tensor, after: Tensor | None) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


def _transpose_folded_shape(codes: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    return _transpose_shape(codes, after), codes.new_empty(codes.shape[1], 1, dtype=torch.float32)


define("transpose(Tensor codes, Tensor? after) -> Tensor", _transpose, _transpose_shape, in_graph=_in_graph)
define(
    "transpose_folded(Tensor codes, Tensor after) -> (Tensor, Tensor)",
    _transpose_folded,
    _transpose_folded_shape,
    in_graph=_in_graph,
)
