"""The activation contract: the middle of an MLP, straight into the codes that the GEMMs around it read.

    h = f(gate) * up       gated
    h = f(gate)            otherwise         f: silu, gelu (with erf), gelu_tanh, relu2 (the squared ReLU)

M: tokens. F: hidden width. D (M, N): the gradient, [d gate | d up] side by side (N = 2 F) or d gate alone (N = F).
All is computed in FP32 from the inputs' dtype; h and D are rounded once, into codes, and never written otherwise. So
the backward makes h again from gate and up instead of keeping it. Those two may be kept as codes too: the forward makes
them from the same read, and the backward computes from codes what it would from a tensor of their values.

Everything is a custom operator: Triton on a GPU, `reference/activation.py`, which is the definition, elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.dispatch import launches_on, uses_triton, why_not
from octavo.kernels.operator import define, flat, is_direct
from octavo.kernels.quant_spec import QuantSpec, empty, laid_out, parse_spec
from octavo.kernels.reference import activation as reference
from octavo.numerics import Quantized

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")

INPUTS = QuantSpec("e4m3", "1x128", "power_of_two")
"""What gate and up are kept in, where they are kept as codes: whoever reads a tile needs nothing of another one."""


class ActivationGradients(NamedTuple):
    """What the backward GEMMs read. None where it was not asked for."""

    rows: Quantized | None
    """D, codes (M, N)."""
    columns: Quantized | None
    """D^T, codes (N, M)."""
    hidden: Quantized | None
    """h^T, codes (F, M)."""


def activation(kind: str, gate: Tensor, up: Tensor | None, target: QuantSpec) -> Quantized:
    """Return the codes of h (M, F), contiguous.

    Args:
        kind: one of `KINDS`.
        gate: (M, F), BF16, FP16 or FP32; may be a view whose rows lie apart.
        up: as gate, or None.

    Raises:
        ConfigError: the kind is unknown, the shapes differ, or the rounding is stochastic.
    """
    _check(kind, gate=gate, up=up)
    _check_rounding(target)
    run = _activation if is_direct(gate) else torch.ops.octavo.activation
    codes, scale = run(gate, up, kind, str(target))
    return Quantized(codes, scale, target.tile)


def activation_and_inputs(
    kind: str, gate: Tensor, up: Tensor | None, target: QuantSpec
) -> tuple[Quantized, tuple[Quantized, ...]]:
    """Return the codes of h, as `activation` does, and (gate,) or (gate, up) quantised to `INPUTS`, from one read.

    Args and errors are those of `activation`. Codes are contiguous; scales lie as `target.empty_scale` says.
    """
    _check(kind, gate=gate, up=up)
    _check_rounding(target)
    run = _activation_and_inputs if is_direct(gate) else torch.ops.octavo.activation_and_inputs
    codes, scale, *inputs = run(gate, up, kind, str(target))
    pairs = zip(inputs[::2], inputs[1::2], strict=True)
    return Quantized(codes, scale, target.tile), tuple(Quantized(*pair, INPUTS.tile) for pair in pairs)


def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    *,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    hidden: QuantSpec | None,
    hidden_scale: Tensor | None = None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> ActivationGradients:
    """Return D quantised as it lies and transposed, and h^T. What has no target is not made.

    Args:
        kind: one of `KINDS`.
        dh: (M, F), the gradient of h, of any dtype that gate may have in the forward.
        gate: (M, F), as in the forward, or its codes, of `activation_and_inputs`.
        up: as gate, or None.
        rows: how to quantise D * row_fold.
        columns: how to quantise (D * column_fold)^T; its granularity is named as the transpose has it.
        hidden: how to quantise h^T, likewise.
        hidden_scale: FP32 (M, 1), powers of two: the scales of the forward's codes, if those are wanted again. Then the
            codes of h^T are the forward's transposed, its scale is (1, M), and `hidden` must be `column`. With gate
            and up as codes h is a little off, and saturates where it was at the end of the format's range.
        row_fold: FP32 (1, N), the scales of a folded weight.
        column_fold: FP32 (M, 1), the scales of a folded input.

    Raises:
        ConfigError: the kind is unknown, shapes do not fit, a rounding is stochastic, `hidden_scale` comes with another
            granularity, or the codes of gate and up are not of `INPUTS`.
    """
    gate, gate_scale = _split("gate", gate)
    up, up_scale = (None, None) if up is None else _split("up", up)
    _check(kind, gate=gate, dh=dh, up=up)
    _check_scales(gate, gate_scale, up, up_scale)
    _check_rounding(rows, columns, hidden)
    m, n = gate.shape[0], gate.shape[1] * (1 if up is None else 2)
    _check_factors("hidden_scale", hidden_scale, (m, 1))
    _check_factors("row_fold", row_fold, (1, n))
    _check_factors("column_fold", column_fold, (m, 1))
    if hidden_scale is not None and (
        hidden is None or (hidden.granularity, hidden.scaling) != ("column", "power_of_two")
    ):
        raise ConfigError(
            f"hidden_scale holds one power of two a token, but hidden is '{hidden}': the forward's codes transposed "
            "have the granularity 'column' and power-of-two scales. Say so, or leave hidden_scale out."
        )
    run = _activation_backward if is_direct(gate) else torch.ops.octavo.activation_backward
    made = run(
        dh, gate, gate_scale, up, up_scale, kind, str(rows or ""), str(columns or ""), str(hidden or ""),
        hidden_scale, row_fold, column_fold,
    )  # fmt: skip
    pairs = [(made[i], made[i + 1]) for i in (0, 2, 4)]
    targets = (rows, columns, hidden)
    return ActivationGradients(
        *(
            None if target is None else Quantized(*pair, target.tile)
            for target, pair in zip(targets, pairs, strict=True)
        )
    )


def activation_backward_plain(kind: str, dh: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return d gate and d up (M, F), contiguous, in the dtype of dh, for recipes that no fused kernel takes.

    Raises:
        ConfigError: the kind is unknown, or the shapes differ.
    """
    _check(kind, dh=dh, gate=gate, up=up)
    run = _activation_backward_plain if is_direct(gate) else torch.ops.octavo.activation_backward_plain
    d_gate, d_up = run(dh, gate, up, kind)
    return d_gate, None if up is None else d_up


