"""Fusible parts of a user's modules, beyond single linear layers: layers that share an input, MLPs, norms, attention.

An MLP is recognised by its results. A copy with tiny layers is run on random numbers and compared with the formula of
every kind of MLP, so that neither its names nor its form matter. What matches is compared again with layers as wide as
its own: it may do something that has no effect on a few numbers. Layers that share an input are found in the source of
`forward`: calls `self.a(x)`, `self.b(x)` of the same name without an assignment in between. A mistake there costs time,
never correctness: a layer that receives another tensor than its group computes alone.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo.conversion.policy import SAVED, Policy
from octavo.kernels.activation import KINDS
from octavo.kernels.norm import unsupported_reason as norm_unsupported_reason
from octavo.kernels.quant_spec import spec_of
from octavo.kernels.reference.activation import value_and_slope
from octavo.nn.attention import ScaledDotProduct, shares_codes
from octavo.nn.attention import unsupported_reason as attention_unsupported_reason
from octavo.nn.fused import FusedMLP, MLPRoles
from octavo.nn.mlp import unsupported_reason
from octavo.nn.modules import full_name
from octavo.nn.norm import adopts
from octavo.nn.probe import CALLS, computes, is_as_its_class, judge_once, random_tensor, shallow_copy
from octavo.recipes import Precision, Recipe

_WIDTH, _HIDDEN = 8, 24  # of the layers in a copy


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionPattern:
    """Layers of a module that are computed together."""

    name: str
    """The module's full name."""
    kind: Literal["mlp", "shared", "norm", "attention"]
    layers: tuple[str, ...] = ()
    """Its children: of an MLP gate, up and down; of an attention the sibling that reads its output."""
    activation: str = ""
    """Activation of an MLP."""
    makes_codes: bool = True
    """Of a norm: whether it quantises its rows itself, as the recipe's scales need one row at most."""
    saved: Precision = "bf16"
    """Format saved for backward: of an MLP's activation inputs, a norm's input, an attention's output."""
    shares_codes: bool = False
    """Of an attention: whether its reader saves the same codes."""

    @property
    def what(self) -> str:
        """Return a line on the operations that are fused and the tensors that are saved in FP8."""
        if self.kind == "mlp":
            kept = f"; {' and '.join(self.layers[:-1])} kept in FP8" if self.saved == "fp8" else ""
            return f"fused: {' + '.join((*self.layers[:-1], self.activation, self.layers[-1]))}{kept}"
        if self.kind == "norm":
            kept = "; its input kept in FP8" if self.saved == "fp8" else ""
            return f"fused: norm{' + quantise' * self.makes_codes}{kept}"
        if self.kind == "attention":
            own = "the codes that {} keeps" if self.shares_codes else "codes of its own, beside those of {}"
            return f"output kept in FP8: {own.format(self.layers[0])}"
        return f"fused: {' + '.join(self.layers)}, their input quantised once"


def find_mlps(model: nn.Module) -> dict[str, MLPRoles]:
    """Return the roles of the children of each MLP in a model, by the MLP's full name."""
    roles_of = judge_once(find_mlp)
    return {name: roles for name, module in model.named_modules() if (roles := roles_of(module)) is not None}


