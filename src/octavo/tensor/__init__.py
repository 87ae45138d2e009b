"""The FP8 tensor: codes and scales that travel together."""

from octavo.tensor.fp8_tensor import FP8Tensor

__all__ = ["FP8Tensor"]
