"""The layers of an export: the same codes as training computes with, whatever a model has gone through."""

from collections.abc import Callable

import pytest
import torch

import octavo
from octavo.lab.models.llama import Llama
from octavo.serving.layers import served_layers


def unequal(model: Llama) -> Llama:
    """A model whose layers that share an input would each have another scale."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_({"wk": 0.3, "wv": 5.0, "w1": 2.0, "gate": 2.0}.get(name.split(".")[-2], 1.0))
    return model


def codes(model: Llama) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {layer.name: (layer.weight.codes.float(), layer.weight.scale) for layer in served_layers(model)}


def attention_of(model: Llama) -> tuple[torch.nn.Module, ...]:
    return next(layer.shared.layers for layer in model.modules() if getattr(layer, "shared", None) is not None)


def hooked(model: Llama) -> None:
    attention_of(model)[1].register_forward_pre_hook(lambda *_: None)


def disabled(model: Llama) -> None:
    attention_of(model)[1].enabled = False


def by_another_recipe(model: Llama) -> None:
    attention_of(model)[1].recipe = octavo.recipes.load("folded")


@pytest.mark.parametrize("change", [hooked, disabled, by_another_recipe])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_has_the_scale_of_its_group_whatever_becomes_of_another(
    make_llama: Callable[..., Llama], recipe: str, change: Callable[[Llama], None]
) -> None:
    model = unequal(make_llama(recipe))
    before, other = codes(model), attention_of(model)[1]
    change(model)
    after = codes(model)
    names = {name for name, module in model.named_modules() if module is other} if change is by_another_recipe else ()
    for name in after.keys() - names:
        assert all(torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True)), name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "just_in_time", "folded"])
def test_training_evaluation_and_inference_compute_the_same(make_llama: Callable[..., Llama], recipe: str) -> None:
    model, ids = unequal(make_llama(recipe)), torch.arange(64).reshape(1, 64)
    trained = model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids), trained)
    with torch.inference_mode():
        assert torch.equal(model(ids), trained)
    hooked(model)
    with torch.inference_mode():
        assert torch.equal(model(ids), trained)
