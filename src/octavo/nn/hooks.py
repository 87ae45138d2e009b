"""Whether somebody is watching a module."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own, which only a call of it runs."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own)
