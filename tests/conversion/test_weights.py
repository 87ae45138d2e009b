"""`Policy(weights="fp8")`: which weights become FP8 tensors, in place, and that they come back."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import octavo
from octavo import Policy
from octavo.errors import ConfigError, NonFiniteError
from octavo.nn import Linear
from octavo.tensor import FP8Tensor

FP8 = Policy(weights="fp8")


def fp8_weights(model: nn.Module) -> list[str]:
    return [name.removesuffix(".weight") for name, p in model.named_parameters() if isinstance(p, FP8Tensor)]


def tokens(model: nn.Module) -> torch.Tensor:
    return torch.randint(model.embed.num_embeddings, (2, 7))


def test_weights_of_converted_linear_layers_become_fp8_tensors(model, converted):
    model.bfloat16()
    before = {name: FP8Tensor.from_tensor(p) for name, p in model.named_parameters() if p.dim() == 2}
    names = list(dict(model.named_parameters()))
    octavo.convert(model, policy=FP8)
    assert fp8_weights(model) == converted
    assert list(dict(model.named_parameters())) == names
    for name in converted:
        weight = model.get_parameter(f"{name}.weight")
        assert torch.equal(weight.dequantize(), before[f"{name}.weight"].dequantize())
        assert weight.requires_grad and isinstance(weight, nn.Parameter)


def test_the_plan_says_so_and_counts_the_bytes(model, converted):
    plan = octavo.plan(model, policy=FP8)
    assert [row.name for row in plan.layers if row.weight == "fp8"] == converted
    sizes = {name: model.get_submodule(name).weight for name in converted}
    saved = sum(4 * w.numel() - w.numel() - 4 * w.shape[0] for w in sizes.values())
    assert plan.saved_bytes == saved > 0
    assert f"weights of 4 layers stored in FP8, {saved / 2**20:,.1f} MiB less than now" in str(plan)
    assert {layer["name"]: layer["weight"] for layer in json.loads(plan.to_json())["layers"]}["layers.0.up"] == "fp8"
    taken = sum(p.nbytes for p in model.parameters())
    octavo.convert(model, policy=FP8)
    assert taken - sum(p.nbytes for p in model.parameters()) == saved
    again = octavo.plan(model)
    assert again.saved_bytes == 0
    assert "weights of 4 layers stored in FP8, as they are now" in str(again)


def test_a_plan_changes_nothing(model):
    octavo.plan(model, policy=FP8)
    assert not fp8_weights(model)


def test_the_parameters_stay_the_same_objects_with_their_gradients_and_marks(model):
    weight = model.layers[0].down.weight
    weight.grad, weight.mine = torch.ones_like(weight), "mine"
    frozen = model.layers[1].down.weight.requires_grad_(False)
    octavo.convert(model, policy=FP8)
    assert model.layers[0].down.weight is weight and isinstance(weight, FP8Tensor)
    assert torch.equal(weight.grad, torch.ones(64, 128)) and weight.mine == "mine"
    assert isinstance(frozen, FP8Tensor) and not frozen.requires_grad
    octavo.revert(model)
    assert model.layers[0].down.weight is weight and type(weight) is nn.Parameter and weight.mine == "mine"


def test_revert_gives_plain_parameters_of_the_same_values_and_dtype(model):
    model.bfloat16()
    octavo.convert(model, policy=FP8)
    expected = model.layers[0].up.weight.detach().dequantize()
    assert octavo.revert(model) == 4
    assert not fp8_weights(model)
    weight = model.layers[0].up.weight
    assert type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and torch.equal(weight, expected)
    model(tokens(model)).sum().backward()
    assert weight.grad is not None


def test_converting_again_keeps_the_codes_that_are_there(model, converted):
    octavo.convert(model, policy=FP8)
    codes = model.layers[0].up.weight.codes
    octavo.convert(model, "folded_fast")
    assert model.layers[0].up.weight.codes is codes
    assert fp8_weights(model) == converted
    octavo.convert(model, policy=Policy(keep={"layers.0.up": "for once"}))
    assert type(model.layers[0].up) is nn.Linear and type(model.layers[0].up.weight) is nn.Parameter
    model(tokens(model)).sum().backward()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "block", "mxfp8"])
def test_recipes_that_would_round_twice_are_refused(model, recipe):
    with pytest.raises(ConfigError, match=rf"'{recipe}' of 'layers.0.up' .*Recipes that can: folded, folded_fast"):
        octavo.convert(model, recipe, policy=FP8)
    assert not fp8_weights(model) and type(model.layers[0].up) is nn.Linear
    octavo.convert(model, policy=FP8)
    with pytest.raises(ConfigError, match=r"layers.0.up.weight is stored in FP8 .* octavo.revert\(model\)"):
        octavo.plan(model, recipe)
    assert type(model.layers[0].up) is Linear
    octavo.revert(model)
    octavo.convert(model, recipe)


def test_one_layer_with_such_a_recipe_is_named(model):
    recipe = {"name": "mixed", "modules": {"layers.1.down": "block"}}
    with pytest.raises(ConfigError, match=r"'block' of 'layers.1.down'"):
        octavo.plan(model, recipe, policy=FP8)
    octavo.plan(model, {"name": "mixed", "modules": {"layers.1.down": "bf16"}}, policy=FP8)


def test_codes_of_another_kind_are_refused(model):
    layer = model.layers[0].up
    layer.weight = nn.Parameter(FP8Tensor.from_tensor(layer.weight, scaling="float32"))
    with pytest.raises(ConfigError, match=r"layers.0.up.weight is stored as .*float32 scales"):
        octavo.convert(model)


def test_a_tied_weight_stays_as_it_is_and_the_plan_says_so(model):
    plan = octavo.convert(model, policy=Policy(weights="fp8", keep_defaults=False))
    row = next(row for row in plan.layers if row.name == "lm_head")
    assert row.is_fp8 and row.weight == "unchanged"
    assert row.reason == "its weight is also embed.weight, and stays as it is"
    assert model.lm_head.weight is model.embed.weight and type(model.embed.weight) is nn.Parameter
    model(tokens(model)).sum().backward()


def test_layers_that_share_a_weight_share_its_codes(model):
    model.layers[1].up.weight = model.layers[0].up.weight
    plan = octavo.convert(model, policy=FP8)
    assert model.layers[1].up.weight is model.layers[0].up.weight
    assert isinstance(model.layers[0].up.weight, FP8Tensor)
    by_name = {row.name: row.saves for row in plan.layers}
    assert by_name["layers.0.up"] > 0 and by_name["layers.1.up"] == 0
    model(tokens(model)).sum().backward()


def test_convolutions_keep_their_weights():
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(64, 64))
    octavo.convert(model, policy=FP8)
    assert fp8_weights(model) == ["2"]
    model(torch.randn(4, 32, 3, 3)).sum().backward()


def test_a_weight_that_a_graph_holds_is_refused_before_anything_changes(model):
    loss = model(tokens(model)).sum()
    hold = model.layers[1].up.weight.view(-1)
    with pytest.raises(ConfigError, match=r"convert before the model runs"):
        octavo.convert(model, policy=FP8)
    assert not fp8_weights(model) and type(model.layers[0].up) is nn.Linear
    del loss, hold
    octavo.convert(model, policy=FP8)


def test_codes_that_are_kept_of_a_plain_weight_are_dropped(model):
    octavo.convert(model)
    model(tokens(model)).sum().backward()
    octavo.convert(model, policy=FP8)
    with octavo.kernels.record() as ledger:
        model(tokens(model)).sum().backward()
    assert ledger.weights == 0


def test_an_unfinished_weight_is_found(model):
    octavo.convert(model, policy=FP8)
    with torch.no_grad():
        model.layers[0].up.weight.copy_(torch.full((128, 64), torch.nan))
    with pytest.raises(NonFiniteError, match=r"layers.0.up.weight holds 8192 value"):
        octavo.convert(model)


def test_on_the_meta_device(model):
    model.to("meta")
    octavo.convert(model, policy=FP8)
    model.to_empty(device="cpu")
    assert model.layers[0].up.weight.codes.device.type == "cpu"


def test_a_wrong_word_is_refused():
    with pytest.raises(ConfigError, match=r"weights = 'fp8s': it is 'unchanged' or 'fp8'"):
        Policy(weights="fp8s")


def test_an_observation_reads_the_weights(model):
    octavo.convert(model, policy=FP8)
    with octavo.observed(model) as seen:
        model(tokens(model)).sum().backward()
    rows = [row for row in seen.rows() if row.role == "weight"]
    assert len(rows) == 4 and not any(row.saturated or row.non_finite for row in rows)


def test_rotated_codes_are_not_stored():
    with pytest.raises(ConfigError, match=r"'rotated' of '' cannot compute with codes that are made once per step"):
        octavo.plan(nn.Linear(64, 64), "rotated", policy=Policy(weights="fp8", min_gain=0))
