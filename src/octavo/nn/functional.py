"""Linear layers in FP8: three GEMMs in one autograd function, controlled by the recipe alone.

M: tokens, N: output features, K: input features.

    fprop   Y  = X W^T       dgrad   dX = dY W       wgrad   dW = dY^T X

Each of X, W and dY is quantised once, and read by two GEMMs. FP8 tensor cores need operands whose summed index is
contiguous, and scales are multiplied into the result, so a GEMM can apply a scale per row of an operand, not one per
column:

    X8 = X / sx   (M, K), sx per token       Y  = diag(sx) (X8 W8^T) diag(sw)
    W8 = W / sw   (N, K), sw per feature

Backward needs W8 and X8 transposed, so that their scales lie along the summed index. A *folded* recipe moves these
scales into the gradient before that is quantised:

    dX = dY W  = (dY diag(sw)) W8        G8 = quantise(dY * sw, a scale per token)
    dW = dY^T X = (diag(sx) dY)^T X8     H8 = quantise(dY^T * sx, a scale per feature)

With power-of-two scales this is exact, X and W are rounded once, and X8 is saved for backward: one byte per element.
Other recipes (a scale per tensor, per 128 elements) quantise dY once and read transposed codes with their scales.

Layers that read the same X are computed as one: X is quantised once, and W is the stack of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from octavo import kernels
from octavo._util.autograd import first_order, refuse_transforms
from octavo._util.compiler import enter_graph, opaque
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import ScaleRef
from octavo.kernels.product import product
from octavo.kernels.runtime import host_state
from octavo.kernels.runtime.tape import Result, replay
from octavo.nn import telemetry_ops
from octavo.nn.attached_codes import InputCodes, attached_input, attached_norm_source, is_output_of_attention, renew
from octavo.nn.first_call import AWAITS_CALL
from octavo.nn.fp8_weights import values
from octavo.nn.needed_grads import needed_grads
from octavo.nn.operands import REAL, check_dtypes, dtype_note, layer_of, note_dtype
from octavo.nn.weight_codes import (
    WeightCodes,
    codes_follow,
    has_fp8_weight,
    multiply,
    quantize_weights,
    quantize_weights_transposed,
)
from octavo.numerics import Quantized
from octavo.recipes import LinearPlan, QuantSpec, Recipe, StoredScale, Transposed, plan_by
from octavo.tensor import is_distributed

if TYPE_CHECKING:
    from octavo.nn.linear import LinearLayer


class Quantizer(NamedTuple):
    """Quantisation of the tensors of a layer, or of layers that share an input."""

    recipe: Recipe
    dtype: torch.dtype
    """Output dtype of every GEMM, and the dtype in which a GEMM in high precision computes."""
    scale_and_amax: Tensor | None = None
    """FP32 (2, 2), [scale, amax] of input and grad_output, if the recipe stores scales (`octavo.nn.scaling_state`).
    Without it every tensor is scaled by its own maximum, as in the first step of such a recipe."""
    stats_buffer: Tensor | None = None
    """FP32 (1 + 2 n, WIDTH), telemetry buffer of n layers (`octavo.nn.telemetry_ops`)."""
    keeps_input: bool = False
    """Save X itself for backward and quantise it again there, instead of saving its codes. X must have neither a stored
    scale nor stochastic rounding."""


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    recipe: Recipe | Quantizer,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T + b with the three GEMMs of `recipe`, in `dtype`.

    Args:
        x: (..., K), with any leading dimensions, of any size.
        weight_NK: (N, K), the master weight, any floating-point dtype; or an `FP8Tensor` of the recipe's format and
            granularity, whose codes are read directly.
        bias_N: (N,) or None; added in `dtype`.
        recipe: a recipe, or a `Quantizer` with further settings and the dtype.
        dtype: default the dtype of x. x is quantised in its own dtype.
    """
    quantizer = recipe if isinstance(recipe, Quantizer) else Quantizer(recipe, dtype or x.dtype)
    return linears(x, [weight_NK], [bias_N], quantizer)[0]


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    quantizer: Quantizer,
    prequantized: InputCodes | None = None,
    codes: WeightCodes | None = None,
) -> list[Tensor]:
    """Return x W_i^T + b_i for layers that share their input: x is quantised once, dgrad and wgrad are one GEMM each.

    Args:
        weights: (N_i, K) each. Scales are those of the stack (sum of N_i, K).
        prequantized: x as the GEMMs read it, (M, K), if the kernel that computed x quantised it too (`attached_input`).
        codes: the weights as fprop reads them, if known (`reuse_weight_codes`).

    Raises:
        ConfigError: an input or a weight that PyTorch refuses too (`octavo.nn.operands`).
    """
    check_operands(x, weights[0])
    plan, keeps_input = quantizer.recipe.plan, quantizer.keeps_input
    x_MK, *source = input_source(x, plan, prequantized)
    if torch.compiler.is_compiling():
        enter_graph(host_state.now.is_open_to_compilers)
        if plan.requantises_exactly and is_output_of_attention(x_MK):
            keeps_input = True  # attention saves it anyway
    update_amax = torch.is_grad_enabled()  # an evaluation leaves stored scales as they are
    options = plan.key, quantizer.dtype, keeps_input, update_amax
    buffers = quantizer.scale_and_amax, quantizer.stats_buffer
    known = NO_CODES if codes is None else codes_for(weights, codes)
    outputs: tuple[Tensor, ...] = _Linears.apply(  # type: ignore[no-untyped-call]
        x_MK, *source, *known, *buffers, options, *weights
    )
    if prequantized is not None:
        renew(x)
    ys: list[Tensor] = []
    for y_MN, bias in zip(outputs, biases, strict=True):
        y = y_MN.reshape(*x.shape[:-1], y_MN.shape[1])
        ys.append(y if bias is None else y + bias.to(y.dtype))
    return ys


