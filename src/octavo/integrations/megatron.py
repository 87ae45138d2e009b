"""Training by Megatron-Core in FP8: `GPTModel(transformer_layer_spec=fp8_spec(get_gpt_layer_local_spec()), ...)`."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.gemm.integer import untried_reason
from octavo.nn.functional import linear
from octavo.numerics import is_rotatable
from octavo.recipes import DEFAULT, FALLBACK, Recipe, RecipeLike, load


class _InFP8:
    """Mixin for a parallel layer of Megatron: its product by a recipe; weights, names and communication are Megatron's.

    Raises:
        UnsupportedError: a recipe with stored scales, an expert's layer on several ranks, or weight gradients that are
            summed inside Megatron's own product.
    """

    def __init__(self, *args: Any, config: Any, recipe: RecipeLike | None = None, **kwargs: Any) -> None:
        if config.gradient_accumulation_fusion:
            raise UnsupportedError("gradient_accumulation_fusion: Megatron's product would be BF16. Set it to False.")
        super().__init__(*args, config=config, **kwargs)  # type: ignore[call-arg]
        self.recipe = load(_default_for(self.weight) if recipe is None else recipe)  # type: ignore[attr-defined]
        if self.recipe.has_stored_scales:
            raise UnsupportedError(
                f"recipe '{self.recipe.name}' stores scales, which a Megatron layer has no place for."
            )
        if self.explicit_expert_comm:  # type: ignore[attr-defined]
            raise UnsupportedError("experts on several ranks stay in BF16: give fp8_spec a spec without them.")


def _default_for(weight: Tensor) -> str:
    """Return the recipe of a layer for which none is named, by the features of its rank and by its device."""
    return DEFAULT if is_rotatable(weight.shape[1]) and untried_reason(weight.device) is None else FALLBACK


class ColumnParallelLinear(_InFP8, tensor_parallel.ColumnParallelLinear):
    """Megatron's layer with the output features split, products in FP8."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, (sequence, batch, features), and the bias that the caller is to add, or None."""
        enter = tensor_parallel.copy_to_tensor_model_parallel_region
        if self.sequence_parallel:
            enter = tensor_parallel.gather_from_sequence_parallel_region
        x = enter(input_, group=self.tp_group)
        bias = None if self.skip_bias_add else self.bias
        y = linear(x, self.weight if weight is None else weight, bias, self.recipe)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = tensor_parallel.gather_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_InFP8, tensor_parallel.RowParallelLinear):
    """Megatron's layer with the input features split, products in FP8; their sum over ranks is BF16."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, (sequence, batch, features), and the bias that the caller is to add, or None."""
        if not self.input_is_parallel:
            input_ = tensor_parallel.scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        leave = tensor_parallel.reduce_from_tensor_model_parallel_region
        if self.sequence_parallel:
            leave = tensor_parallel.reduce_scatter_to_sequence_parallel_region
        y = leave(linear(input_, self.weight, None, self.recipe), group=self.tp_group)
        if self.skip_bias_add:
            return y, self.bias
        return (y if self.bias is None else y + self.bias), None


_CLASSES = {
    tensor_parallel.ColumnParallelLinear: ColumnParallelLinear,
    tensor_parallel.RowParallelLinear: RowParallelLinear,
}


Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules)


def fp8_spec(spec: Spec, recipe: RecipeLike | None = None) -> Spec:
    """Return the spec of a layer or a block with Megatron's parallel layers in FP8; the spec given stays as it is.

    Args:
        spec: with Megatron's own layers, as `get_gpt_layer_local_spec` returns it, or `get_gpt_decoder_block_spec`
            without Transformer Engine. Embedding and head are in none.
        recipe: one that keeps no scales from step to step; None: `octavo.recipes.DEFAULT`, or
            `FALLBACK` for layers and devices that cannot rotate.

    Raises:
        ConfigError: the spec has no such layer, as that of Transformer Engine has none.
    """
    found = copy.deepcopy(spec)
    if not _replace(found, None if recipe is None else load(recipe)):
        raise ConfigError("fp8_spec: no layer of Megatron's own in this spec. Start from get_gpt_layer_local_spec().")
    return found


def _replace(node: Any, recipe: Recipe | None) -> int:
    """Replace the layers below a spec in place, and return how many there were."""
    if isinstance(node, list | tuple):  # the layers of a block
        return sum(_replace(each, recipe) for each in node)
    count = 0
    for field in fields(node) if is_dataclass(node) else ():
        value = getattr(node, field.name)
        module = value.module if isinstance(value, ModuleSpec) else value
        if isinstance(module, type) and module in _CLASSES:
            given = value.params if isinstance(value, ModuleSpec) else {}
            setattr(node, field.name, ModuleSpec(module=_CLASSES[module], params={**given, "recipe": recipe}))
            count += 1
        else:
            count += _replace(value, recipe)
    return count
