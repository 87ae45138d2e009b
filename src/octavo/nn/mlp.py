"""The MLP of a transformer as one autograd function: two or three linear layers and the activation between them.

    gated   y = (f(x W_gate^T) * x W_up^T) W_down^T          plain   y = f(x W_up^T) W_down^T

The activation is computed in the pass that quantises it, and again in backward, in the pass that quantises its
gradients for the two GEMMs that read them. Saved for backward are x in FP8 and the inputs of the activation, the
outputs of gate and up; the hidden activation is never stored. These inputs are about half of what a Llama saves for
backward. They can be saved in FP8 too: y is then unchanged, bit for bit, and the gradients are those of inputs that
were rounded once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo._util.autograd import first_order
from octavo._util.compiler import enter_graph, opaque
from octavo.kernels import QuantSpec
from octavo.kernels.activation import INPUTS, Factors, Targets, activate, activation_backward
from octavo.kernels.runtime import host_state
from octavo.kernels.runtime.tape import Result, replay
from octavo.nn.attached_codes import InputCodes, renew
from octavo.nn.functional import (
    NO_CODES,
    InputSource,
    Quantizer,
    SavedInput,
    SavedWeights,
    check_operands,
    codes_for,
    dgrad,
    fprop,
    input_fold,
    input_source,
    read_gradient,
    read_input,
    read_weights,
    save_weights,
    unstack,
    weight_fold,
    wgrad,
)
from octavo.nn.needed_grads import needed_grads
from octavo.nn.weight_codes import WeightCodes
from octavo.numerics import Quantized
from octavo.recipes import LinearPlan, Precision, Recipe, Transposed, plan_by


def unsupported_reason(inner: Recipe, outer: Recipe) -> str | None:
    """Return why an MLP cannot be computed as one, or None. `inner`: of gate and up, `outer`: of down."""
    for recipe in (inner, outer):
        operands = [operand for _, *pair in recipe.gemms() for operand in pair]
        if len(operands) < 6:
            return f"recipe '{recipe.name}' leaves a GEMM in BF16"
        if any(operand.rounding != "nearest" for operand in operands):
            return f"recipe '{recipe.name}' rounds stochastically"
        if recipe.is_emulated:
            return f"recipe '{recipe.name}' is emulated: no kernel makes 1x32 scales while it computes"
        if recipe.has_stored_scales:
            return f"recipe '{recipe.name}' keeps scales from step to step, which belong to single layers"
    return None


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    kind: str,
    quantizers: tuple[Quantizer, Quantizer],
    prequantized: InputCodes | None = None,
    codes: tuple[WeightCodes | None, WeightCodes | None] = (None, None),
    activation_inputs: Precision = "bf16",
) -> Tensor:
    """Return the output (..., D) of an MLP without the bias of its last layer for x (..., D).

    Args:
        weights: gate and up, (F, D) each, or up alone; then down, (D, F).
        kind: activation, by its name in `kernels.activation`.
        quantizers: of gate and up, and of down, with the same dtype.
        prequantized: x as the GEMMs of gate and up read it, (M, D), if the kernel that computed x quantised it too.
        codes: the weights as fprop reads them, if known: the stack of gate and up, and down.
        activation_inputs: format of gate and up saved for backward: `bf16`, in `dtype`, unchanged, or `fp8`, E4M3 codes
            with a power-of-two scale per 128 columns of a token.
    """
    inner, outer = quantizers
    plan = inner.recipe.plan
    check_operands(x, weights[0])
    if torch.compiler.is_compiling():
        enter_graph(host_state.now.is_open_to_compilers)
    options = options_of(kind, (plan, outer.recipe.plan), inner.dtype, activation_inputs, inner.keeps_input)
    y_MD: Tensor = _MLP.apply(  # type: ignore[no-untyped-call]
        *input_source(x, plan, prequantized),
        *codes_for(weights[:-1], codes[0]),
        *codes_for(weights[-1:], codes[1]),
        inner.stats_buffer,
        outer.stats_buffer,
        options,
        *weights,
    )
    if prequantized is not None:
        renew(x)
    return y_MD.reshape(*x.shape[:-1], y_MD.shape[1])


def options_of(
    kind: str, plans: tuple[LinearPlan, LinearPlan], dtype: torch.dtype, inputs: Precision, keeps_input: bool
) -> tuple[Any, ...]:
    """Return the options of `_MLP`, constants of a call; inputs: format of gate and up saved for backward."""
    trains = torch.is_grad_enabled()
    return kind, plans[0].key, plans[1].key, dtype, inputs == "fp8" and trains, keeps_input, trains


_X, _W = len(InputSource._fields), len(NO_CODES)
_WEIGHTS = _X + 2 * _W + 3
"""Index of the first weight among the arguments of `_MLP.apply`: fields of `InputSource`, codes and scale of gate and
up, codes and scale of down, the stats buffers of both, options, *weights."""


UNKNOWN = (None,) * (_X + 2 * _W - 1)
"""Arguments between x and the buffers, where no codes of the input or the weights are known."""


@opaque
class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor | None:
        *tensors, options = arguments[:_WEIGHTS]  # see `_Linears`
        weights = arguments[_WEIGHTS:]
        *options, trains = options
        needed = ctx.needs_input_grad[0], any(ctx.needs_input_grad[_WEIGHTS:-1]), ctx.needs_input_grad[-1]
        needs = [trains and each for each in needed]  # see `_Linears`
        (y_MD,), *saved = replay(_forward, (*options, *needs), (*tensors, *weights))
        ctx.save_for_backward(*(tensor for group in saved for tensor in group))
        ctx.stats = tensors[-2:]
        sizes = tuple([len(group) for group in saved])
        rows, dtypes = tuple([w.shape[0] for w in weights]), tuple([w.dtype for w in weights])
        kind, inner, outer, dtype, keeps_codes, _ = options
        ctx.options = kind, inner, outer, dtype, keeps_codes, tensors[0].dtype, sizes, rows, dtypes
        ctx.set_materialize_grads(False)
        return y_MD

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        needs_x, needs_weights = needed_grads(ctx, _WEIGHTS)
        options = *ctx.options, needs_x, tuple(needs_weights)
        (dx,), dws = replay(_backward, options, (*ctx.stats, grad_outputs[0], *ctx.saved_tensors))
        return dx, *(None,) * (_WEIGHTS - 1), *dws


def _forward(options: tuple[Any, ...], *tensors: Any) -> Result:
    """Return the output, and what is saved: of x, the scale of h, gate and up, of their weights, and of down's."""
    kind, *keys, dtype, keeps_codes, keeps_input, needs_x, needs_inner, needs_down = options
    inner, outer = map(plan_by, keys)
    source, weights = InputSource(*tensors[:_X]), tensors[_WEIGHTS - 1 :]
    known, known_down = tensors[_X : _X + _W], tensors[_X + _W : _X + 2 * _W]
    stats, down_stats = tensors[_X + 2 * _W : _WEIGHTS - 1]
    needs_hidden = needs_x or needs_inner
    x, saved_x = read_input(source, inner, dtype, needs_inner, keeps_input=keeps_input)
    w = read_weights(weights[:-1], inner, known, needs_x)
    down = read_weights(weights[-1:], outer, known_down, needs_hidden or needs_down)
    assert w is not None and down is not None
    before = fprop([source.x], x, w, weights[:-1], inner, dtype, stats)
    hidden, inputs, scale = activated(kind, before, outer, keeps_codes, needs_down)
    saved_w = save_weights(w, weights[:-1], inner, known[0] is not None) if needs_x else SavedWeights()
    return (
        fprop(before, hidden, down, weights[-1:], outer, dtype, down_stats, kind),
        saved_x,
        (scale,),
        inputs,
        saved_w.tensors,
        save_weights(down, weights[-1:], outer, known_down[0] is not None).tensors,
    )


