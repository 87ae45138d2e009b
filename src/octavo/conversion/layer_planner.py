"""Rows of a plan: the precision and kernels of each linear layer, convolution and product of experts, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial

import torch
from torch import nn

from octavo.conversion.experts import FoundExperts, no_grouped_kernel
from octavo.conversion.fusion_patterns import reader_of
from octavo.conversion.gain import EXPERTS_FROM, predicted_gain, predicted_gain_of_experts
from octavo.conversion.layer_plan import IN_PROJECTION_KIND, LayerPlan
from octavo.conversion.policy import NO_FP8, TOO_SMALL, Policy
from octavo.conversion.refusals import device_unsupported_reason
from octavo.conversion.stacks import FoundStack
from octavo.conversion.unconverted import IN_ONE_CALL, active_share
from octavo.conversion.unfit import find_unfit
from octavo.conversion.weights import Layer
from octavo.kernels.explain import gemm_kernel
from octavo.kernels.gemm import EMULATED
from octavo.kernels.runtime.dispatch import on_gpu, rates
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.conv import unsupported_reason_recipe
from octavo.nn.experts import FIRST, SECOND, ExpertRoles, unfused_reason
from octavo.nn.grouped import unsupported_reason as unsupported_reason_grouped
from octavo.nn.linear import is_transposed
from octavo.nn.modules import full_name
from octavo.nn.multihead import IN_PROJECTION, widths_of
from octavo.nn.multihead import unsupported_reason_recipe as unsupported_reason_attention
from octavo.numerics import block_for
from octavo.numerics.rotation import largest_block
from octavo.recipes import GEMMS, Evidence, Recipe, load


@dataclass(frozen=True, kw_only=True)
class LayerPlanner:
    """Makes the rows of a plan. Its fields are the inputs of `make_plan`."""

    model: nn.Module
    recipe: Recipe
    recipes: Mapping[str, Recipe]
    """Name of a layer or product of experts -> its recipe, with `recipe.modules` applied."""
    policy: Policy
    tokens: int
    device: torch.device
    roles: Mapping[int, str]
    """`id` of a layer or of its weight -> its role, if that keeps it in BF16 by default."""
    in_fp8: Mapping[str, str] = field(default_factory=dict)
    """Name of a layer whose recipe multiplies INT8 or rotated codes in fprop, and which cannot -> the reason."""

    def layers(self, layers: Mapping[str, Layer], others: Sequence[LayerPlan] = ()) -> list[LayerPlan]:
        """Return the rows of linear layers and convolutions.

        Args:
            others: rows of other modules; those of `attentions` decide whether `out_proj` is called.
        """
        blocks, unfit = self.policy.blocks_to_keep(self.model), find_unfit(self.model, layers.values())
        unfit |= _read_by_attention(self.model, others)
        rows = []
        for name, layer in layers.items():
            role, reason = self.roles.get(id(layer), ""), unfit.get(id(layer), "")
            kept = _reason_of_block(name, blocks) or self.policy.reason_to_keep(name, layer, role, reason)
            rows.append(self._layer(name, layer, kept))
        return self._without_second_copies(rows, others)

    def experts(self, experts: Mapping[str, FoundExperts]) -> Iterator[LayerPlan]:
        """Yield the rows of both products of each module of experts."""
        blocks = self.policy.blocks_to_keep(self.model)
        for name, found in experts.items():
            module = self.model.get_submodule(name)
            sizes = (*found.first, *found.second)
            kept = _reason_of_block(name, blocks) or self.policy.reason_to_keep_experts(name, module, sizes)
            yield from self._experts(name, module, found, kept or no_grouped_kernel(self.device))

    def attentions(self, attentions: Mapping[str, nn.MultiheadAttention]) -> Iterator[LayerPlan]:
        """Yield the row of the in-projection of each `nn.MultiheadAttention`."""
        blocks = self.policy.blocks_to_keep(self.model)
        for name, module in attentions.items():
            owner = name.rpartition(".")[0]
            kept = _reason_of_block(owner, blocks) or self.policy.reason_to_keep_attention(owner, module)
            row = self._layer(name, module, kept or unsupported_reason_attention(self.recipes[name]))
            shapes = [f"{rows} x {features}" for rows, features in _projection_shapes(module)]
            notes = (
                f"three weights: {', '.join(shapes)}" if row.is_fp8 and len(shapes) > 1 else "",
                "its weights stay as they are" if row.is_fp8 and self.policy.weights == "fp8" else "",
            )
            yield replace(row, reason="; ".join(filter(None, (row.reason, *notes))))

    def stacks(self, stacks: Mapping[str, FoundStack]) -> Iterator[LayerPlan]:
        """Yield the row of each module with one matrix per expert."""
        blocks = self.policy.blocks_to_keep(self.model)
        for name, stack in stacks.items():
            module, recipe = self.model.get_submodule(name), self.recipes[name]
            evidence = _evidence_for(name, self.recipe)
            kept = _reason_of_block(name, blocks) or self.policy.reason_to_keep_experts(name, module, stack.shape)
            kept = kept or no_grouped_kernel(self.device) or unsupported_reason_grouped(recipe)
            if kept is None and not recipe.is_fp8:
                kept = _chosen_reason(evidence)
            carried_out = recipe if kept is None else None
            row = self._grouped(name, f"{stack.experts} matrices", stack.shape, stack.experts, carried_out)
            notes = evidence.reason if evidence else "", self.in_fp8.get(name), _block_note(recipe, stack.shape[1])
            active = active_share(module, stack.experts)
            yield replace(row, active=active, reason=kept or "; ".join(filter(None, notes)), evidence=evidence)

    def _layer(self, name: str, layer: Layer | nn.MultiheadAttention, kept: str | None) -> LayerPlan:
        """Return the row of one layer, or of an in-projection. kept: the policy's reason to keep it in BF16."""
        recipe, found = self.recipes[name], _evidence_for(name, self.recipe)
        kind, shape, taps = _gemm_of(layer)
        known = rates(self.device) if recipe.is_fp8 else None
        shapes = _projection_shapes(layer) if isinstance(layer, nn.MultiheadAttention) else [shape]
        gain = min(predicted_gain(recipe, n, k, self.tokens, taps, rates=known) for n, k in shapes) if known else None
        if kept is None and taps:
            kept = unsupported_reason_recipe(recipe)
        if kept is None and not recipe.is_fp8:
            kept = _chosen_reason(found)
        if kept is None and gain is not None and gain < self.policy.min_gain and not found:
            unit = "output pixels" if taps else "tokens"
            kept = f"{TOO_SMALL}: predicted {gain:.2f} times BF16 at {self.tokens} {unit}"
        if kept is not None:
            recipe, gain = load("bf16"), None
        kernels, fallback = self._kernels(recipe)
        keeps_input = kind == "linear" and self.policy.keeps_input(name, recipe)
        notes = (
            found.reason if found else "",
            fallback,
            "keeps its input" if keeps_input else "",
            self.in_fp8.get(name, ""),
            _block_note(recipe, shape[1]),
        )
        return LayerPlan(
            name=name,
            kind=kind,
            shape=shape,
            recipe=recipe.name,
            precision=_precision(recipe),
            kernels=" / ".join(kernels),
            gain=gain,
            reason=kept or "; ".join(filter(None, notes)),
            keeps_input=keeps_input,
            evidence=found,
        )

    def _kernels(self, recipe: Recipe) -> tuple[list[str], str]:
        """Return the kernel of each GEMM, and a note if the reference runs on a GPU."""
        operands = {name: (a, b) for name, a, b in recipe.gemms()}
        names, note = [], ""
        for gemm in GEMMS:
            if gemm not in operands:
                names.append("-")
                continue
            name, refused = self._gemm_kernel(*((operand.format, operand.granularity) for operand in operands[gemm]))
            names.append(name)
            if name in EMULATED:
                note = "emulated: no faster than BF16"
            if name == "reference" and self._is_refused:
                note = "by the reference: no fast kernel on this GPU"
            elif name == "reference" and self.device.type == "cuda":
                note = f"{gemm} falls back: {'; '.join(f'{kernel}: {why}' for kernel, why in refused.items())}"
        return names, note

    @cached_property
    def _is_refused(self) -> bool:
        return device_unsupported_reason(self.device) is not None

    @cached_property
    def _gemm_kernel(self) -> Callable[..., tuple[str, dict[str, str]]]:
        """`gemm_kernel` on this device, asked once per kind of operands: it quantises two matrices."""
        return cache(partial(gemm_kernel, self.device))

    def _experts(self, name: str, module: nn.Module, found: FoundExperts, kept: str | None) -> Iterator[LayerPlan]:
        """Yield the rows of a module of experts. kept: the reason to keep it in BF16."""
        names = full_name(name, FIRST), full_name(name, SECOND)
        given = [self.recipes[each] for each in names]
        in_map = [_evidence_for(each, self.recipe) for each in names]
        reasons = [kept or unsupported_reason_grouped(recipe) for recipe in given]
        chosen = [None if own.is_fp8 else _chosen_reason(entry) for own, entry in zip(given, in_map, strict=True)]
        reasons = [why or own for why, own in zip(reasons, chosen, strict=True)]
        how = _how(found.roles, *given) if reasons == [None, None] else ""
        active = active_share(module, found.count)
        gain = self._gain_of_experts(found, given[0], active) if how.startswith("fused") else None
        for i, shape in enumerate((found.first, found.second)):
            recipe = given[i] if reasons[i] is None else None
            entry = in_map[i]
            note = "" if recipe is None else _block_note(recipe, shape[1])
            notes = entry.reason if entry else "", self.in_fp8.get(names[i]), note, how
            row = self._grouped(names[i], f"{found.count} experts", shape, found.count, recipe)
            reason = reasons[i] or "; ".join(filter(None, notes))
            yield replace(row, active=active, gain=gain, reason=reason, evidence=entry)

    def _grouped(self, name: str, kind: str, shape: tuple[int, int], count: int, recipe: Recipe | None) -> LayerPlan:
        """Return the row of a grouped GEMM without its reason. recipe: None in BF16."""
        recipe = recipe or load("bf16")
        kernel = "grouped_gemm" if on_gpu(self.device) else "reference"
        kernels = " / ".join(kernel if recipe.gemm(gemm).is_fp8 else "-" for gemm in GEMMS)
        return LayerPlan(
            name=name, kind=kind, shape=shape, count=count, recipe=recipe.name, precision=_precision(recipe),
            kernels=kernels, gain=None, reason="",
        )  # fmt: skip

    def _gain_of_experts(self, found: FoundExperts, recipe: Recipe, active: float) -> float | None:
        """Return the predicted gain of fused experts; None without rates, if narrow, or of an unknown share."""
        known = rates(self.device)
        if known is None or active == 1.0 or min(found.second) < EXPERTS_FROM:
            return None
        rows = self.tokens * active * found.count
        return predicted_gain_of_experts(recipe, found.first, found.second, found.count, rows, rates=known)

    def _without_second_copies(self, rows: list[LayerPlan], others: Sequence[LayerPlan]) -> list[LayerPlan]:
        """Let layers that read attention's output quantise it again in backward: attention saves that tensor anyway.

        Not `out_proj` behind an `nn.MultiheadAttention` that is not `batch_first`: it reads a copy in another layout.
        """
        if not self.policy.fuse or self.policy.saved.attention_output == "fp8":
            return rows
        cores = {name: core for name, core in self.model.named_modules() if isinstance(core, ScaledDotProduct)}
        readers = {reader_of(name, core) for name, core in cores.items()}
        attentions = [row.module for row in others if row.is_in_projection and row.is_fp8]
        attentions = [name for name in attentions if self.model.get_submodule(name).batch_first]
        readers |= {full_name(name, "out_proj") for name in attentions}
        readers = {name for name in readers if name in self.recipes and self.recipes[name].plan.requantises_exactly}
        return [replace(row, keeps_input=True) if row.is_fp8 and row.name in readers else row for row in rows]


