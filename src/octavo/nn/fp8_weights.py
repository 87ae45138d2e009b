"""Weights that are FP8 tensors: every GEMM reads their codes, and nothing is quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedError
from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import parse_spec
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Quantized
from octavo.recipes import Operand, Recipe, load, names
from octavo.tensor import FP8Tensor, implements


def values(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight as a GEMM in high precision reads it; differentiable, also for an FP8 weight."""
    return weight.dequantize(dtype) if isinstance(weight, FP8Tensor) else weight.to(dtype)


def codes_of(weight: Tensor, target: QuantSpec, transposed: bool = False) -> Quantized:
    """Return the codes of an FP8 weight; for a plain one that shares an input with FP8 weights, make them.

    Raises:
        UnsupportedError: an FP8 weight has codes of another kind, or its transpose would be quantised by itself.
    """
    if not isinstance(weight, FP8Tensor):
        return kernels.quantize(weight.detach(), *target)
    if torch.compiler.is_compiling():  # so that codes and scales are inputs of the compiler's graph
        codes, scale = torch.ops.octavo.codes_of(weight, str(target), transposed)
        return Quantized(codes, scale, target.tile)
    return _checked(weight, target, transposed)


def _checked(weight: FP8Tensor, target: QuantSpec, transposed: bool) -> Quantized:
    has = QuantSpec(weight.format, weight.granularity.name, weight.scaling)
    if transposed or has != target:
        wanted = f"{target}, transposed" if transposed else str(target)
        raise UnsupportedError(
            f"an FP8 weight holds the codes of {has}, and its recipe wants those of {wanted}: it would be rounded a "
            "second time. Use a recipe that reads the codes it has, such as 'folded', or give the layer a plain weight "
            "(octavo.revert) before it is converted."
        )
    return weight.quantized


def unsupported_reason(recipe: Recipe) -> str | None:
    """Return why a recipe cannot compute with an FP8 weight, E4M3 with a power-of-two scale per row, or None."""
    if not recipe.fprop.is_fp8:
        return "its fprop is in BF16"
    if recipe.fprop.weight != Operand(granularity="row"):
        return f"its fprop reads a weight that is {recipe.fprop.weight}, not E4M3 with a power-of-two scale per row"
    if recipe.dgrad.is_fp8 and not recipe.reuses("dgrad.weight"):
        return "its dgrad quantises the transposed weight by itself, which would be a second rounding"
    return None


def recipes_for_fp8_weights() -> list[str]:
    """Return the names of the recipes that compute with FP8 weights."""
    return [name for name in names() if unsupported_reason(load(name)) is None]


def _refuse(*_: object) -> None:
    raise UnsupportedError("octavo::codes_of reads an FP8Tensor.")


@operation(fake=_refuse)
def _codes_of(weight: Tensor, target: str, transposed: bool) -> list[Tensor]:
    raise UnsupportedError("octavo::codes_of reads an FP8Tensor.")


@implements(torch.ops.octavo.codes_of.default)
def _codes_of_fp8(weight: FP8Tensor, target: str, transposed: bool) -> list[Tensor]:
    wanted = parse_spec(target)
    assert wanted is not None
    return list(_checked(weight, wanted, transposed)[:2])


@implements(torch.ops.aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(*args: object, **kwargs: object) -> Tensor:
    """Compute an `nn.TransformerEncoderLayer` by PyTorch's fast path, which evaluates in high precision."""
    plain = [each.dequantize() if isinstance(each, FP8Tensor) else each for each in args]
    result: Tensor = torch.ops.aten._transformer_encoder_layer_fwd.default(*plain, **kwargs)
    return result