def settings_of(layers: Sequence[LinearLayer], x: Tensor) -> tuple[Quantizer, InputCodes | None, WeightCodes | None]:
    """Return how layers that are computed together quantise, and the codes that exist: of x, and of their weights."""
    first, is_traced = layers[0], torch.compiler.is_compiling()
    recipe, slot = first.recipe, first.scaling_slot
    scales = None if slot is None else slot.scale_and_amax
    if slot is not None and first.scaling_state is not None and torch.is_grad_enabled():
        first.scaling_state.note_forward(slot, first)
    is_noted = is_traced or first.stats_slot is not None
    for layer in layers:
        is_noted = is_noted or AWAITS_CALL in vars(layer)
    stats = telemetry_ops.stats_buffer_of(layers) if is_noted else None
    quantizer = Quantizer(recipe, compute_dtype(x), scales, stats, first.keeps_input)
    # Codes are attributes of x, and most tensors have none.
    return quantizer, attached_input(x, recipe) if is_traced or vars(x) else None, first.weight_codes


class InputSource(NamedTuple):
    """An input as its layers get it: its values, and what other operations know of its codes."""

    x: Tensor
    """(M, K)."""
    codes: Tensor | None = None
    """(M, K), as fprop reads x, if the kernel that computed x quantised it too, or if x is the result of a norm."""
    scale: Tensor | None = None
    """Scale of `codes`."""
    second_codes: Tensor | None = None
    """(M, K), the second set of codes, if wgrad reads one and the kernel that computed x made it."""
    second_scale: Tensor | None = None
    """Scale of the second set; without its codes if backward makes them from `norm_input`."""
    norm_input: Tensor | None = None
    """(M, K), the input of the RMS norm that x is the result of: backward can requantise x from it."""
    norm_rstd: Tensor | None = None
    """FP32 (M,)."""
    norm_weight: Tensor | None = None
    """(K,)."""


