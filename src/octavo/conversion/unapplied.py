"""Where a policy asks for activations in FP8 and does not get them: said in the plan, refused under `strict`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from octavo.conversion.fusion_patterns import FusionPattern, full_name, reader_of, why_unfused
from octavo.conversion.policy import Policy
from octavo.nn.attention import ScaledDotProduct, unsupported_reason
from octavo.nn.fused import MLPRoles
from octavo.recipes import Recipe


def find_unapplied(
    model: nn.Module,
    policy: Policy,
    recipes: dict[str, Recipe],
    mlps: Mapping[str, MLPRoles],
    structures: tuple[FusionPattern, ...],
    keep_input: Collection[str],
) -> Iterator[str]:
    """Yield a line for each place where an option of the policy does nothing, and one for each that does so everywhere.

    Args:
        recipes: full name of each linear layer in FP8 -> its recipe.
        mlps: what `find_mlps` found.
        structures: what is computed together.
        keep_input: full names of the layers that keep their input as it is.
    """
    applied = {kind: [s.name for s in structures if s.kind == kind] for kind in ("mlp", "norm", "attention")}
    if policy.activation_inputs == "fp8":
        yield from _mlps(recipes, {name: roles for name, roles in mlps.items() if name not in applied["mlp"]})
        if not mlps:
            yield "activation_inputs = 'fp8' does nothing: no MLP is recognised in the model"
    if policy.norm_inputs == "fp8" and not applied["norm"]:
        yield "norm_inputs = 'fp8' does nothing: no norm is recognised whose result a layer in FP8 could read"
    if policy.attention_output == "fp8":
        found = {name: module for name, module in model.named_modules() if isinstance(module, ScaledDotProduct)}
        for name, module in found.items():
            if name not in applied["attention"]:
                reader = reader_of(name, module)
                why = unsupported_reason(recipes.get(reader), reader in keep_input)
                yield f"attention_output = 'fp8' does nothing in {name}, which {reader} reads: {why}"
        if not found:
            yield (
                "attention_output = 'fp8' does nothing: no module of the model computes its attention by "
                "octavo.nn.ScaledDotProduct"
            )


def _mlps(recipes: dict[str, Recipe], left: dict[str, MLPRoles]) -> Iterator[str]:
    for name, roles in left.items():
        own = {child: recipes.get(full_name(name, child)) for child in (*roles.inner, roles.down)}
        why = why_unfused(roles, own)
        yield f"activation_inputs = 'fp8' does nothing in {name or 'the model itself'}, an MLP: {why}"
