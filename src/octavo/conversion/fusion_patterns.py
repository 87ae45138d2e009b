"""Fusible parts of a user's modules: MLPs, norms, attention, and layers that share an input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from torch import nn

from octavo.conversion.blocks import Wrapped
from octavo.conversion.policy import SAVED, Policy
from octavo.conversion.roles import inside_blocks
from octavo.conversion.shared_inputs import find_shared
from octavo.kernels.norm import unsupported_reason as norm_unsupported_reason
from octavo.kernels.quant_spec import spec_of
from octavo.nn.attention import ScaledDotProduct, shares_codes
from octavo.nn.attention import unsupported_reason as attention_unsupported_reason
from octavo.nn.fused import MLPRoles
from octavo.nn.mlp import unsupported_reason
from octavo.nn.modules import OF_EVERY_MODULE, full_name, is_position
from octavo.nn.norm import form_of
from octavo.nn.probe import judge_once
from octavo.nn.residual import norms_of_stream
from octavo.nn.rotary_attention import rotations_in
from octavo.recipes import Precision, Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionPattern:
    """Layers of a module that are computed together."""

    name: str
    """The module's full name."""
    kind: Literal["mlp", "shared", "norm", "attention", "rotary", "activation", "residual"]
    layers: tuple[str, ...] = ()
    """Names of children: gate, up and down of an MLP, also where its activation alone is fused; for attention, the
    sibling that reads its output. Of a rotary embedding, the names of the functions that rotate q and k; of residual
    sums, those of the norms that read them."""
    activation: str = ""
    """Name of the activation of an MLP."""
    makes_codes: bool = True
    """Norms only: whether the norm quantises its rows itself, which needs scales of at most one row and a reader."""
    has_reader: bool = True
    """Norms only: whether a layer in FP8 may read its result. Compiled readers quantise it even if the norm cannot."""
    saved: Precision = "bf16"
    """Format of the tensor saved for backward: an MLP's activation inputs, a norm's input, an attention's output."""
    form: str = ""
    """Norms only: `octavo.nn.norm.Norm.form`."""
    shares_codes: bool = False
    """Attention only: whether its reader saves the same codes."""

    @property
    def what(self) -> str:
        """Return a line on the operations that are fused and the tensors that are saved in FP8."""
        if self.kind == "mlp":
            kept = f"; {' and '.join(self.layers[:-1])} kept in FP8" if self.saved == "fp8" else ""
            return f"fused: {' + '.join((*self.layers[:-1], self.activation, self.layers[-1]))}{kept}"
        if self.kind == "norm":
            kept = "; its input kept in FP8" if self.saved == "fp8" else ""
            return f"fused: norm{' + quantise' * self.makes_codes}{kept}"
        if self.kind == "activation":
            return f"fused: {self.activation} of {self.layers[0]}, times {self.layers[1]}"
        if self.kind == "rotary":
            return f"fused: rotary embedding of q and k ({', '.join(self.layers)})"
        if self.kind == "residual":
            return f"fused: residual sums and their gradients, with {' and '.join(self.layers)}"
        if self.kind == "attention":
            own = "the codes that {} keeps" if self.shares_codes else "codes of its own, beside those of {}"
            return f"output kept in FP8: {own.format(self.layers[0])}"
        return f"fused: {' + '.join(self.layers)}, their input quantised once"


class _Unapplied(NamedTuple):
    """A place where the policy asks for activations in FP8 without effect."""

    option: str
    """The field of the policy."""
    reason: str
    """Location and reason."""


def find_patterns(
    model: nn.Module,
    recipes: Mapping[str, Recipe],
    mlps: Mapping[str, MLPRoles],
    policy: Policy,
    keep_input: Collection[str] = (),
) -> tuple[list[FusionPattern], list[str]]:
    """Return the patterns that can be fused, and where the policy asks for activations in FP8 without effect.

    Args:
        recipes: full name of each linear layer in FP8 -> its recipe.
        mlps: the result of `find_mlps`.
        policy: what of it is fused, and its formats of what MLPs, norms and attention save for backward.
        keep_input: full names of the layers that save their input unchanged.
    """
    found: list[FusionPattern | _Unapplied] = []
    saved = policy.saved
    widths = {cast(nn.Linear, model.get_submodule(name)).in_features for name in recipes}
    targets = [spec_of(recipe.fprop.input) for recipe in recipes.values() if recipe.fprop.is_fp8]
    makes_codes = any(norm_unsupported_reason(target) is None for target in targets)
    form, residual = judge_once(form_of), _Residual()
    blocks = inside_blocks(model)
    last = max((place for place, (name, _) in enumerate(model.named_modules()) if name in recipes), default=-1)
    judged: dict[Any, tuple[str, ...]] = {}
    for place, (name, module) in enumerate(model.named_modules()):
        if (kind := form(module)) is not None:
            is_read = _width(module) in widths
            if is_read or policy.fuse == "all":
                # Behind all blocks and layers in FP8, as before a head, nothing reads codes.
                has_reader = is_read and (place < last or id(module) in blocks)
                found.append(
                    FusionPattern(
                        name=name,
                        kind="norm",
                        makes_codes=makes_codes and has_reader,
                        has_reader=has_reader,
                        saved=saved.norm_inputs if is_read else "bf16",
                        form=kind,
                    )
                )
        elif isinstance(module, ScaledDotProduct):
            if saved.attention_output == "fp8":
                found.append(_attention(name, module, recipes, keep_input))
        else:
            found += _of_layers(name, module, recipes, mlps.get(name), policy)
            if policy.fuse == "all" and (names := rotations_in(module, judged)):
                found.append(FusionPattern(name=name, kind="rotary", layers=names))
            if policy.fuse == "all" and id(module) in blocks and not isinstance(module, Wrapped):
                found += residual(name, module, form)
    patterns = [each for each in found if isinstance(each, FusionPattern)]
    unapplied = [each for each in found if isinstance(each, _Unapplied)]
    return patterns, list(_without_effect(policy, {pattern.kind for pattern in patterns}, unapplied))


