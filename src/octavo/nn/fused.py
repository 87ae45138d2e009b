"""A user's own MLP module, computed as one function (`octavo.nn.mlp`). Its children stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import Tensor, nn

from octavo.nn.handoff import taken
from octavo.nn.functional import target_of
from octavo.nn.linear import Linear, compute_dtype
from octavo.nn.mlp import mlp


@dataclass(frozen=True)
class MLPRoles:
    """Which child of an MLP module does what."""

    kind: str
    """The activation, as `kernels.activation` names it."""
    inner: tuple[str, ...]
    """(gate, up), or (up,) where there is no gate."""
    down: str


class FusedMLP(nn.Module):
    """Mixed into the class of a module that computes an MLP; `fuse` makes such a class, `unfuse` takes it away."""

    roles: MLPRoles

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the MLP of x (..., D). With a hook or a disabled layer inside, it is computed as the user wrote it."""
        children = [self.get_submodule(name) for name in (*self.roles.inner, self.roles.down)]
        plain = all(type(child) is Linear and child.enabled and not _has_hooks(child) for child in children)
        if args or kwargs or not plain:
            return cast(Tensor, super().forward(x, *args, **kwargs))
        *inner, down = cast(list[Linear], children)
        ready = taken(x, target_of(inner[0].recipe.fprop.input))
        weights = [layer.weight for layer in inner]
        return mlp(
            x, weights, down.weight, down.bias, self.roles.kind, inner[0].recipe, down.recipe, compute_dtype(x), ready
        )


def fuse(module: nn.Module, roles: MLPRoles) -> None:
    """Make a module compute its MLP as one, in place."""
    module.__class__ = _fused_class(type(module))
    cast(FusedMLP, module).roles = roles


def unfuse(module: nn.Module) -> None:
    """Undo `fuse`, in place."""
    del cast(Any, module).roles
    module.__class__ = type(module).__mro__[2]


@cache
def _fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{cls.__name__}", (FusedMLP, cls), {"__module__": cls.__module__})


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
