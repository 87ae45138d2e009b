"""Linear layers in FP8: three GEMMs, one autograd function, everything decided by the recipe.

M: tokens, N: output features, K: input features.

    fprop   Y  = X W^T       dgrad   dX = dY W       wgrad   dW = dY^T X

Each of X, W and dY is quantised once, and read by two GEMMs. FP8 tensor cores take operands whose summed index is
contiguous, and multiply scales into the result, so a GEMM can apply a scale per row of an operand, not one per column:

    X8 = X / sx   (M, K), sx per token       Y  = diag(sx) (X8 W8^T) diag(sw)
    W8 = W / sw   (N, K), sw per feature

Backward needs W8 and X8 transposed, and then their scales lie along the summed index. A *folded* recipe moves them into
the gradient, which is quantised after it:

    dX = dY W  = (dY diag(sw)) W8        G8 = quantise(dY * sw, a scale per token)
    dW = dY^T X = (diag(sx) dY)^T X8     H8 = quantise(dY^T * sx, a scale per feature)

With power-of-two scales the move is exact, X and W are rounded once, and what is kept for backward is X8: one byte per
element. Other recipes (a scale per tensor, per 128 elements) quantise dY once and read transposed codes as they are.

Layers that read the same X are computed as one: X is quantised once, and W is the stack of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo._util.autograd import first_order, refuse_transforms
from octavo.kernels import ScaleRef
from octavo.kernels.product import product
from octavo.kernels.quant_spec import spec_of
from octavo.kernels.tape import Result, replay
from octavo.nn import telemetry_ops
from octavo.nn.attached_codes import attached_normed, is_output_of_attention
from octavo.nn.fp8_weights import has_fp8_weight, values
from octavo.nn.needed_grads import needed_grads
from octavo.nn.operands import check_operands, note_dtype
from octavo.nn.weight_codes import WeightCodes, multiply, quantize_matrix, quantize_transposed, quantize_weights
from octavo.numerics import Quantized
from octavo.recipes import STORED_SCALE_ROLES, Operand, Recipe


class Quantizer(NamedTuple):
    """Quantisation of the tensors of a layer, or of layers that share an input."""

    recipe: Recipe
    dtype: torch.dtype
    """Output dtype of every GEMM, and the dtype that a GEMM in high precision computes in."""
    amax_and_scale: Tensor | None = None
    """FP32 (2, 2), where scales that the recipe keeps from step to step lie (`octavo.nn.scaling_state`). Without them
    every tensor is scaled by its own maximum, as in the first step of such a recipe."""
    stats_buffer: Tensor | None = None
    """FP32 (1 + 2 n, WIDTH), where telemetry of n layers goes (`octavo.nn.telemetry_ops`)."""
    keeps_input: bool = False
    """Keep X itself for backward and quantise it again there, instead of keeping its codes. X must not have a stored
    scale or be rounded stochastically."""


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    recipe: Recipe | Quantizer,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T + b with the three GEMMs of `recipe`, in `dtype`.

    Args:
        x: (..., K); the leading dimensions may be anything, empty included.
        weight_NK: (N, K), any floating-point dtype: the master weight. Or an `FP8Tensor` of the recipe's
            format and granularity, whose codes are read as they are.
        bias_N: (N,) or None; added in `dtype`.
        recipe: or a `Quantizer`, which says more, and the dtype too.
        dtype: default the dtype of x. Quantisation starts from x as it is.
    """
    quantizer = recipe if isinstance(recipe, Quantizer) else Quantizer(recipe, dtype or x.dtype)
    return linears(x, [weight_NK], [bias_N], quantizer)[0]


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    quantizer: Quantizer,
    prequantized: Quantized | None = None,
    codes: WeightCodes | None = None,
) -> list[Tensor]:
    """Return x W_i^T + b_i for layers that share their input: x is quantised once, dgrad and wgrad are one GEMM each.

    Args:
        weights: (N_i, K) each. Scales are those of the stack (sum of N_i, K).
        prequantized: x as fprop reads it, (M, K), where the kernel that made x has quantised it too.
        codes: the weights as fprop reads them, where they are known (`reuse_weight_codes`).

    Raises:
        ConfigError: an input or a weight that PyTorch refuses too (`octavo.nn.operands`).
    """
    check_operands(x, weights[0])
    x_MK = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    recipe, dtype, amax_and_scale, stats, keeps_input = quantizer
    if torch.compiler.is_compiling() and requantises_exactly(recipe) and is_output_of_attention(x_MK):
        keeps_input = True  # attention keeps it anyway
    x_codes, x_scale, *source = codes_of_input(x, recipe, prequantized)
    w_codes, w_scale = known_codes(codes, weights)
    options = recipe, dtype, keeps_input, torch.is_grad_enabled()  # an evaluation leaves no trace in stored scales
    outputs: tuple[Tensor, ...] = _Linears.apply(  # type: ignore[no-untyped-call]
        x_MK, x_codes, x_scale, *source, w_codes, w_scale, amax_and_scale, stats, options, *weights
    )
    shaped = [y_MN.reshape(*x.shape[:-1], y_MN.shape[1]) for y_MN in outputs]
    return [y if b is None else y + b.to(y.dtype) for y, b in zip(shaped, biases, strict=True)]