class _Unapplied(NamedTuple):
    """A place where the policy asks for activations in FP8 without effect."""

    option: str
    """The field of the policy."""
    reason: str
    """Where, and why."""


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
        policy: its formats of what MLPs, norms and attention save for backward.
        keep_input: full names of the layers that save their input unchanged.
    """
    found: list[FusionPattern | _Unapplied] = []
    widths = {cast(nn.Linear, model.get_submodule(name)).in_features for name in recipes}
    targets = [spec_of(recipe.fprop.input) for recipe in recipes.values() if recipe.fprop.is_fp8]
    makes_codes = any(norm_unsupported_reason(target) is None for target in targets)
    is_norm = judge_once(adopts)
    for name, module in model.named_modules():
        if is_norm(module):
            if _width(module) in widths:
                found.append(FusionPattern(name=name, kind="norm", makes_codes=makes_codes, saved=policy.norm_inputs))
        elif isinstance(module, ScaledDotProduct):
            if policy.attention_output == "fp8":
                found.append(_attention(name, module, recipes, keep_input))
        else:
            found += _of_layers(name, module, recipes, mlps.get(name), policy.activation_inputs)
    patterns = [each for each in found if isinstance(each, FusionPattern)]
    unapplied = [each for each in found if isinstance(each, _Unapplied)]
    return patterns, list(_without_effect(policy, {pattern.kind for pattern in patterns}, unapplied))


def _without_effect(policy: Policy, kinds: Collection[str], unapplied: Sequence[_Unapplied]) -> Iterator[str]:
    """Yield a line per place in which an option of the policy does nothing. kinds: of the patterns found."""
    for option, kind in zip(SAVED, ("mlp", "norm", "attention"), strict=True):
        if getattr(policy, option) != "fp8":
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
    name: str, module: nn.Module, recipes: Mapping[str, Recipe], roles: MLPRoles | None, saved: Precision
) -> Iterator[FusionPattern | _Unapplied]:
    """Yield a module as an MLP, if it has the roles of one, or the groups of its layers that share an input.

    Args:
        saved: format of the activation inputs of an MLP.
    """
    own = {child: recipes.get(full_name(name, child)) for child, _ in module.named_children()}
    if roles is not None:
        reason = _mlp_unsupported_reason(roles, own)
        if reason is None:
            layers = *roles.inner, roles.down
            yield FusionPattern(name=name, kind="mlp", layers=layers, activation=roles.kind, saved=saved)
            return
        yield _Unapplied("activation_inputs", f"{name or 'the model itself'}, an MLP: {reason}")
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


def find_gates(model: nn.Module) -> set[str]:
    """Return full names of linear layers beside one of the transposed shape, as MLPs have them and routers do not.

    This also covers MLPs whose formula `find_mlp` does not know.
    """
    found: set[str] = set()
    for name, module in model.named_modules():
        layers = {child: layer for child, layer in module.named_children() if isinstance(layer, nn.Linear)}
        shapes = {(layer.out_features, layer.in_features) for layer in layers.values()}
        found |= {
            full_name(name, child)
            for child, layer in layers.items()
            if layer.in_features != layer.out_features and (layer.in_features, layer.out_features) in shapes
        }
    return found


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


def _width(norm: nn.Module) -> int:
    """Return the width of a norm's result."""
    weight = getattr(norm, "weight", None)
    shape = norm.normalized_shape if weight is None else weight.shape
    return int(cast(Any, shape)[0])


def find_mlp(module: nn.Module) -> MLPRoles | None:
    """Return the roles of the children of a module whose `forward` is an MLP, or None for any other module.

    It is one if its children are two or three linear layers, nothing else in it has tensors, and it computes the
    formula and nothing else, for small and for large inputs (`octavo.nn.probe`).
    """
    layers = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    if len(layers) not in (2, 3) or any(name.rpartition(".")[0] not in layers for name, _ in tensors):
        return None
    if not is_as_its_class(module):
        return None
    possible = list(_possible_roles(layers))
    if isinstance(module, FusedMLP) and module.mlp_roles in possible and module.is_as_recognised():
        return module.mlp_roles
    return next((roles for roles in possible if _is_mlp(module, roles)), None)


def _possible_roles(layers: dict[str, nn.Linear]) -> Iterator[MLPRoles]:
    """Yield every assignment of 2 or 3 linear layers to the roles of an MLP that shapes and biases allow."""
    for *inner, down in itertools.permutations(layers):
        into = {(layers[name].in_features, layers[name].out_features) for name in inner}
        fits = into == {(layers[down].out_features, layers[down].in_features)}
        if fits and all(layers[name].bias is None for name in inner):
            yield from (MLPRoles(kind, tuple(inner), down) for kind in KINDS)