def _reason_of_block(name: str, blocks: Mapping[str, str]) -> str | None:
    """Return why the block around a module stays in BF16, or None."""
    return next((why for block, why in blocks.items() if f"{name}.".startswith(f"{block}.")), None)


def _block_note(recipe: Recipe, features: int) -> str:
    """Return a note if a layer is rotated by smaller blocks than its recipe names."""
    if not recipe.fprop.is_fp8 or not (largest := recipe.fprop.input.signed_rotation):
        return ""
    block = block_for(features, largest)
    if block == largest:
        return ""
    return f"rotated by blocks of {abs(block)}, {largest_block(block)} that divides {features}"


def _precision(recipe: Recipe) -> str:
    return " / ".join(recipe.gemm(gemm).precision for gemm in GEMMS)


def _how(roles: ExpertRoles, first: Recipe, second: Recipe) -> str:
    why = unfused_reason(roles, first, second)
    inner = "gate, up" if roles.is_gated else "up"
    return f"GEMM by GEMM: {why}" if why else f"fused: sort, {inner}, {roles.kind}, down, sum"


def _evidence_for(name: str, recipe: Recipe) -> Evidence | None:
    """Return a precision map's entry for the pattern that decided a layer's recipe."""
    pattern = next((pattern for pattern in reversed(recipe.modules) if fnmatchcase(name, pattern)), None)
    return None if pattern is None else recipe.evidence.get(pattern)


