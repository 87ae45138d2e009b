"""The hash of the data that a calibration has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class DataHash:
    """SHA-256 of batches: of their tensors' shapes, dtypes and bytes, and of plain values."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, batch: Any) -> None:
        """Add a batch: tensors, arrays, numbers and strings, in lists, tuples and mappings.

        Of any other object only the type counts.
        """
        for part in _parts(batch):
            self._hash.update(part)

    def __str__(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"{plain.dtype} {tuple(plain.shape)}".encode()
        yield plain.flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key).encode()
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        plain_kinds = (str, bytes, int, float, bool, type(None))
        yield (repr(value) if isinstance(value, plain_kinds) else type(value).__qualname__).encode()