def _backward(options: tuple[Any, ...], *tensors: Any) -> Result:
    """Return the gradients of x and of the weights."""
    kind, *keys, dtype, keeps_codes, x_dtype, sizes, rows, dtypes, needs_x, needs_weights = options
    inner, outer = map(plan_by, keys)
    stats, down_stats, grad_output, *saved = tensors
    saved_x, (hidden_scale,), inputs, saved_w, saved_down = _split(saved, sizes)
    x, w, down = SavedInput(*saved_x), SavedWeights.of(saved_w, rows[:-1]), SavedWeights.of(saved_down, rows[-1:])
    *needs_inner, needs_down = needs_weights
    dy = [grad_output.to(dtype)]
    g, h = read_gradient(dy, hidden_scale, down, outer, needs_down)
    d_hidden = dgrad(dy, g, down, outer, dtype, down_stats)
    gradients = activation_backward(
        kind,
        d_hidden,
        *gate_and_up(inputs, keeps_codes),
        Targets(
            rows=inner.dy if needs_x else None,
            columns=inner.dy_t if any(needs_inner) else None,
            hidden=_hidden_target(outer) if needs_down else None,
        ),
        Factors(
            rows=weight_fold(w, inner) if needs_x else None,
            columns=input_fold(x.scale, inner) if any(needs_inner) else None,
            hidden=hidden_scale if needs_down and _scale_gives_codes(outer, keeps_codes) else None,
        ),
    )
    dx = None
    if needs_x:
        dx = dgrad((d_hidden, *inputs), gradients.rows, w, inner, dtype, stats, kind).to(x_dtype)
    dws: list[Tensor | None] = [None] * len(rows)
    if any(needs_inner):
        parts = unstack(wgrad(dy, gradients.columns, x, inner, dtype), rows[:-1], dtypes[:-1])
        dws[:-1] = [part if needed else None for part, needed in zip(parts, needs_inner, strict=True)]
    if needs_down:
        assert gradients.hidden is not None and h is not None
        is_folded = outer.x_back is Transposed.FOLDED
        hidden = kernels.without_scale(gradients.hidden) if is_folded else gradients.hidden
        dws[-1] = kernels.gemm(h, hidden, dtype, outer.accumulate[2]).to(dtypes[-1])
    return (dx,), dws


