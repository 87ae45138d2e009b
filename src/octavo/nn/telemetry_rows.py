"""Layers that telemetry can measure, and the meaning of the rows of its buffer.

Layers that are computed together have one buffer (`octavo.nn.telemetry_ops`): rows for the input, the n weights and the
n grad_outputs. After all of these come the rows of the weights' gradients, one per layer.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.kernels import QuantSpec
from octavo.kernels.sample import SampleInput, sample, sampled_rows
from octavo.nn.conv import Convolution
from octavo.nn.experts import ExpertLinear
from octavo.nn.grouped import GroupedLinear
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import full_name
from octavo.nn.multihead import IN_PROJECTION, MultiheadAttention
from octavo.tensor import FP8Tensor, local

Layer = LinearLayer | Convolution | GroupedLinear | MultiheadAttention
"""Layers that can be measured; of an `nn.MultiheadAttention` the in-projection."""

AS_IT_IS = QuantSpec("e5m2", "tensor", "float32")
"""Format in which the gradient of a weight, which is not quantised, is measured: with a scale of 1."""


class Row(NamedTuple):
    """Meaning of a row of a snapshot."""

    layer: str
    """Full name of the layer."""
    role: str
    """`input`, `weight`, `grad_output`, or `grad_weight`, the gradient that the optimizer reads."""
    operand: str
    """Quantisation: of inputs and weights for fprop, of a gradient for dgrad; empty for `grad_weight`, which is not
    quantised."""
    shape: tuple[int, ...]
    """Shape of a weight and its gradient; empty if it depends on the batch."""


def find(model: nn.Module) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return the layers to measure by name, and why other FP8 layers cannot be.

    Raises:
        ConfigError: another telemetry measures a layer.
    """
    found: dict[str, Layer] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        recipe = getattr(module, "recipe", None)
        if isinstance(module, MultiheadAttention):
            name = full_name(name, IN_PROJECTION)
        elif not hasattr(module, "weight"):
            continue
        if not getattr(recipe, "is_fp8", False):
            continue
        if not isinstance(module, Layer):
            left[name] = f"{type(module).__name__} is no layer that telemetry knows"
        elif isinstance(module, MultiheadAttention) and module.in_proj_weight is None:
            left[name] = "q, k and v have a weight each (kdim, vdim)"
        elif not weights_of(module):
            left[name] = "its weight is computed, by a parametrization for example"
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
    """Return the rows of a layer, with their indices in the buffer. Operands that no GEMM reads in FP8 have none.

    In the order of a step, read forward for the first two and backward for gradients.

    Args:
        top: first row of its buffer.
        number: index of the layer in it.
        members: number of its layers.
        last: row of its weight's gradient.
    """
    recipe, shape = layer.recipe, tuple(_weight(layer).shape)
    rows = []
    if recipe.fprop.is_fp8:
        rows.append((Row(name, "input", str(recipe.fprop.input), ()), top))
        rows.append((Row(name, "weight", str(recipe.fprop.weight), shape), top + 1 + number))
    rows.append((Row(name, "grad_weight", "", shape), last))
    if recipe.dgrad.is_fp8:
        rows.append((Row(name, "grad_output", str(recipe.dgrad.grad_output), ()), top + 1 + members + number))
    return rows


def weights_of(layer: Layer) -> list[nn.Parameter]:
    """Return the parameters that make up the weight of a layer; none if one of them is computed from others."""
    owner, names = (layer.owner, layer.names) if isinstance(layer, ExpertLinear) else (layer, (_weight_name(layer),))
    found = [parameter for name in names if (parameter := owner._parameters.get(name)) is not None]
    return found if len(found) == len(names) else []


def module_of(model: nn.Module, layer: str) -> nn.Module:
    """Return the module that computes a measured layer, by the name of the layer.

    The in-projection of an `nn.MultiheadAttention` is none itself.
    """
    outer, _, last = layer.rpartition(".")
    if last == IN_PROJECTION and isinstance(attention := model.get_submodule(outer), MultiheadAttention):
        return attention
    return model.get_submodule(layer)


def _weight_name(layer: Layer) -> str:
    return "in_proj_weight" if isinstance(layer, MultiheadAttention) else "weight"


def _weight(layer: Layer) -> Tensor:
    return cast(Tensor, getattr(layer, _weight_name(layer)))


def sample_gradient(layer: Layer, one: Tensor, row: Tensor) -> None:
    """Write the statistics of a weight's gradient into a row; nothing if there is none, or only codes.

    A weight may be parametrized after telemetry began: its gradient is then that of no parameter.

    Of a sharded gradient, this rank's part is sampled.

    Args:
        one: FP32 (1, 1), a scale of 1.
        row: FP32 (WIDTH,) or (WIDTH + BINS,).
    """
    weights = weights_of(layer)
    if not weights:
        return
    gradient = layer.gradient if isinstance(layer, ExpertLinear) else weights[0].grad
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
