"""The norm contract: normalisation of the rows of a matrix, fused with quantisation for the GEMMs that read them.

    RMS norm      y = x * rstd * weight                   rstd = 1 / sqrt(mean(x^2) + eps)
    layer norm    y = (x - mean) * rstd * weight + bias   rstd = 1 / sqrt(mean((x - mean)^2) + eps)

M: rows, one per token. D: width. Arithmetic is FP32; y is rounded once to x's dtype. y is quantised *before* that
rounding, to save one; to two sets of codes, if fprop and backward read different ones. As summation order differs from
the reference's, a code may be off by one. Backward takes x, or its codes as described by `KEPT`, with the same result
as for the dequantised values.

In a residual stream x is a sum, and the next sum reads it too: `normalise_sum` adds what a layer has computed and
normalises the sum in one pass, and backward adds the gradient that passes by the norm. Both round as the operations by
themselves do.

All are custom operators: Triton on a GPU; `reference.py`, the definition, elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.quant_spec import QuantSpec, empty, laid_out
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Quantized

GRANULARITIES = ("row", "1x128")
"""Granularities available to a program that holds one row."""
KEPT = QuantSpec("e4m3", "1x128", "power_of_two")
"""Quantisation of x if saved for backward as codes: `kernels.quantize(x, *KEPT)`."""
LONGEST_ROW = 16384
"""Maximum row length of the Triton kernels, which hold one row per program."""


class Normed(NamedTuple):
    """Results of one forward pass."""

    y: Tensor
    """(M, D), x's dtype."""
    quantized: Quantized | None
    """Codes of y (M, D); None without a target."""
    rstd: Tensor
    """(M,), FP32, for backward."""
    mean: Tensor | None
    """(M,), FP32, for backward of a layer norm; None for an RMS norm."""
    second: Quantized | None
    """A second set of codes of y (M, D); None without a second target."""
    sum: Tensor | None = None
    """x + addend (M, D), in the dtype that PyTorch gives it, by `normalise_sum`; the rest is of it."""


def unsupported_reason(target: QuantSpec) -> str | None:
    """Return why a norm cannot quantise to `target` in the same pass, or None."""
    if target.rounding != "nearest":
        return f"it rounds to nearest only, not '{target.rounding}'"
    if target.granularity not in GRANULARITIES:
        return f"it has {' and '.join(GRANULARITIES)} scales only, not '{target.granularity}'"
    if target.needs_whole_rows and target.granularity != "row":
        return f"INT8 and rotated codes have row scales only, not '{target.granularity}'"
    return None


def _second_unsupported_reason(second: QuantSpec) -> str | None:
    if second.rotation or second.granularity != "row":
        return "its second codes have row scales, and are not rotated"
    return unsupported_reason(second)


def _check(x: Tensor, **others: Tensor | None) -> None:
    if x.dim() != 2:
        raise ConfigError(f"a norm takes a matrix (M, D), got shape {tuple(x.shape)}: flatten the leading dimensions.")
    for name, other in others.items():
        expected = x.shape[1:] if name in ("weight", "bias") else x.shape
        if other is not None and other.shape != expected:
            raise ConfigError(f"{name} has shape {tuple(other.shape)}, but x {tuple(x.shape)} wants {tuple(expected)}.")


def _refused(x: Tensor) -> str | None:
    cols = x.shape[1]
    return f"rows of {cols} elements are longer than {LONGEST_ROW}" if cols > LONGEST_ROW else None


def _forward_fake(
    x: Tensor,
    _weight: object,
    _bias: object,
    _eps: float,
    target: QuantSpec | None,
    centred: bool,
    second: QuantSpec | None,
) -> Normed:
    quantized, others = (spec and empty(spec, x.shape[0], x.shape[1], x.device) for spec in (target, second))
    rstd, mean = (x.new_empty(x.shape[0], dtype=torch.float32) if is_made else None for is_made in (True, centred))
    assert rstd is not None
    return Normed(x.new_empty(x.shape), quantized, rstd, mean, others)


