"""`octavo.nn.GroupedLinear`: the linear layers of a mixture of experts in FP8, one for each group of tokens.

T: tokens, sorted by expert. E: experts. N: output features. K: input features.

    fprop   y[t] = x[t] W[e(t)]^T      dgrad   dx[t] = dy[t] W[e(t)]      wgrad   dW[e] = sum over its t of dy[t]^T x[t]

Every expert computes like an `octavo.nn.Linear` of its weight on its tokens: each token has its own scale, and scales
along the tokens belong to one expert. All experts are one GEMM, and the number of tokens of each stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo._util.autograd import first_order, tracked
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.experts import weighted
from octavo.kernels.grouped import (
    ExpertCodes,
    Padded,
    grouped_gemm,
    grouped_mm,
    grouped_wgrad,
    quantize_groups,
    transpose_groups,
)
from octavo.nn import telemetry_experts
from octavo.nn.adopted import refuse_bare_codes
from octavo.nn.functional import SavedInput, SavedWeights, compute_dtype
from octavo.nn.operands import check_dtypes
from octavo.nn.switch import Switchable
from octavo.nn.telemetry_ops import GemmOptions, Source, StatsSlot, stats_buffer_of
from octavo.nn.weight_codes import quantize_weights
from octavo.numerics import Quantized
from octavo.recipes import FALLBACK, Recipe, RecipeLike, Transposed, load

_BF16 = load("bf16")
"""Created once, outside of traced code: Dynamo cannot trace the construction of a recipe."""


class GroupedLinear(Switchable):
    """One linear layer per expert, computed by a recipe for all experts at once. It has no bias."""

    weight: nn.Parameter
    """(E, N, K): the master weights."""
    recipe: Recipe
    enabled: bool
    """False: compute in high precision, for an evaluation."""
    weight_codes: StackCodes | None = None
    """The weights in eight bits, while they are known not to change (`octavo.nn.reuse_weight_codes`)."""
    stats_slot: StatsSlot | None = None
    """Telemetry buffer of the experts, while telemetry is on (`octavo.nn.telemetry`)."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = FALLBACK,
    ) -> None:
        """Initialise the weight of each expert as `nn.Linear` does.

        Raises:
            UnsupportedError: a grouped GEMM cannot apply the recipe's scales.
        """
        super().__init__()
        self.recipe, self.enabled = load(recipe), True
        if (reason := unsupported_reason(self.recipe)) is not None:
            raise UnsupportedError(f"GroupedLinear cannot compute by recipe '{self.recipe.name}': {reason}.")
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise the weights: uniform in +-1 / sqrt(K)."""
        bound = 1 / math.sqrt(max(self.weight.shape[2], 1))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return y (T, N), in x's dtype, or in autocast's dtype if it is on.

        Args:
            x: (T, K), the tokens of expert 0 first, then those of expert 1, and so on.
            ends: int32 (E,), the end of each expert's tokens, as for `torch.nn.functional.grouped_mm`; the last one is
                T. An expert may have none.

        Raises:
            ConfigError: shapes or dtypes that do not fit.
        """
        experts, _, features = self.weight.shape
        if x.dim() != 2 or x.shape[1] != features or ends.shape != (experts,) or ends.dtype != torch.int32:
            raise ConfigError(
                f"GroupedLinear takes x (T, {features}) and int32 ends ({experts},), got {tuple(x.shape)} and "
                f"{ends.dtype} {tuple(ends.shape)}."
            )
        return self.multiply(x, self.weight, ends)

    def multiply(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return `forward` with weights (E, N, K) derived from those of this layer, such as a view of them."""
        recipe = self.recipe if self.enabled else _BF16
        return grouped_linear(x, weight, ends, recipe, stats_buffer_of([self]), self.weight_codes)

    @property
    def parts(self) -> list[Tensor]:
        """The parameters that the weight consists of."""
        return [self.weight]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        messages[-1].extend(refuse_bare_codes(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "weight_codes"}  # copies change

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        experts, out_features, in_features = self.weight.shape
        described = f"experts={experts}, in_features={in_features}, out_features={out_features}"
        return f"{described}, recipe={self.recipe.name}" + ("" if self.enabled else ", disabled")


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    recipe: RecipeLike = _BF16,
    stats: Tensor | None = None,
    codes: StackCodes | None = None,
) -> Tensor:
    """Return y (T, N) for sorted rows x (T, K) and weights (E, N, K): see `GroupedLinear`.

    Args:
        ends: int32 (E,), the end of each expert's rows.
        stats: telemetry buffer (`octavo.nn.telemetry_experts`).
        codes: the weights in eight bits, if known.

    Raises:
        ConfigError: x or the weights are integers, complex, or FP8 codes without scales.
    """
    check_dtypes(x, weight)
    made: tuple[Tensor | None, ...] = (None,) * 4
    if codes is not None:  # Dynamo takes no tensor twice
        made = (*codes.forward, *((None, None) if codes.backward is codes.forward else codes.backward))
    arguments = *tracked(x, weight), ends, load(recipe), compute_dtype(x), stats, *made
    result: Tensor = _GroupedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class StackCodes(NamedTuple):
    """Weights of experts in eight bits."""

    forward: ExpertCodes
    """As fprop reads them."""
    backward: ExpertCodes
    """As a folded dgrad reads them before the transpose: those of fprop, or a second set."""


def quantize_experts(weights: Tensor, recipe: Recipe, needs_input: bool = True) -> StackCodes:
    """Quantise weights (E, N, K). needs_input: whether dgrad will run, which may read a second set of codes."""
    plan = recipe.plan
    assert plan.w is not None
    second = plan.w_second if needs_input else None
    made = quantize_weights([weights.flatten(0, 1)], plan.w, second, keeps_second=True)
    codes, scale, _ = made.stack
    forward = ExpertCodes(codes.view(weights.shape), scale.view(weights.shape[:2]))
    if made.second is None:
        return StackCodes(forward, forward)
    codes_of_dgrad, scale = made.second
    assert codes_of_dgrad is not None
    return StackCodes(forward, ExpertCodes(codes_of_dgrad.view(weights.shape), scale.view(weights.shape[:2])))


def unsupported_reason(recipe: Recipe) -> str | None:
    """Return why the GEMMs of a recipe cannot be grouped, or None."""
    can = (
        "Grouped GEMMs have a scale per row and E4M3 operands, or INT8 ones in fprop: folded, folded_fast, rotated, "
        "rowwise and bf16 are such recipes"
    )
    for gemm, *operands in recipe.gemms():
        formats = ("e4m3", "int8") if gemm == "fprop" else ("e4m3",)
        for operand in operands:
            if not (operand.granularity in ("row", "column") and operand.format in formats):
                return f"its {gemm} has an operand {operand}. {can}"
            if operand.rotation and gemm != "fprop":
                return f"its {gemm} has an operand {operand}, only linear layers rotate there. {can}"
            if not operand.is_repeatable:
                return f"its {gemm} has an operand {operand}, only linear layers round and scale like that. {can}"
    return None


def _reads_fprop(back: Transposed) -> bool:
    """Return whether a backward GEMM reads codes that fprop's pass made. Compilers of PyTorch 2.11 trace no `in`."""
    return back is Transposed.CODES or back is Transposed.FOLDED


class _GroupedLinear(torch.autograd.Function):
    """Saves what wgrad reads of x and dgrad of the weights, in FP8 if possible, and the ends."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, ends, recipe, dtype, stats, *codes = inputs
        x8, saved = _read_input(x, ends, recipe, dtype, ctx.needs_input_grad[1])
        ctx.recipe, ctx.dtype, ctx.x_dtype, ctx.stats = recipe, dtype, x.dtype, stats
        ctx.shape, ctx.weight_dtype = weight.shape, weight.dtype
        ctx.set_materialize_grads(False)
        if x8 is None:
            ctx.save_for_backward(ends, *saved[:3], None, None, weight)
            return grouped_mm(x.to(dtype).contiguous(), weight.to(dtype).mT, ends)
        if codes[0] is None:
            w = quantize_experts(weight, recipe, ctx.needs_input_grad[0])
        else:
            first = ExpertCodes(*codes[:2])
            w = StackCodes(first, first if codes[2] is None else ExpertCodes(*codes[2:]))
        saved_w = SavedWeights(*w.backward) if _reads_fprop(recipe.plan.w_back) else SavedWeights(weights=[weight])
        ctx.save_for_backward(ends, *saved[:3], *saved_w.tensors)
        return grouped_fprop(x8, w.forward, ends, recipe, dtype, Origin([x], weight), stats)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        (ends, *saved), recipe, dtype = ctx.saved_tensors, ctx.recipe, ctx.dtype
        x, w = SavedInput(*saved[:3]), SavedWeights.of(saved[3:], ())
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dy = dy.to(dtype).contiguous()
        fold = w.scale if recipe.plan.w_back is Transposed.FOLDED else None
        g, h = _read_gradient(dy, x.scale, fold, ends, recipe, needs_x, needs_weight)
        dx = _dgrad(dy, g, w, fold, ends, ctx).to(ctx.x_dtype) if needs_x else None
        dw = _wgrad(dy, h, x, ends, recipe, dtype).to(ctx.weight_dtype) if needs_weight else None
        return dx, dw, *(None,) * 8


def _read_input(
    x: Tensor, ends: Tensor, recipe: Recipe, dtype: torch.dtype, needs_weight: bool
) -> tuple[Quantized | None, SavedInput]:
    """Return x as fprop reads it, and as it is saved for wgrad: values, codes by row, or its own, padded."""
    plan = recipe.plan
    rows, reused = plan.x, _reads_fprop(plan.x_back)
    if rows is not None and plan.x_second is not None and needs_weight:
        both = kernels.quantize_rows_twice([x], rows, plan.x_second, keeps_codes=True)
        return both.first, SavedInput(codes=both.codes, scale=both.scale)
    columns = plan.x_t if needs_weight and plan.x_back is Transposed.QUANTIZED else None
    x8 = padded = None
    if columns is not None:
        in_one_pass = None if rows is None or rows.needs_whole_rows else rows
        x8, padded = quantize_groups(x, ends, in_one_pass, columns)
    if rows is not None and x8 is None:
        x8 = kernels.quantize(x, *rows)
    if not needs_weight:
        return x8, SavedInput()
    if padded is not None:
        return x8, SavedInput(None, *padded)
    if reused and x8 is not None:
        return x8, SavedInput(codes=x8.codes, scale=x8.scale)
    return x8, SavedInput(x.to(dtype).contiguous())


def _read_gradient(
    dy: Tensor,
    input_scale: Tensor | None,
    fold: Tensor | None,
    ends: Tensor,
    recipe: Recipe,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Quantized | None, Padded | None]:
    """Return dy as dgrad and as wgrad read it, from one read, with the scales of folded partners; None for BF16.

    Args:
        input_scale: scale of the input in fprop; read if wgrad is folded.
        fold: the scales (E, N) of the weights in fprop, if they move into the gradient.
    """
    rows, columns = recipe.plan.dy if needs_x else None, recipe.plan.dy_t if needs_weight else None
    if rows is None and columns is None:
        return None, None
    row_fold = None if rows is None else fold
    column_fold = input_scale if columns is not None and recipe.plan.x_back is Transposed.FOLDED else None
    return quantize_groups(dy, ends, rows, columns, row_fold, column_fold)


def _dgrad(dy: Tensor, g: Quantized | None, w: SavedWeights, fold: Tensor | None, ends: Tensor, ctx: Any) -> Tensor:
    recipe, dtype, (experts, rows, cols) = ctx.recipe, ctx.dtype, ctx.shape
    if g is None:
        return grouped_mm(dy, w.weights[0].to(dtype), ends)
    source = Source.of([dy], recipe.dgrad.grad_output, fold=fold)
    options = GemmOptions(dtype, recipe.dgrad.accumulate)
    if w.codes is not None:
        return grouped_dgrad_folded(g, w.codes, ends, options, source, ctx.stats)
    stack = kernels.quantize_matrix(w.weights[0].detach().mT.flatten(0, 1), recipe.plan.w_t)
    turned = ExpertCodes(stack.codes.view(experts, cols, rows), stack.scale.view(experts, cols))
    return _grouped_dgrad(g, turned, ends, options, source, ctx.stats)


def _wgrad(dy: Tensor, h: Padded | None, x: SavedInput, ends: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    if h is None:
        assert x.values is not None
        return grouped_mm(dy.t(), x.values, ends)
    assert x.codes is not None
    if recipe.plan.x_back is Transposed.FOLDED:
        return grouped_wgrad(h, Padded(transpose_groups(x.codes, ends), None), ends, dtype)
    return grouped_wgrad(h, Padded(x.codes, x.scale), ends, dtype)


# --- GEMMs of stacks, also for `octavo.nn.experts` --------------------------------------------------------------------


class Origin(NamedTuple):
    """Operands of an fprop in high precision, for telemetry."""

    tensors: Sequence[Tensor]
    """The tensors that the rows are computed from, as described by `Source`."""
    weight: Tensor
    """(E, N, K)."""
    kind: str = ""
    """Kind of their computation, `Source.kind`."""


def grouped_fprop(
    x: Quantized, w: ExpertCodes, ends: Tensor, recipe: Recipe, dtype: torch.dtype, origin: Origin,
    stats: Tensor | None, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y (R, N), its rows multiplied by weights (R,) if there are any."""
    options = GemmOptions(dtype, recipe.fprop.accumulate)
    if stats is None:
        return grouped_gemm(x if weights is None else weighted(x, weights), w, ends, *options)
    tokens = Source.of(origin.tensors, recipe.fprop.input, origin.kind)
    stack = Source.of([origin.weight], recipe.fprop.weight)
    return telemetry_experts.sampled_grouped_fprop(x, w, ends, options, tokens, stack, stats, weights)


def grouped_dgrad_folded(
    g: Quantized, codes: Tensor, ends: Tensor, options: GemmOptions, source: Source, stats: Tensor | None
) -> Tensor:
    """Return g W (R, K). codes: (E, N, K), by row, whose scales are in g."""
    experts, rows, cols = codes.shape
    turned = kernels.transpose(codes.flatten(0, 1), g.codes).view(cols, experts, rows).transpose(0, 1)
    return _grouped_dgrad(g, ExpertCodes(turned, None), ends, options, source, stats)


def _grouped_dgrad(
    g: Quantized, w: ExpertCodes, ends: Tensor, options: GemmOptions, source: Source, stats: Tensor | None
) -> Tensor:
    if stats is None:
        return grouped_gemm(g, w, ends, *options)
    return telemetry_experts.sampled_grouped_dgrad(g, w, ends, options, source, stats)
