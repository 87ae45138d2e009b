"""The experts of a mixture in FP8: two grouped GEMMs with the activation between them, as one autograd function.

    y[t] = sum over the experts e of token t of  r[t, e] * f(x[t] W_gate[e]^T) * (x[t] W_up[e]^T) W_down[e]^T

T: tokens. S: experts per token. R = T S: rows, sorted by expert (`octavo.kernels.experts`). D: width. F: hidden width.

Folded row scales make all of this exact except for the rounding of codes, and cheap. A token is quantised once, however
many experts it has, and its codes are copied to the rows of its experts. The routing weight r is multiplied into the
scale of a row of the second GEMM, which then returns weighted rows, and in backward into the factor by which the scales
of the hidden codes are folded into the gradient. Saved for backward are one byte per element of x (T, D), the inputs of
the activation (R, 2 F), in BF16 or as codes, and a few numbers per row. Sorted or transposed copies are made where a
GEMM reads them, as codes, and never saved. If fprop multiplies INT8, backward reads a second set of codes, in FP8,
which the same passes make: these are saved.

In other cases - another recipe with row scales, biases, an activation of the module's own - the two GEMMs are computed
by `GroupedLinear`, and the rest by PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo._util.autograd import first_order, tracked
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.activation import KINDS, Factors, Targets
from octavo.kernels.experts import Routing, activation_backward, combine, quantize_tokens, route
from octavo.kernels.grouped import ExpertCodes, Padded, grouped_wgrad, quantize_groups, transpose_groups
from octavo.kernels.quant_spec import spec_of
from octavo.nn.functional import compute_dtype
from octavo.nn.grouped import GroupedLinear, Origin, StackCodes, grouped_dgrad_folded, grouped_fprop, quantize_experts
from octavo.nn.mlp import activated, gate_and_up
from octavo.nn.operands import check_dtypes
from octavo.nn.recognised import Recognised
from octavo.nn.telemetry_ops import ROWS, GemmOptions, Source, stats_buffer_of
from octavo.numerics import PER_ROW, Quantized
from octavo.recipes import Precision, Recipe
from octavo.tensor import is_distributed, local

FIRST, SECOND = "gate_up_gemm", "down_gemm"
"""Names of the GEMMs of adopted experts, children of the module without parameters of their own."""


class ExpertRoles(NamedTuple):
    """Roles of the parameters of a module of experts, and how it is called."""

    inner: tuple[str, ...]
    """Gate and up: one stack of both (E, 2 F, D), two of (E, F, D), or up alone."""
    down: str
    """(E, D, F)."""
    kind: str
    """Activation, by its name in `kernels.activation`; empty for the module's own `_apply_gate`."""
    is_gated: bool = True
    is_transposed: bool = False
    """Whether weights are stored (E, in, out)."""
    is_interleaved: bool = False
    """Whether gate and up alternate in their stack."""
    biases: tuple[str, ...] = ()
    """Biases of the stack (E, 2 F) and of down (E, D)."""
    arguments: tuple[str, ...] = ("x", "ids", "weights")
    """Names of the arguments of `forward`: tokens, their experts and routing weights; or sorted rows and their number
    per expert; or sorted rows alone, as many for each expert (Llama 4)."""

    @property
    def is_sorted(self) -> bool:
        """Whether the module is called with sorted rows."""
        return len(self.arguments) < 3

    @property
    def has_equal_groups(self) -> bool:
        """Whether it is called with as many rows for each expert."""
        return len(self.arguments) == 1


class ExpertOptions(NamedTuple):
    """Options of the fused computation of experts."""

    kind: str
    recipe: Recipe
    dtype: torch.dtype
    keeps_codes: bool


def unfused_reason(roles: ExpertRoles, first: Recipe, second: Recipe) -> str | None:
    """Return why experts are computed GEMM by GEMM, or None."""
    if roles.kind not in KINDS:
        return "an activation of its own"
    if roles.biases:
        return "biases"
    if first != second:
        return "two recipes"
    if not (first.folds("dgrad.weight") and first.folds("wgrad.input")):
        return f"recipe '{first.name}' does not fold its scales"
    if first.folded_rows("input").scaling == "float32":
        return f"recipe '{first.name}' has FP32 scales, from which backward would not make the same codes again"
    return None