def _check(kind: str, gate: Tensor, **others: Tensor | None) -> None:
    if kind not in KINDS:
        raise ConfigError(f"unknown activation '{kind}'.{did_you_mean(kind, KINDS)} Activations: {', '.join(KINDS)}.")
    if gate.dim() != 2:
        raise ConfigError(
            f"gate must be a matrix (M, F), got shape {tuple(gate.shape)}: flatten its leading dimensions."
        )
    for name, other in others.items():
        if other is not None and other.shape != gate.shape:
            raise ConfigError(
                f"{name} has shape {tuple(other.shape)}, gate {tuple(gate.shape)}: they must be the same."
            )


def _split(name: str, x: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """Return a tensor and None, or codes and their scale."""
    if isinstance(x, Tensor):
        return x, None
    if (x.codes.dtype, x.granularity) != (INPUTS.fmt.dtype, INPUTS.tile):
        raise ConfigError(
            f"{name} has codes of {x.codes.dtype} with a scale {x.granularity.name}: the backward reads "
            f"{INPUTS.fmt.dtype} with a scale {INPUTS.granularity}, as `activation_and_inputs` makes them."
        )
    return x.codes, x.scale


def _check_scales(gate: Tensor, gate_scale: Tensor | None, up: Tensor | None, up_scale: Tensor | None) -> None:
    if up is not None and (gate_scale is None) != (up_scale is None):
        raise ConfigError("gate and up must both be tensors or both be codes: here they are one of each.")
    for name, scale in (("gate", gate_scale), ("up", up_scale)):
        _check_factors(f"the scale of {name}", scale, INPUTS.tile.scale_shape(*gate.shape))


def _check_rounding(*targets: QuantSpec | None) -> None:
    if any(target.rounding != "nearest" for target in filter(None, targets)):
        raise ConfigError("a fused activation rounds to nearest: quantise what `activation_backward_plain` returns.")


def _check_factors(name: str, factors: Tensor | None, shape: tuple[int, int]) -> None:
    if factors is not None and (factors.shape != shape or factors.dtype != torch.float32):
        raise ConfigError(f"{name} must be FP32 {shape}, it is {factors.dtype} {tuple(factors.shape)}.")


def _runs_triton(gate: Tensor, up: Tensor | None, operation: str, **targets: QuantSpec | None) -> bool:
    if gate.numel() == 0 or not gate.is_cuda:
        return False
    refused = None
    if why_not(gate.device) is None:
        from octavo.kernels.triton import activation as fused

        refused = fused.refuses(gate.shape[1], up is not None, **targets)
    return uses_triton(gate, operation, refused)


def _activation(gate: Tensor, up: Tensor | None, kind: str, target: str) -> tuple[Tensor, Tensor]:
    goal = parse_spec(target)
    assert goal is not None
    if _runs_triton(gate, up, f"activation {kind}", hidden=goal):
        from octavo.kernels.triton import activation as fused

        with launches_on(gate.device):
            return fused.activation(kind, gate, up, goal)[:2]
    return reference.activation(kind, gate, up, goal)[:2]


def _in_graph(gate: Tensor, up: Tensor | None, kind: str, target: str) -> bool:
    if not gate.is_cuda or why_not(gate.device) is not None:
        return False
    from octavo.kernels.triton import activation as fused

    hidden = parse_spec(target)
    return fused.refuses(gate.shape[1], up is not None, hidden=hidden) is None and not fused.limits_registers(hidden)


def _activation_shape(gate: Tensor, up: Tensor | None, kind: str, target: str) -> tuple[Tensor, Tensor]:
    goal = parse_spec(target)
    assert goal is not None
    rows, cols = gate.shape
    return empty(goal, rows, cols, gate.device)[:2]


def _activation_and_inputs(gate: Tensor, up: Tensor | None, kind: str, target: str) -> list[Tensor]:
    goal = parse_spec(target)
    assert goal is not None
    if _runs_triton(gate, up, f"activation_and_inputs {kind}", hidden=goal):
        from octavo.kernels.triton import activation as fused

        with launches_on(gate.device):
            made = fused.activation_and_inputs(kind, gate, up, goal, INPUTS)
    else:
        made = reference.activation_and_inputs(kind, gate, up, goal, INPUTS)
    return [tensor for quantized in made for tensor in quantized[:2]]


def _activation_and_inputs_shape(gate: Tensor, up: Tensor | None, kind: str, target: str) -> list[Tensor]:
    goal = parse_spec(target)
    assert goal is not None
    goals = goal, *(INPUTS for x in (gate, up) if x is not None)
    rows, cols = gate.shape
    return [tensor for each in goals for tensor in empty(each, rows, cols, gate.device)[:2]]


def _as_given(codes: Tensor, scale: Tensor | None) -> Tensor | Quantized:
    """Undo `_split`. A scale that was saved and brought back may lie otherwise than kernels read it."""
    return codes if scale is None else laid_out(Quantized(codes, scale, INPUTS.tile))


def _activation_backward(
    dh: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor | None, up_scale: Tensor | None, kind: str,
    rows: str, columns: str, hidden: str,
    hidden_scale: Tensor | None, row_fold: Tensor | None, column_fold: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    inputs = _as_given(gate, gate_scale), None if up is None else _as_given(up, up_scale)
    targets = parse_spec(rows), parse_spec(columns), parse_spec(hidden)
    named = dict(zip(("rows", "columns", "hidden"), targets, strict=True))
    if _runs_triton(gate, up, f"activation_backward {kind}", **named):
        from octavo.kernels.triton import activation as fused

        with launches_on(gate.device):
            made = fused.activation_backward(kind, dh, *inputs, *targets, hidden_scale, row_fold, column_fold)
    else:
        made = reference.activation_backward(kind, dh, *inputs, *targets, hidden_scale, row_fold, column_fold)
    return list(flat(*made, like=dh))


def _backward_in_graph(
    dh: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor | None, up_scale: Tensor | None, kind: str,
    rows: str, columns: str, hidden: str, *_: Tensor | None,
) -> bool:  # fmt: skip
    if not gate.is_cuda or why_not(gate.device) is not None:
        return False
    from octavo.kernels.triton import activation as fused

    targets = parse_spec(rows), parse_spec(columns), parse_spec(hidden)
    named = dict(zip(("rows", "columns", "hidden"), targets, strict=True))
    return fused.refuses(gate.shape[1], up is not None, **named) is None and not fused.limits_registers(*targets)


def _activation_backward_shape(
    dh: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor | None, up_scale: Tensor | None, kind: str,
    rows: str, columns: str, hidden: str,
    hidden_scale: Tensor | None, row_fold: Tensor | None, column_fold: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    (m, f), device = gate.shape, gate.device
    n = f if up is None else 2 * f
    row, column, h_t = parse_spec(rows), parse_spec(columns), parse_spec(hidden)
    made = row and empty(row, m, n, device), column and empty(column, n, m, device), h_t and empty(h_t, f, m, device)
    return list(flat(*made, like=dh))


def _activation_backward_plain(dh: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    if _runs_triton(gate, up, f"activation_backward_plain {kind}"):
        from octavo.kernels.triton import activation as fused

        with launches_on(gate.device):
            d_gate, d_up = fused.activation_backward_plain(kind, dh, gate, up)
    else:
        d_gate, d_up = reference.activation_backward_plain(kind, dh, gate, up)
    return d_gate.contiguous(), dh.new_empty(0) if d_up is None else d_up.contiguous()


def _activation_backward_plain_shape(dh: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    return dh.new_empty(dh.shape), dh.new_empty(0 if up is None else dh.shape)


define(
    "activation(Tensor gate, Tensor? up, str kind, str target) -> (Tensor, Tensor)",
    _activation,
    _activation_shape,
    torch.Tag.needs_fixed_stride_order,
    in_graph=_in_graph,
)
define(
    "activation_and_inputs(Tensor gate, Tensor? up, str kind, str target) -> Tensor[]",
    _activation_and_inputs,
    _activation_and_inputs_shape,
    torch.Tag.needs_fixed_stride_order,
    in_graph=_in_graph,
)
define(
    "activation_backward(Tensor dh, Tensor gate, Tensor? gate_scale, Tensor? up, Tensor? up_scale, str kind, "
    "str rows, str columns, str hidden, Tensor? hidden_scale, Tensor? row_fold, Tensor? column_fold) -> Tensor[]",
    _activation_backward,
    _activation_backward_shape,
    torch.Tag.needs_fixed_stride_order,
    in_graph=_backward_in_graph,
)
define(
    "activation_backward_plain(Tensor dh, Tensor gate, Tensor? up, str kind) -> (Tensor, Tensor)",
    _activation_backward_plain,
    _activation_backward_plain_shape,
    torch.Tag.needs_fixed_stride_order,
)
