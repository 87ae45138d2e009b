"""`FP8Tensor`: a matrix stored in FP8 that PyTorch programs can use as a tensor.

It holds the codes and scales of a `numerics.Quantized`, and the dtype that it represents. It can be moved between
devices, detached, cloned, copied, transposed, compiled by `torch.compile`, and multiplied by the FP8 GEMMs. So it can
be a parameter: `nn.Parameter(FP8Tensor.from_tensor(w))`, with gradients that are plain tensors of its dtype. Octavo's
operators declare by `implements` how they read one. Every other operation raises: an implicit conversion to BF16 would
defeat the purpose of FP8 storage. Call `dequantize()` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo._util.autograd import first_order
from octavo.errors import CheckpointError, UnsupportedError
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Granularity, Quantized, Scaling, dequantize, format_of, granularity_named

aten = torch.ops.aten


class FP8Tensor(Tensor):
    """A matrix (R, C) in FP8. It appears as a tensor of its original dtype and takes one byte per element."""

    codes: Tensor
    """(R, C), float8."""
    scale: Tensor
    """FP32; multiplies the codes. Shape as `granularity.scale_shape(R, C)` gives it."""
    granularity: Granularity
    scaling: Scaling
    """How scales are chosen for values that are copied in. Scales passed to the constructor are not checked against
    it."""
    shares_scale: bool = False
    """Whether rows outside this tensor have the same scale; then it is read-only."""

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        codes: Tensor,
        scale: Tensor,
        granularity: Granularity,
        dtype: torch.dtype,
        scaling: Scaling = "power_of_two",
    ) -> FP8Tensor:
        if not dtype.is_floating_point:
            raise UnsupportedError(
                f"an FP8Tensor cannot represent {dtype}: its values are real numbers with fractions. To convert them, "
                f"call .dequantize().to({dtype})."
            )
        tensor: FP8Tensor = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        tensor.codes, tensor.scale = codes, scale
        tensor.granularity, tensor.scaling = granularity, scaling
        return tensor

    @classmethod
    def from_tensor(
        cls, x: Tensor, format: str = "e4m3", granularity: str = "row", scaling: Scaling = "power_of_two"
    ) -> FP8Tensor:
        """Quantise a matrix (R, C).

        Raises:
            ConfigError: x is not a matrix, or a name is unknown.
        """
        return cls(*kernels.quantize(x.detach(), format, granularity, scaling), x.dtype, scaling)

    @property
    def quantized(self) -> Quantized:
        """The codes and scales, as the kernels take them."""
        return Quantized(self.codes, self.scale, self.granularity)

    @property
    def format(self) -> str:
        """The format of the codes, `e4m3` or `e5m2`."""
        return format_of(self.codes).name

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    @property
    def data(self) -> FP8Tensor:
        """Codes and scale, detached. Assign another FP8 tensor of this shape to take over its codes and scale.

        Raises:
            UnsupportedError: a plain tensor, or one of another shape, dtype or device, is assigned.
        """
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        # PyTorch would replace neither codes nor scale, without a word.
        if not isinstance(value, FP8Tensor) or value.shape != self.shape:
            raise UnsupportedError(
                f"{self!r}.data = ... takes an FP8Tensor of the same shape, got {type(value).__name__} "
                f"{tuple(value.shape)}. Use .copy_(values), which quantises them."
            )
        if (value.dtype, value.device) != (self.dtype, self.device):
            raise UnsupportedError(
                f"{self!r}.data = ... takes an FP8Tensor that represents {self.dtype} on {self.device}, got "
                f"{value.dtype} on {value.device}. To change the dtype or the device of a parameter, move its module: "
                "module.to(dtype) or module.to(device)."
            )
        self.codes, self.scale = value.codes, value.scale
        self.granularity, self.scaling = value.granularity, value.scaling

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, codes * scale, in `dtype` (default: the dtype it represents).

        Differentiable: the gradient of the values is that of the tensor, in its dtype.
        """
        values: Tensor = _Values.apply(self, dtype or self.dtype)  # type: ignore[no-untyped-call]
        return values

    def storage(self) -> Any:
        """Raise: no memory holds the values, which writers of files look for here.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{self!r} has codes and scales in memory, not values in {self.dtype}. To write a file of values, pass the"
            " state_dict() of a converted model, or dequantize(); of codes and scales, to_tensors()."
        )

    def share_memory_(self) -> FP8Tensor:
        """Move codes and scale to memory that processes share, as PyTorch moves a plain tensor."""
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether codes and scale are in memory that processes share."""
        return bool(self.codes.is_shared() and self.scale.is_shared())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `codes` and `scale` as plain tensors, for a checkpoint without pickle."""
        return {"codes": self.codes, "scale": self.scale}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], granularity: str, dtype: torch.dtype, scaling: Scaling = "power_of_two"
    ) -> FP8Tensor:
        """Restore a tensor from the result of `to_tensors`.

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
        return cls(codes, scale, tile, dtype, scaling)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = " x ".join(map(str, self.shape))
        return f"FP8Tensor({shape}, {self.codes.dtype}, scale per {self.granularity.name}, from {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Granularity, torch.dtype, Scaling]]:
        return ["codes", "scale"], (self.granularity, self.dtype, self.scaling)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Granularity, torch.dtype, Scaling], size: Any, stride: Any
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
            raise _undefined(str(func))
        return _OPERATIONS[func](*args, **(kwargs or {}))


