"""The activation contract: the activation of an MLP, fused with quantisation for the adjacent GEMMs.

    h = f(gate) * up       gated
    h = f(gate)            otherwise         f: silu, gelu (with erf), gelu_tanh, relu2 (the squared ReLU)

M: tokens. F: hidden width. D (M, N): the gradient, [d gate | d up] concatenated (N = 2 F) or d gate alone (N = F).
Arithmetic is FP32. h and D are rounded once, into codes, and never stored in high precision, so backward recomputes h
from gate and up. These may be saved as codes as well: forward quantises them in the same pass, and backward gives the
same result for codes as for a tensor of the dequantised values. `activate_plain` and `activation_backward_plain` are
for layers that read h and D in high precision.

All are custom operators: Triton on a GPU; `reference.py`, the definition, elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.activation import reference
from octavo.kernels.quant_spec import QuantSpec, empty, empty_scale, laid_out
from octavo.kernels.runtime.dispatch import implementation, run_kernel, runs_triton
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Quantized

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")

INPUTS = QuantSpec("e4m3", "1x128", "power_of_two")
"""Quantisation of gate and up if saved as codes; each tile can be read independently."""


class ActivationGradients(NamedTuple):
    """Operands of the backward GEMMs; None if not requested."""

    rows: Quantized | None
    """D, codes (M, N)."""
    columns: Quantized | None
    """D^T, codes (N, M)."""
    hidden: Quantized | None
    """h^T, codes (F, M)."""


class Activated(NamedTuple):
    """Results of the forward."""

    hidden: Quantized
    """h, codes (M, F)."""
    inputs: tuple[Quantized, ...]
    """Codes of gate, and of up if there is one, if requested."""
    second_scale: Tensor | None
    """FP32 (M, 1), scales of a second set of codes of h by row, if requested: backward makes its codes from gate, up
    and these (`Factors.hidden`)."""


class Targets(NamedTuple):
    """Quantisation of backward's results, None to skip one. Granularities of D^T and h^T refer to the transpose."""

    rows: QuantSpec | None = None
    """For D * `Factors.rows`."""
    columns: QuantSpec | None = None
    """For (D * `Factors.columns`)^T."""
    hidden: QuantSpec | None = None
    """For h^T."""


class Factors(NamedTuple):
    """FP32 scales applied in backward."""

    rows: Tensor | None = None
    """(1, N), scales of a folded weight."""
    columns: Tensor | None = None
    """(M, 1), scales of a folded input."""
    hidden: Tensor | None = None
    """(M, 1), powers of two: scales of the forward codes, to reproduce those codes. h^T then has the transposed forward
    codes and scale (1, M), and its target must be `column`. If gate and up are codes, h is approximate, and saturates
    where the forward value was at the end of the format's range."""


def activate(
    kind: str,
    gate: Tensor,
    up: Tensor | None,
    target: QuantSpec,
    *,
    keeps_inputs: bool = False,
    second: QuantSpec | None = None,
) -> Activated:
    """Return the codes of h (M, F), and what backward reads, from one read.

    Codes are contiguous; scales have the layout of `quant_spec.empty_scale`.

    Args:
        kind: one of `KINDS`.
        gate: (M, F), BF16, FP16 or FP32; rows need not be adjacent in memory.
        up: as gate, or None.
        keeps_inputs: also quantise gate and up to `INPUTS`.
        second: target of a second set of codes of h by row, of which the scales are returned.

    Raises:
        ConfigError: unknown kind, mismatched shapes, or stochastic rounding.
    """
    _check(kind, gate=gate, up=up)
    _check_rounding(target, second)
    hidden, *inputs, scale = _activation(kind, gate, up, target, INPUTS if keeps_inputs else None, second)
    return Activated(hidden, tuple(inputs), scale)


