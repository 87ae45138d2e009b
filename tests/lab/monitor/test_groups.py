"""Statistics per parameter group: against NumPy in float64, for weights and gradients in high precision and in FP8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.monitor.groups import GroupStatistics
from octavo.lab.monitor.store import RunReader
from octavo.nn.fp8_weights import values


def _model(**policy: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    octavo.convert(model, "folded", policy=octavo.Policy(**policy))
    return model


def _groups(model: nn.Module) -> list[dict[str, object]]:
    named = list(model.named_parameters())
    return [
        {"params": [each for each in named if each[1].ndim == 2], "name": "matrices"},
        {"params": [each for each in named if each[1].ndim < 2], "weight_decay": 0.0},
    ]


def _backward(model: nn.Module) -> None:
    model(torch.randn(32, 64, generator=torch.Generator().manual_seed(1))).square().mean().backward()


def _expected(tensors: list[torch.Tensor]) -> list[float]:
    flat = np.concatenate([each.detach().double().flatten().numpy() for each in tensors])
    return [flat.mean(), flat.var(), np.abs(flat).max()]


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("gradients", ["wide", "fp8"])
def test_they_are_those_of_all_elements(weights: str, gradients: str) -> None:
    model = _model(**({"weights": "fp8"} if weights == "fp8" else {}))
    optimizer = octavo.optim.AdamW(_groups(model), lr=1e-3, states="exact", gradients=gradients)
    with GroupStatistics(optimizer) as groups:
        _backward(model)
        before = [
            [values(p.detach(), torch.float32).clone() for p in group["params"]] for group in optimizer.param_groups
        ]
        gradient = [
            [g.float().clone() for g in optimizer.gradients(group["params"])] for group in optimizer.param_groups
        ]
        optimizer.step()
        found = {name: float(value) for name, value in groups.scalars().items()}
    names = [f"{group}_{kind}" for group in ("matrices", "group1") for kind in ("weight", "gradient")]
    tensors = [each for pair in zip(before, gradient, strict=True) for each in pair]
    for name, each in zip(names, tensors, strict=True):
        assert [found.pop(f"{name}_{stat}") for stat in ("mean", "variance", "amax")] == pytest.approx(
            _expected(each), rel=1e-6, abs=1e-12
        )
    assert found == {}
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()
    assert groups.scalars() == {}, "detached"


def test_a_variance_far_below_the_square_of_the_mean_is_kept() -> None:
    layer = nn.Linear(256, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    layer.weight.data[0, ::2] += 2**-12
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    groups = GroupStatistics(optimizer, names=["all"])
    optimizer.step()
    found = groups.scalars()
    assert float(found["all_weight_variance"]) == 2**-26
    assert {*found} == {f"all_weight_{stat}" for stat in ("mean", "variance", "amax")}, "there are no gradients"


def test_a_monitor_stores_those_of_every_second_step(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    groups = GroupStatistics(optimizer, every=2)
    with octavo.Monitor(model, tmp_path, telemetry=None) as monitor:
        for _ in range(4):
            _backward(model)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=1.0, **groups.scalars())
    with RunReader(tmp_path) as run:
        assert run.scalar("group0_gradient_variance").points()[0].tolist() == [2, 4]
        assert (run.scalar("group0_gradient_variance").points()[1] > 0).all()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(ConfigError, match="every must be a positive number"):
        GroupStatistics(optimizer, 0)
    with pytest.raises(ConfigError, match=r"1 parameter groups need as many distinct names, got \['a', 'b'\]"):
        GroupStatistics(optimizer, names=["a", "b"])
    monkeypatch.setattr("octavo.lab.monitor.groups.is_distributed", lambda parameter: True)
    with pytest.raises(UnsupportedError, match="sharded over ranks"):
        GroupStatistics(optimizer)
