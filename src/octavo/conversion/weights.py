"""FP8 weights: the layers of a plan that store theirs as codes, and the change of a parameter in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.conversion.layer_plan import LayerPlan, Weights
from octavo.errors import ConfigError
from octavo.kernels.runtime.dispatch import is_plain
from octavo.nn.conv import AnyConvolution
from octavo.nn.fp8_weights import recipes_for_fp8_weights, unsupported_reason
from octavo.nn.linear import is_transposed
from octavo.nn.modules import full_name
from octavo.recipes import Recipe
from octavo.tensor import FP8Tensor

Layer = nn.Linear | AnyConvolution
"""A layer with a GEMM. To type checkers a `Conv1D` of transformers is an `nn.Linear`."""


def plan_weights(
    model: nn.Module, layers: Mapping[str, Layer], rows: Sequence[LayerPlan], recipes: Mapping[str, Recipe],
    weights: Weights,
) -> tuple[LayerPlan, ...]:  # fmt: skip
    """Return the rows of a plan with the storage of each weight, and the bytes that it saves.

    Args:
        layers: by name, with the same names as `rows` and `recipes`.

    Raises:
        ConfigError: a recipe cannot read the codes of an FP8 weight, or a weight has an unknown class.
    """
    linears = {row.name: layers[row.name] for row in rows if row.is_fp8 and row.kind == "linear"}
    wanted = {name: one for name, one in linears.items() if weights == "fp8" or isinstance(one.weight, FP8Tensor)}
    for name, layer in wanted.items():
        _check(name, layer, recipes[name])
    others = dict(_read_by_others(model, wanted))
    seen: set[int] = set()
    result = []
    for row in rows:
        weight: Tensor = layers[row.name].weight
        note = ""
        if row.name in wanted and id(weight) in others and not isinstance(weight, FP8Tensor):
            note = f"its weight is also {others[id(weight)]}, and stays as it is"
        elif row.name in wanted:
            codes_and_scales = weight.numel() + 4 * weight.shape[0]
            saves = 0 if id(weight) in seen else weight.nbytes - codes_and_scales
            row = replace(row, weight="fp8", saves=saves)
            seen.add(id(weight))
        elif weights == "fp8" and row.is_fp8 and is_transposed(layers[row.name]):
            note = "its weight is stored as (K, N), and stays as it is"
        result.append(replace(row, reason="; ".join(filter(None, (row.reason, note)))))
    return tuple(result)


def store(layer: Layer, weight: Weights, is_fp8: bool) -> None:
    """Change the storage of a layer's weight if it is not the planned one.

    Args:
        weight: the planned storage.
        is_fp8: whether the layer computes in FP8. Other layers need plain values.
    """
    stored = layer.weight
    if weight == "fp8" and not isinstance(stored, FP8Tensor):
        _become(stored, FP8Tensor.from_tensor(stored.detach()))
    elif not is_fp8:
        make_plain(layer)


def make_plain(layer: Layer) -> None:
    """Replace a layer's FP8 weight by a plain parameter of its values, in its nominal dtype."""
    stored = layer.weight
    if isinstance(stored, FP8Tensor):
        _become(stored, stored.detach().dequantize())


def check_free(weights: Sequence[Tensor]) -> None:
    """Check that parameters can be changed in place.

    Raises:
        ConfigError: a parameter is referenced by a graph that has not run backward, or by compiled code.
    """
    for weight in weights:
        holders = weight._use_count() - int(weight.requires_grad)  # type: ignore[attr-defined]  # one adds up gradients
        if weakref.getweakrefs(weight) or holders > 1:
            raise ConfigError(
                "a weight is in use, by compiled code or by a graph that has not run backward, so that what it is "
                "stored in cannot change now: convert before the model runs, or drop the outputs of earlier forwards. "
                "Nothing was converted."
            )


def _check(name: str, layer: Layer, recipe: Recipe) -> None:
    weight: Tensor = layer.weight
    reason = unsupported_reason(recipe)
    where = full_name(name, "weight")
    if reason is not None:
        can = f"Recipes that can: {', '.join(recipes_for_fp8_weights())}"
        if isinstance(weight, FP8Tensor):
            raise ConfigError(
                f"{where} is stored in FP8 ({weight!r}), and recipe '{recipe.name}' cannot compute with its codes: "
                f"{reason}. {can}. Or call octavo.revert(model) first, which gives plain weights back."
            )
        raise ConfigError(
            f"policy: weights = 'fp8': recipe '{recipe.name}' of '{name}' cannot compute with codes that are made "
            f"once per step: {reason}. {can}. Or leave `weights` out."
        )
    if isinstance(weight, FP8Tensor):
        if (weight.format, weight.granularity.name, weight.scaling) != ("e4m3", "row", "power_of_two"):
            raise ConfigError(
                f"{where} is stored as {weight!r} with {weight.scaling} scales; layers read E4M3 codes with a "
                "power-of-two scale per row: FP8Tensor.from_tensor(weight.dequantize()) makes such ones."
            )
    elif not is_plain(weight):
        raise ConfigError(
            f"policy: weights = 'fp8': {where} is a {type(weight).__name__}. Convert the model before it is sharded."
        )


def _read_by_others(model: nn.Module, wanted: Mapping[str, Layer]) -> Iterator[tuple[int, str]]:
    """Yield each parameter (`id`) that is more than the weight of the wanted layers, and its name there."""
    ours = {id(layer) for layer in wanted.values()}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (id(module) in ours and name == "weight"):
                yield id(parameter), full_name(module_name, name)


def _become(parameter: Tensor, tensor: Tensor) -> None:
    """Turn a parameter into another tensor, in place: every holder of it, such as an optimizer, holds the new one."""
    gradient, parameter.grad = parameter.grad, None  # swapping fails if anything else refers to it
    attributes = {name: value for name, value in vars(parameter).items() if name not in _FIELDS}
    torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    vars(parameter).update(attributes)
    parameter.grad = gradient


_FIELDS = ("codes", "scale", "granularity", "scaling")