@operation(
    name="norm",
    fake=_forward_fake,
    results=lambda _x, _weight, _bias, _eps, target, centred, second: (True, target, True, centred, second),
)
def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: QuantSpec | None = None,
    centred: bool = False,
    second: QuantSpec | None = None,
) -> Normed:
    """Return the norm of each row of x.

    Args:
        x: (M, D), BF16, FP16 or FP32; rows need not be adjacent in memory.
        weight: (D,), any of these dtypes, or None.
        bias: as weight, for a layer norm.
        target: quantisation of y, or None to skip it.
        centred: True for a layer norm, False for an RMS norm.
        second: another quantisation of y, by row and without a rotation, or None.

    Raises:
        ConfigError: mismatched shapes.
        UnsupportedError: `unsupported_reason(target)`; omit the target, and pass y to `kernels.quantize`.
    """
    return _run(x, weight, bias, eps, target, centred, second)


def _sum_fake(x: Tensor, addend: Tensor, *arguments: Any) -> Normed:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, addend.dtype))
    return _forward_fake(total, *arguments)._replace(sum=total)


@operation(
    name="norm_of_sum",
    fake=_sum_fake,
    results=lambda _x, _addend, _weight, _bias, _eps, target, centred, second: (
        True, target, True, centred, second, True,
    ),
)  # fmt: skip
def normalise_sum(
    x: Tensor,
    addend: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: QuantSpec | None = None,
    centred: bool = False,
    second: QuantSpec | None = None,
) -> Normed:
    """Return x + addend, and the norm of each row of it: the results of `normalise(x + addend, ...)`.

    With mixed dtypes, or another alignment of rows, a GPU may sum a row in another order than `normalise` does.

    Args:
        x: as for `normalise`, like the rest.
        addend: (M, D), any of these dtypes.

    Raises:
        ConfigError: mismatched shapes.
        UnsupportedError: as for `normalise`.
    """
    return _run(x, weight, bias, eps, target, centred, second, addend)


def _run(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: QuantSpec | None,
    centred: bool,
    second: QuantSpec | None,
    addend: Tensor | None = None,
) -> Normed:
    """Check the arguments and run the kernel."""
    _check(x, addend=addend, weight=weight, bias=bias)
    for spec, reason_against in ((target, unsupported_reason), (second, _second_unsupported_reason)):
        if spec is not None and (reason := reason_against(spec)):
            raise UnsupportedError(f"a norm cannot quantise to '{spec}': {reason}. Quantise y after it, or change one.")
    label = "layer_norm" if centred else "rms_norm"
    arguments = x, weight, bias, eps, target, centred, second, addend
    y, quantized, rstd, mean, others, total = run_kernel("norm.forward", x, arguments, label, _refused(x))
    quantized, others = (None if made is None else laid_out(made) for made in (quantized, others))
    return Normed(y.contiguous(), quantized, rstd, mean, others, None if total is None else total.contiguous())


def _backward_fake(
    dy: Tensor, x: Tensor | Quantized, weight: Tensor | None, bias: Tensor | None, *_: object
) -> list[Tensor | None]:
    sums = (None if parameter is None else parameter.new_empty(parameter.shape) for parameter in (weight, bias))
    return [(x if isinstance(x, Tensor) else dy).new_empty(dy.shape), *sums]


@operation(
    name="norm_backward",
    fake=_backward_fake,
    results=lambda _dy, _x, weight, bias, *_: (True, weight is not None, bias is not None),
)
def normalise_backward(
    dy: Tensor,
    x: Tensor | Quantized,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    passing: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias.

    Args:
        dy: (M, D), BF16, FP16 or FP32.
        x: (M, D), or its codes as in `KEPT`.
        weight: (D,) or None.
        bias: as weight.
        mean: FP32 (M,), from forward; None for an RMS norm.
        rstd: FP32 (M,), from forward.
        passing: (M, D), the gradient of x from its other readers, added to dx after dx is rounded.

    Returns:
        dx (M, D) in x's dtype, or in dy's if x is codes; dweight and dbias (D,), accumulated in FP32, in the dtypes of
        weight and bias.

    Raises:
        ConfigError: mismatched shapes.
        UnsupportedError: codes with a granularity other than that of `KEPT`.
    """
    if isinstance(x, Quantized) and x.granularity != KEPT.tile:
        raise UnsupportedError(f"a norm's input is kept as '{KEPT}', got codes with '{x.granularity.name}' scales.")
    _check(x if isinstance(x, Tensor) else x.codes, dy=dy, passing=passing, weight=weight, bias=bias)
    arguments = dy, x if isinstance(x, Tensor) else laid_out(x), weight, bias, mean, rstd, passing
    label = "rms_norm_backward" if mean is None else "layer_norm_backward"
    dx, dweight, dbias = run_kernel("norm.backward", dy, arguments, label, _refused(dy))
    return dx.contiguous(), dweight, dbias