class ExpertLinear(GroupedLinear):
    """One of the two GEMMs of adopted experts. Its weights remain parameters of their module.

    It does not keep that module alive. A copy of the module is the owner of its copied GEMMs; one that is copied alone
    has no weights.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...], roles: ExpertRoles, recipe: Recipe) -> None:
        nn.Module.__init__(self)
        self.recipe, self.enabled = recipe, True
        self.names, self.roles = names, roles
        self.belongs_to(owner)

    def belongs_to(self, owner: nn.Module) -> None:
        """Take the weights from this module."""
        self._owner: weakref.ref[nn.Module] | None = weakref.ref(owner)

    @property
    def has_owner(self) -> bool:
        """Whether the module of its weights is there."""
        return self._owner is not None and self._owner() is not None

    @property
    def owner(self) -> nn.Module:
        """The module that has its weights.

        Raises:
            UnsupportedError: it is gone, or this GEMM was copied without it.
        """
        owner = None if self._owner is None else self._owner()
        if owner is None:
            raise UnsupportedError("a GEMM of experts has no weights without their module: copy, or keep, the module.")
        return owner

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_owner"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        older = state.get("owner", ())  # in files of older versions
        super().__setstate__({name: value for name, value in state.items() if name != "owner"})  # type: ignore[no-untyped-call]
        self._owner = weakref.ref(older[0]) if older else None

    @property
    def parts(self) -> list[Tensor]:
        """The parameters."""
        owner = self.owner
        return [getattr(owner, name) for name in self.names]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(E, N, K), gate above up: the parameter itself if it is stored so; of sharded experts the local ones."""
        return self._stacked([_here(part) for part in self.parts])

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of `weight`, None if there is none yet."""
        gradients = [local(part.grad) for part in self.parts if part.grad is not None]
        return self._stacked(gradients) if len(gradients) == len(self.names) else None

    def _stacked(self, parts: list[Tensor]) -> Tensor:
        stack = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2 if self.roles.is_transposed else 1)
        stack = stack.mT if self.roles.is_transposed else stack
        if self.roles.is_interleaved and self.names == self.roles.inner:
            stack = stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return stack if stack.is_contiguous() else stack.contiguous()


def _here(parameter: Tensor) -> Tensor:
    """Return the part of a parameter on this rank, with autograd."""
    return cast(Any, parameter).to_local() if is_distributed(parameter) else parameter


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x, with its gradient multiplied by a factor."""
    result: Tensor = x if factor == 1 else _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if dy is None else dy * ctx.factor, None