def _check(kind: str, gate: Tensor, **others: Tensor | None) -> None:
    if kind not in KINDS:
        raise ConfigError(f"unknown activation '{kind}'.{did_you_mean(kind, KINDS)} Activations: {', '.join(KINDS)}.")
    if gate.dim() != 2:
        raise ConfigError(
            f"gate must be a matrix (M, F), got shape {tuple(gate.shape)}: flatten its leading dimensions."
        )
    for name, other in others.items():
        if other is not None and other.shape != gate.shape:
            raise ConfigError(f"{name} has shape {tuple(other.shape)}, gate {tuple(gate.shape)}: shapes must be equal.")


def _check_codes(name: str, x: Tensor | Quantized) -> Tensor:
    """Return the tensor, or the codes after checking their format and granularity."""
    if isinstance(x, Tensor):
        return x
    if (x.codes.dtype, x.granularity) != (INPUTS.fmt.dtype, INPUTS.tile):
        raise ConfigError(
            f"{name} has codes of {x.codes.dtype} with {x.granularity.name} scales: the backward reads "
            f"{INPUTS.fmt.dtype} with {INPUTS.granularity} scales, as returned by `activate`."
        )
    return x.codes


def _check_rounding(*targets: QuantSpec | None) -> None:
    if any(target.rounding != "nearest" for target in filter(None, targets)):
        raise ConfigError("a fused activation rounds to nearest: quantise the result of `activation_backward_plain`.")


def _check_factors(name: str, factors: Tensor | None, shape: tuple[int, int]) -> None:
    if factors is not None and (factors.shape != shape or factors.dtype != torch.float32):
        raise ConfigError(f"{name} must be FP32 {shape}, got {factors.dtype} {tuple(factors.shape)}.")


def _refused(gate: Tensor, up: object, **targets: QuantSpec | None) -> str | None:
    if not runs_triton(gate):
        return None
    reason: str | None = implementation("triton", "activation").unsupported_reason(
        gate.shape[1], up is not None, **targets
    )
    return reason


def _is_in_graph(gate: Tensor, up: object, **targets: QuantSpec | None) -> bool:
    if not runs_triton(gate) or _refused(gate, up, **targets):
        return False
    return not implementation("triton", "activation").limits_registers(*targets.values())


def _kept(gate: Tensor, up: Tensor | None, inputs: QuantSpec | None) -> list[QuantSpec]:
    return [inputs for x in (gate, up) if inputs is not None and x is not None]


def _activation_fake(
    _kind: str, gate: Tensor, up: Tensor | None, target: QuantSpec, inputs: QuantSpec | None, second: QuantSpec | None
) -> list[Any]:
    made = [empty(spec, gate.shape[0], gate.shape[1], gate.device) for spec in (target, *_kept(gate, up, inputs))]
    return [*made, second and empty_scale(second, gate.shape[0], gate.shape[1], gate.device)]


@operation(
    reference=reference.activate,
    unsupported=lambda _kind, gate, up, target, *_: _refused(gate, up, hidden=target),
    ledger=lambda kind, *_: f"activation {kind}",
    fake=_activation_fake,
    results=lambda _kind, gate, up, target, inputs, second: [target, *_kept(gate, up, inputs), second is not None],
    in_graph=lambda _kind, gate, up, target, *_: _is_in_graph(gate, up, hidden=target),
    tags=[torch.Tag.needs_fixed_stride_order],
)
def _activation(
    kind: str, gate: Tensor, up: Tensor | None, target: QuantSpec, inputs: QuantSpec | None, second: QuantSpec | None
) -> Sequence[Any]:
    """Return h, gate and up if `inputs`, and the scales of `second`, None without it."""


def _backward_fake(
    _kind: str, dh: Tensor, _gate: object, up: object, targets: Targets, _factors: Factors
) -> ActivationGradients:
    m, f = dh.shape
    n = f if up is None else 2 * f
    shapes = (m, n), (n, m), (f, m)
    made = (target and empty(target, *shape, dh.device) for target, shape in zip(targets, shapes, strict=True))
    return ActivationGradients(*made)


