"""Subjects of commands: a model, its batches and its loss; and what is done with one batch of any form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError

Step = Callable[[], Any]
Loss = Callable[[nn.Module, Any], Tensor]

NO_VALUES = (RuntimeError, TypeError, ValueError)
"""Errors of code that reads values of a tensor on the meta device, by `item`, `if` or NumPy."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its batches and its loss, as `octavo.lab.train.opening` reads them."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the model in FP32, with the same weights in each call; on the default device, which may be `meta`."""
    batches: Callable[[], Iterator[Any]]
    """Starts an endless sequence of batches, the same in each call; tensors on the CPU."""
    loss: Loss
    """(model, batch) -> mean loss, shape ()."""
    tokens: int
    """Size of a batch, in units of `unit`."""
    unit: str = "token"
    data: str = "random tokens, Zipf-distributed"
    """Description of the batches."""
    decode: Callable[[nn.Module, Any], Step] | None = None
    """(model, batch) -> a function that decodes one more token of each sequence; None for a model that does not."""

    def build_without_values(self) -> nn.Module:
        """Return the model on the meta device unless its code reads values of tensors."""
        try:
            with torch.device("meta"):
                return self.build()
        except NO_VALUES:
            return self.build()


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a batch."""

    batch: int = 8
    """Sequences, or images."""
    sequence: int = 1024
    """Tokens per sequence."""
    data: Path | None = None
    """Text for a language model, tokenised by the tokenizer.json beside its config, else by bytes."""


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a model that computes it itself: its result, or that result's `loss`."""
    found = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    found = getattr(found, "loss", found)
    if not isinstance(found, Tensor) or found.dim():
        raise ConfigError("the model returns no loss for a batch. Give the Python file a function loss(model, batch).")
    return found


def first_tensor(batch: Any) -> Tensor:
    """Return the first tensor of a batch: its first dimension counts samples."""
    values = batch.values() if isinstance(batch, Mapping) else (batch,) if isinstance(batch, Tensor) else batch
    found = next((value for value in values if isinstance(value, Tensor)), None)
    if found is None:
        raise ConfigError("a batch has no tensor: batches() must yield tuples or mappings of tensors.")
    return found


def first_sample(batch: Any) -> Any:
    """Return the first sample of a batch, as a batch."""
    return _mapped(batch, lambda tensor: tensor[:1] if tensor.dim() else tensor)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with each tensor of it changed."""
    if isinstance(batch, Mapping):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        make = getattr(type(batch), "_make", type(batch))  # a named tuple takes its fields one by one
        return make(_mapped(value, change) for value in batch)
    return change(batch) if isinstance(batch, Tensor) else batch
