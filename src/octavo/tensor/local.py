"""The part of a tensor in this process: inside DTensors and wrapper subclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.tensor.fp8_tensor import FP8Tensor


class WrapperTensor(Tensor):
    """Base of tensor subclasses that wrap one tensor of the same shape and dtype to change its handling."""

    wrapped: Tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, in its own memory: plain, or an `FP8Tensor`.

    A tensor that is not distributed is returned unchanged.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    if is_distributed(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]  # `to_local` is a step of autograd
    return tensor.wrapped if isinstance(tensor, WrapperTensor) else tensor


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor. Loads PyTorch's distributed package only for subclasses of Tensor."""
    if type(tensor) in (Tensor, nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def dtensor_like(like: Any, values: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return this rank's values as a DTensor with the mesh and placements of `like`, without communication.

    Args:
        shape: the global shape, in contiguous strides; by default shape and strides of `like`.
    """
    from torch.distributed.tensor import DTensor

    whole = like if shape is None else torch.empty(shape, device="meta")
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def non_finite(tensor: Tensor) -> Tensor:
    """Return the number of NaN and infinite values of this rank's part, int64, shape (); 0 for integers.

    Those of an `FP8Tensor` are the values of `dequantize()`: NaN and infinite codes, all codes with a scale that is not
    finite, and products that overflow in the dtype that it represents.
    """
    part = local(tensor).detach()
    if isinstance(part, FP8Tensor):
        part = part.dequantize()
    if not part.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    return (~torch.isfinite(part.float() if part.element_size() == 1 else part)).sum()  # no isfinite for FP8
