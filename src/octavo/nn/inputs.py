"""An input that is kept as it is, and quantised again when wgrad reads it.

A layer usually keeps the codes of its input. Where something else keeps the input itself, as attention keeps its
output, the codes are one byte per element too many. The operator takes the gradient and the input: so a compiler cannot
move it into the forward and keep what it makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.kernels.operator import call, define_packed
from octavo.numerics import PER_COLUMN, Quantized


def wgrad_of_input(h: Quantized, x_MK: Tensor, target: QuantSpec, dtype: torch.dtype, accumulate: str) -> Tensor:
    """Return dW = H X (N, K) in `dtype`.

    Args:
        h: the gradient as wgrad reads it, (N, M). Where X is folded, it holds the scales of X.
        x_MK: the input, BF16, FP16 or FP32.
        target: how X^T (K, M) is quantised, rounded to nearest.
    """
    arguments = h, x_MK, target, dtype, accumulate
    result: Tensor = call("wgrad_of_input", _wgrad_of_input, arguments, [True])[0]
    return result


def _wgrad_of_input(h: Quantized, x_MK: Tensor, target: QuantSpec, dtype: torch.dtype, accumulate: str) -> list[Tensor]:
    _, x_KM = kernels.quantize_pair([x_MK], None, target)
    assert x_KM is not None
    right = kernels.without_scale(x_KM) if target.tile == PER_COLUMN else x_KM
    return [kernels.gemm(h, right, dtype, accumulate)]


def _shape(h: Quantized, x_MK: Tensor, target: QuantSpec, dtype: torch.dtype, accumulate: str) -> list[Tensor]:
    return [h.codes.new_empty(h.codes.shape[0], x_MK.shape[1], dtype=dtype)]


define_packed("wgrad_of_input", _wgrad_of_input, _shape)