class Experts(Recognised):
    """Experts that compute in FP8: mixed into the class of a module by conversion."""

    prefix = "FP8"
    fields = (*Recognised.fields, "expert_roles", "expert_inputs", "exchange")
    expert_roles: ExpertRoles
    expert_inputs: Precision
    """Precision in which the inputs of the activation are saved for backward."""
    exchange: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] | None = None
    """Computes (self, x, ids, weights) if other ranks have some of the experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of the module: (T, D), or for sorted rows (R, D).

        Raises:
            UnsupportedError: the module has changed since it was converted, and its experts are on several ranks.
        """
        if not self.is_as_recognised():
            if self.exchange is not None:
                raise UnsupportedError(
                    "these experts are on several ranks, and their module has changed since it was converted."
                    " Change it before the conversion."
                )
            return cast(Tensor, super().forward(*args, **kwargs))
        given = self._arguments(args, kwargs)
        if self.expert_roles.has_equal_groups and (given[0].dim() != 2 or len(given[0]) % self.count):
            return cast(Tensor, super().forward(*args, **kwargs))  # which raises, or knows what is meant
        if self.expert_roles.is_sorted:
            rows, order = given[0], torch.arange(len(given[0]), dtype=torch.int32, device=given[0].device)
            if self.expert_roles.has_equal_groups:
                groups = torch.arange(1, self.count + 1, dtype=torch.int32, device=rows.device)
                ends = groups * (len(rows) // self.count)
            else:
                ends = given[1].cumsum(0, dtype=torch.int32)
            return self.compute(rows, Routing(order, order[:, None], ends), None)
        if getattr(self, "_is_expert_parallel", False):
            raise UnsupportedError("experts that transformers itself shards over ranks cannot compute in FP8.")
        x, ids, weights = given
        flat, ids = x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1])
        ids, weights = without_skipped(ids, weights.reshape(ids.shape), self.count)
        if self.exchange is not None:
            return self.exchange(self, flat, ids, weights).to(x.dtype).view(x.shape)
        routing = route(ids, self.count)
        return self.compute(flat, routing, weights).to(x.dtype).view(x.shape)

    @property
    def count(self) -> int:
        """E."""
        return self.products[0].parts[0].shape[0]

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments of a call in the order of `expert_roles.arguments`, each of which must be given once."""
        names = self.expert_roles.arguments
        if {*names[len(args) :]} != {*kwargs} or len(args) > len(names):
            raise TypeError(
                f"{type(self).__name__} takes the arguments {', '.join(names)}, got {len(args)} by position"
                + (f" and {', '.join(kwargs)} by name." if kwargs else ".")
            )
        return [*args, *(kwargs[name] for name in names[len(args) :])]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for gemm in self.children():
            if isinstance(gemm, ExpertLinear) and not gemm.has_owner:  # not those of a shallow copy
                gemm.belongs_to(self)

    def release(self) -> None:
        """Turn this module back into its original class, in place, without its GEMMs."""
        for name in (FIRST, SECOND):
            self._modules.pop(name, None)
        super().release()

    @property
    def products(self) -> tuple[ExpertLinear, ExpertLinear]:
        """The GEMM of gate and up, and that of down."""
        return cast(ExpertLinear, self.get_submodule(FIRST)), cast(ExpertLinear, self.get_submodule(SECOND))

    def compute(self, x: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
        """Return y (T, D) for tokens x (T, D), in x's dtype, or in autocast's dtype if it is on.

        Args:
            routing: routing of the tokens.
            weights: (T, S), the routing weights; None for 1.
        """
        if (options := self.options(x)) is not None:
            first, second = self.products
            return experts(x, weights, (first.weight, second.weight), routing, options, (first, second))
        return self.by_products(x, routing, weights)

    def options(self, x: Tensor) -> ExpertOptions | None:
        """Return how tokens x are computed by one function, None if they are not."""
        first, second = self.products
        if not (first.enabled and second.enabled) or unfused_reason(self.expert_roles, first.recipe, second.recipe):
            return None
        return ExpertOptions(self.expert_roles.kind, first.recipe, compute_dtype(x), self.expert_inputs == "fp8")

    def by_products(self, x: Tensor, routing: Routing, weights: Tensor | None, factor: float = 1.0) -> Tensor:
        """Return y (T, D) for tokens x (T, D), GEMM by GEMM.

        Args:
            routing: routing of the tokens.
            weights: (T, S), the routing weights; None for 1.
            factor: factor of the gradients of parameters.
        """
        rows, sorted_ = dispatch(x, weights, routing)
        hidden = self._activate(self._product(0, rows, routing.ends, factor))
        y = self._product(1, hidden, routing.ends, factor)
        return collect(y * sorted_[:, None].to(y.dtype), routing)

    def _product(self, number: int, rows: Tensor, ends: Tensor, factor: float) -> Tensor:
        """Return the GEMM of gate and up, or that of down, with its bias."""
        layer = self.products[number]
        y = layer.multiply(rows, scaled_gradient(layer.weight, factor), ends)
        if not self.expert_roles.biases:
            return y
        bias = scaled_gradient(_here(self.get_parameter(self.expert_roles.biases[number])), factor)
        if number == 0 and self.expert_roles.is_interleaved:
            bias = bias.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        expert = torch.searchsorted(ends, torch.arange(len(y), dtype=torch.int32, device=y.device), right=True)
        return y + bias[expert].to(y.dtype)

    def _activate(self, y: Tensor) -> Tensor:
        roles = self.expert_roles
        if not roles.kind:
            return cast(Tensor, cast(Any, self)._apply_gate(y))
        gate, *up = y.chunk(2, dim=1) if roles.is_gated else (y,)
        h: Tensor = _VALUES[roles.kind](gate)
        return h if not up else h * up[0]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        return ", ".join(filter(None, (super().extra_repr(), f"activation={self.expert_roles.kind or 'its own'}")))


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def adopt(module: nn.Module, roles: ExpertRoles, recipe: Recipe, second: Recipe, inputs: Precision) -> None:
    """Make a module of experts compute in FP8, in place. Parameters, names and state_dict stay.

    Args:
        recipe: recipe of gate and up.
        second: recipe of down.
        inputs: precision in which the inputs of the activation are saved for backward.
    """
    Experts.take(module, expert_roles=roles, expert_inputs=inputs)
    module.add_module(FIRST, ExpertLinear(module, roles.inner, roles, recipe))
    module.add_module(SECOND, ExpertLinear(module, (roles.down,), roles, second))


def without_skipped(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return ids and routing weights (T, S) without the id E, by which transformers says that a slot has no expert.

    Such a slot is computed with the weight 0 by an expert that its token has, so that it is finite where the token's
    own slots are (0 times an infinity is NaN), or by the last expert if the token has none: it adds 0 to the results
    and to all gradients. A token without any expert must be finite: nothing masks it.
    """
    skipped = ids == experts
    own = ids.amin(dim=1, keepdim=True).clamp(max=experts - 1)
    return torch.where(skipped, own, ids), weights.masked_fill(skipped, 0)


