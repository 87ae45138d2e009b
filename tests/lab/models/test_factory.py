from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from octavo.lab.models import ModelConfig, build, count_parameters

SMALL: dict[str, Any] = {"vocab": 272, "dim": 64, "layers": 3, "heads": 4, "sequence": 32}
ARCHITECTURES = pytest.mark.parametrize("architecture", ["llama", "gpt"])


@ARCHITECTURES
def test_one_seed_gives_the_same_bits_whatever_was_drawn_before(architecture: Any) -> None:
    config = ModelConfig(**SMALL, architecture=architecture)
    first = build(config, seed=7)
    torch.randn(100)
    second, other = build(config, seed=7), build(config, seed=8)
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.state_dict()["lm_head.weight"], other.state_dict()["lm_head.weight"])


@ARCHITECTURES
def test_building_leaves_the_global_random_state_alone(architecture: Any) -> None:
    before = torch.get_rng_state()
    model = build(ModelConfig(**SMALL, architecture=architecture), seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


@ARCHITECTURES
def test_what_layers_would_draw_themselves_is_left_out(architecture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    draw = torch.Tensor.normal_
    monkeypatch.setattr(torch.Tensor, "normal_", lambda x, *a, **k: drawn.append(x.numel()) or draw(x, *a, **k))
    monkeypatch.setattr(torch.Tensor, "uniform_", None)
    model = build(ModelConfig(**SMALL, architecture=architecture), seed=0)
    assert sum(drawn) == sum(p.numel() for p in model.parameters() if p.dim() == 2)


@ARCHITECTURES
def test_initial_spread(architecture: Any) -> None:
    model = build(ModelConfig(**SMALL, architecture=architecture), seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            small = name.endswith(("wo.weight", "w2.weight"))
            expected = 0.02 / math.sqrt(6) if small else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.06), name
            assert abs(parameter.mean().item()) < 0.1 * expected, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(not name.endswith("bias")))), name


def test_a_tied_weight_is_counted_once() -> None:
    free, tied = (build(ModelConfig(**SMALL, tie_embeddings=tie), seed=0) for tie in (False, True))
    assert count_parameters(free) - count_parameters(tied) == 272 * 64


def test_count_parameters_counts_elements() -> None:
    assert count_parameters(nn.Linear(3, 5)) == 20
