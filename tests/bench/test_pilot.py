"""The check of `octavo pilot`: what it counts as a right recommendation."""

from __future__ import annotations

import pytest

from octavo.conversion import make_plan
from octavo.kernels.runtime.devices import H200
from octavo.lab.models import build
from octavo.lab.models.config import ModelConfig
from octavo.lab.pilot.judging import Pilot
from octavo.lab.pilot.measuring import Measurement
from octavo_bench.pilot import MODELS, is_right


def pilot(**step_ms: float) -> Pilot:
    model = build(ModelConfig(vocab=272, dim=128, layers=1, heads=4, ffn=256, sequence=64), 0)
    found = {name: Measurement(precision=name, step_ms=ms) for name, ms in {"bf16": 100.0, **step_ms}.items()}
    return Pilot(
        workload="mine", unit="token", tokens=8192, samples=8, data="random", device="a GPU", predicted_for="",
        capacity_gib=80.0, parameters=10**6, rows=8192, elsewhere=0.2, compiled=False, rates=H200, measured=found,
        plans={name: make_plan(model, name) for name in step_ms},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("small", "full", "right"),
    [
        ({"folded": 80, "block": 90}, {"folded": 82, "block": 90}, True),
        ({"folded": 80, "block": 90}, {"folded": 90, "block": 80}, False),
        ({"folded": 80, "block": 81}, {"folded": 81, "block": 80}, True),  # equally fast
        ({"folded": 80}, {"folded": 100}, False),
        ({"folded": 98}, {"folded": 97}, True),  # not yet, and rightly
        ({"folded": 98}, {"folded": 80}, False),
    ],
)
def test_a_recommendation_is_right_if_the_full_measurement_confirms_it(small, full, right):
    assert is_right(pilot(**small), pilot(**full)) is right


def test_three_models_of_others():
    transformers = pytest.importorskip("transformers")
    assert len(MODELS) == 3
    for config, _ in MODELS.values():
        assert transformers.AutoConfig.for_model(**config).model_type == config["model_type"]
        assert hasattr(transformers, config["architectures"][0])
