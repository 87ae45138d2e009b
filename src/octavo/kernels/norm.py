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

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.dispatch import launches_on, uses_triton
from octavo.kernels.operator import define, is_direct
from octavo.kernels.quant_spec import QuantSpec, empty, laid_out, parse_spec
from octavo.kernels.reference import norm as reference
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


def refuses(target: QuantSpec) -> str | None:
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
        UnsupportedError: `refuses(target)`: normalise without it, and hand y to `kernels.quantize`.
    """
    _check(x, target, weight=weight, residual=residual)
    run = _rms_norm if is_direct(x) else torch.ops.octavo.rms_norm
    y, codes, scale, rstd, total = run(x, weight, eps, residual, str(target or ""), keep_y)
    return Normed(
        y if keep_y else None,
        None if target is None else Quantized(codes, scale, target.tile),
        rstd,
        None if residual is None else total,
    )


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
    run = _layer_norm if is_direct(x) else torch.ops.octavo.layer_norm
    y, codes, scale, rstd, total, mean = run(x, weight, bias, eps, residual, str(target or ""), keep_y)
    return Normed(
        y if keep_y else None,
        None if target is None else Quantized(codes, scale, target.tile),
        rstd,
        None if residual is None else total,
        mean,
    )


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
    values, scale = _kept(x)
    _check(values, None, dy=dy, weight=weight, residual_grad=residual_grad)
    run = _rms_norm_backward if is_direct(dy) else torch.ops.octavo.rms_norm_backward
    dx, dweight = run(dy, values, weight, rstd, residual_grad, scale)
    return dx, None if weight is None else dweight


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
    values, scale = _kept(x)
    _check(values, None, dy=dy, weight=weight, bias=bias, residual_grad=residual_grad)
    run = _backward if is_direct(dy) else torch.ops.octavo.layer_norm_backward
    dx, dweight, dbias = run(dy, values, weight, bias, mean, rstd, residual_grad, scale)
    return dx, None if weight is None else dweight, None if bias is None else dbias


def _kept(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """Return what was normalised as operators take it: values, or codes and their scale."""
    if isinstance(x, Tensor):
        return x, None
    if x.granularity != KEPT.tile:
        raise UnsupportedError(f"a norm's input is kept as '{KEPT}', and these codes are '{x.granularity.name}'.")
    return x.codes, x.scale


def _check(x: Tensor, target: QuantSpec | None, **others: Tensor | None) -> None:
    if x.dim() != 2:
        raise ConfigError(f"a norm takes a matrix (M, D), got shape {tuple(x.shape)}: flatten the leading dimensions.")
    for name, other in others.items():
        wanted = x.shape[1:] if name in ("weight", "bias") else x.shape
        if other is not None and other.shape != wanted:
            raise ConfigError(f"{name} has shape {tuple(other.shape)}, but x {tuple(x.shape)} wants {tuple(wanted)}.")
    if target is not None and (reason := refuses(target)):
        raise UnsupportedError(f"a norm cannot quantise to '{target}': {reason}. Quantise y after it, or change one.")


def _runs_triton(x: Tensor, operation: str) -> bool:
    cols = x.shape[1]
    refused = f"rows of {cols} elements do not fit a program, {LONGEST_ROW} do" if cols > LONGEST_ROW else None
    return x.numel() > 0 and uses_triton(x, operation, refused)


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, target: str, keep_y: bool
) -> tuple[Tensor, ...]:
    return _forward(x, weight, None, eps, residual, target, keep_y, centred=False)[:-1]


def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    target: str,
    keep_y: bool,
) -> tuple[Tensor, ...]:
    return _forward(x, weight, bias, eps, residual, target, keep_y, centred=True)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    target: str,
    keep_y: bool,
    centred: bool,
) -> tuple[Tensor, ...]:
    goal = parse_spec(target)
    if _runs_triton(x, "layer_norm" if centred else "rms_norm"):
        from octavo.kernels.triton import norm as fused

        with launches_on(x.device):
            return _flat(*fused.forward(x, weight, bias, eps, residual, goal, keep_y, centred), like=x)
    return _flat(*reference.forward(x, weight, bias, eps, residual, goal, keep_y, centred), like=x)


def _flat(
    y: Tensor | None,
    quantized: Quantized | None,
    rstd: Tensor,
    total: Tensor | None,
    mean: Tensor | None,
    *,
    like: Tensor,
) -> tuple[Tensor, ...]:
    """Return all of it contiguous, but scales as GEMMs read them; an empty tensor for what was not made."""
    codes, scale = (None, None) if quantized is None else laid_out(quantized)[:2]
    y, total = (None if tensor is None else tensor.contiguous() for tensor in (y, total))
    made = (y, codes, scale, rstd, total, mean)
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in made)


def _rms_norm_shape(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, target: str, keep_y: bool
) -> tuple[Tensor, ...]:
    return _layer_norm_shape(x, weight, None, eps, residual, target, keep_y)[:-1]


def _layer_norm_shape(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    target: str,
    keep_y: bool,
) -> tuple[Tensor, ...]:
    goal = parse_spec(target)
    statistics = [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2)]
    return _flat(
        x.new_empty(x.shape) if keep_y else None,
        None if goal is None else empty(goal, x.shape[0], x.shape[1], x.device),
        statistics[0],
        None if residual is None else x.new_empty(x.shape),
        statistics[1],
        like=x,
    )


def _rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return _backward(dy, x, weight, None, None, rstd, residual_grad, scale)[:-1]


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = x if scale is None else laid_out(Quantized(x, scale, KEPT.tile))
    if _runs_triton(x, "rms_norm_backward" if mean is None else "layer_norm_backward"):
        from octavo.kernels.triton import norm as fused

        with launches_on(x.device):
            dx, dweight, dbias = fused.backward(dy, kept, weight, bias, mean, rstd, residual_grad)
    else:
        dx, dweight, dbias = reference.backward(dy, kept, weight, bias, mean, rstd, residual_grad)
    return (
        dx.contiguous(),
        x.new_empty(0) if dweight is None else dweight,
        x.new_empty(0) if dbias is None else dbias,
    )


def _rms_norm_backward_shape(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return _backward_shape(dy, x, weight, None, None, rstd, residual_grad, scale)[:-1]


def _backward_shape(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = [x.new_empty(0) if p is None else p.new_empty(p.shape) for p in (weight, bias)]
    return (x if scale is None else dy).new_empty(x.shape), sums[0], sums[1]


define(
    "rms_norm(Tensor x, Tensor? weight, float eps, Tensor? residual, str target, bool keep_y) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rms_norm,
    _rms_norm_shape,
)
define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual_grad, Tensor? scale=None) "
    "-> (Tensor, Tensor)",
    _rms_norm_backward,
    _rms_norm_backward_shape,
)
define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual, str target, bool keep_y) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer_norm,
    _layer_norm_shape,
)
define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "Tensor? residual_grad, Tensor? scale=None) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_shape,
)
