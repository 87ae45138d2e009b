"""Modules of a model: the names of what they hold, and their hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle


def full_name(module: str, name: str) -> str:
    """Return what a model calls a child, parameter or role of the module of that name; the model's own is empty."""
    return f"{module}.{name}" if module else name


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own, or a forward, as accelerate gives it, which only a call runs."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or "forward" in vars(module)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks, which were just made, until the end of the block."""
    made = list(handles)
    try:
        yield
    finally:
        for handle in made:
            handle.remove()
