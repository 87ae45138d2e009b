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
from octavo.kernels.operator import define
from octavo.kernels.quant_spec import parse_spec
from octavo.numerics import PER_COLUMN, Quantized, granularity_named


def wgrad_of_input(h: Quantized, x_MK: Tensor, target: QuantSpec, dtype: torch.dtype, accumulate: str) -> Tensor:
    """Return dW = H X (N, K) in `dtype`.

    Args:
        h: the gradient as wgrad reads it, (N, M). Where X is folded, it holds the scales of X.
        x_MK: the input, BF16, FP16 or FP32.
        target: how X^T (K, M) is quantised, rounded to nearest.
    """
    result: Tensor = torch.ops.octavo.wgrad_of_input(
        h.codes, h.scale, h.granularity.name, x_MK, str(target), dtype, accumulate
    )
    return result


def _wgrad_of_input(
    h: Tensor, h_scale: Tensor, h_granularity: str, x_MK: Tensor, target: str, dtype: torch.dtype, accumulate: str
) -> Tensor:
    goal = parse_spec(target)
    _, x_KM = kernels.quantize_pair([x_MK], None, goal)
    assert goal is not None and x_KM is not None
    right = kernels.without_scale(x_KM) if goal.tile == PER_COLUMN else x_KM
    return kernels.gemm(Quantized(h, h_scale, granularity_named(h_granularity)), right, dtype, accumulate)


def _wgrad_of_input_shape(
    h: Tensor, h_scale: Tensor, h_granularity: str, x_MK: Tensor, target: str, dtype: torch.dtype, accumulate: str
) -> Tensor:
    return h.new_empty(h.shape[0], x_MK.shape[1], dtype=dtype)


define(
    "wgrad_of_input(Tensor h, Tensor h_scale, str h_granularity, Tensor x_MK, str target, "
    "ScalarType dtype, str accumulate) -> Tensor",
    _wgrad_of_input,
    _wgrad_of_input_shape,
)
