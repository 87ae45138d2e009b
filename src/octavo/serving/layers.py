"""The layers of a model in eight bits, for serving: the codes that fprop reads, and the quantisation of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedError
from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import spec_of
from octavo.nn import GroupedLinear
from octavo.nn.conv import AnyConvolution, Convolution
from octavo.nn.experts import ExpertLinear, Experts
from octavo.nn.fused import fusion_groups
from octavo.nn.linear import LinearLayer, TransposedLinear, is_adopted, is_transposed
from octavo.nn.modules import unwrapped_name
from octavo.nn.multihead import MultiheadAttention
from octavo.nn.shared import quantize_together
from octavo.nn.weight_codes import quantize_weights, split_rows
from octavo.numerics import Quantized, block_for, dequantize, rotate
from octavo.recipes import Operand
from octavo.tensor import is_distributed

NOT_STORED = "no format stores it in FP8"
"""End of the reasons of layers in FP8 that are stored as values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedLayer:
    """A linear layer to be served in eight bits."""

    name: str
    """Full name in the model, without the names of wrappers."""
    weight: Quantized
    """Codes and scales, (N, K), as fprop reads them."""
    target: QuantSpec
    """Quantisation of the weight."""
    input: Operand
    """Quantisation of the input."""
    input_scale: Tensor | None
    """FP32 (1,) for a static scale; None if the engine computes it from the input."""
    is_expert: bool = False
    """Whether it is a product of an expert."""

    @property
    def kind(self) -> str:
        """Description of the quantisation."""
        weight, inputs = self.target.granularity, self.input.granularity.replace("row", "token")
        integer, rotated = (
            self.target.fmt.is_integer,
            f", rotated by blocks of {abs(self.rotation)}" if self.rotation else "",
        )
        static = "" if self.input_scale is None else ", static"
        return f"{'INT8, ' if integer else ''}weights by {weight}, inputs by {inputs}{static}{rotated}"

    @property
    def rotation(self) -> int:
        """Size of the blocks by which inputs and the rows of the weight are rotated, as `numerics.rotate`; 0: none."""
        block = block_for(self.weight.codes.shape[1], self.target.rotation)
        return block if block != 1 else 0

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes, (N, K), without the rotation."""
        if not self.rotation:
            return dequantize(self.weight, dtype)
        return rotate(dequantize(self.weight), self.rotation).to(dtype)  # its own inverse


def modules_by_own_name(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their full names, without the names of wrappers, each of which has the name of its module."""
    return ((unwrapped_name(name), module) for name, module in model.named_modules())


def served_layers(model: nn.Module) -> list[ServedLayer]:
    """Return the linear layers with fprop in FP8; fused layers with their shared codes.

    Raises:
        UnsupportedError: weights are sharded or rounded stochastically, or a block of scales spans two layers.
    """
    layers = {
        name: layer
        for name, layer in modules_by_own_name(model)
        if is_adopted(layer) and not is_transposed(layer) and layer.recipe.fprop.is_fp8
    }
    names = {id(layer): name for name, layer in layers.items()}
    found: dict[str, ServedLayer] = {}
    for group in fusion_groups(model, layers.values()):
        found |= {layer.name: layer for layer in _served(group, names)}
    return [found[name] for name in layers]


def served_experts(model: nn.Module, names: tuple[str, str, str]) -> dict[str, list[ServedLayer]]:
    """Return the gated experts with fprop in FP8, each as three layers, by the full name of the parameter they are in.

    Args:
        names: of gate, up and down of an expert, as engines call them.
    """
    found: dict[str, list[ServedLayer]] = {}
    for owner, module in modules_by_own_name(model):
        if not isinstance(module, Experts) or module.expert_roles.biases or not module.expert_roles.is_gated:
            continue
        for product, parts in zip(module.products, (names[:2], names[2:]), strict=True):
            if product.recipe.fprop.is_fp8:
                layers = list(_experts_of(owner, product, parts))
                found |= {f"{owner}.{name}": [] for name in product.names[1:]}  # stored with the first
                found[f"{owner}.{product.names[0]}"] = layers
    return found


def _experts_of(owner: str, product: ExpertLinear, parts: Sequence[str]) -> Iterator[ServedLayer]:
    """Yield the layers of each expert of a product, gate before up."""
    target, weight = spec_of(product.recipe.fprop.weight), product.weight.detach()
    stack = quantize_weights([weight.flatten(0, 1)], target).stack
    rows = split_rows(stack, [weight.shape[1] // len(parts)] * (len(weight) * len(parts)))
    assert rows is not None  # grouped products have a scale per row
    for number, row in enumerate(rows):
        expert, part = divmod(number, len(parts))
        name = f"{owner}.{expert}.{parts[part]}"
        operand = product.recipe.fprop.input
        yield ServedLayer(name=name, weight=row, target=target, input=operand, input_scale=None, is_expert=True)


def unserved_layers(model: nn.Module, served: Sequence[ServedLayer]) -> dict[str, str]:
    """Return the other layers with a GEMM, which are stored as values, with the reason."""
    known = {layer.name for layer in served}
    coded = {name.rpartition(".")[0].rpartition(".")[0] for name in known}
    others = {
        name: layer
        for name, layer in modules_by_own_name(model)
        if name not in known
        and isinstance(layer, nn.Linear | LinearLayer | AnyConvolution | GroupedLinear | MultiheadAttention)
        if not (isinstance(layer, ExpertLinear) and name.rpartition(".")[0] in coded)
    }
    return {name: _reason(layer) for name, layer in others.items()}


def _reason(layer: nn.Module) -> str:
    if isinstance(layer, Convolution | GroupedLinear | MultiheadAttention | TransposedLinear):
        stored = "its weight is stored as (K, N), as GPT-2's: " if isinstance(layer, TransposedLinear) else ""
        return stored + NOT_STORED
    if isinstance(layer, LinearLayer):
        return f"recipe '{layer.recipe.name}' computes its fprop in BF16"
    return "trained in high precision"


def _served(group: Sequence[LinearLayer], names: dict[int, str]) -> Iterator[ServedLayer]:
    """Yield the layers of a group, quantised together if they are fused, as in training (`quantize_together`)."""
    recipe = group[0].recipe
    if len(group) > 1 and any(layer.recipe is not recipe for layer in group):
        for layer in group:
            yield from _served([layer], names)
        return
    weights, target, name = [layer.weight for layer in group], spec_of(recipe.fprop.weight), names[id(group[0])]
    if any(is_distributed(weight) for weight in weights):
        raise UnsupportedError(
            f"export: '{name}.weight' is sharded over ranks. Export a checkpoint, in one process: octavo export RUN."
        )
    if target.rounding != "nearest":
        raise UnsupportedError(
            f"export: recipe '{recipe.name}' rounds the weight of '{name}' stochastically in each forward, so that "
            "there are no trained codes. Use the format 'plain', or a recipe that rounds weights to nearest."
        )
    codes = quantize_together(group, weights)
    parts = None if codes is None else codes.parts()
    if parts is None:
        raise UnsupportedError(
            f"export: '{name}' is fused with others, and blocks of {target.granularity} span two layers, because their "
            "widths are no multiples of the block. Use the format 'plain', or convert with Policy(fuse=False)."
        )
    for layer, part in zip(group, parts, strict=True):
        scale = None
        if recipe.fprop.input.scale_from == "static" and layer.scaling_slot is not None:
            scale = layer.scaling_slot.scale_and_amax[0, :1].detach().clone()
        yield ServedLayer(
            name=names[id(layer)], weight=part, target=target, input=recipe.fprop.input, input_scale=scale
        )