def _chosen_reason(found: Evidence | None) -> str:
    """Return why a recipe in BF16 was chosen, given its entry in a precision map."""
    return found.reason if found else NO_FP8


def _read_by_attention(model: nn.Module, others: Iterable[LayerPlan]) -> dict[int, str]:
    """Return the `id` of each `out_proj` that PyTorch's own attention will multiply by itself, and the reason."""
    rows, reasons = {row.module: row for row in others if row.is_in_projection}, {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or (name in rows and rows[name].is_fp8):
            continue
        why = f"its {IN_PROJECTION} stays in BF16" if name in rows else IN_ONE_CALL
        reasons[id(module.out_proj)] = f"nn.MultiheadAttention reads its weight and never calls it: {why}"
    return reasons


def _gemm_of(layer: Layer | nn.MultiheadAttention) -> tuple[str, tuple[int, int], int]:
    """Return a layer's kind, (N, K) of its GEMM, and the pixels of a convolution's patch, 0 for a linear layer."""
    if isinstance(layer, nn.MultiheadAttention):
        shapes = _projection_shapes(layer)
        return IN_PROJECTION_KIND, (shapes[0][0], sum(features for _, features in shapes)), 0
    if is_transposed(layer):
        return "stored as K x N", (layer.weight.shape[1], layer.weight.shape[0]), 0
    if isinstance(layer, nn.Linear):
        return "linear", (layer.out_features, layer.in_features), 0
    taps, kernel = math.prod(layer.kernel_size), "x".join(map(str, layer.kernel_size))
    shape = layer.out_channels, layer.in_channels // layer.groups * taps
    return f"{type(layer).__name__.lower()} {kernel}", shape, taps


def _projection_shapes(module: nn.MultiheadAttention) -> list[tuple[int, int]]:
    """Return (N, K) of each GEMM of an in-projection in fprop: one, or three with `kdim` or `vdim`."""
    if module.in_proj_weight is not None:
        return [(3 * module.embed_dim, module.embed_dim)]
    return [(module.embed_dim, features) for features in widths_of(module)]