class SavedInput(NamedTuple):
    """An input as it is saved for wgrad: as values, as codes, or as values and the scale of the codes in fprop.

    All fields are None if no weight needs a gradient.
    """

    values: Tensor | None = None
    """(M, K): the input, or the input of the RMS norm that it is the result of."""
    codes: Tensor | None = None
    """(M, K), those of fprop or of the second set; or (K, M), if wgrad quantises the transpose by itself."""
    scale: Tensor | None = None
    """Scale of `codes`; beside values, scale of the codes in fprop."""
    norm_rstd: Tensor | None = None
    norm_weight: Tensor | None = None


class SavedWeights(NamedTuple):
    """Weights (N_i, K) as they are saved for dgrad: as the codes of their stack, as values, or as values and scale."""

    codes: Tensor | None = None
    """(sum of N_i, K), those of fprop or of the second set; None: `weights` are saved."""
    scale: Tensor | None = None
    """Scale of the codes, unless dgrad quantises the transpose by itself."""
    weights: Sequence[Tensor] = ()
    """Not read if there are codes."""
    rows: tuple[int, ...] = ()
    """N_i."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors alone, for `save_for_backward`."""
        return self.codes, self.scale, *self.weights

    @classmethod
    def of(cls, tensors: Sequence[Any], rows: tuple[int, ...]) -> SavedWeights:
        """Undo `tensors`."""
        codes, scale, *weights = tensors
        return cls(codes, scale, weights, rows)

    def quantized(self, plan: LinearPlan) -> tuple[Quantized, ...]:
        """Return the weights as dgrad reads them, before the transpose: one stack, or one matrix per weight."""
        if self.codes is not None and self.scale is not None:
            return (Quantized(self.codes, self.scale, plan.w_rows.tile),)
        return quantize_weights(self.weights, plan.w_rows).matrices


NO_CODES = (None,) * 4
_X, _SAVED_X, _W = len(InputSource._fields), len(SavedInput._fields), len(NO_CODES)
_WEIGHTS = _X + _W + 3
"""Index of the first weight among the arguments of `_Linears.apply`: fields of `InputSource`, those of `codes_for`,
scale_and_amax, stats_buffer, options, *weights."""


UNKNOWN = (None,) * (_X + _W - 1)
"""Fields of `InputSource` but for x, and of `codes_for`, where no codes of the input or the weights are known."""


