"""Which layers of a model are computed as one: those that share an input, gate and up of an MLP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from octavo.nn.fused import FusedMLP

L = TypeVar("L", bound=nn.Module)


def fusion_groups(model: nn.Module, layers: Iterable[L]) -> list[list[L]]:
    """Return layers of a model by what is computed as one: gate and up of MLPs, those of one input, the rest alone.

    A group that has a member which is not among `layers` is none.
    """
    layers = list(layers)
    known = {id(layer) for layer in layers}
    together: list[list[Any]] = []
    for module in model.modules():
        if isinstance(module, FusedMLP):
            together.append([module.get_submodule(name) for name in module.mlp_roles.inner])
    shared = [getattr(layer, "shared", None) for layer in layers]
    together += [list(group.layers) for group in shared if group is not None]
    together += [[layer] for layer in layers]
    groups, placed = [], set[int]()
    for group in together:
        members = {id(layer) for layer in group}
        if members <= known and not members & placed:
            groups.append(group)
            placed |= members
    return groups
