"""`octavo bench localize`, on the models of these tests."""

from __future__ import annotations

import copy

import pytest

import octavo
from octavo.lab.sensitivity.loss import losses
from octavo_bench.localize import RANDOM, SINGLE, random_maps, rank_correlation, verify


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 25], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 2, 3, 4], [2, 1, 4, 3], 0.6),  # 1 - 6 * 4 / (4 * 15)
        ([1, 1, 2, 3], [1, 2, 3, 4], 0.9486832980505138),  # ranks 1.5, 1.5, 3, 4
        ([1, 1, 1], [1, 2, 3], 0),
    ],
)
def test_rank_correlation(a, b, expected):
    assert rank_correlation(a, b) == pytest.approx(expected)


def test_on_the_same_data_a_single_layer_is_as_predicted_and_a_map_as_converted(case):
    """Predicted from all of the batches one at a time, each layer's change is the one measured; a map's is the sum."""
    model, batches, loss = case
    found = octavo.localize(model, batches, "tensorwise", loss=loss, few=4, autocast=None)
    single, several = verify(model, found, batches, loss, maps=6)
    assert (single["maps"], single["layers"], several["maps"]) == (SINGLE, 3, RANDOM)
    assert single["predicted"] == pytest.approx(single["measured"], abs=1e-7)
    assert single["rank_correlation"] == pytest.approx(1)
    changes = {layer.name: layer.change.mean for layer in found.layers}
    only = {"base": "tensorwise", "dgrad": {"precision": "bf16"}, "wgrad": {"precision": "bf16"}}
    for place, names in enumerate(random_maps(list(changes), 6)):
        twin = copy.deepcopy(model).eval()
        before = losses(twin, batches, loss).mean()
        octavo.convert(twin, {"base": "bf16", "modules": dict.fromkeys(names, only)})
        assert several["measured"][place] == pytest.approx(float(losses(twin, batches, loss).mean() - before), abs=1e-8)
        assert several["predicted"][place] == pytest.approx(sum(changes[name] for name in names))
    assert [layer.change.mean for layer in found.layers] == single["predicted"]
    assert single["error"] > 0


def test_fewer_layers_than_there_are_and_the_same_ones_each_time(case):
    model, batches, loss = case
    found = octavo.localize(model, batches, "tensorwise", loss=loss, few=4, autocast=None)
    rows = [verify(model, found, batches[:1], loss, maps=2) for _ in range(2)]
    assert rows[0] == rows[1] and len(rows[0][0]["predicted"]) == 2
