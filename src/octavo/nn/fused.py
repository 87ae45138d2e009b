"""A user's MLP module computed as one function (`octavo.nn.mlp`), and which layers of a model are computed as one.

The children of an MLP stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from octavo.nn.functional import Quantizer
from octavo.nn.linear import Linear, is_adopted
from octavo.nn.mlp import mlp
from octavo.nn.modules import has_hooks
from octavo.nn.recognised import Recognised
from octavo.nn.shared import brings_weight, settings_of
from octavo.nn.telemetry_ops import stats_buffer_of
from octavo.recipes import Precision, Recipe


@dataclass(frozen=True)
class MLPRoles:
    """Roles of the children of an MLP module."""

    kind: str
    """Activation, by its name in `kernels.activation`."""
    inner: tuple[str, ...]
    """(gate, up), or (up,) without a gate."""
    down: str


class FusedMLP(Recognised):
    """Mixin for the class of a module that computes an MLP; `fuse` adds it, `release` removes it."""

    prefix = "Fused"
    fields = (*Recognised.fields, "mlp_roles", "mlp_recipes", "mlp_activation_inputs")
    mlp_roles: MLPRoles
    mlp_recipes: tuple[Recipe, Recipe]
    """Recipes of gate and up, and of down."""
    mlp_activation_inputs: Precision = "bf16"
    """Precision in which the outputs of gate and up are saved for backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the MLP of x (..., D). With a hook or a disabled layer inside, the user's own forward runs."""
        layers = self._layers() if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs else None
        if layers is None:
            return super().forward(*args, **kwargs)
        (*inner, down), x, outer = layers, args[0], self.mlp_recipes[1]
        quantizer, given, codes = settings_of(inner, x)
        quantizers = quantizer, Quantizer(outer, quantizer.dtype, stats_buffer=stats_buffer_of([down]))
        weights = [*(layer.weight for layer in inner), down.weight]
        known = codes, down.weight_codes
        y = mlp(x, weights, self.mlp_roles.kind, quantizers, given, known, self.mlp_activation_inputs)
        return y if down.bias is None else y + down.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        inputs = "" if self.mlp_activation_inputs == "bf16" else f"activation_inputs={self.mlp_activation_inputs}"
        return ", ".join(filter(None, (super().extra_repr(), f"activation={self.mlp_roles.kind}", inputs)))

    def _layers(self) -> list[Linear] | None:
        """Return gate, up and down; None if the module has changed, or if a hook reads an intermediate result."""
        if not self.is_as_recognised():
            return None
        roles, (inner, outer) = self.mlp_roles, self.mlp_recipes
        recipes = dict.fromkeys(roles.inner, inner) | {roles.down: outer}
        layers = [self.get_submodule(name) for name in recipes]
        same = all(
            is_adopted(layer) and layer.enabled and layer.recipe.plan.key == recipe.plan.key and layer.is_as_converted()
            for layer, recipe in zip(layers, recipes.values(), strict=True)
        ) and all(layer.bias is None for layer in layers[:-1])
        watched = _has_any_global_hook() or any(has_hooks(child) for child in self.modules() if child is not self)
        return cast(list[Linear], layers) if same and not watched else None


def fuse(module: nn.Module, roles: MLPRoles, activation_inputs: Precision = "bf16") -> None:
    """Make a module compute its MLP as one function, in place. Its layers are FP8 layers already.

    Args:
        activation_inputs: see `octavo.nn.mlp.mlp`.
    """
    inner, down = (cast(Linear, module.get_submodule(name)) for name in (roles.inner[0], roles.down))
    recipes = inner.recipe, down.recipe
    FusedMLP.take(module, mlp_roles=roles, mlp_recipes=recipes, mlp_activation_inputs=activation_inputs)


L = TypeVar("L", bound=nn.Module)


def fusion_groups(model: nn.Module, layers: Iterable[L]) -> list[list[L]]:
    """Return layers grouped by what is computed as one: gate and up of MLPs, layers with one input, others alone.

    Groups with a member that is not among `layers` are ignored. Layers that bring their weight (`brings_weight`) are in
    no group.
    """
    layers = list(layers)
    known = {id(layer) for layer in layers}
    together: list[list[Any]] = []
    for module in model.modules():
        if isinstance(module, FusedMLP):
            together.append([module.get_submodule(name) for name in module.mlp_roles.inner])
    shared = [getattr(layer, "shared", None) for layer in layers]
    together += [[m for m in group.layers if not brings_weight(m)] for group in shared if group is not None]
    together += [[layer] for layer in layers]
    groups, placed = [], set[int]()
    for group in together:
        members = {id(layer) for layer in group}
        if group and members <= known and not members & placed:
            groups.append(group)
            placed |= members
    return groups