class _Linears(torch.autograd.Function):
    """Y_i = X W_i^T. Saves what the needed backward GEMMs read: X and W in FP8 wherever they are."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # All in one: torch.compile counts the parameters, and where there is one argument more, it leaves out ctx.
        *tensors, options = inputs[:_WEIGHTS]
        weights = inputs[_WEIGHTS:]
        needed = ctx.needs_input_grad[0], any(ctx.needs_input_grad[_WEIGHTS:])
        kept_x, kept_w, outputs = replay(_forward, (*options, *needed), (*tensors, *weights))
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.kept, ctx.options = len(kept_x), (*options[:2], inputs[0].dtype)
        ctx.buffers = tensors[-2:]  # no saved tensors: backward writes to them, and hooks may give it copies
        ctx.parts = tuple([(weight.shape[0], weight.dtype) for weight in weights])
        ctx.set_materialize_grads(False)  # a layer whose output nobody used has no gradient, as in PyTorch
        return tuple(outputs)  # type: ignore[arg-type]  # none is None

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(dy is None for dy in dys):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: a checkpoint hands them out once
        needs_x, needs_weight = needed_grads(ctx, _WEIGHTS)
        options = *ctx.options, ctx.parts, ctx.kept, needs_x, tuple(needs_weight)
        (dx,), dws = replay(_backward, options, (*ctx.buffers, *dys, *saved))
        return dx, *(None,) * (_WEIGHTS - 1), *dws


_WEIGHTS = 11
"""Which argument of `_Linears.apply` is the first weight."""


def _forward(options: tuple[Any, ...], *tensors: Any) -> Result:
    """Return what backward needs of X, and of W, and the outputs."""
    recipe, dtype, keeps_input, update_amax, needs_x, needs_weight = options
    x_MK, x_codes, x_scale, *source, w_codes, w_scale, amax_and_scale, stats = tensors[: _WEIGHTS - 1]
    weights = tensors[_WEIGHTS - 1 :]
    given = None if x_codes is None else Quantized(x_codes, x_scale, recipe.fprop.input.tile)
    cell = scale_ref_of(amax_and_scale, recipe, "input", update_amax)
    x = read_input(x_MK, recipe, dtype, needs_weight, given, cell, keeps_input, source)
    attached = None if w_codes is None else (w_codes, w_scale)
    w = read_weights(weights, recipe, attached)
    kept = kept_weights(w, weights, recipe, attached is not None) if needs_x else ()
    return x.kept, kept, fprop([x_MK], x.fprop, w, weights, recipe, dtype, stats)


def _backward(options: tuple[Any, ...], *tensors: Any) -> Result:
    """Return dX, and dW_i."""
    recipe, dtype, x_dtype, parts, count, needs_x, needs_weight = options
    amax_and_scale, stats, *rest = tensors
    dys, kept, w = rest[: len(parts)], tuple(rest[len(parts) : len(parts) + count]), rest[len(parts) + count :]
    needs_weight = [needed and dy is not None for needed, dy in zip(needs_weight, dys, strict=True)]
    sources = with_zeros([None if dy is None else dy.to(dtype) for dy in dys], [rows for rows, _ in parts])
    cell = scale_ref_of(amax_and_scale, recipe, "grad_output")
    weight = Kept(w, tuple([rows for rows, _ in parts])) if needs_x else None
    g, h = read_gradient(sources, scale_of(kept), weight, recipe, any(needs_weight), cell)
    dx = None if weight is None else dgrad(sources, g, weight, recipe, dtype, stats).to(x_dtype)
    if not any(needs_weight):
        return (dx,), [None] * len(parts)
    cut = unstack(wgrad(sources, h, kept, recipe, dtype), parts)
    return (dx,), [part if needed else None for part, needed in zip(cut, needs_weight, strict=True)]


class Input(NamedTuple):
    """The input of linear layers as their GEMMs read it."""

    fprop: Quantized | None
    """(M, K); None where fprop is in BF16."""
    kept: tuple[Tensor, ...]
    """What backward needs of it: (x,) or (x, scale of fprop) as it is, (input of its norm, scale of fprop, *norm),
    (codes (M, K), scale) of fprop, (codes (K, M), scale) of wgrad's own; or ()."""


