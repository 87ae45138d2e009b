"""The change of recipe for the last share of a run, as the integrations make it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import octavo
from octavo import Policy
from octavo.errors import ConfigError
from octavo.integrations.recipe_switch import RecipeSwitch
from octavo.recipes import RecipeLike

POLICY = Policy(min_gain=0)


def test_a_rehearsal_leaves_stored_scales_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    octavo.convert(model, "delayed", policy=POLICY)
    model(torch.randn(16, 32)).sum().backward()
    before = octavo.scales(model).state_dict()  # type: ignore[union-attr]

    def convert(recipe: RecipeLike) -> octavo.Plan:
        return octavo.convert(model, recipe, policy=POLICY)

    RecipeSwitch(0.2, "rowwise_bf16_fprop").rehearse(model, "delayed", convert)
    after = octavo.scales(model).state_dict()  # type: ignore[union-attr]
    assert any(bool(tensor.any()) for tensor in before.values())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_change_is_due_once() -> None:
    switch = RecipeSwitch(0.3, "bf16")
    assert [switch.is_due(step, 10) for step in (0, 6, 7, 8)] == [False, False, True, False]
    assert not RecipeSwitch(0.0, "bf16").is_due(9, 10)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        RecipeSwitch(1.5, "bf16")
