"""Loss scaling: what happens on an overflow and after a quiet window, against a plain model of it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.errors import ConfigError, RunError
from octavo.lab.models import ModelConfig, build
from octavo.lab.train import LossScale, checkpoint, train
from octavo.lab.train.config import OptimizerConfig, RunConfig
from octavo.lab.train.loss_scale import GIVE_UP
from octavo.lab.train.state_tensors import restore_tensors, state_tensors
from octavo.lab.train.train_state import TrainState

CONFIG = ModelConfig(vocab=32, dim=32, layers=1, heads=2, ffn=32, sequence=8)
Configure = Callable[..., RunConfig]


def lane(window: int = 2000, **settings: object) -> TrainState:
    chosen = {"loss_scale": "dynamic", "loss_scale_window": window, **settings}
    return TrainState("bf16", build(CONFIG, seed=0), OptimizerConfig(**chosen), autocast=False)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def overflow_in(trained: TrainState, value: float = float("inf")) -> None:
    """Make one gradient of the next step infinite, or NaN."""
    weight = trained.parameters["layers.0.attention.wq.weight"]
    handle = weight.register_hook(lambda grad: (handle.remove(), grad.index_fill(0, torch.tensor([3]), value))[1])


def snapshot(trained: TrainState) -> dict[str, Tensor]:
    return {
        name: tensor.clone() for name, tensor in state_tensors(trained).items() if not name.startswith("loss_scale")
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_skips_that_step_alone_and_halves_the_scale(value: float) -> None:
    trained = lane()
    trained.step(*batch(1), step=1, lr=1e-2)
    before = snapshot(trained)
    overflow_in(trained, value)
    trained.step(*batch(2), step=2, lr=1e-2)
    assert same(snapshot(trained), before)  # parameters, both moments and the step counts
    assert (float(trained.loss_scale.scale), int(trained.loss_scale.overflows)) == (128.0, 1)
    trained.check("unused")  # a skipped step is no broken run
    trained.step(*batch(3), step=3, lr=1e-2)
    assert not same(snapshot(trained), before)


def test_a_run_goes_on_as_if_the_skipped_step_had_never_been() -> None:
    with_overflow, without = lane(), lane()
    for step in (1, 2, 3):
        if step == 2:
            overflow_in(with_overflow)
        with_overflow.step(*batch(step), step=step, lr=1e-2)
        if step != 2:
            without.step(*batch(step), step=step, lr=1e-2)
    assert same(snapshot(with_overflow), snapshot(without))


def test_a_first_step_that_overflows_leaves_empty_moments() -> None:
    trained = lane()
    weights = {name: p.detach().clone() for name, p in trained.parameters.items()}
    overflow_in(trained)
    trained.step(*batch(), step=1, lr=1e-2)
    assert all(torch.equal(p, weights[name]) for name, p in trained.parameters.items())
    states = trained.optimizer.state.values()
    assert all(not value.any() for state in states for value in state.values())


def test_a_loss_that_is_not_finite_is_an_overflow() -> None:
    scale = LossScale()
    weight = nn.Parameter(torch.ones(2))
    scale.scaled(weight.sum()).backward()
    scale.unscale([weight], torch.tensor(float("nan")))
    scale.step(torch.optim.AdamW([weight], fused=True))
    assert int(scale.overflows) == 1 and torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("mode", ["none", "constant", "dynamic"])
@pytest.mark.parametrize("recipe", ["bf16", "folded"])
def test_a_power_of_two_changes_no_bit_of_what_is_learned(mode: str, recipe: str) -> None:
    from octavo.conversion import convert

    reference, scaled = lane(loss_scale="none"), lane(loss_scale=mode)
    for trained in (reference, scaled):
        trained.autocast = True
        if recipe != "bf16":
            assert convert(trained.model, recipe).recipes
    for step in range(1, 4):
        a = reference.step(*batch(step), step=step, lr=1e-2)
        b = scaled.step(*batch(step), step=step, lr=1e-2)
        assert torch.equal(a.loss, b.loss) and torch.equal(a.gradient_norm, b.gradient_norm)
    assert same(snapshot(reference), snapshot(scaled))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_the_scale_against_a_plain_model(overflows: list[bool], window: int) -> None:
    scale = LossScale(window=window)
    expected, quiet = 256.0, 0
    for overflow in overflows:
        scale._update(torch.tensor(overflow))
        quiet = 0 if overflow else quiet + 1
        expected *= 0.5 if overflow else 1.0
        if quiet == window:
            expected, quiet = 2 * expected, 0
        assert float(scale.scale) == expected
    assert int(scale.overflows) == sum(overflows)


def test_overflows_without_end_are_a_broken_run() -> None:
    trained = lane()
    for step in range(1, GIVE_UP + 2):
        if step == GIVE_UP:
            trained.check("unused")
        overflow_in(trained)
        trained.step(*batch(), step=step, lr=1e-2)
    with pytest.raises(RunError, match=rf"no longer finite at step {GIVE_UP}\. X"):
        trained.check("X")


@pytest.mark.parametrize("mode", ["none", "constant"])
def test_only_dynamic_skips(mode: str) -> None:
    trained = lane(loss_scale=mode)
    overflow_in(trained)
    trained.step(*batch(), step=1, lr=1e-2)
    with pytest.raises(RunError, match="step 1"):
        trained.check("")


def test_an_optimizer_that_is_not_fused_skips_too() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scale = torch.optim.SGD([weight], lr=0.5, fused=False), LossScale(start=4.0)
    for factor, expected in ((float("inf"), 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        scale.scaled((weight * factor).sum()).backward()
        scale.unscale([weight])
        scale.step(optimizer)
        assert weight.tolist() == [expected, expected]
    assert float(scale.scale) == 2.0


def test_the_state_is_saved_and_restored() -> None:
    saved, fresh = lane(window=3), lane(window=3)
    for step in (1, 2):
        saved.step(*batch(step), step=step, lr=1e-2)
    restore_tensors(fresh, copy.deepcopy(state_tensors(saved)), Path("here"))
    for trained in (saved, fresh):
        trained.step(*batch(3), step=3, lr=1e-2)
    assert same(state_tensors(saved), state_tensors(fresh))
    assert float(fresh.loss_scale.scale) == 512.0


def test_a_run_logs_its_scale_and_resumes_bit_for_bit(configure: Configure, tmp_path: Path) -> None:
    optimizer = {"loss_scale": "dynamic", "loss_scale_window": 2}
    every = {"steps": 5, "log_every": 1, "checkpoint_every": 1, "keep": 9, "baseline": False}
    straight = configure(run={**every, "out": str(tmp_path / "a")}, optimizer=optimizer)
    summary = train(straight)
    assert summary["skipped_steps"] == {"fp8": 0}
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scales = [line["loss_scale_fp8"] for line in lines if "loss_scale_fp8" in line]
    assert scales == [256.0, 512.0, 512.0, 1024.0, 1024.0]
    last = tmp_path / "a/checkpoints/step-000005/fp8.safetensors"
    ended = load_file(last)
    for path in checkpoint.find(tmp_path / "a/checkpoints")[3:]:
        shutil.rmtree(path)
    train(straight, resume=True)
    assert same(ended, load_file(last))
    assert float(ended["loss_scale.scale"]) == 1024.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "dynamc"}, "'dynamc' is none of"),
        ({"start": 100.0}, "100.0 is not a power of two"),
        ({"start": 0.0}, "not a power of two"),
        ({"window": 0}, "window of 0"),
    ],
)
def test_impossible_settings(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossScale(**arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_on_a_gpu_a_step_skips_without_waiting_for_the_host() -> None:
    config = OptimizerConfig(loss_scale="dynamic", clip_per_group={"*.wq": 1.0}, lr_factors={"*.wk": 0.5})
    trained = TrainState("bf16", build(CONFIG, seed=0).cuda(), config)
    inputs, targets = (part.cuda() for part in batch())
    trained.step(inputs, targets, step=1, lr=1e-2)
    before = snapshot(trained)
    weight, row = trained.parameters["layers.0.attention.wo.weight"], torch.tensor([3], device="cuda")
    handle = weight.register_hook(lambda grad: grad.index_fill(0, row, float("inf")))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained.step(inputs, targets, step=2, lr=1e-2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    handle.remove()
    assert same(snapshot(trained), before)
    assert (float(trained.loss_scale.scale), int(trained.loss_scale.overflows)) == (128.0, 1)