Implementation = Callable[..., Any]
_OPERATIONS: dict[Any, Implementation] = {}


def implements(*operators: Any) -> Callable[[Implementation], Implementation]:
    """Decorate the implementation of these operators, overloads of `torch.ops`, for arguments that are FP8 tensors.

    It takes the operator's arguments. `torch.compile` traces it, and compiles what it calls.
    """

    def register(function: Implementation) -> Implementation:
        _OPERATIONS.update(dict.fromkeys(operators, function))
        return function

    return register


def _undefined(operation: str) -> UnsupportedError:
    written = operation.partition(".")[2].partition(".")[0].endswith("_")
    return UnsupportedError(
        f"{operation} is not defined for an FP8Tensor: "
        + ("the result would be rounded to FP8 again. " if written else "it would have to leave FP8. ")
        + "Call .dequantize() first if that is meant. PyTorch's optimizers cannot update FP8 weights, those of "
        + "octavo.optim can."
        + (" Before adapters are merged into a model's weights, call octavo.revert(model)." if written else "")
    )


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        values: Tensor = torch.ops.octavo.values(x, dtype)
        return values

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], None  # autograd gives it the dtype that it is the gradient of


@operation(name="values", fake=lambda x, dtype: torch.empty_like(x, dtype=dtype))
def _plain_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@implements(torch.ops.octavo.values.default)
def _values(x: FP8Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(x.quantized, dtype)


def _each(x: FP8Tensor, operation: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> FP8Tensor:
    """Return the operation applied to codes and to scales."""
    made = type(x)(operation(x.codes), operation(x.scale), x.granularity, dtype or x.dtype, x.scaling)
    made.shares_scale = x.shares_scale and operation is Tensor.detach
    return made


@implements(aten.detach.default, aten.alias.default)
def _detach(x: FP8Tensor) -> FP8Tensor:
    return _each(x, Tensor.detach)


@implements(aten.clone.default)
def _clone(x: FP8Tensor, **_: Any) -> FP8Tensor:
    return _each(x, Tensor.clone)


@implements(aten.view.default)
def _view(x: FP8Tensor, size: Sequence[int]) -> FP8Tensor:
    """Return a view of the same shape, as PyTorch makes to find the node that accumulates a gradient."""
    if tuple(size) != tuple(x.shape):
        raise _undefined(f"aten.view.default to the shape {tuple(size)}")
    return _each(x, Tensor.detach)


@implements(aten.empty_like.default)
def _empty_like(x: FP8Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> FP8Tensor:
    return _each(x, lambda part: torch.empty_like(part, device=device or x.device), dtype)


@implements(aten._to_copy.default)
def _to(
    x: FP8Tensor, dtype: torch.dtype | None = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> FP8Tensor:
    """Move it, or change the dtype that it represents; codes and scales stay the same."""
    return _each(x, lambda part: part.to(device or x.device, non_blocking=non_blocking, copy=True), dtype)


@implements(aten.copy_.default)
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values, quantised as `x` is, or codes if both are of one kind."""
    if not isinstance(x, FP8Tensor):
        assert isinstance(source, FP8Tensor)
        return x.copy_(_values(source, x.dtype), non_blocking=non_blocking)
    if x.shares_scale:
        raise UnsupportedError(
            f"{x!r}.copy_: these rows share a scale with other rows, whose values would change with it. Write the whole"
            " matrix, or quantise it with one scale per row."
        )
    if not (isinstance(source, FP8Tensor) and _kind(source) == _kind(x)):
        values = _values(source, torch.float32) if isinstance(source, FP8Tensor) else source
        source = FP8Tensor.from_tensor(values.to(x.device), x.format, x.granularity.name, x.scaling)
    x.codes.copy_(source.codes, non_blocking=non_blocking)
    x.scale.copy_(source.scale, non_blocking=non_blocking)
    return x


def _kind(x: FP8Tensor) -> tuple[torch.dtype, Granularity, Scaling]:
    return x.codes.dtype, x.granularity, x.scaling


@implements(aten.is_pinned.default)
def _is_pinned(x: FP8Tensor, device: Any = None) -> bool:
    return x.codes.is_pinned() and x.scale.is_pinned()


@implements(aten.record_stream.default)
def _record_stream(x: FP8Tensor, stream: torch.Stream) -> None:
    for part in (x.codes, x.scale):
        aten.record_stream.default(part, stream)


@implements(aten.t.default, aten.transpose.int)
def _transpose(x: FP8Tensor, dim0: int = 0, dim1: int = 1) -> FP8Tensor:
    return FP8Tensor(*x.quantized.t(), x.dtype, x.scaling) if dim0 % 2 != dim1 % 2 else _each(x, Tensor.detach)


@implements(aten.mm.default)
def _matmul(a: FP8Tensor, b: FP8Tensor) -> Tensor:
    """a (M, K) @ b (K, N), both in FP8; b is usually the transpose of a stored (N, K)."""
    if not (isinstance(a, FP8Tensor) and isinstance(b, FP8Tensor)):
        raise UnsupportedError(
            "an FP8Tensor multiplies only another FP8Tensor: quantise the other operand, "
            "or call .dequantize() on this one."
        )
    return kernels.gemm(kernels.contiguous(a.quantized), kernels.contiguous(b.quantized.t()), a.dtype)


# What `torch.load(weights_only=True)` may build: plain data, as `to_tensors` gives it.
torch.serialization.add_safe_globals([FP8Tensor, Granularity])
