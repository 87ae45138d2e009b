"""Layers that telemetry samples, and the meaning of the rows of its buffer.

Layers that are computed together have one buffer (`octavo.nn.telemetry_ops`): rows for the input, the n weights and the
n grad_outputs. Behind all of them are the rows of the weights' gradients, one per layer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.kernels import QuantSpec
from octavo.kernels.sample import SampleInput, sample, sampled_rows
from octavo.nn.conv import Convolution
from octavo.nn.experts import ExpertLinear
from octavo.nn.grouped import GroupedLinear
from octavo.nn.linear import Linear
from octavo.tensor import FP8Tensor, local

Layer = Linear | Convolution | GroupedLinear
"""What can be looked at."""

AS_IT_IS = QuantSpec("e5m2", "tensor", "float32")
"""What the gradient of a weight, which nobody quantises, is looked at as: with a scale of 1."""


class Row(NamedTuple):
    """What a row of a snapshot is about."""

    layer: str
    """The full name of the layer."""
    role: str
    """`input`, `weight`, `grad_output`, or `grad_weight`, the gradient that the optimizer reads."""
    operand: str
    """How it is quantised: for fprop, and a gradient for dgrad; empty for `grad_weight`, which is not."""
    shape: tuple[int, ...]
    """Of a weight and its gradient; empty where it follows the batch."""


def find(model: nn.Module) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return the layers to look at by name, and why other FP8 layers cannot be.

    Raises:
        ConfigError: telemetry looks at a layer already.
    """
    found: dict[str, Layer] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        recipe = getattr(module, "recipe", None)
        if not isinstance(module, nn.Module) or not getattr(recipe, "is_fp8", False) or not hasattr(module, "weight"):
            continue
        if not isinstance(module, Layer):
            left[name] = f"{type(module).__name__} is no layer that telemetry knows"
        elif not (module.recipe.fprop.is_fp8 or module.recipe.dgrad.is_fp8):
            left[name] = f"recipe '{module.recipe.name}' runs its fprop and its dgrad in BF16"
        elif module.stats_slot is not None:
            raise ConfigError(
                f"telemetry watches '{name}' already: close the `Loop` or `Monitor` that measures it, or detach that"
                " telemetry, first."
            )
        else:
            found[name] = module
    return found, left


def rows_of(name: str, layer: Layer, top: int, number: int, members: int, last: int) -> list[tuple[Row, int]]:
    """Return what is known of a layer, and where in the buffer. What no GEMM reads in FP8 has no row.

    In the order in which a step makes them, read forward for the first two and backward for gradients.

    Args:
        top: the first row of its buffer.
        number: of the layer in it.
        members: how many layers it has.
        last: the row of its weight's gradient.
    """
    recipe, shape = layer.recipe, tuple(layer.weight.shape)
    rows = []
    if recipe.fprop.is_fp8:
        rows.append((Row(name, "input", str(recipe.fprop.input), ()), top))
        rows.append((Row(name, "weight", str(recipe.fprop.weight), shape), top + 1 + number))
    rows.append((Row(name, "grad_weight", "", shape), last))
    if recipe.dgrad.is_fp8:
        rows.append((Row(name, "grad_output", str(recipe.dgrad.grad_output), ()), top + 1 + members + number))
    return rows


def weights_of(layer: Layer) -> list[Tensor]:
    """Return the parameters that are the weight of a layer."""
    return layer.parts if isinstance(layer, ExpertLinear) else [layer.get_parameter("weight")]


def sample_gradient(layer: Layer, one: Tensor, row: Tensor) -> None:
    """Write the statistics of the weight's gradient into a row; nothing where there is none, or only codes.

    Of a gradient that is sharded, this rank's part is looked at.

    Args:
        one: FP32 (1, 1), a scale of 1.
        row: FP32 (WIDTH,) or (WIDTH + BINS,).
    """
    gradient = layer.gradient if isinstance(layer, ExpertLinear) else layer.get_parameter("weight").grad
    gradient = None if gradient is None else local(gradient)
    if gradient is None or isinstance(gradient, FP8Tensor) or not gradient.numel():
        return
    gradient = gradient.detach()
    if isinstance(layer, GroupedLinear):
        gradient = gradient.flatten(0, 1)
    if gradient.dim() == 2:
        sample(SampleInput(gradient, one, AS_IT_IS), row)
        return
    rows = sampled_rows(len(gradient), row)
    sample(SampleInput(gradient[rows].flatten(1), one, AS_IT_IS, rows=len(gradient)), row)
