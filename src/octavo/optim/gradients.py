"""Storage of gradients as FP8 codes between backward and the step: one byte instead of two or four.

A gradient is quantised once, when complete: accumulation in FP8 would round each addition, and lose small ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.optimizer import load_gradient, store_gradient
from octavo.kernels.storage import Storage
from octavo.optim.tensors import as_matrix, gradient_of, like, matrix_shape

FORMATS = ("wide", "fp8")
"""Storage of gradients until the step: in the dtype in which backward computes them, or as FP8 codes."""


class StoredGradient(NamedTuple):
    """A gradient stored in FP8."""

    codes: Tensor
    """E4M3, with the shape and strides of the parameter."""
    scale: Tensor
    """E8M0: uint8 (R, ceil(C / 128)), or (1, 1) where the tier has one scale per tensor."""

    def dequantize(self, parameter: Tensor) -> Tensor:
        """Return the values, FP32, with the shape and strides of the parameter."""
        value = like(parameter, torch.float32)
        as_matrix(value, parameter).copy_(load_gradient(as_matrix(self.codes, parameter), self.scale))
        return value


class GradientStore:
    """The FP8 gradients of an optimizer, by parameter number."""

    def __init__(self) -> None:
        self._stored: dict[int, StoredGradient] = {}
        self._spare: dict[int, StoredGradient] = {}

    def __bool__(self) -> bool:
        return bool(self._stored)

    def get(self, number: int) -> StoredGradient | None:
        """Return the gradient of a parameter, or None."""
        return self._stored.get(number)

    def take(self, number: int, name: str, parameter: Tensor, storage: Storage) -> None:
        """Quantise the gradient of a parameter, rounding to nearest, and free the original.

        Raises:
            UnsupportedError: one is stored already.
        """
        if number in self._stored:
            raise UnsupportedError(
                f"optimizer: parameter '{name}': backward computed a second gradient, and the first is stored in FP8,"
                " where accumulation would round. If it has been stepped, call optimizer.zero_grad():"
                " model.zero_grad() does not clear it. To accumulate several backward passes, run all of them in `with"
                " optimizer.accumulating():`."
            )
        gradient = gradient_of(parameter, name)
        shape = storage.scale_shape(*matrix_shape(parameter))
        assert shape is not None
        kept = self._spare.pop(number, None)
        if kept is None or kept.scale.shape != shape:
            scale = torch.empty(shape, dtype=torch.uint8, device=gradient.device)
            kept = StoredGradient(like(parameter, storage.float.dtype), scale)
        store_gradient(gradient, as_matrix(kept.codes, parameter), kept.scale, storage.scaling)
        self._stored[number] = kept
        parameter.grad = None

    def all(self) -> dict[int, StoredGradient]:
        """Return all stored gradients, by parameter number."""
        return dict(self._stored)

    def put_back(self, gradients: Mapping[int, StoredGradient]) -> None:
        """Replace the stored gradients by those that `all` returned, after a CUDA graph has rewritten them."""
        self._stored = dict(gradients)

    def clear(self, keep_memory: bool) -> None:
        """Drop all gradients. With `keep_memory` the next ones reuse their memory, as a CUDA graph needs."""
        self._spare = self._spare | self._stored if keep_memory else {}
        self._stored = {}


def check_format(gradients: str) -> None:
    """Check that a gradient storage is known.

    Raises:
        ConfigError: it is not.
    """
    if gradients not in FORMATS:
        near = did_you_mean(gradients, FORMATS)
        raise ConfigError(f"optimizer gradients: '{gradients}' is none of {', '.join(FORMATS)}.{near}")