@opaque
class _Linears(torch.autograd.Function):
    """Y_i = X W_i^T. Saves what the required backward GEMMs read: X and W in FP8 wherever they are."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # Not one parameter per argument: Dynamo counts parameters, and drops ctx if there are more arguments.
        *tensors, options = arguments[:_WEIGHTS]
        weights = arguments[_WEIGHTS:]
        # What a parameter requires says nothing of the grad mode, which is off inside here: the last option.
        needed = options[-1] and ctx.needs_input_grad[0], options[-1] and any(ctx.needs_input_grad[_WEIGHTS:])
        saved_x, saved_w, outputs = replay(_forward, (*options, *needed), (*tensors, *weights))
        ctx.save_for_backward(*saved_x, *saved_w)
        ctx.buffers = tensors[-2:]  # not saved tensors: backward writes to them, and hooks may replace those by copies
        rows, dtypes = zip(*[(w.shape[0], w.dtype) for w in weights], strict=True)
        key, dtype, *_ = options
        ctx.options = key, dtype, tensors[0].dtype, rows, dtypes
        ctx.set_materialize_grads(False)  # an output without a gradient has None, as in PyTorch
        return tuple(outputs)  # type: ignore[arg-type]  # none is None

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(dy is None for dy in dys):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: a checkpoint returns them once
        needs_x, needs_weights = needed_grads(ctx, _WEIGHTS)
        options = *ctx.options, needs_x, tuple(needs_weights)
        (dx,), dws = replay(_backward, options, (*ctx.buffers, *dys, *saved))
        return dx, *(None,) * (_WEIGHTS - 1), *dws


def _forward(options: tuple[Any, ...], *tensors: Any) -> Result:
    """Return what is saved of X and of W, and the outputs. tensors: the arguments of `_Linears` without options."""
    key, dtype, keeps_input, update_amax, needs_x, needs_weight = options
    plan = plan_by(key)
    source, weights = InputSource(*tensors[:_X]), tensors[_WEIGHTS - 1 :]
    known, (scale_and_amax, stats) = tensors[_X : _X + _W], tensors[_X + _W : _WEIGHTS - 1]
    scale_ref = None if scale_and_amax is None else scale_ref_of(scale_and_amax, plan.x_stored, update_amax)
    x, saved_x = read_input(source, plan, dtype, needs_weight, scale_ref, keeps_input)
    w = read_weights(weights, plan, known, needs_x)
    saved_w = save_weights(w, weights, plan, known[0] is not None) if needs_x else SavedWeights()
    return saved_x, saved_w.tensors, fprop([source.x], x, w, weights, plan, dtype, stats)


def _backward(options: tuple[Any, ...], *tensors: Any) -> Result:
    """Return dX, and dW_i. tensors: scale_and_amax, stats_buffer, dY_i, `SavedInput`, tensors of `SavedWeights`."""
    key, dtype, x_dtype, rows, dtypes, needs_x, needs_weights = options
    plan = plan_by(key)
    scale_and_amax, stats, *rest = tensors
    dys, saved = rest[: len(rows)], rest[len(rows) :]
    x = SavedInput(*saved[:_SAVED_X])
    w = SavedWeights.of(saved[_SAVED_X:], rows) if needs_x else None
    needs_weights = tuple([needed and dy is not None for needed, dy in zip(needs_weights, dys, strict=True)])
    sources = with_zeros([None if dy is None else dy.to(dtype) for dy in dys], rows)
    scale_ref = scale_ref_of(scale_and_amax, plan.dy_stored)
    g, h = read_gradient(sources, x.scale, w, plan, any(needs_weights), scale_ref)
    dx = None if w is None else dgrad(sources, g, w, plan, dtype, stats).to(x_dtype)
    if not any(needs_weights):
        return (dx,), [None] * len(rows)
    dws = unstack(wgrad(sources, h, x, plan, dtype), rows, dtypes)
    return (dx,), [dw if needed else None for dw, needed in zip(dws, needs_weights, strict=True)]


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Check an input (..., K), empty or not, and a weight (N, K).

    Raises:
        ConfigError: a dtype is an integer, complex or FP8 without scales, or K differs.
        UnsupportedError: the weight is a DTensor, of which this rank has a part.
    """
    if x.dtype not in REAL or weight.dtype not in REAL:
        check_dtypes(x, weight)
    if type(weight) is not nn.Parameter and is_distributed(weight):
        raise UnsupportedError(
            f"a weight of shape {tuple(weight.shape)} is a DTensor, and FP8 layers compute with plain tensors. For "
            "tensor parallelism give parallelize_module the styles of octavo.distributed: Parallel, ColumnParallel, "
            "RowParallel. Under fully_shard call the module that is sharded, not a child of it."
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ConfigError(
            f"{layer_of(weight)}an input of shape {tuple(x.shape)} cannot be multiplied by a weight of shape "
            f"{tuple(weight.shape)}: its last dimension must be {weight.shape[-1]}."
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes x: autocast's if it is on, otherwise that of x.

    Raises:
        UnsupportedError: inside a transform of `torch.func`, or forward-mode differentiation.
    """
    # The conditions of `refuse_transforms`, `autocast_dtype` and `note_dtype`, without their calls in each forward.
    kind, is_traced = x.device.type, torch.compiler.is_compiling()
    if not is_traced and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        refuse_transforms()
    dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else x.dtype
    if dtype is not torch.bfloat16 and (is_traced or dtype_note(dtype, kind) is not None):
        note_dtype(dtype, kind)
    return dtype


def scale_ref_of(
    scale_and_amax: Tensor | None, stored: StoredScale | None, update_amax: bool = True
) -> ScaleRef | None:
    """Return the stored scale of a layer's input or grad_output; None if it is scaled by its own maximum.

    Args:
        scale_and_amax: see `Quantizer`.
        stored: `LinearPlan.x_stored` or `dy_stored`.
        update_amax: whether the maximum of this tensor counts for the scale of later steps.
    """
    if scale_and_amax is None or stored is None:
        return None
    return ScaleRef(scale_and_amax, stored.row, stored.is_just_in_time, update_amax)


# --- operands ---------------------------------------------------------------------------------------------------------


def quantize_operand(x: Tensor, target: QuantSpec, fold: Tensor | None = None) -> Quantized:
    """Quantise a matrix to a target of a plan, after multiplying `fold` into its columns.

    Args:
        x: (R, C).
        fold: FP32 (1, C), the scales of a folded partner, or None.
    """
    return kernels.quantize_matrix(x if fold is None else x.float() * fold, target)


def quantize_both(
    sources: Sequence[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
    scale_ref: ScaleRef | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise the matrix (R, C) of `sources` side by side: directly for `rows`, transposed for `columns`.

    Args:
        row_fold: FP32 (1, C), multiplied in before `rows`.
        column_fold: FP32 (R, 1), multiplied in before `columns`.
        scale_ref: stored scale of the matrix, if it has one; there are no folds then.
    """
    if scale_ref is not None:
        return kernels.quantize_with_scale(sources, scale_ref, rows, columns)
    if (rows is None or rows.rounding == "nearest") and (columns is None or columns.rounding == "nearest"):
        return kernels.quantize_pair(sources, rows, columns, row_fold, column_fold)
    x = sources[0] if len(sources) == 1 else torch.cat(list(sources), dim=1)
    fold_t = None if column_fold is None else column_fold.t()
    return (
        None if rows is None else quantize_operand(x, rows, row_fold),
        None if columns is None else quantize_operand(x.t(), columns, fold_t),
    )


def input_source(
    x: Tensor, plan: LinearPlan, prequantized: InputCodes | None
) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
    """Return the fields of an `InputSource`: x (..., K) as (M, K), and its known codes."""
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    is_traced = torch.compiler.is_compiling()
    normed = attached_norm_source(x) if is_traced and plan.requantises_exactly else None
    if normed is not None and plan.x is not None:
        with torch.no_grad():
            codes, second_scale = kernels.quantize_normed(normed.x, normed.norm, plan.x, plan.x_second)
        return x_MK, codes.codes, codes.scale, None, second_scale, normed.x, *normed.norm
    if prequantized is None:
        return x_MK, *(None,) * (_X - 1)
    fprop, second = prequantized
    second_set = (None, None) if second is None else second[:2]
    return x_MK, fprop.codes, fprop.scale, *second_set, None, None, None


def read_input(
    source: InputSource,
    plan: LinearPlan,
    dtype: torch.dtype,
    needs_weight: bool,
    scale_ref: ScaleRef | None = None,
    keeps_input: bool = False,
) -> tuple[Quantized | None, SavedInput]:
    """Return an input (M, K) as fprop reads it, None in BF16, and what is saved of it for wgrad.

    Args:
        dtype: that of a GEMM in high precision.
        needs_weight: whether wgrad will run; if not, nothing is saved.
        scale_ref: stored scale of the input, if it has one.
        keeps_input: save the input itself, and let wgrad quantise it again.
    """
    x_MK, prequantized = source.x, None
    if plan.x is not None and source.codes is not None and source.scale is not None:
        prequantized = Quantized(source.codes, source.scale, plan.x.tile)
    if source.norm_input is not None:
        scale = source.scale if source.second_scale is None else source.second_scale
        saved = SavedInput(source.norm_input, None, scale, source.norm_rstd, source.norm_weight)
        return prequantized, saved if needs_weight else SavedInput()
    # Codes of another kernel may come from values before rounding, so that backward could not make them again.
    x = None if keeps_input else prequantized
    if plan.x is not None and plan.x_second is not None and needs_weight:
        if x is not None:  # fprop reads what it reads without a backward, whether the second set is there or not
            codes, scale = source.second_codes, source.second_scale
            if codes is None:
                codes, scale = kernels.quantize_matrix(x_MK, plan.x_second)[:2]
            return x, SavedInput(codes=codes, scale=scale)
        both = kernels.quantize_rows_twice([x_MK], plan.x, plan.x_second, keeps_codes=not keeps_input)
        return both.first, SavedInput(x_MK if keeps_input else None, both.codes, both.scale)
    if plan.x_back is Transposed.QUANTIZED and needs_weight and not keeps_input:
        # wgrad needs the transpose quantised by itself: from the same read
        made, transposed = quantize_both([x_MK], None if x else plan.x, plan.x_t, scale_ref=scale_ref)
        assert transposed is not None
        return x or made, SavedInput(codes=transposed.codes, scale=transposed.scale)
    if plan.x is not None and x is None:
        stored = scale_ref is not None
        x = (
            quantize_both([x_MK], plan.x, None, scale_ref=scale_ref)[0]
            if stored
            else kernels.quantize_matrix(x_MK, plan.x)
        )
    if not needs_weight:
        return x, SavedInput()
    if plan.x_back is Transposed.VALUES:
        return x, SavedInput(x_MK.to(dtype))
    if keeps_input:
        scale = x.scale if x is not None and plan.x_back is Transposed.FOLDED else None
        return x, SavedInput(x_MK, scale=scale)
    assert x is not None
    return x, SavedInput(codes=x.codes, scale=x.scale)


def read_weights(
    weights: Sequence[Tensor],
    plan: LinearPlan,
    known: Sequence[Tensor | None] = NO_CODES,
    needs_input: bool = False,
) -> WeightCodes | None:
    """Return the weights as fprop reads them; None if it is in BF16.

    Args:
        known: what `codes_for` returned.
        needs_input: whether dgrad will run, which may read a second set of codes.
    """
    if plan.w is None:
        return None
    codes, scale, second_codes, second_scale = known
    if codes is None or scale is None:
        return quantize_weights(weights, plan.w, plan.w_second if needs_input else None)
    second = None if second_scale is None else (second_codes, second_scale)
    return WeightCodes((Quantized(codes, scale, plan.w.tile),), tuple([w.shape[0] for w in weights]), second)


def codes_for(weights: Sequence[Tensor], codes: WeightCodes | None) -> tuple[Tensor | None, ...]:
    """Return codes and scale of a stack of weights (sum of N_i, K) for fprop, and of their second set.

    None for each that is not known, and for all unless `codes` are those of exactly these layers.
    """
    if codes is None or codes.rows != tuple(weight.shape[0] for weight in weights):
        return NO_CODES
    return *codes.stack[:2], *(codes.second or (None, None))


def save_weights(
    w: WeightCodes | None, weights: Sequence[Tensor], plan: LinearPlan, are_codes_kept: bool = False
) -> SavedWeights:
    """Return weights as they are saved for dgrad: the codes of fprop if it reuses them, else the weights.

    Codes that follow from the weights and a power-of-two scale per row are not saved: the scale is. Quantising again
    takes as many launches as transposing codes, and reads one byte per element more.

    Args:
        w: the weights as fprop reads them; None if it is in BF16.
        are_codes_kept: whether the codes stay in memory anyway (`reuse_weight_codes`).
    """
    rows = tuple([weight.shape[0] for weight in weights]) if w is None else w.rows
    if w is not None and w.second is not None:
        codes, scale = w.second
        return SavedWeights(codes, scale, weights if codes is None else (), rows)
    reuses = plan.w_second is None and plan.w_back in (Transposed.CODES, Transposed.FOLDED)
    if w is None or not reuses or has_fp8_weight(weights):
        return SavedWeights(weights=weights, rows=rows)
    if plan.w_back is Transposed.FOLDED and codes_follow(weights, plan.w_rows) and not are_codes_kept:
        return SavedWeights(None, w.stack.scale, weights, rows)
    return SavedWeights(*w.matrices[0][:2], rows=rows)


def read_gradient(
    dys: Sequence[Tensor],
    input_scale: Tensor | None,
    weight: SavedWeights | None,
    plan: LinearPlan,
    needs_weight: bool,
    scale_ref: ScaleRef | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Return dY as dgrad reads it, (M, N), and as wgrad reads it, (N, M), quantised from one read; None for BF16.

    Args:
        input_scale: scale of the input in fprop; read if wgrad is folded.
        weight: None if dgrad is not needed.
        scale_ref: as for `quantize_both`.
    """
    rows, columns = plan.dy if weight is not None else None, plan.dy_t if needs_weight else None
    if rows is None and columns is None:
        return None, None
    row_fold = None if weight is None else weight_fold(weight, plan)
    column_fold = None if columns is None else input_fold(input_scale, plan)
    return quantize_both(dys, rows, columns, row_fold, column_fold, scale_ref)


def weight_fold(weight: SavedWeights, plan: LinearPlan) -> Tensor | None:
    """Return the scales of the weights (1, N) that move into the gradient for dgrad, None if none do."""
    if plan.w_back is not Transposed.FOLDED:
        return None
    if weight.scale is not None:
        return weight.scale.t()
    scales = [matrix.scale for matrix in weight.quantized(plan)]
    return (scales[0] if len(scales) == 1 else torch.cat(scales)).t()


def input_fold(input_scale: Tensor | None, plan: LinearPlan) -> Tensor | None:
    """Return the scales of the input (M, 1) that move into the gradient for wgrad, None if none do."""
    return input_scale if plan.x_back is Transposed.FOLDED else None


def transposed_weight(weight: SavedWeights, plan: LinearPlan, after: Tensor) -> Quantized:
    """Return the stack of weights as dgrad reads it, (K, N). after: the gradient that it is multiplied by."""
    if plan.w_back is Transposed.QUANTIZED:
        return quantize_weights_transposed(weight.weights, plan.w_t)
    if weight.codes is None and weight.scale is not None:
        return kernels.requantize_transposed(weight.weights, weight.scale, plan.w_rows, after, None)
    matrices = weight.quantized(plan)
    parts = [transpose_codes(matrix, plan.w_back is Transposed.FOLDED, after) for matrix in matrices]
    if len(parts) == 1:
        return parts[0]
    # Several FP8 weights. Joined after the transposes: otherwise a compiler saves the joined copy for backward.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts], dim=1).view(parts[0].codes.dtype)
    tile = parts[0].granularity
    scale = parts[0].scale if tile.cols is None else torch.cat([part.scale for part in parts], dim=1)
    return Quantized(codes, scale, tile)


def transposed_input(x: SavedInput, plan: LinearPlan, after: Tensor) -> Quantized:
    """Return an input as wgrad reads it, (K, M). after: the gradient that it is multiplied by."""
    if x.codes is not None and x.scale is not None:
        if plan.x_back is Transposed.QUANTIZED:
            return Quantized(x.codes, x.scale, plan.x_t.tile)
        return transpose_codes(Quantized(x.codes, x.scale, plan.x_rows.tile), plan.x_back is Transposed.FOLDED, after)
    assert x.values is not None
    if plan.requantises_exactly:
        assert x.scale is not None
        norm = None if x.norm_rstd is None or x.norm_weight is None else (x.norm_rstd, x.norm_weight)
        return kernels.requantize_transposed([x.values], x.scale, plan.x_rows, after, norm)
    made = kernels.quantize_transposed(x.values, plan.x_t, after)
    return kernels.without_scale(made) if plan.x_back is Transposed.FOLDED else made


def transpose_codes(source: Quantized, folded: bool, after: Tensor) -> Quantized:
    """Return a matrix of fprop as a backward GEMM reads it: its codes transposed, its scale 1 if folded."""
    if folded:
        return kernels.transpose_folded(source.codes, after)
    return kernels.transpose_quantized(source, after)


# --- the three GEMMs --------------------------------------------------------------------------------------------------


def fprop(
    tensors: Sequence[Tensor],
    x: Quantized | None,
    w: WeightCodes | None,
    weights: Sequence[Tensor],
    plan: LinearPlan,
    dtype: torch.dtype,
    stats: Tensor | None = None,
    kind: str = "",
) -> list[Tensor]:
    """Return X W_i^T for each weight, and sample X and W for telemetry if there is a buffer.

    Args:
        tensors: X (M, K); or with `kind` the tensors that X is computed from (`octavo.nn.telemetry_ops.Source`).
        x: X as fprop reads it; like `w` None if fprop is in BF16.
    """
    if x is None or w is None or plan.x is None or plan.w is None:
        return [product(tensors[0].to(dtype), values(weight_NK, dtype).t()) for weight_NK in weights]
    if stats is None and len(weights) == 1:
        return [kernels.gemm(x, w.matrices[0], dtype, plan.accumulate[0])]
    if stats is None:
        return multiply(x, w, dtype, plan.accumulate[0])
    origin = telemetry_ops.Source(tensors, plan.x, plan.x_stored is None, kind)
    options = telemetry_ops.GemmOptions(dtype, plan.accumulate[0])
    w, plain = w._replace(second=None), () if has_fp8_weight(weights) else weights
    return telemetry_ops.sampled_fprop(x, w, plan.w, plain, options, origin, stats)


def dgrad(
    dys: Sequence[Tensor],
    g: Quantized | None,
    weight: SavedWeights,
    plan: LinearPlan,
    dtype: torch.dtype,
    stats: Tensor | None = None,
    kind: str = "",
) -> Tensor:
    """Return dX (M, K), the sum over the weights of dY_i W_i, and sample dY for telemetry if there is a buffer.

    Args:
        dys: the gradients (M, N_i); or with `kind` the tensors that they are computed from
            (`octavo.nn.telemetry_ops.Source`).
        g: the gradients side by side as dgrad reads them; None if dgrad is in BF16.
    """
    if g is None or plan.dy is None:
        pairs = zip(dys, weight.weights, strict=True)
        parts = [product(dy_MN, values(weight_NK, dtype)) for dy_MN, weight_NK in pairs]
        return sum(parts[1:], start=parts[0])
    w_KN, accumulate = transposed_weight(weight, plan, g.codes), plan.accumulate[1]
    if stats is None:
        return kernels.gemm(g, w_KN, dtype, accumulate)
    origin = telemetry_ops.Source(dys, plan.dy, plan.dy_stored is None, kind, weight_fold(weight, plan))
    options = telemetry_ops.GemmOptions(dtype, accumulate)
    return telemetry_ops.sampled_dgrad(g, w_KN, len(weight.rows), options, origin, stats)


def wgrad(dys: Sequence[Tensor], h: Quantized | None, x: SavedInput, plan: LinearPlan, dtype: torch.dtype) -> Tensor:
    """Return dW (N, K) of the stack."""
    if h is None:
        assert x.values is not None
        return torch.cat([product(dy_MN.t(), x.values) for dy_MN in dys])
    return kernels.gemm(h, transposed_input(x, plan, h.codes), dtype, plan.accumulate[2])


def with_zeros(dys: Sequence[Tensor | None], widths: Sequence[int]) -> list[Tensor]:
    """Return the gradients (M, N_i) of all outputs, with zeros for unused outputs; at least one is used."""
    like = next(dy for dy in dys if dy is not None)
    return [like.new_zeros(like.shape[0], n) if dy is None else dy for dy, n in zip(dys, widths, strict=True)]


def unstack(dw: Tensor, rows: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Split the gradient of a stack into those of its weights, each in its dtype."""
    if len(rows) == 1:
        return [dw.to(dtypes[0])]
    return [dw_NK.to(dtype) for dw_NK, dtype in zip(dw.split(list(rows)), dtypes, strict=True)]
