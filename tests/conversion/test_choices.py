import json

import pytest
import torch
from torch import nn

from octavo.conversion import LayerPlan, Plan, make_plan
from octavo.conversion.choices import advice, choices, price_of
from octavo.kernels.runtime.devices import GPUS
from octavo.recipes import load


class _Model(nn.Module):
    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.lm_head = nn.Linear(dim, vocab)


def _plan(recipe: str = "folded", dim: int = 4096, device: str = "h200"):
    with torch.device("meta"):
        model = _Model(dim, 8 * dim)
    return make_plan(model, recipe, tokens=16384, device=device)


def _inputs(plan: Plan) -> tuple[tuple[LayerPlan, ...], str, int]:
    return plan.layers, plan.device, plan.tokens


def test_the_gain_is_that_of_all_products_heads_in_bf16_included() -> None:
    plan = _plan()
    folded = next(choice for choice in choices(*_inputs(plan)) if choice.recipe == "folded" and not choice.head)
    up, down, head = plan.layers
    assert up.gain and down.gain and head.gain is None
    # Each has half of the head's products.
    assert folded.gain == pytest.approx(4 / (1 / up.gain + 1 / down.gain + 2))


@pytest.mark.parametrize("recipe", ["folded", "block", "bf16"])
def test_whatever_is_planned_the_advice_is_the_same(recipe: str) -> None:
    *_, free, priced = str(_plan(recipe)).splitlines()
    assert free.startswith("fastest at the accuracy usual for FP8: folded 1.2")
    assert priced.startswith("faster, but less accurate: folded_fast with heads in FP8 1.68") and "bits" in priced


def test_layers_too_small_to_gain_are_counted_in_bf16() -> None:
    plan = _plan(dim=256)
    assert plan.fp8_layers == 0 and str(plan).endswith(
        "no recipe is predicted to beat BF16 at 16,384 tokens per forward: use more, or wider layers"
    )
    assert {choice.gain for choice in choices(*_inputs(plan)) if choice.recipe == "block"} == {1.0}
    assert min(choice.gain for choice in choices(*_inputs(plan))) >= 1.0


def test_no_rates_no_advice() -> None:
    assert GPUS["b200"].rates is None
    assert advice(*_inputs(_plan(device="b200"))) == advice(*_inputs(_plan(device="cpu"))) == []
    assert "fastest" not in str(_plan(device="cpu"))


def test_json_has_the_choices_and_their_prices() -> None:
    found = json.loads(_plan().to_json())["choices"]
    gains = [choice["gain"] for choice in found]
    assert gains == sorted(gains, reverse=True) and {"folded", "tensorwise", "block"} <= {c["recipe"] for c in found}
    assert not {"delayed", "static", "mxfp8", "bf16"} & {choice["recipe"] for choice in found}


def test_a_price_is_told_by_what_a_recipe_does() -> None:
    assert price_of(load("folded")) == price_of(load("block")) == ""
    assert "fewer bits" in price_of(load("folded_fast")) and "loss" in price_of(load("folded"), head=True)
