"""Buffers of a model that change with each forward pass: running statistics, counts of routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that steps may change, by name: the `state_dict`, and buffers that are not part of it.

    Without the extra states of modules, which may be any object.
    """
    saved = {name: value for name, value in model.state_dict().items() if name.split(".")[-1] != "_extra_state"}
    return {**dict(model.named_buffers()), **saved}


@torch.no_grad()
def overwrite(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors, by name, in their own memory."""
    for name, tensor in tensors.items():
        if _is_writable(tensor):
            tensor.copy_(values[name])


@contextmanager
def untouched_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after the block, also those that a forward pass replaces by new tensors."""
    held = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    buffers = dict(model.named_buffers())
    values = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer
        overwrite(buffers, values)


def _is_writable(tensor: Tensor) -> bool:
    """Return False for tensors that no pass can write: of inference mode, or whose elements share memory."""
    if tensor.is_inference():
        return False
    is_plain = tensor.layout == torch.strided
    return not (is_plain and any(size > 1 and not by for size, by in zip(tensor.shape, tensor.stride(), strict=True)))
