"""Modules of a model: full names, blocks, positions, and hooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
"""Attributes that PyTorch gives every module."""


WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Names that `torch.compile`, activation checkpointing and FSDP put between a module and its parent."""


def full_name(module: str, name: str) -> str:
    """Return the full name of a child, parameter or role of a module, whose own name may be empty."""
    return f"{module}.{name}" if module else name


def unwrapped_name(name: str) -> str:
    """Return a full name without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def blocks_of(model: nn.Module) -> list[str]:
    """Return the full names of a model's blocks, in order."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # Before experts in each of them, which may be more: together the blocks have more parameters than any one's.
    name = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()), default=None)
    return [] if name is None else [full_name(name, child) for child, _ in lists[name].named_children()]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or an instance's own `forward`, as with accelerate, that only a call runs."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or "forward" in vars(module)


_POSITION = re.compile(r"((layer|block)_?)?(id|idx|index|num|number|name)")


def is_position(name: str, value: Any) -> bool:
    """Return whether an attribute names the position of a module in its model: `layer_idx`, `block_id` or `name`."""
    return isinstance(value, int | float | str) and _POSITION.fullmatch(name) is not None


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a call from the arguments that hooks get: the first one, by position or by keyword."""
    return args[0] if args else next(iter(kwargs.values()), None)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks that were just registered at the end of the block."""
    made = list(handles)
    try:
        yield
    finally:
        for handle in made:
            handle.remove()