class Kept(NamedTuple):
    """The weights as backward has them."""

    tensors: Sequence[Tensor]
    """(codes, scale) of the stack as fprop read it, the weights themselves, or these and that scale."""
    rows: tuple[int, ...]
    """N_i."""

    @property
    def weights_and_scale(self) -> tuple[Sequence[Tensor], Tensor] | None:
        """The weights, and the scale of the codes that fprop read; None where either is not kept."""
        *weights, last = self.tensors
        return (weights, last) if len(weights) == len(self.rows) and weights[0].element_size() > 1 else None

    def codes(self, recipe: Recipe) -> WeightCodes:
        """Return the weights as fprop read them."""
        if self.tensors[0].element_size() == 1:
            codes, scale = self.tensors
            return WeightCodes((Quantized(codes, scale, recipe.fprop.weight.tile),), self.rows)
        return quantize_weights(self.tensors, spec_of(recipe.fprop.weight))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes x in: autocast's where that is on, else its own.

    Raises:
        UnsupportedError: within a transform of `torch.func`, or forward-mode differentiation.
    """
    refuse_transforms()
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype is not torch.bfloat16:
        note_dtype(dtype, device)
    return dtype


def scale_ref_of(amax_and_scale: Tensor | None, recipe: Recipe, role: str, update_amax: bool = True) -> ScaleRef | None:
    """Return where a layer's `input` or `grad_output` has its scale, None if it is made of its own maximum.

    Args:
        amax_and_scale: see `Quantizer`.
        update_amax: whether the maximum of this tensor counts for the scale of later steps.
    """
    operand = None if amax_and_scale is None else recipe.stored_scale(role)
    if amax_and_scale is None or operand is None:
        return None
    return ScaleRef(amax_and_scale, STORED_SCALE_ROLES.index(role), operand.scale_from == "just_in_time", update_amax)


# ---------------------------------------------------------------- operands


def quantize_operand(x: Tensor, operand: Operand, fold: Tensor | None = None) -> Quantized:
    """Quantise a matrix as a recipe's operand says, after multiplying `fold` into its columns.

    Args:
        x: (R, C).
        fold: FP32 (1, C), the scales of a folded partner, or None.
    """
    return quantize_matrix(x if fold is None else x.float() * fold, spec_of(operand))


def quantize_both(
    sources: Sequence[Tensor],
    rows: Operand | None,
    columns: Operand | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
    cell: ScaleRef | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantise the matrix (R, C) that lies in `sources` side by side: as it is for `rows`, transposed for `columns`.

    Args:
        row_fold: FP32 (1, C), multiplied in before `rows`.
        column_fold: FP32 (R, 1), multiplied in before `columns`.
        cell: where its scale is, if it is kept from step to step: then there are no folds.
    """
    row, column = (None if operand is None else spec_of(operand) for operand in (rows, columns))
    if cell is not None:
        return kernels.quantize_with_scale(sources, cell, row, column)
    if all(target is None or target.rounding == "nearest" for target in (row, column)):
        return kernels.quantize_pair(sources, row, column, row_fold, column_fold)
    x = sources[0] if len(sources) == 1 else torch.cat(list(sources), dim=1)
    fold_t = None if column_fold is None else column_fold.t()
    return (
        None if rows is None else quantize_operand(x, rows, row_fold),
        None if columns is None else quantize_operand(x.t(), columns, fold_t),
    )


