from __future__ import annotations

from pathlib import Path

import torch

from octavo.models import ModelConfig, build
from octavo.train.config import OptimizerConfig
from octavo.train.lane import Lane
from octavo.train.state import lane_tensors, random_tensors, restore_lane, restore_random


def lane(seed: int, *, tied: bool) -> Lane:
    config = ModelConfig(vocab=32, dim=16, layers=1, heads=2, ffn=32, sequence=8, tie_embeddings=tied)
    return Lane("bf16", build(config, seed), OptimizerConfig())


def test_a_tied_weight_is_saved_once_and_stays_tied() -> None:
    ids = torch.randint(32, (2, 9))
    saved, fresh = lane(0, tied=True), lane(1, tied=True)
    saved.step(ids[:, :-1], ids[:, 1:], step=1, lr=1e-3)
    tensors = lane_tensors(saved)
    assert ("model.tok_embeddings.weight" in tensors) != ("model.lm_head.weight" in tensors)
    restore_lane(fresh, tensors, Path("here"))
    assert fresh.model.get_parameter("lm_head.weight") is fresh.model.get_parameter("tok_embeddings.weight")
    restored = lane_tensors(fresh)
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


def test_the_optimizer_state_is_a_copy() -> None:
    ids = torch.randint(32, (2, 9))
    saved, fresh = lane(0, tied=False), lane(1, tied=False)
    saved.step(ids[:, :-1], ids[:, 1:], step=1, lr=1e-3)
    tensors = lane_tensors(saved)
    restore_lane(fresh, tensors, Path("here"))
    before = tensors["optimizer.norm.weight.exp_avg"].clone()
    fresh.step(ids[:, :-1], ids[:, 1:], step=2, lr=1e-3)
    assert torch.equal(tensors["optimizer.norm.weight.exp_avg"], before)


def test_random_numbers_continue() -> None:
    state = random_tensors()
    drawn = torch.rand(3)
    restore_random(state)
    assert torch.equal(torch.rand(3), drawn)
