"""What a user's modules compute, beyond single linear layers: which layers share an input, which modules are MLPs.

An MLP is recognised by what it does. A copy with tiny layers is run on random numbers and compared with the formula of
every kind of MLP, so that neither names nor the way it is written matter. Layers that share an input are found in the
source of `forward`: calls `self.a(x)`, `self.b(x)` of the same name, which nothing assigns in between. A mistake there
costs time, never correctness: a layer that is handed another tensor than its group computes alone.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from octavo.kernels.activation import KINDS
from octavo.kernels.reference.activation import value_and_slope
from octavo.nn.fused import FusedMLP, MLPRoles
from octavo.nn.mlp import refuses
from octavo.recipes import Recipe

_WIDTH, _HIDDEN = 8, 24  # of the layers in a copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """Layers of a module that are computed together."""

    name: str
    """The module's full name."""
    kind: Literal["mlp", "shared"]
    layers: tuple[str, ...]
    """The children it is made of; of an MLP gate, up and down."""
    activation: str = ""
    """Of an MLP."""

    @property
    def what(self) -> str:
        """Say what is computed together, in a line."""
        if self.kind == "mlp":
            return f"{', '.join(self.layers)} and {self.activation} between them computed as one"
        return f"{', '.join(self.layers)} share an input, quantised once; one dgrad, one wgrad"


def find_structures(model: nn.Module, recipes: dict[str, Recipe]) -> Iterator[Structure]:
    """Yield what can be computed together among the layers that run in FP8.

    Args:
        recipes: full name of each FP8 layer -> its recipe.
    """
    for name, module in model.named_modules():
        own = {child: recipes.get(f"{name}.{child}" if name else child) for child, _ in module.named_children()}
        roles = find_mlp(module)
        if roles is not None and _can_fuse(roles, own):
            yield Structure(name=name, kind="mlp", layers=(*roles.inner, roles.down), activation=roles.kind)
            continue
        for names in find_shared(module):
            if own[names[0]] is not None and all(own[child] == own[names[0]] for child in names):
                yield Structure(name=name, kind="shared", layers=names)


def _can_fuse(roles: MLPRoles, recipes: dict[str, Recipe | None]) -> bool:
    inner, outer = recipes[roles.inner[0]], recipes[roles.down]
    if inner is None or outer is None or any(recipes[name] != inner for name in roles.inner):
        return False
    return refuses(inner, outer) is None


def find_mlp(module: nn.Module) -> MLPRoles | None:
    """Return the roles of the children of a module whose `forward` is an MLP, or None for any other module."""
    layers = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    if len(layers) not in (2, 3) or any(list(other.parameters()) or list(other.buffers()) for other in others):
        return None
    roles = list(_possible_roles(layers))
    if not roles:
        return None
    probe, x = _tiny_copy(module, roles[0]), _random(2, 3, _WIDTH)
    try:
        with torch.no_grad():
            got = probe(x)
    except Exception:  # whatever it needs, it is not one tensor: no MLP
        return None
    if not isinstance(got, Tensor) or got.shape != x.shape:
        return None
    return next((role for role in roles if torch.allclose(_formula(probe, role, x), got, rtol=1e-4, atol=1e-5)), None)


def _possible_roles(layers: dict[str, nn.Linear]) -> Iterator[MLPRoles]:
    """Yield every reading of 2 or 3 linear layers as an MLP that their shapes and biases allow."""
    for *inner, down in itertools.permutations(layers):
        into = {(layers[name].in_features, layers[name].out_features) for name in inner}
        fits = into == {(layers[down].out_features, layers[down].in_features)}
        if fits and all(layers[name].bias is None for name in inner):
            yield from (MLPRoles(kind, tuple(inner), down) for kind in KINDS)


def _tiny_copy(module: nn.Module, roles: MLPRoles) -> nn.Module:
    """Return a copy of a module on the CPU whose linear layers are small and random; nothing else is copied."""
    probe = copy.copy(module)
    probe._modules = dict(module._modules)
    if isinstance(module, FusedMLP):
        probe.__class__ = type(module).__mro__[2]
    for name in (*roles.inner, roles.down):
        shape = (_WIDTH, _HIDDEN) if name == roles.down else (_HIDDEN, _WIDTH)
        layer = nn.Linear(shape[1], shape[0], bias=module.get_submodule(name).bias is not None, device="cpu")
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(_random(*parameter.shape))
        probe._modules[name] = layer
    probe.training = True  # so that a dropout is seen
    return probe


def _random(*shape: int) -> Tensor:
    """Return random numbers that depend on the shape alone, on the CPU whatever the default device is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")


def _formula(probe: nn.Module, roles: MLPRoles, x: Tensor) -> Tensor:
    inner = [probe.get_submodule(name)(x) for name in roles.inner]
    hidden = value_and_slope(roles.kind, inner[0])[0]
    result: Tensor = probe.get_submodule(roles.down)(hidden * inner[1] if len(inner) > 1 else hidden)
    return result


def find_shared(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of linear children of a module that its `forward` calls on the same variable, by group."""
    layers = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if len(layers) < 2:
        return []
    try:
        source = textwrap.dedent(inspect.getsource(type(module).forward))
        function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration):
        return []
    groups: dict[tuple[str, int], list[str]] = {}
    assigned: dict[str, int] = {}
    for statement in function.body:  # straight-line code only: what stands in a branch or a loop may not run
        for name, argument in _calls(statement):
            if name in layers:
                groups.setdefault((argument, assigned.get(argument, 0)), []).append(name)
        for variable in _assigned(statement):
            assigned[variable] = assigned.get(variable, 0) + 1
    return [tuple(names) for names in groups.values() if len(set(names)) == len(names) > 1]


def _calls(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield (child, variable) for each call `self.child(variable)` in a statement, in the order of the source."""
    if isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.FunctionDef):
        return
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and len(node.args) == 1]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        target, argument = call.func, call.args[0]
        of_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        if of_self and isinstance(argument, ast.Name) and not call.keywords:
            assert isinstance(target, ast.Attribute)
            yield target.attr, argument.id


def _assigned(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement may give another value."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