def read_input(
    x_MK: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    needs_weight: bool,
    prequantized: Quantized | None = None,
    cell: ScaleRef | None = None,
    keeps_input: bool = False,
    source: Sequence[Tensor | None] = (None,),
) -> Input:
    """Quantise an input for fprop, and keep what wgrad will need of it.

    Args:
        prequantized: fprop's codes if they are there; left alone with `keeps_input`.
        cell: where its scale is, if it is kept from step to step.
        keeps_input: keep it as it is, and let wgrad quantise it again.
        source: what `codes_of_input` found that wgrad can make the codes of.
    """
    if prequantized is not None and source[0] is not None:
        kept = (source[0], prequantized.scale, *source[1:]) if needs_weight else ()
        return Input(prequantized, kept)  # type: ignore[arg-type]  # all three are there, or none
    forward = recipe.fprop.input if recipe.fprop.is_fp8 else None
    # Codes made elsewhere may be of x before it was rounded: backward could not make the same ones again.
    given = prequantized if forward and not keeps_input else None
    own = recipe.wgrad.is_fp8 and needs_weight and not keeps_input and not recipe.reuses("wgrad.input")
    if own:  # wgrad quantises the transpose by itself, from the same read
        x, transposed = quantize_both([x_MK], None if given else forward, recipe.wgrad.input, cell=cell)
        assert transposed is not None
        return Input(given or x, transposed[:2])
    x = given
    if forward and x is None:
        x = quantize_operand(x_MK, forward) if cell is None else quantize_both([x_MK], forward, None, cell=cell)[0]
    if not needs_weight:
        return Input(x, ())
    if not recipe.wgrad.is_fp8:
        return Input(x, (x_MK.to(dtype),))
    if keeps_input:
        return Input(x, (x_MK, x.scale) if x is not None and recipe.folds("wgrad.input") else (x_MK,))
    assert x is not None
    return Input(x, x[:2])


def scale_of(kept: tuple[Tensor, ...]) -> Tensor | None:
    """Return the scale that `read_input` kept, if it did."""
    return kept[1] if len(kept) > 1 else None


def read_weights(
    weights: Sequence[Tensor], recipe: Recipe, attached: tuple[Tensor, Tensor] | None = None
) -> WeightCodes | None:
    """Return the weights as fprop reads them, None where it is in BF16. attached: codes and scale, where known."""
    if not recipe.fprop.is_fp8:
        return None
    if attached is None:
        return quantize_weights(weights, spec_of(recipe.fprop.weight))
    rows = tuple(weight.shape[0] for weight in weights)
    return WeightCodes((Quantized(*attached, recipe.fprop.weight.tile),), rows)


def codes_of_input(x: Tensor, recipe: Recipe, prequantized: Quantized | None) -> Sequence[Tensor | None]:
    """Return codes and scale of x where they are known, and the norm's input, rstd and weight that they follow from."""
    normed = attached_normed(x) if requantises_exactly(recipe) else None
    if normed is not None:
        with torch.no_grad():
            codes = kernels.quantize_normed(normed.x, normed.norm, spec_of(recipe.fprop.input))
        return *codes[:2], normed.x, *normed.norm
    return *((None, None) if prequantized is None else prequantized[:2]), None, None, None


def requantises_exactly(recipe: Recipe) -> bool:
    """Return whether the codes of an input follow from its values and fprop's scale, for wgrad as for fprop."""
    return recipe.folds("wgrad.input") and recipe.fprop.input.scaling == "power_of_two"


