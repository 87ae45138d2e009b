from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.lab.models import ModelConfig, build
from octavo.lab.train.config import OptimizerConfig
from octavo.lab.train.state_tensors import restore_tensors, state_tensors
from octavo.lab.train.train_state import TrainState


def lane(seed: int, *, tied: bool = False, dim: int = 16, **settings: Any) -> TrainState:
    config = ModelConfig(vocab=32, dim=dim, layers=1, heads=2, ffn=2 * dim, sequence=8, tie_embeddings=tied)
    return TrainState("bf16", build(config, seed), OptimizerConfig(**settings))


def test_a_tied_weight_is_saved_once_and_stays_tied() -> None:
    ids = torch.randint(32, (2, 9))
    saved, fresh = lane(0, tied=True), lane(1, tied=True)
    saved.step(ids[:, :-1], ids[:, 1:], step=1, lr=1e-3)
    tensors = state_tensors(saved)
    assert ("model.tok_embeddings.weight" in tensors) != ("model.lm_head.weight" in tensors)
    restore_tensors(fresh, tensors, Path("here"))
    assert fresh.model.get_parameter("lm_head.weight") is fresh.model.get_parameter("tok_embeddings.weight")
    restored = state_tensors(fresh)
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


def test_the_optimizer_state_is_a_copy() -> None:
    ids = torch.randint(32, (2, 9))
    saved, fresh = lane(0, tied=False), lane(1, tied=False)
    saved.step(ids[:, :-1], ids[:, 1:], step=1, lr=1e-3)
    tensors = state_tensors(saved)
    restore_tensors(fresh, tensors, Path("here"))
    before = tensors["optimizer.norm.weight.exp_avg"].clone()
    fresh.step(ids[:, :-1], ids[:, 1:], step=2, lr=1e-3)
    assert torch.equal(tensors["optimizer.norm.weight.exp_avg"], before)


@pytest.mark.parametrize(("saved", "asked"), [("fp8", "exact"), ("exact", "fp8"), ("fp8", "fp32"), ("exact", "fp32")])
def test_states_of_another_tier_are_refused_and_nothing_is_copied(saved: str, asked: str) -> None:
    ids = torch.randint(32, (2, 9))
    one, other = lane(0, dim=64, states=saved), lane(1, dim=64, states=asked)
    one.step(ids[:, :-1], ids[:, 1:], step=1, lr=1e-3)
    before = {name: tensor.clone() for name, tensor in state_tensors(other).items()}
    with pytest.raises(
        CheckpointError, match=r"here: the optimizer's states of 'layers.*' are of another tier.*exp_avg"
    ):
        restore_tensors(other, state_tensors(one), Path("here"))
    after = state_tensors(other)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
