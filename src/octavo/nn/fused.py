"""A user's MLP module computed as one function (`octavo.nn.mlp`), and which layers of a model are computed as one.

The children of an MLP stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from octavo._util.compiler import answer, ask_tracer, module_of
from octavo.nn.first_call import note_traced
from octavo.nn.functional import Quantizer, compute_dtype, settings_of
from octavo.nn.linear import Linear, is_adopted
from octavo.nn.mlp import _MLP, UNKNOWN, mlp, options_of
from octavo.nn.modules import has_hooks
from octavo.nn.recognised import Recognised
from octavo.nn.shared import brings_weight
from octavo.nn.telemetry_ops import stats_buffer_of, which_buffer
from octavo.nn.traced import apply, are_usual, fit, tensors_of
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
        if torch.compiler.is_compiling() and len(args) == 1 and not kwargs:
            y = traced_mlp(self, args[0])
            if y is not None:
                return y
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

    def _find_call_key(self) -> str:
        plans = [recipe.plan.key for recipe in self.mlp_recipes]
        return "|".join([str(self.mlp_roles), self.mlp_activation_inputs, *plans])

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        inputs = "" if self.mlp_activation_inputs == "bf16" else f"activation_inputs={self.mlp_activation_inputs}"
        return ", ".join(filter(None, (super().extra_repr(), f"activation={self.mlp_roles.kind}", inputs)))

    def _layers(self) -> list[Linear] | None:
        """Return gate, up and down; None if the module has changed, or if a hook reads an intermediate result."""
        if not self.is_as_recognised():
            return None
        layers = self.layers_as_fused()
        watched = _has_any_global_hook() or any(has_hooks(child) for child in self.modules() if child is not self)
        return None if watched else layers

    def layers_as_fused(self) -> list[Linear] | None:
        """Return gate, up and down; None if one has changed since they were fused."""
        roles, (inner, outer) = self.mlp_roles, self.mlp_recipes
        recipes = dict.fromkeys(roles.inner, inner) | {roles.down: outer}
        layers = [self.get_submodule(name) for name in recipes]
        same = all(
            is_adopted(layer) and layer.enabled and layer.recipe.plan.key == recipe.plan.key and layer.is_as_converted()
            for layer, recipe in zip(layers, recipes.values(), strict=True)
        ) and all(layer.bias is None for layer in layers[:-1])
        return cast(list[Linear], layers) if same else None


def traced_mlp(module: FusedMLP, x: Tensor) -> Tensor | None:
    """Return the MLP of x (..., D) in compiled code, with few guards (`octavo.nn.traced`); None: as in eager mode."""
    turn = ask_tracer(x, _find_turn, module)
    if turn is None:
        return None
    key, children, paths, keys = turn
    is_same = module.call_key == key and len(module._modules) == children and module.is_as_recognised()
    if not is_same or _has_any_global_hook():
        return None
    layers: list[Any] = []
    for path in paths:
        child: Any = module
        for name in path:
            child = child._modules[name]
        if has_hooks(child):
            return None
        layers.append(child)
    layers = layers[: len(keys)]
    for i in range(len(keys)):
        if layers[i].call_key != keys[i] or (i + 1 < len(keys) and layers[i].bias is not None):
            return None
    weights = [layer.weight for layer in layers]
    call = ask_tracer([x, *weights], _find_call, module)
    if call is None:
        return None
    constants, inner, outer = call
    stats = getattr(layers[0].stats_slot, inner) if inner else None
    down_stats = getattr(layers[-1].stats_slot, outer) if outer else None
    y_MD: Tensor | None = apply(_MLP, x, constants, (stats, down_stats), weights)
    if y_MD is None:
        return None
    y = y_MD.reshape(*x.shape[:-1], y_MD.shape[1])
    bias = layers[-1].bias
    return y if bias is None else y + bias.to(y.dtype)


def _find_turn(context: Any) -> None:
    """Answer None if eager code is to compute, otherwise four values.

    The `call_key` of the MLP; the number of its children; the paths of its layers, gate, up and down, and then of the
    other modules in it; and the `call_key` of each layer.
    """
    module = module_of(context)
    layers = module.layers_as_fused() if issubclass(context.get_local("x").python_type(), Tensor) else None
    if layers is None or any(isinstance(layer, Recognised) for layer in layers):
        return answer(None)
    roles = module.mlp_roles
    names = *roles.inner, roles.down
    others = [name for name, _ in module.named_modules() if name and name not in names]
    paths = tuple([tuple(name.split(".")) for name in (*names, *others)])
    return answer((module.call_key, len(module._modules), paths, tuple([layer.call_key for layer in layers])))


def _find_call(context: Any) -> None:
    """Answer the arguments of `_MLP` that are constants, and `which_buffer` is, of gate and up and of down.

    None for anything unusual. x is the input, and the weights of gate, up and down.
    """
    module = module_of(context)
    layers, (x, weight, *_) = module.layers_as_fused(), tensors_of(context)
    if not are_usual(layers) or any(layer.weight_codes is not None for layer in layers) or not fit(x, weight):
        return answer(None)
    note_traced()
    inner, outer = module.mlp_recipes
    plans, inputs = (inner.plan, outer.plan), module.mlp_activation_inputs
    options = options_of(module.mlp_roles.kind, plans, compute_dtype(x), inputs, layers[0].keeps_input)
    return answer(((UNKNOWN, options), which_buffer(layers[:-1]), which_buffer(layers[-1:])))


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
