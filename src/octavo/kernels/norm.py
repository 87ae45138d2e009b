"""The norm contract: one read of a matrix gives its normalised rows, and their codes for the GEMMs that read them.

    s = x + residual, rounded to x's dtype; s = x where there is no residual
    RMS norm      y = s * rstd * weight                   rstd = 1 / sqrt(mean(s^2) + eps)
    layer norm    y = (s - mean) * rstd * weight + bias   rstd = 1 / sqrt(mean((s - mean)^2) + eps)

M: rows, one a token. D: width. All in FP32; y is rounded once to x's dtype. The codes are those of y *before* that
rounding: one rounding fewer. Where the kernel sums in another order than the reference, a code may be one off.
The backward takes s itself, or the codes of it that `KEPT` describes: then it computes what it would from their values.

Everything is a custom operator: Triton on a GPU, `reference/norm.py`, which is the definition, elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.dispatch import run_twin
from octavo.kernels.operator import call, define_packed
from octavo.kernels.quant_spec import QuantSpec, empty, laid_out
from octavo.numerics import Quantized

GRANULARITIES = ("row", "1x128")
"""What a program that holds a row can quantise by."""
KEPT = QuantSpec("e4m3", "1x128", "power_of_two")
"""What s is kept in for the backward, where it is kept as codes: `kernels.quantize(s, *KEPT)`."""
LONGEST_ROW = 16384
"""Elements of a row that one program of the Triton kernels still holds."""


class Normed(NamedTuple):
    """What one pass gives. None where it was not asked for."""

    y: Tensor | None
    """(M, D), x's dtype."""
    quantized: Quantized | None
    """y, codes (M, D)."""
    rstd: Tensor
    """(M,), FP32: what the backward reads beside s."""
    total: Tensor | None
    """(M, D), x's dtype: s, where there is a residual."""
    mean: Tensor | None = None
    """(M,), FP32, of a layer norm."""


def unsupported_reason(target: QuantSpec) -> str | None:
    """Return why a norm cannot quantise so in its one pass, or None."""
    if target.rounding != "nearest":
        return f"it rounds to nearest only, not '{target.rounding}'"
    if target.granularity not in GRANULARITIES:
        return f"the scales of '{target.granularity}' are not known when a row is: {' and '.join(GRANULARITIES)} are"
    return None


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    target: QuantSpec | None = None,
    keep_y: bool = True,
) -> Normed:
    """Return the RMS norm of each row of x + residual.

    Args:
        x: (M, D), BF16, FP16 or FP32; its rows may lie apart.
        weight: (D,), any of these dtypes, or None.
        residual: (M, D), any of these dtypes.
        target: how to quantise y, or None for not at all.
        keep_y: whether y itself is written.

    Raises:
        ConfigError: shapes that do not fit.
        UnsupportedError: `unsupported_reason(target)`: normalise without it, and hand y to `kernels.quantize`.
    """
    _check(x, target, weight=weight, residual=residual)
    return _norm(x, weight, None, eps, residual, target, keep_y, centred=False)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    target: QuantSpec | None = None,
    keep_y: bool = True,
) -> Normed:
    """Return the layer norm of each row of x + residual. Arguments and errors are those of `rms_norm`; bias: (D,)."""
    _check(x, target, weight=weight, bias=bias, residual=residual)
    return _norm(x, weight, bias, eps, residual, target, keep_y, centred=True)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None,
    target: QuantSpec | None, keep_y: bool, centred: bool,
) -> Normed:  # fmt: skip
    arguments = x, weight, bias, eps, residual, target, keep_y, centred
    return Normed(*call("norm", _forward, arguments, [keep_y, target, True, residual is not None, centred]))