def _is_mlp(module: nn.Module, roles: MLPRoles) -> bool:
    """Return whether the forward of a module is the MLP of these roles.

    Its own widths are probed one at a time: that needs little memory and time, and no values of its weights.
    """
    down = cast(nn.Linear, module.get_submodule(roles.down))
    wide = (down.out_features, _HIDDEN), (_WIDTH, down.in_features)
    is_one = _gives_mlp(module, roles, (_WIDTH, _HIDDEN), 1e-5, CALLS)
    return is_one and all(_gives_mlp(module, roles, widths, 1e-4, 1) for widths in wide)


def _gives_mlp(module: nn.Module, roles: MLPRoles, widths: tuple[int, int], tolerance: float, calls: int) -> bool:
    """Return whether a copy of these widths, of x and hidden, computes the MLP. Long sums need a larger tolerance."""
    rows = torch.tensor([1e-2, 1.0, 1.0, 1e3], device="cpu", dtype=torch.float32)[:, None]
    return computes(
        lambda training: _random_copy(module, roles, training, widths),
        lambda probe, x: _formula(probe, roles, x),
        random_tensor(0, 2, 4, widths[0]) * rows,
        tolerance,
        calls,
    )


def _random_copy(module: nn.Module, roles: MLPRoles, training: bool, widths: tuple[int, int]) -> nn.Module:
    """Return a copy of a module whose linear layers are random and of these widths; it holds no other tensors."""
    probe = shallow_copy(module, training)
    for seed, name in enumerate((*roles.inner, roles.down)):
        shape = widths if name == roles.down else widths[::-1]
        layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float32, device="meta")
        layer.weight = nn.Parameter(random_tensor(1 + seed, *shape))
        if module.get_submodule(name).bias is not None:
            layer.bias = nn.Parameter(random_tensor(4 + seed, shape[0]))
        probe._modules[name] = layer
    return probe


def _formula(probe: nn.Module, roles: MLPRoles, x: Tensor) -> Tensor:
    inner = [probe.get_submodule(name)(x) for name in roles.inner]
    value, slope = (part.detach() for part in value_and_slope(roles.kind, inner[0].detach()))
    hidden = value + (inner[0] - inner[0].detach()) * slope  # of this value and this slope, to the bit
    result: Tensor = probe.get_submodule(roles.down)(hidden * inner[1] if len(inner) > 1 else hidden)
    return result


def find_shared(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of linear children of a module that its `forward` calls on the same variable, by group."""
    layers = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    function = _source(module) if len(layers) > 1 else None
    if function is None or not function.args.args:
        return []
    owner = function.args.args[0].arg
    groups: dict[tuple[str, int], list[str]] = {}
    assigned: dict[str, int] = {}
    for statement in _straight_line(function.body):
        for name, argument in _calls(statement, owner):
            if name in layers:
                groups.setdefault((argument, assigned.get(argument, 0)), []).append(name)
        for variable in _assigned(statement):
            assigned[variable] = assigned.get(variable, 0) + 1
    return [tuple(names) for names in groups.values() if len(set(names)) == len(names) > 1]


def _source(module: nn.Module) -> ast.FunctionDef | None:
    """Return the parsed `forward` of a module without its decorators; None if there is no source."""
    parent = getattr(type(module), "parent", type(module))
    try:
        source = textwrap.dedent(inspect.getsource(parent.forward))
        return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration):
        return None


def _straight_line(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield statements in execution order, for a `with` its items and then its body."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from statement.items
            yield from _straight_line(statement.body)
        else:
            yield statement


def _calls(statement: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    """Yield (child, variable) for each call `self.child(variable)` in a statement, in the order of the source."""
    calls = [node for node in _certain(statement) if isinstance(node, ast.Call) and len(node.args) == 1]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        target, argument = call.func, call.args[0]
        if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == owner):
            continue
        if isinstance(argument, ast.Name):
            yield target.attr, argument.id


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below one, except those in branches, loops and functions, which may not run, or run often."""
    simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return | ast.withitem
    doubtful = ast.Lambda | ast.IfExp | ast.BoolOp | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    if isinstance(node, simple) or (isinstance(node, ast.expr | ast.keyword) and not isinstance(node, doubtful)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _certain(child)


def _assigned(statement: ast.AST) -> set[str]:
    """Return the variables that a statement may assign."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
