"""Invariants of parameters: what a check sees of weights and moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from octavo import Policy, convert
from octavo.distributed import shard
from octavo.lab.guard.parameters import SAMPLE, ParameterCheck, ParameterStats
from octavo.optim import AdamW
from octavo.tensor import local


def measured(check: ParameterCheck, step: int) -> ParameterStats:
    found = check.measure(step)
    assert found is not None
    return found()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 256))


def test_changes_are_root_mean_squares_and_norms_are_of_everything(model: nn.Module) -> None:
    check = ParameterCheck(model, torch.optim.SGD(model.parameters(), 0.1), every=5)
    check.restart(0)
    model[0].weight.data += 0.25
    assert check.measure(3) is None  # not due
    found = measured(check, 5)
    assert (found.names[0], found.steps) == ("0.weight", 5)
    assert found.change == pytest.approx([0.25, 0, 0, 0])
    assert found.norm[0] == pytest.approx(float(model[0].weight.detach().norm()))
    assert np.isnan(found.first).all() and np.isnan(found.second).all()
    assert measured(check, 10).change == pytest.approx([0, 0, 0, 0])


def test_an_element_outside_of_the_sample_shows_in_the_norm(model: nn.Module) -> None:
    weight = model[1].weight.data
    assert weight.numel() > SAMPLE
    check = ParameterCheck(model, torch.optim.SGD(model.parameters(), 0.1), every=1)
    check.restart(0)
    weight.view(-1)[1] = 40.0
    assert measured(check, 1).change[2] > 0.1
    weight.view(-1)[1] = torch.nan
    assert math.isnan(measured(check, 2).norm[2])
    assert check.nonfinite() == "1.weight"


def test_a_code_of_an_fp8_weight_that_is_not_finite_is_found(model: nn.Module) -> None:
    convert(model, "folded", policy=Policy(min_gain=0, weights="fp8"))
    check = ParameterCheck(model, AdamW(model.parameters(), lr=1e-3), every=1)
    assert check.nonfinite() == ""
    model[1].weight.data.codes.view(torch.uint8)[3, 5] = 0x7F
    assert check.nonfinite() == "1.weight"


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_moments_are_measured_in_each_tier(model: nn.Module, states: str) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-3, states=states)
    check = ParameterCheck(model, optimizer, every=1)
    check.restart(0)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    found = measured(check, 1)
    assert (found.first > 0).all() and (found.second > 0).all()


def test_a_rollback_starts_from_the_values_of_then(model: nn.Module) -> None:
    check = ParameterCheck(model, torch.optim.SGD(model.parameters(), 0.1), every=1)
    check.restart(0)
    model[0].weight.data += 1
    check.measure(1)
    model[0].weight.data -= 1
    check.restart(0)
    assert measured(check, 1).change == pytest.approx([0, 0, 0, 0])


def test_a_parameter_is_not_compared_with_another_one_of_its_shape() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    check = ParameterCheck(model, torch.optim.SGD(model.parameters(), 0.1), every=1)
    for step, trained in enumerate((0, 0, 1, 1), 1):
        for number, layer in enumerate(model):
            layer.requires_grad_(number == trained)
        found = measured(check, step)
        assert found.names == [f"{trained}.weight", f"{trained}.bias"]
        assert found.steps == (step % 2 == 0) and np.nan_to_num(found.change).tolist() == [0, 0]


def test_fingerprints_are_of_values_not_of_names(model: nn.Module) -> None:
    check = ParameterCheck(model, torch.optim.SGD(model.parameters(), 0.1), every=1)
    before = check.fingerprints()
    assert before == check.fingerprints() and len({tuple(each) for each in before.values()}) == 4
    model[0].weight.data *= 1.001
    assert [name for name, now in check.fingerprints().items() if now != before[name]] == ["0.weight"]


def of_shards(rank: int, ranks: int) -> tuple[list[list[float]], str]:
    """Measure a model of whose last layer, with one row, the second rank holds nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    shard(model, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    check = ParameterCheck(model, optimizer, every=1, group=dist.group.WORLD)
    check.restart(0)
    for parameter in model.parameters():
        parameter.data.add_(0.25)
    found = measured(check, 1)
    local(model[1].weight.data).fill_(torch.nan)
    return [found.norm.tolist(), found.change.tolist()], check.nonfinite()


def test_a_parameter_that_some_ranks_hold_nothing_of() -> None:
    (found, bad), other = run(of_shards, 2)
    assert (found, bad) == other and bad == "1.weight"
    assert found[1] == pytest.approx([0.25] * 4) and np.isfinite(found[0]).all()