def dispatch(x: Tensor, weights: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return tokens (T, D) and their routing weights (T, S), None for 1, as sorted rows: (R, D) and (R,)."""
    rows: Tensor = _Rows.apply(x, *routing[:2])  # type: ignore[no-untyped-call]
    if weights is None:
        return rows, rows.new_ones(len(rows))
    empty = weights.new_zeros(len(rows))
    return rows, empty.scatter(0, routing.place.flatten().long(), weights.flatten())


def collect(y: Tensor, routing: Routing) -> Tensor:
    """Return the sum over each token's sorted rows (R, D), as (T, D)."""
    result: Tensor = _Sums.apply(y, *routing[:2])  # type: ignore[no-untyped-call]
    return result


class _Rows(torch.autograd.Function):
    """Tokens (T, D) as sorted rows (R, D); backward sums them in the order of `combine`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.set_materialize_grads(False)
        return x[source]

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if dy is None else combine(dy.contiguous(), *ctx.saved_tensors), None, None


class _Sums(torch.autograd.Function):
    """Rows (R, D) summed per token, (T, D)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.set_materialize_grads(False)
        return combine(y.contiguous(), place)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if dy is None else dy[ctx.saved_tensors[0]], None, None


# --- experts as one autograd function ---------------------------------------------------------------------------------


def experts(
    x: Tensor,
    weights: Tensor | None,
    stacks: tuple[Tensor, Tensor],
    routing: Routing,
    options: ExpertOptions,
    layers: tuple[ExpertLinear, ExpertLinear] | None = None,
) -> Tensor:
    """Return y (T, D) in `options.dtype`.

    Args:
        x: (T, D).
        weights: (T, S), or None for 1.
        stacks: gate and up (E, 2 F, D), or up alone (E, F, D); down (E, D, F).
        routing: routing of the T tokens.
        options: a recipe with folded row scales, and further settings.
        layers: layers with telemetry buffers, and codes to be reused.

    Raises:
        ConfigError: shapes that do not fit.
    """
    (first, second), (count, width) = stacks, x.shape
    check_dtypes(x, first, second)
    if first.shape[2] != width or second.shape[1] != width or len(routing.place) != count:
        raise ConfigError(
            f"experts of weights {tuple(first.shape)} and {tuple(second.shape)} take x (T, {first.shape[2]}) and as "
            f"many routed tokens, got {tuple(x.shape)} and {len(routing.place)} tokens."
        )
    if weights is None:
        weights = torch.ones(routing.place.shape, dtype=torch.float32, device=x.device)
    stats = tuple([stats_buffer_of([layer]) for layer in layers or ()]) or (None, None)
    codes = tuple([layer.weight_codes for layer in layers or ()]) or (None, None)
    result: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        *tracked(x, weights, first, second), routing, options, stats, codes
    )
    return result


