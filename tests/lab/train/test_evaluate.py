from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from torch import Tensor, nn

from octavo.lab.models import ModelConfig, build
from octavo.lab.train.config import OptimizerConfig
from octavo.lab.train.evaluate import heldout_losses, heldout_scores, perplexity
from octavo.lab.train.setup import set_up
from octavo.lab.train.train_state import TrainState

if TYPE_CHECKING:
    from conftest import Configure


class MeanTarget(nn.Module):
    """Its losses are the means of the targets; and what it saw of the mode and of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, inputs: Tensor, targets: Tensor, *, by_sequence: bool) -> Tensor:
        assert by_sequence
        self.modes.append((self.training, torch.is_grad_enabled()))
        return targets.float().mean(dim=1) * self.weight.sum()


def test_every_sequence_has_its_loss_in_order() -> None:
    lane = TrainState("bf16", MeanTarget(), OptimizerConfig(), autocast=False)
    large, small = torch.full((3, 4), 1), torch.full((1, 4), 5)
    assert heldout_losses(lane, [(large, large), (small, small)]).tolist() == [1.0, 1.0, 1.0, 5.0]


def test_a_smaller_batch_has_the_shape_of_the_first_and_each_sequence_its_loss_once() -> None:
    model, rows = MeanTarget(), torch.arange(1, 8)[:, None].expand(7, 4)
    lane = TrainState("bf16", model, OptimizerConfig(), autocast=False)
    model.register_forward_pre_hook(lambda _, arguments: shapes.append(arguments[0].shape))
    shapes: list[torch.Size] = []
    assert heldout_losses(lane, [(each, each) for each in rows.split(3)]).tolist() == [*range(1, 8)]
    assert set(shapes) == {(3, 4)} and len(shapes) == 3


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_the_losses_of_sequences_are_the_models_loss(architecture: Literal["llama", "gpt"]) -> None:
    config = ModelConfig(architecture=architecture, vocab=32, dim=16, layers=1, heads=2, ffn=32, sequence=8)
    lane = TrainState("bf16", build(config, seed=0), OptimizerConfig(), autocast=False)
    inputs, targets = torch.randint(32, (2, 5, 8))
    losses = heldout_losses(lane, [(inputs, targets)])
    logits = lane.model(inputs).double()
    expected = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none").mean(dim=1)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert lane.loss(inputs, targets).item() == pytest.approx(float(losses.mean()), rel=1e-6)


def test_scores_are_losses_and_the_share_of_targets_that_were_likeliest() -> None:
    config = ModelConfig(vocab=32, dim=16, layers=1, heads=2, ffn=32, sequence=8)
    lane = TrainState("bf16", build(config, seed=0), OptimizerConfig(), autocast=False)
    inputs, targets = torch.randint(32, (2, 5, 8))
    targets[3] = lane.model(inputs).argmax(-1)[3]
    scores = heldout_scores(lane, iter([(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]))
    assert torch.equal(scores[:, 0], heldout_losses(lane, [(inputs, targets)]))
    hits = (lane.model(inputs).argmax(-1) == targets).double().mean(1)
    torch.testing.assert_close(scores[:, 1], hits)
    assert scores[3, 1] == 1 and scores.dtype == torch.float64


def test_the_mean_of_packed_conversations_is_that_over_their_targets() -> None:
    config = ModelConfig(vocab=32, dim=16, layers=1, heads=2, ffn=32, sequence=8)
    lane = TrainState("bf16", build(config, seed=0), OptimizerConfig(), autocast=False)
    inputs, targets = torch.randint(32, (2, 5, 8))
    for row, count in enumerate((8, 1, 3, 0, 5)):
        targets[row, count:] = -100
    losses, hits = heldout_scores(lane, [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]).unbind(1)
    logits = lane.model(inputs).double()
    expected = torch.nn.functional.cross_entropy(logits.mT, targets)
    torch.testing.assert_close(losses.mean(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(hits.mean(), (logits.argmax(-1) == targets).sum().double() / 17)
    assert torch.equal(losses, heldout_losses(lane, [(inputs, targets)]))


def test_it_leaves_the_model_in_training() -> None:
    model = MeanTarget()
    lane = TrainState("bf16", model, OptimizerConfig(), autocast=False)
    heldout_losses(lane, [(torch.ones(1, 1), torch.ones(1, 1))])
    assert model.modes == [(False, False)]
    assert model.training
    assert model.weight.grad is None


def test_the_heldout_loss_does_not_depend_on_the_parts_of_a_batch(configure: Configure) -> None:
    """7 windows of 32 tokens fill neither 4 nor 2 at a time."""
    losses = []
    for accumulate in (1, 2, 4):
        setup = set_up(configure(run={"accumulate": accumulate, "eval_tokens": 7 * 32, "recipe": "rowwise"}))
        losses.append([heldout_losses(state, setup.heldout) for state in setup.states])
    for parts in losses[1:]:
        for one, other in zip(losses[0], parts, strict=True):
            assert one.shape == (7,)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


def test_perplexity() -> None:
    assert perplexity(math.log(17)) == pytest.approx(17)
    assert perplexity(1e4) == math.inf
