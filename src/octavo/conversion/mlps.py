"""MLPs in a user's model, recognised by their results.

A copy with tiny layers is run on random numbers and compared with the formula of every kind of MLP, so that neither
its names nor its form matter. What matches is compared again with layers as wide as its own: it may do something that
has no effect on a few numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from octavo.kernels.activation import KINDS
from octavo.kernels.activation.reference import value_and_slope
from octavo.nn.fused import FusedMLP, MLPRoles
from octavo.nn.probe import CALLS, computes, is_as_its_class, judge_once, random_tensor, shallow_copy
from octavo.nn.side_effects import Conduct

_WIDTH, _HIDDEN = 8, 24  # of the layers in a copy
_SHAPES = (0,), (5,), (1, 1), (2, 3, 2), (1, 4097)
"""Leading dimensions of further inputs: no token, one token, more than a tile, and one, two and three of them."""


def find_mlps(model: nn.Module) -> dict[str, MLPRoles]:
    """Return the roles of the children of each MLP in a model, by the MLP's full name."""
    roles_of = judge_once(_find_mlp)
    candidates = {name: module for name, module in model.named_modules() if _has_one_dtype(module)}
    return {name: roles for name, module in candidates.items() if (roles := roles_of(module)) is not None}


def find_mlp(module: nn.Module) -> MLPRoles | None:
    """Return the roles of the children of a module whose `forward` is an MLP, or None for any other module.

    It is one if its children are two or three linear layers, nothing else in it has tensors, and it computes the
    formula and nothing else, for small and for large inputs (`octavo.nn.probe`). With layers of different dtypes, the
    dtypes of its intermediate results are a choice of its own.
    """
    return _find_mlp(module) if _has_one_dtype(module) else None


def _has_one_dtype(module: nn.Module) -> bool:
    layers = [child for child in module.children() if isinstance(child, nn.Linear)]
    return len({layer.weight.dtype for layer in layers}) == 1


def _find_mlp(module: nn.Module) -> MLPRoles | None:
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
    conduct = Conduct(products=len(roles.inner) + 1, saved=len(roles.inner) * _HIDDEN)
    everywhere = replace(conduct, shapes=_SHAPES, in_bf16=True, under_autocast=True)
    is_one = _gives_mlp(module, roles, (_WIDTH, _HIDDEN), 1e-5, CALLS, everywhere)
    return is_one and all(_gives_mlp(module, roles, widths, 1e-4, 1, conduct) for widths in wide)


def _gives_mlp(
    module: nn.Module, roles: MLPRoles, widths: tuple[int, int], tolerance: float, calls: int, conduct: Conduct
) -> bool:
    """Return whether a copy of these widths, of x and hidden, computes the MLP. Long sums need a larger tolerance."""

    def draw(*shape: int) -> Tensor:
        rows = torch.tensor([1e-2, 1.0, 1.0, 1e3], device="cpu", dtype=torch.float32)[:, None]
        return random_tensor(0, *shape, widths[0]) if shape else random_tensor(0, 2, 4, widths[0]) * rows

    return computes(
        lambda training: _random_copy(module, roles, training, widths),
        lambda probe, x: _formula(probe, roles, x),
        draw,
        tolerance,
        calls,
        conduct,
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