def known_codes(codes: WeightCodes | None, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return codes and scale of weights where these are known, and not those of another number of layers."""
    if codes is None or codes.rows != tuple(weight.shape[0] for weight in weights):
        return None, None
    return codes.stack[:2]


def kept_weights(
    w: WeightCodes | None, weights: Sequence[Tensor], recipe: Recipe, are_codes_kept: bool = False
) -> Sequence[Tensor]:
    """Return the tensors to save for dgrad: the codes of the weights where it reuses them, else the weights.

    Codes that follow from the weights and a power-of-two scale per row are not kept: the scale is. Quantising again
    takes as many launches as transposing codes, and reads one byte per element more.

    Args:
        are_codes_kept: whether somebody else keeps the codes (`reuse_weight_codes`).
    """
    if w is None or not recipe.reuses("dgrad.weight") or has_fp8_weight(weights):
        return weights
    follow = recipe.folds("dgrad.weight") and recipe.fprop.weight.scaling == "power_of_two"
    follow = follow and all(x.dim() == 2 and x.element_size() == 2 for x in weights)
    if follow and not are_codes_kept:
        return *weights, w.stack.scale
    return w.matrices[0][:2]


def read_gradient(
    dys: Sequence[Tensor],
    input_scale: Tensor | None,
    weight: Kept | None,
    recipe: Recipe,
    needs_weight: bool,
    cell: ScaleRef | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Return dY as dgrad reads it, (M, N), and as wgrad reads it, (N, M), quantised from one read; None for BF16.

    Args:
        input_scale: that of fprop's codes of the input; read where wgrad is folded.
        weight: None where dgrad is not needed.
        cell: as for `quantize_both`.
    """
    rows, columns = recipe.grad_outputs(weight is not None, needs_weight)
    if rows is None and columns is None:
        return None, None
    row_fold = None if weight is None else weight_fold(weight, recipe)
    return quantize_both(dys, rows, columns, row_fold, input_fold(input_scale, recipe) if columns else None, cell)


def weight_fold(weight: Kept, recipe: Recipe) -> Tensor | None:
    """Return the scales of the weights (1, N) that move into the gradient for dgrad, None where none do."""
    if not recipe.folds("dgrad.weight"):
        return None
    if (known := weight.weights_and_scale) is not None:
        return known[1].t()
    scales = [matrix.scale for matrix in weight.codes(recipe).matrices]
    return (scales[0] if len(scales) == 1 else torch.cat(scales)).t()


def input_fold(input_scale: Tensor | None, recipe: Recipe) -> Tensor | None:
    """Return the scales of the input (M, 1) that move into the gradient for wgrad, None where none do."""
    return input_scale if recipe.folds("wgrad.input") else None


def transposed_weight(weight: Kept, recipe: Recipe, after: Tensor) -> Quantized:
    """Return the stack of weights as dgrad reads it, (K, N). after: the gradient that it is multiplied with."""
    if not recipe.reuses("dgrad.weight"):
        return quantize_transposed(weight.tensors, spec_of(recipe.dgrad.weight))
    if (known := weight.weights_and_scale) is not None:
        return kernels.requantize_transposed(*known, spec_of(recipe.fprop.weight), after)
    matrices = weight.codes(recipe).matrices
    parts = [transpose_codes(matrix, recipe.folds("dgrad.weight"), after) for matrix in matrices]
    if len(parts) == 1:
        return parts[0]
    # Several FP8 weights. Joined after the transposes: else a compiler keeps a joined copy for them.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts], dim=1).view(parts[0].codes.dtype)
    tile = parts[0].granularity
    scale = parts[0].scale if tile.cols is None else torch.cat([part.scale for part in parts], dim=1)
    return Quantized(codes, scale, tile)


def transposed_input(kept: tuple[Tensor, ...], recipe: Recipe, after: Tensor) -> Quantized:
    """Return what `read_input` kept as wgrad reads it, (K, M)."""
    if kept[0].element_size() > 1 and requantises_exactly(recipe):
        norm = (kept[2], kept[3]) if len(kept) > 2 else None
        return kernels.requantize_transposed(kept[:1], kept[1], spec_of(recipe.fprop.input), after, norm)
    if kept[0].element_size() > 1:
        x = kernels.quantize_transposed(kept[0], spec_of(recipe.wgrad.input), after)
        return kernels.without_scale(x) if recipe.folds("wgrad.input") else x
    if not recipe.reuses("wgrad.input"):
        return Quantized(kept[0], kept[1], recipe.wgrad.input.tile)
    return transpose_codes(Quantized(kept[0], kept[1], recipe.fprop.input.tile), recipe.folds("wgrad.input"), after)


def transpose_codes(source: Quantized, folded: bool, after: Tensor) -> Quantized:
    """Return a matrix of fprop as a backward GEMM reads it: its codes transposed, its scale 1 if it is folded."""
    if folded:
        return kernels.transpose_folded(source.codes, after)
    return kernels.transpose_quantized(source, after)


# ---------------------------------------------------------------- the three GEMMs


def fprop(
    tensors: Sequence[Tensor],
    x: Quantized | None,
    w: WeightCodes | None,
    weights: Sequence[Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
    stats: Tensor | None = None,
    kind: str = "",
) -> list[Tensor]:
    """Return X W_i^T for each weight, and sample X and W for telemetry where there is a buffer.

    Args:
        tensors: X (M, K), or with `kind` what it is made of (`octavo.nn.telemetry_ops.Source`).
        x: X as fprop reads it; None, as w is, where it is in BF16.
    """
    if x is None or w is None:
        return [product(tensors[0].to(dtype), values(weight_NK, dtype).t()) for weight_NK in weights]
    if stats is None:
        return multiply(x, w, dtype, recipe.fprop.accumulate)
    origin = telemetry_ops.Source.of(tensors, recipe.fprop.input, kind)
    spec, accumulate = spec_of(recipe.fprop.weight), recipe.fprop.accumulate
    return telemetry_ops.fprop(x, w, weights, spec, dtype, accumulate, origin, stats)


def dgrad(
    dys: Sequence[Tensor],
    g: Quantized | None,
    weight: Kept,
    recipe: Recipe,
    dtype: torch.dtype,
    stats: Tensor | None = None,
    kind: str = "",
) -> Tensor:
    """Return dX (M, K), the sum over the weights of dY_i W_i, and sample dY for telemetry where there is a buffer.

    Args:
        dys: the gradients (M, N_i), or with `kind` what they are made of (`octavo.nn.telemetry_ops.Source`).
        g: the gradients as dgrad reads them, side by side; None where it is in BF16.
    """
    if g is None:
        pairs = zip(dys, weight.tensors, strict=True)
        parts = [product(dy_MN, values(weight_NK, dtype)) for dy_MN, weight_NK in pairs]
        return sum(parts[1:], start=parts[0])
    w_KN, accumulate = transposed_weight(weight, recipe, g.codes), recipe.dgrad.accumulate
    if stats is None:
        return kernels.gemm(g, w_KN, dtype, accumulate)
    origin = telemetry_ops.Source.of(dys, recipe.dgrad.grad_output, kind, weight_fold(weight, recipe))
    return telemetry_ops.dgrad(g, w_KN, len(weight.rows), dtype, accumulate, origin, stats)


def wgrad(
    dys: Sequence[Tensor], h: Quantized | None, kept: tuple[Tensor, ...], recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Return dW (N, K) of the stack. kept: what `read_input` kept of X."""
    if h is None:
        return torch.cat([product(dy_MN.t(), kept[0]) for dy_MN in dys])
    return kernels.gemm(h, transposed_input(kept, recipe, h.codes), dtype, recipe.wgrad.accumulate)


def with_zeros(dys: Sequence[Tensor | None], widths: Sequence[int]) -> list[Tensor]:
    """Return gradients (M, N_i) of all outputs: zeros for those that nobody used, while others of the stack were."""
    like = next(dy for dy in dys if dy is not None)
    return [like.new_zeros(like.shape[0], n) if dy is None else dy for dy, n in zip(dys, widths, strict=True)]


def unstack(dw: Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Cut the gradient of a stack into those of its weights, each given by its rows and dtype."""
    if len(parts) == 1:
        return [dw.to(parts[0][1])]
    cut = dw.split([rows for rows, _ in parts])
    return [dw_NK.to(dtype) for dw_NK, (_, dtype) in zip(cut, parts, strict=True)]
