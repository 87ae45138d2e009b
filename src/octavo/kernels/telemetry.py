"""What quantising loses: largest value, elements flushed to zero, saturated, not finite. Counted where codes are made.

    stats = new_stats(device)                      int64 (4,), zeros
    quantized = quantize_counted(x, target, stats) the codes of `kernels.quantize`, and their counts added to stats
    read(stats)                                    what has come together; waits for the GPU

It slows a quantisation down, so ask now and then. Where nobody asks it costs nothing: kernels are compiled without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.dispatch import launches_on, uses_triton
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize
from octavo.kernels.sample import limits
from octavo.numerics import Quantized, format_of


class Counts(NamedTuple):
    """What has come together in some statistics."""

    amax: float
    """The largest finite magnitude."""
    flushed: int
    """Finite values, not zero, whose code is zero."""
    saturated: int
    """Finite values past the largest code by more than rounding: more than half a step."""
    non_finite: int
    """NaN and infinities."""


def new_stats(device: torch.device | str) -> Tensor:
    """Return the memory of statistics: int64 (4,), the bits of an FP32 amax and three counts, all zero."""
    return torch.zeros(4, dtype=torch.int64, device=device)


def read(stats: Tensor) -> Counts:
    """Return what statistics hold. Waits for the GPU."""
    bits, *counts = stats.tolist()
    return Counts(float(torch.tensor(bits, dtype=torch.int32).view(torch.float32)), *counts)


def quantize_counted(x: Tensor, target: QuantSpec, stats: Tensor) -> Quantized:
    """Return `kernels.quantize` of x (R, C), and add its counts to `stats`. Eager mode only.

    Args:
        target: rounded to nearest.
        stats: of `new_stats`, on the device of x. It may hold counts: the amax becomes the larger one, counts add up.

    Raises:
        ConfigError: x is not a matrix, the rounding is stochastic, or `stats` is not what `new_stats` gives.
        UnsupportedError: in compiled code.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "quantize_counted counts in eager mode only: call it outside of what torch.compile sees."
        )
    _check(x, target, stats)
    if x.is_cuda and x.numel():
        from octavo.kernels.triton import quantize as fast

        if uses_triton(x, "quantize", fast.refuses(target)):
            with launches_on(x.device):
                result = fast.quantize_pair([x], target, None, stats=(stats, None))[0]
            assert result is not None
            return result
    result = quantize(x, *target)
    counts = count(x, result)
    stats[0].copy_(torch.maximum(stats[0], counts[0]))
    stats[1:] += counts[1:]
    return result


def count(x: Tensor, quantized: Quantized) -> Tensor:
    """Return the statistics of one matrix as they are defined, int64 (4,).

    Args:
        x: (R, C), what was quantised: with its fold, if there was one.
        quantized: codes (R, C), rounded to nearest.
    """
    fmt = format_of(quantized.codes)
    if x.numel() == 0:
        return new_stats(x.device)
    magnitude = x.float().abs()
    finite = magnitude < torch.inf
    is_zero = quantized.codes.view(torch.uint8) & 0x7F == 0
    scale = quantized.granularity.expand(quantized.scale, *x.shape)
    flushed = finite & (magnitude > 0) & is_zero
    saturated = finite & (magnitude / scale > limits(fmt).saturated)
    amax = torch.where(finite, magnitude, 0.0).max().view(torch.int32)
    return torch.stack([amax.long(), *(found.sum() for found in (flushed, saturated, ~finite))])


def _check(x: Tensor, target: QuantSpec, stats: Tensor) -> None:
    if x.dim() != 2:
        raise ConfigError(f"quantize_counted takes a matrix, got shape {tuple(x.shape)}: flatten it first.")
    if target.rounding != "nearest":
        raise ConfigError(f"counts are of codes rounded to nearest, not '{target.rounding}'.")
    if (stats.dtype, stats.shape, stats.device) != (torch.int64, (4,), x.device) or not stats.is_contiguous():
        raise ConfigError(
            f"stats is {stats.dtype} {tuple(stats.shape)} on {stats.device}: make it with new_stats('{x.device}')."
        )
