"""Storage of gradients as FP8 codes between backward and the step: one byte instead of two or four.

A gradient is quantised once, when complete: accumulation in FP8 would round each addition, and lose small ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.kernels.optimizer import load_gradient, store_gradient
from octavo.kernels.storage import Storage
from octavo.optim.tensors import as_matrix, gradient_of, like, matrix_shape


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
        self.stored: dict[int, StoredGradient] = {}
        self._spare: dict[int, StoredGradient] = {}

    def take(self, number: int, name: str, parameter: Tensor, storage: Storage) -> None:
        """Quantise the gradient of a parameter, rounding to nearest, and free the original.

        Raises:
            UnsupportedError: one is stored already.
        """
        if number in self.stored:
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
        self.stored[number] = kept
        parameter.grad = None

    def clear(self, keep_memory: bool) -> None:
        """Drop all gradients. With `keep_memory` the next ones reuse their memory, as a CUDA graph needs."""
        self._spare = self._spare | self.stored if keep_memory else {}
        self.stored = {}