class Rows(NamedTuple):
    """The input of experts in FP8, as wgrad reads it."""

    tokens: Quantized
    """(T, D)."""
    source: Tensor
    """int32 (R,), the token of each row."""
    weights: Tensor
    """FP32 (R,), the routing weights."""


class SavedRows(NamedTuple):
    """Tensors that `forward_rows` saves for `backward_rows`."""

    first: ExpertCodes
    second: ExpertCodes
    hidden_scale: Tensor
    """FP32 (R, 1), of the codes of the hidden activation that wgrad reads."""
    inputs: Sequence[Tensor]
    """The result of the first GEMM (R, 2 F) or (R, F), or codes and scales of gate and up."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors alone, for `save_for_backward`."""
        return *self.first, *self.second, self.hidden_scale, *self.inputs

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> SavedRows:
        """Undo `tensors`."""
        return cls(ExpertCodes(*tensors[:2]), ExpertCodes(*tensors[2:4]), tensors[4], tensors[5:])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weights, first, second, routing, options, stats, known = inputs
        needs_x, _, needs_first, needs_second = needs = ctx.needs_input_grad[:4]
        tokens, rows, sorted_ = quantize_rows(x, weights, routing.place, options.recipe, needs_first)
        y, saved = forward_rows(
            (rows, sorted_), (first, second), routing.ends, options, (x, routing.source),
            (needs_x, any(needs), needs_second), stats, known,
        )  # fmt: skip
        ctx.save_for_backward(*tokens[:2], sorted_, *routing, *saved.tensors)
        ctx.options, ctx.stats = options, stats
        ctx.set_materialize_grads(False)
        ctx.dtypes = [each.dtype for each in (x, weights, first, second)]
        return combine(y, routing.place)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        codes, scale, sorted_, source, place, ends, *saved = ctx.saved_tensors
        rows = Rows(Quantized(codes, scale, PER_ROW), source, sorted_)
        needs_x, _, *needs_stacks = ctx.needs_input_grad[:4]
        dy = dy.to(ctx.options.dtype).contiguous()
        needs = needs_x, *needs_stacks
        dx, d_weights, *dws = backward_rows(dy, rows, ends, SavedRows.of(saved), ctx.options, needs, ctx.stats)
        found = None if dx is None else combine(dx, place), d_weights[place], *dws
        return *(None if d is None else d.to(t) for d, t in zip(found, ctx.dtypes, strict=True)), *(None,) * 4


def quantize_rows(
    x: Tensor, weights: Tensor, place: Tensor, recipe: Recipe, needs_wgrad: bool
) -> tuple[Quantized, Quantized, Tensor]:
    """Return codes of tokens (T, D) for wgrad, of sorted rows (R, D) for fprop, and routing weights of rows, FP32 (R,).

    Args:
        weights: (T, S).
        place: as in `Routing`.
        needs_wgrad: whether wgrad will run, which may read a second set of codes.
    """
    second = recipe.plan.x_second if needs_wgrad else None
    tokens, rows = quantize_tokens(x, place, spec_of(recipe.fprop.input), second)
    sorted_ = weights.new_empty(place.numel(), dtype=torch.float32)
    sorted_[place.flatten()] = weights.flatten().float()
    return tokens, rows, sorted_