@operation(
    fake=_backward_fake,
    results=lambda *arguments: arguments[4],
    in_graph=lambda _kind, dh, _gate, up, targets, _factors: _is_in_graph(dh, up, **targets._asdict()),
    tags=[torch.Tag.needs_fixed_stride_order],
)
def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    targets: Targets,
    factors: Factors = Factors(),  # noqa: B008 - immutable
) -> ActivationGradients:
    """Return D, D^T and h^T, quantised; a result without a target is skipped.

    Args:
        kind: one of `KINDS`.
        dh: (M, F), gradient of h, BF16, FP16 or FP32.
        gate: (M, F), as in forward, or its codes from `activate`.
        up: as gate, or None.

    Raises:
        ConfigError: unknown kind, mismatched shapes, stochastic rounding, `factors.hidden` with a granularity other
            than `column`, only one of gate and up as codes, or codes not quantised to `INPUTS`.
    """
    gate_values, up_values = _check_codes("gate", gate), None if up is None else _check_codes("up", up)
    _check(kind, gate=gate_values, dh=dh, up=up_values)
    if up is not None and isinstance(gate, Tensor) != isinstance(up, Tensor):
        raise ConfigError("gate and up must both be tensors or both be codes: got one of each.")
    for name, x in (("gate", gate), ("up", up)):
        if isinstance(x, Quantized):
            _check_factors(f"the scale of {name}", x.scale, INPUTS.tile.scale_shape(*dh.shape))
    _check_rounding(*targets)
    (m, f), hidden = dh.shape, targets.hidden
    shapes = (1, f if up is None else 2 * f), (m, 1), (m, 1)
    for name, factor, shape in zip(Factors._fields, factors, shapes, strict=True):
        _check_factors(f"factors.{name}", factor, shape)
    if factors.hidden is not None and (hidden is None or hidden.granularity != "column"):
        raise ConfigError(
            f"factors.hidden holds one scale per token, but targets.hidden is '{hidden}': the transposed forward codes "
            "have granularity 'column'. Pass a 'column' target, or omit factors.hidden."
        )
    if isinstance(gate, Quantized):  # saved and restored scales may have strides that kernels do not take
        gate, up = laid_out(gate), laid_out(up) if isinstance(up, Quantized) else None
    arguments, refused = (kind, dh, gate, up, targets, factors), _refused(dh, up, **targets._asdict())
    label = f"activation_backward {kind}"
    return ActivationGradients(*run_kernel("activation.activation_backward", dh, arguments, label, refused))


@operation(fake=lambda _kind, gate, _up: gate.new_empty(gate.shape), tags=[torch.Tag.needs_fixed_stride_order])
def activate_plain(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """Return h (M, F), contiguous, in the dtype of gate, for a layer that reads it in that dtype.

    Raises:
        ConfigError: unknown kind, or mismatched shapes.
    """
    _check(kind, gate=gate, up=up)
    arguments, label = (kind, gate, up), f"activation {kind}"
    made: Tensor = run_kernel("activation.activate_plain", gate, arguments, label, _refused(gate, up))
    return made


def _plain_fake(_kind: str, dh: Tensor, _gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return dh.new_empty(dh.shape), None if up is None else dh.new_empty(dh.shape)


@operation(
    fake=_plain_fake,
    results=lambda _kind, _dh, _gate, up: (True, up is not None),
    tags=[torch.Tag.needs_fixed_stride_order],
)
def activation_backward_plain(kind: str, dh: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return d gate and d up (M, F), contiguous, in the dtype of dh, for recipes without a fused kernel.

    Raises:
        ConfigError: unknown kind, or mismatched shapes.
    """
    _check(kind, dh=dh, gate=gate, up=up)
    label, refused = f"activation_backward_plain {kind}", _refused(gate, up)
    d_gate, d_up = run_kernel("activation.activation_backward_plain", gate, (kind, dh, gate, up), label, refused)
    return d_gate.contiguous(), None if d_up is None else d_up.contiguous()
