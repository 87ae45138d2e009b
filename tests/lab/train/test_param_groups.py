"""Settings by name pattern."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.lab.train.param_groups import groups_of, value_of

NAMES = ["embed.weight", "layers.0.wq.weight", "layers.0.wo.weight", "layers.1.wq.weight", "norm.weight"]


def test_a_pattern_means_a_parameter_or_its_module() -> None:
    assert value_of(NAMES, {"*.wq": 0.5}, "x") == {"layers.0.wq.weight": 0.5, "layers.1.wq.weight": 0.5}
    assert value_of(NAMES, {"*.wq.weight": 0.5}, "x") == value_of(NAMES, {"*.wq": 0.5}, "x")
    assert value_of(NAMES, {"norm": 2.0, "embed.weight": 3.0}, "x") == {"norm.weight": 2.0, "embed.weight": 3.0}


def test_the_last_match_wins() -> None:
    values = value_of(NAMES, {"layers.*": 1.0, "*.wq": 2.0, "layers.1.*": 3.0}, "x")
    assert values == {"layers.0.wq.weight": 2.0, "layers.0.wo.weight": 1.0, "layers.1.wq.weight": 3.0}


def test_each_parameter_is_in_one_group_and_an_empty_group_is_none() -> None:
    groups = groups_of(NAMES, {"embed": 9.0, "layers.*": 1.0, "*.wo": 2.0, "embed*": 3.0}, "x")
    own = [["layers.0.wq.weight", "layers.1.wq.weight"], ["layers.0.wo.weight"], ["embed.weight"]]
    assert groups == list(zip([1.0, 2.0, 3.0], own, strict=True))


@pytest.mark.parametrize(("pattern", "meant"), [("*.wqq", "*.wq"), ("nrm", "norm"), ("layers.0.woo", "layers.0.wo")])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        value_of(NAMES, {"*.wo": 1.0, pattern: 1.0}, "optimizer.lr_factors")
    assert f"optimizer.lr_factors: '{pattern}' matches no trained parameter" in str(caught.value)
    assert f"Did you mean '{meant}'?" in str(caught.value)