def forward_rows(
    rows: tuple[Quantized, Tensor], stacks: tuple[Tensor, Tensor], ends: Tensor, options: ExpertOptions,
    origin: tuple[Tensor, Tensor], needs: tuple[bool, bool, bool], stats: Sequence[Tensor | None],
    known: Sequence[StackCodes | None] = (None, None),
) -> tuple[Tensor, SavedRows]:  # fmt: skip
    """Return the weighted results (R, D) of sorted rows (R, D), and what backward reads of them.

    Args:
        rows: the rows, and their weights, FP32 (R,).
        origin: the tokens, and the token of each row, for telemetry.
        needs: whether dgrad of gate and up, dgrad of down, and wgrad of down will run.
        stats: telemetry buffer of either GEMM.
        known: codes of either stack, if they are reused.
    """
    (x, weights), (kind, recipe, dtype, keeps_codes) = rows, options
    first, second = (
        codes or quantize_experts(w, recipe, needed) for codes, w, needed in zip(known, stacks, needs[:2], strict=True)
    )
    before = grouped_fprop(x, first.forward, ends, recipe, dtype, Origin(origin, stacks[0], ROWS), stats[0])
    middle = _halves(before, second.forward.codes.shape[2])
    hidden, inputs, hidden_scale = activated(kind, middle, recipe.plan, keeps_codes, needs[2])
    y = grouped_fprop(hidden, second.forward, ends, recipe, dtype, Origin(middle, stacks[1], kind), stats[1], weights)
    return y, SavedRows(first.backward, second.backward, hidden_scale, inputs if keeps_codes else [before])


def backward_rows(
    dy: Tensor, rows: Rows, ends: Tensor, saved: SavedRows, options: ExpertOptions, needs: tuple[bool, ...],
    stats: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of rows (R, D), of routing weights (R,), of gate and up, and of down.

    Args:
        dy: (T, D), the gradient of the sums: that of a row is dy[rows.source].
        saved: what `forward_rows` returned.
        needs: whether rows, gate and up, down need a gradient.
    """
    kind, recipe, dtype, keeps_codes = options
    (w1, s1), (w2, s2), hidden_scale, saved_inputs = saved
    gemm = GemmOptions(dtype, recipe.dgrad.accumulate)
    g_spec, h_spec = spec_of(recipe.dgrad.grad_output), spec_of(recipe.wgrad.grad_output)
    fold = hidden_scale * rows.weights[:, None]
    g, h = quantize_groups(dy, ends, g_spec, h_spec if needs[2] else None, s2, fold, rows.source)
    assert g is not None
    source = Source.of((dy, rows.source), recipe.dgrad.grad_output, ROWS, s2)
    dh = grouped_dgrad_folded(g, w2, ends, gemm, source, stats[1])
    gate, up = gate_and_up(saved_inputs if keeps_codes else _halves(saved_inputs[0], w2.shape[2]), keeps_codes)
    targets = [spec if needed else None for spec, needed in zip((g_spec, h_spec, h_spec), needs, strict=True)]
    factors = Factors(s1, rows.tokens.scale[rows.source], hidden_scale)
    found = activation_backward(kind, dh, gate, up, rows.weights, ends, Targets(*targets), factors)
    dw2 = None if h is None or found.hidden is None else grouped_wgrad(h, Padded(found.hidden, None), ends, dtype)
    inputs = [each for x in (gate, up) if x is not None for each in ([x] if isinstance(x, Tensor) else x[:2])]
    source = Source.of([dh, rows.weights, *inputs], recipe.dgrad.grad_output, kind, s1)
    dx = None if found.rows is None else grouped_dgrad_folded(found.rows, w1, ends, gemm, source, stats[0])
    dw1 = None
    if found.columns is not None:
        tokens = transpose_groups(rows.tokens.codes, ends, rows.source)
        dw1 = grouped_wgrad(found.columns, Padded(tokens, None), ends, dtype)
    return dx, found.weights, dw1, dw2


def _halves(before: Tensor, width: int) -> list[Tensor]:
    """Return gate and up as views, or up alone. width: F."""
    return [before[:, :width], before[:, width:]] if before.shape[1] == 2 * width else [before]