def _without_effect(policy: Policy, kinds: Collection[str], unapplied: Sequence[_Unapplied]) -> Iterator[str]:
    """Yield a line per place in which an option of the policy does nothing. kinds: of the patterns found."""
    for option, kind in zip(SAVED, ("mlp", "norm", "attention"), strict=True):
        if getattr(policy.saved, option) != "fp8":
            continue
        places = [f" in {each.reason}" for each in unapplied if each.option == option]
        nowhere = [] if places or kind in kinds else [_NOTHING[option]]
        yield from (f"{option} = 'fp8' does nothing{place}" for place in (*places, *nowhere))


_NOTHING = {
    "activation_inputs": ": no MLP is recognised in the model",
    "norm_inputs": ": no norm is recognised whose result a layer in FP8 could read",
    "attention_output": ": no module of the model computes its attention by octavo.nn.ScaledDotProduct",
}


def _attention(
    name: str, module: ScaledDotProduct, recipes: Mapping[str, Recipe], keep_input: Collection[str]
) -> FusionPattern | _Unapplied:
    """Return an attention whose output is saved in FP8, or where and why it is not."""
    reader = reader_of(name, module)
    recipe = recipes.get(reader)
    if (reason := attention_unsupported_reason(recipe, reader in keep_input)) is not None:
        return _Unapplied("attention_output", f"{name}, which {reader} reads: {reason}")
    assert recipe is not None
    shares = shares_codes(recipe) and recipe.reuses("wgrad.input")
    return FusionPattern(name=name, kind="attention", layers=(module.reader,), saved="fp8", shares_codes=shares)


def _of_layers(
    name: str, module: nn.Module, recipes: Mapping[str, Recipe], roles: MLPRoles | None, policy: Policy
) -> Iterator[FusionPattern | _Unapplied]:
    """Yield a module as an MLP, if it has the roles of one, or its activation and its layers that share an input."""
    own = {child: recipes.get(full_name(name, child)) for child, _ in module.named_children()}
    if roles is not None:
        reason = _mlp_unsupported_reason(roles, own)
        if reason is None:
            layers = *roles.inner, roles.down
            saved = policy.saved.activation_inputs
            yield FusionPattern(name=name, kind="mlp", layers=layers, activation=roles.kind, saved=saved)
            return
        yield _Unapplied("activation_inputs", f"{name or 'the model itself'}, an MLP: {reason}")
        if policy.fuse == "all" and len(roles.inner) == 2:  # without a gate eager code has one kernel each way too
            layers = *roles.inner, roles.down
            yield FusionPattern(name=name, kind="activation", layers=layers, activation=roles.kind)
    for names in find_shared(module):
        yield from (FusionPattern(name=name, kind="shared", layers=same) for same in _of_one_recipe(names, own))


def _mlp_unsupported_reason(roles: MLPRoles, recipes: Mapping[str, Recipe | None]) -> str | None:
    """Return why an MLP is not computed as one, or None. recipes: of its children."""
    inner, down = recipes[roles.inner[0]], recipes[roles.down]
    if inner is None or down is None or any(recipes[child] is None for child in roles.inner):
        return "one of its layers stays in BF16"
    if any(recipes[child] != inner for child in roles.inner):
        return "its layers differ in their recipes"
    return unsupported_reason(inner, down)


def _of_one_recipe(names: tuple[str, ...], recipes: Mapping[str, Recipe | None]) -> list[tuple[str, ...]]:
    """Return the groups of two or more of these layers that have the same recipe."""
    different: list[Recipe] = []
    for recipe in filter(None, map(recipes.get, names)):
        if recipe not in different:
            different.append(recipe)
    groups = [tuple(name for name in names if recipes[name] == recipe) for recipe in different]
    return [group for group in groups if len(group) > 1]


def reader_of(name: str, attention: ScaledDotProduct) -> str:
    """Return the full name of the layer that reads the output of an attention of this name."""
    return full_name(name.rpartition(".")[0], attention.reader)


class _Residual:
    """Residual sums in blocks, of which one of each kind is tried."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, ...]] = {}

    def __call__(
        self, name: str, module: nn.Module, form: Callable[[nn.Module], str | None]
    ) -> Iterator[FusionPattern]:
        """Yield a module that takes a residual stream. form: of a module, `octavo.nn.norm.form_of`."""
        norms = tuple([child for child, each in module.named_children() if form(each) is not None])
        if not norms:
            return
        own = {k: v for k, v in vars(module).items() if k not in OF_EVERY_MODULE and not is_position(k, v)}
        settings = tuple([(k, v if isinstance(v, bool | int | float | str) else id(v)) for k, v in own.items()])
        key = type(module), norms, tuple([child for child, _ in module.named_children()]), settings
        if key not in self._known:
            self._known[key] = norms_of_stream(module, norms)
        if read := self._known[key]:
            yield FusionPattern(name=name, kind="residual", layers=read)


def _width(norm: nn.Module) -> int:
    """Return the width of a norm's result."""
    weight = getattr(norm, "weight", None)
    shape = norm.normalized_shape if weight is None else weight.shape
    return int(cast(Any, shape)[0])