def _split(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return consecutive parts of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [tuple(tensors[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def activated(
    kind: str, before: Sequence[Tensor], outer: LinearPlan, keeps_codes: bool, needs_down: bool = True
) -> tuple[Quantized, Sequence[Tensor], Tensor]:
    """Return h as down's fprop reads it, and what backward reads.

    That is gate and up, as tensors or as codes and scales, and the scale of h's codes by row, which wgrad folds.

    Args:
        needs_down: whether down's wgrad will run, which may read a second set of codes.
    """
    assert outer.x is not None
    gate, up = before[0], before[1] if len(before) > 1 else None
    second = outer.x_second if needs_down else None
    result = activate(kind, gate, up, outer.x, keeps_inputs=keeps_codes, second=second)
    scale = result.hidden.scale if result.second_scale is None else result.second_scale
    inputs = [tensor for quantized in result.inputs for tensor in quantized[:2]] if keeps_codes else before
    return result.hidden, inputs, scale


def gate_and_up(inputs: Sequence[Tensor], as_codes: bool) -> tuple[Tensor | Quantized, Tensor | Quantized | None]:
    """Return gate, and up or None, from what `activated` returned for backward."""
    found: list[Tensor | Quantized] = list(inputs)
    if as_codes:
        found = [Quantized(*pair, INPUTS.tile) for pair in zip(inputs[::2], inputs[1::2], strict=True)]
    return found[0], found[1] if len(found) > 1 else None


def _hidden_target(outer: LinearPlan) -> QuantSpec:
    """Return how the hidden activation, transposed, is quantised for wgrad."""
    if outer.x_back is Transposed.QUANTIZED:
        return outer.x_t
    return outer.x_rows._replace(granularity=outer.x_rows.tile.transposed.name)


def _scale_gives_codes(outer: LinearPlan, keeps_codes: bool) -> bool:
    """Return whether backward quantises h by the scales of fprop, which are folded into dY: one per row.

    Not if 1 / scale is not the factor of fprop: the same scales are then found again from h. But h of rounded inputs
    would get other scales than those that are folded, so that it takes those of fprop in any case.
    """
    rows = outer.x_back is not Transposed.QUANTIZED
    return rows and outer.x_rows.granularity == "row" and (outer.x_rows.scaling != "float32" or keeps_codes)