def rms_norm_backward(
    dy: Tensor, x: Tensor | Quantized, weight: Tensor | None, rstd: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of s, which are those of x and of residual, and of weight.

    Args:
        dy: (M, D), any dtype that x may have.
        x: (M, D), what was normalised: `total` where there was a residual; or its codes, as `KEPT` says.
        weight: (D,) or None.
        rstd: (M,), FP32, the forward's.
        residual_grad: (M, D), what reaches s on other ways; added in FP32, before the one rounding.

    Returns:
        dx (M, D) in x's dtype, of codes in dy's; dweight (D,) in weight's dtype, summed in FP32.

    Raises:
        ConfigError: shapes that do not fit.
    """
    _check(_values(x), None, dy=dy, weight=weight, residual_grad=residual_grad)
    arguments = dy, x, weight, None, None, rstd, residual_grad
    dx, dweight, _ = call("norm_backward", _backward, arguments, [True, weight is not None, False])
    return dx, dweight


def layer_norm_backward(
    dy: Tensor,
    x: Tensor | Quantized,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of s, weight and bias. Arguments and errors are those of `rms_norm_backward`."""
    _check(_values(x), None, dy=dy, weight=weight, bias=bias, residual_grad=residual_grad)
    arguments = dy, x, weight, bias, mean, rstd, residual_grad
    dx, dweight, dbias = call("norm_backward", _backward, arguments, [True, weight is not None, bias is not None])
    return dx, dweight, dbias


def _values(x: Tensor | Quantized) -> Tensor:
    """Return what was normalised, values or codes."""
    if isinstance(x, Tensor):
        return x
    if x.granularity != KEPT.tile:
        raise UnsupportedError(f"a norm's input is kept as '{KEPT}', and these codes are '{x.granularity.name}'.")
    return x.codes


def _check(x: Tensor, target: QuantSpec | None, **others: Tensor | None) -> None:
    if x.dim() != 2:
        raise ConfigError(f"a norm takes a matrix (M, D), got shape {tuple(x.shape)}: flatten the leading dimensions.")
    for name, other in others.items():
        wanted = x.shape[1:] if name in ("weight", "bias") else x.shape
        if other is not None and other.shape != wanted:
            raise ConfigError(f"{name} has shape {tuple(other.shape)}, but x {tuple(x.shape)} wants {tuple(wanted)}.")
    if target is not None and (reason := unsupported_reason(target)):
        raise UnsupportedError(f"a norm cannot quantise to '{target}': {reason}. Quantise y after it, or change one.")


def _refused(x: Tensor) -> str | None:
    cols = x.shape[1]
    return f"rows of {cols} elements do not fit a program, {LONGEST_ROW} do" if cols > LONGEST_ROW else None


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None,
    target: QuantSpec | None, keep_y: bool, centred: bool,
) -> list[Tensor | Quantized | None]:  # fmt: skip
    arguments = x, weight, bias, eps, residual, target, keep_y, centred
    operation = "layer_norm" if centred else "rms_norm"
    y, quantized, rstd, total, mean = run_twin("norm.forward", x, arguments, operation, _refused(x))
    y, total = (None if tensor is None else tensor.contiguous() for tensor in (y, total))
    return [y, None if quantized is None else laid_out(quantized), rstd, total, mean]


def _forward_shape(
    x: Tensor, _weight: Tensor | None, _bias: Tensor | None, _eps: float, residual: Tensor | None,
    target: QuantSpec | None, keep_y: bool, centred: bool,
) -> list[Tensor | Quantized | None]:  # fmt: skip
    (rows, cols), device = x.shape, x.device
    quantized = None if target is None else empty(target, rows, cols, device)
    y, total = (x.new_empty(x.shape) if is_made else None for is_made in (keep_y, residual is not None))
    rstd, mean = (x.new_empty(rows, dtype=torch.float32) if is_made else None for is_made in (True, centred))
    return [y, quantized, rstd, total, mean]


def _backward(
    dy: Tensor, x: Tensor | Quantized, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor,
    residual_grad: Tensor | None,
) -> Sequence[Tensor | None]:  # fmt: skip
    kept = x if isinstance(x, Tensor) else laid_out(x)
    arguments = dy, kept, weight, bias, mean, rstd, residual_grad
    operation = "rms_norm_backward" if mean is None else "layer_norm_backward"
    dx, *sums = run_twin("norm.backward", dy, arguments, operation, _refused(dy))
    return [dx.contiguous(), *sums]


def _backward_shape(
    dy: Tensor, x: Tensor | Quantized, weight: Tensor | None, bias: Tensor | None, *_: object
) -> Sequence[Tensor | None]:
    sums = (None if parameter is None else parameter.new_empty(parameter.shape) for parameter in (weight, bias))
    return [(x if isinstance(x, Tensor) else dy).new_empty(dy.shape), *sums]


define_packed("norm", _forward, _forward_shape)
define_packed("norm_backward", _backward, _backward_shape)
