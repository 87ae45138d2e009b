"""`FP8Tensor`: a matrix that is stored in FP8 and knows how to be one in a PyTorch program.

It holds what `numerics.Quantized` holds, codes and scales, and the dtype it came from. It moves between devices,
detaches, clones, transposes, goes through `torch.compile`, and multiplies through the FP8 GEMMs. Every other
operation raises: a silent trip through BF16 is what FP8 storage is there to avoid. Call `dequantize()` where that is
wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import CheckpointError, UnsupportedError
from octavo.numerics import Granularity, Quantized, dequantize, granularity_named

aten = torch.ops.aten


class FP8Tensor(Tensor):
    """A matrix of shape (R, C) in FP8. It looks like a tensor of its original dtype and takes one byte an element."""

    codes: Tensor
    """(R, C), float8."""
    scale: Tensor
    """FP32; multiplies the codes. Shape as `granularity.scale_shape(R, C)` gives it."""
    granularity: Granularity

    @staticmethod
    def __new__(  # noqa: D102
        cls, codes: Tensor, scale: Tensor, granularity: Granularity, dtype: torch.dtype
    ) -> FP8Tensor:
        tensor: FP8Tensor = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        tensor.codes, tensor.scale, tensor.granularity = codes, scale, granularity
        return tensor

    @classmethod
    def from_tensor(
        cls, x: Tensor, format: str = "e4m3", granularity: str = "row", scaling: str = "power_of_two"
    ) -> FP8Tensor:
        """Quantise a matrix (R, C).

        Raises:
            ConfigError: x is not a matrix, or a name is unknown.
        """
        quantized = kernels.quantize(x.detach(), format, granularity, scaling)  # type: ignore[arg-type]
        return cls(*quantized, x.dtype)

    @property
    def quantized(self) -> Quantized:
        """The codes and scales, as the kernels take them."""
        return Quantized(self.codes, self.scale, self.granularity)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, codes * scale, in `dtype` (default: the dtype it was made from)."""
        return dequantize(self.quantized, dtype or self.dtype)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `codes` and `scale`: plain tensors, for a checkpoint without pickle."""
        return {"codes": self.codes, "scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], granularity: str, dtype: torch.dtype) -> FP8Tensor:
        """Build it again from what `to_tensors` gave.

        Raises:
            CheckpointError: a tensor is missing, or the scales do not fit the codes.
        """
        if set(tensors) != {"codes", "scale"}:
            raise CheckpointError(f"an FP8 tensor is stored as 'codes' and 'scale'; found {sorted(tensors)}.")
        codes, scale, tile = tensors["codes"], tensors["scale"], granularity_named(granularity)
        expected = tile.scale_shape(*codes.shape)
        if tuple(scale.shape) != expected:
            raise CheckpointError(
                f"codes of shape {tuple(codes.shape)} with granularity '{granularity}' have scales of shape "
                f"{expected}, found {tuple(scale.shape)}: the file is of another tensor."
            )
        return cls(codes, scale, tile, dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = " x ".join(map(str, self.shape))
        return f"FP8Tensor({shape}, {self.codes.dtype}, scale per {self.granularity.name}, from {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Granularity, torch.dtype]]:
        return ["codes", "scale"], (self.granularity, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Granularity, torch.dtype], size: Any, stride: Any
    ) -> FP8Tensor:
        return cls(inner["codes"], inner["scale"], *meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _OPERATIONS:
            raise UnsupportedError(
                f"{func} is not defined for an FP8Tensor: it would have to leave FP8. "
                "Call .dequantize() first if that is meant."
            )
        return _OPERATIONS[func](*args, **(kwargs or {}))


def _each(operation: Callable[[Tensor], Tensor]) -> Callable[..., FP8Tensor]:
    """Return the operation applied to codes and scales alike."""

    def apply(x: FP8Tensor, *_: Any, **__: Any) -> FP8Tensor:
        return FP8Tensor(operation(x.codes), operation(x.scale), x.granularity, x.dtype)

    return apply


def _transpose(x: FP8Tensor, dim0: int = 0, dim1: int = 1) -> FP8Tensor:
    return FP8Tensor(*x.quantized.t(), x.dtype) if dim0 % 2 != dim1 % 2 else x


def _to(x: FP8Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        return x.dequantize(dtype).to(device or x.device)
    return FP8Tensor(x.codes.to(device), x.scale.to(device), x.granularity, x.dtype)


def _matmul(a: FP8Tensor, b: FP8Tensor) -> Tensor:
    """a (M, K) @ b (K, N), both in FP8; b is most often the transpose of a stored (N, K)."""
    if not (isinstance(a, FP8Tensor) and isinstance(b, FP8Tensor)):
        raise UnsupportedError(
            "an FP8Tensor multiplies only another FP8Tensor: quantise the other operand, "
            "or call .dequantize() on this one."
        )
    return kernels.gemm(kernels.contiguous(a.quantized), kernels.contiguous(b.quantized.t()), a.dtype)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _each(Tensor.detach),
    aten.alias.default: _each(Tensor.detach),
    aten.clone.default: _each(Tensor.clone),
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten._to_copy.default: _to,
    aten.mm.default: _matmul,
}
