from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.distributed import reduction
from octavo.errors import ConfigError, RunError
from octavo.lab.models import ModelConfig, build
from octavo.lab.train.config import OptimizerConfig
from octavo.lab.train.train_state import TrainState
from octavo.optim import AdamW

CONFIG = ModelConfig(vocab=32, dim=16, layers=1, heads=2, ffn=32, sequence=8)


def lane(**settings: Any) -> TrainState:
    return TrainState("bf16", build(CONFIG, seed=0), OptimizerConfig(**settings), autocast=False)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def test_accumulated_parts_equal_the_whole_batch() -> None:
    whole, parts = lane(eps=1e-3), lane(eps=1e-3)
    for step in range(3):
        a = whole.step(*batch(step), step=step, lr=1e-2)
        b = parts.step(*batch(step), step=step, lr=1e-2, accumulate=4)
        # The same sum in another order: FP32 rounds each of some 1e2 to 1e3 additions at 6e-8.
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(a.gradient_norm, b.gradient_norm, rtol=1e-5, atol=0)
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(parameter, parts.parameters[name], rtol=1e-4, atol=1e-6, msg=name)


def gradient_norm(model: nn.Module) -> float:
    model(*batch()).backward()
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


def test_the_gradient_norm_is_global_and_measured_before_clipping() -> None:
    clipped = lane(clip=1e-3)
    expected = gradient_norm(copy.deepcopy(clipped.model))
    assert float(clipped.step(*batch(), step=1, lr=0.0).gradient_norm) == pytest.approx(expected, rel=1e-5)


def test_clipping_scales_the_gradient_that_the_update_sees() -> None:
    clipped, free = lane(clip=1e-3), lane(clip=0.0)
    norm = float(free.step(*batch(), step=1, lr=0.0).gradient_norm)
    clipped.step(*batch(), step=1, lr=0.0)
    for name, parameter in clipped.parameters.items():
        seen = clipped.optimizer.state[parameter]["exp_avg"]
        unscaled = free.optimizer.state[free.parameters[name]]["exp_avg"]
        torch.testing.assert_close(seen, unscaled * (1e-3 / norm), rtol=1e-4, atol=1e-12)


def test_decay_is_decoupled_and_only_on_matrices() -> None:
    trained = lane(weight_decay=0.5, eps=1e30)  # so large an eps leaves nothing of the gradient's step
    before = {name: p.detach().clone() for name, p in trained.parameters.items()}
    trained.step(*batch(), step=1, lr=0.1)
    for name, parameter in trained.parameters.items():
        factor = 1 - 0.1 * 0.5 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter, before[name] * factor, msg=name)


def test_the_learning_rate_is_that_of_the_step() -> None:
    trained = lane(lr=1.0, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in trained.parameters.items()}
    trained.step(*batch(), step=1, lr=0.0)
    assert all(torch.equal(p, before[name]) for name, p in trained.parameters.items())


def test_frozen_parameters_stay_as_they_are() -> None:
    model = build(CONFIG, seed=0)
    frozen = model.get_parameter("layers.0.feed_forward.w1.weight").requires_grad_(False)
    before = frozen.detach().clone()
    TrainState("bf16", model, OptimizerConfig(), autocast=False).step(*batch(), step=1, lr=1e-2)
    assert torch.equal(frozen, before)


def test_the_first_broken_step_is_named_with_the_way_back() -> None:
    trained = lane()
    trained.step(*batch(), step=1, lr=1e-3)
    trained.check("unused")
    with torch.no_grad():
        trained.parameters["layers.0.feed_forward.w1.weight"][0, 0] = float("nan")
    for step in (2, 3):
        trained.step(*batch(), step=step, lr=1e-3)
    with pytest.raises(RunError, match=r"BF16 model is no longer finite at step 2\. The last good checkpoint is X\."):
        trained.check("The last good checkpoint is X.")


def test_groups_are_clipped_before_the_whole() -> None:
    limits = {"layers.0.attention.*": 1e-3, "*.w2": 1e-4, "norm": 1e3}
    clipped, free = lane(clip_per_group=limits, clip=2e-3), lane(clip=0.0)
    norm = free.step(*batch(), step=1, lr=0.0).gradient_norm
    assert torch.equal(clipped.step(*batch(), step=1, lr=0.0).gradient_norm, norm)  # before any clipping

    # The first moment after one step is 0.1 times the gradient that the update saw.
    expected = {name: free.optimizer.state[p]["exp_avg"].double() * 10 for name, p in free.parameters.items()}
    for part, limit in (("attention.", 1e-3), ("w2.", 1e-4)):
        names = [name for name in expected if part in name]
        length = sum(float(expected[name].square().sum()) for name in names) ** 0.5
        assert length > limit
        for name in names:
            expected[name] *= limit / length
    length = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    assert length > 2e-3
    for name, parameter in clipped.parameters.items():
        seen = clipped.optimizer.state[parameter]["exp_avg"].double() * 10
        torch.testing.assert_close(seen, expected[name] * 2e-3 / length, rtol=1e-3, atol=1e-10, msg=name)


def test_a_factor_on_the_learning_rate_is_that_of_the_named_layers_alone() -> None:
    plain, factored = lane(), lane(lr_factors={"*.wq": 0.5, "norm": 0.0})
    before = {name: p.detach().clone() for name, p in plain.parameters.items()}
    for trained in (plain, factored):
        trained.step(*batch(), step=1, lr=1e-2)
    for name, start in before.items():
        factor = 0.5 if ".wq." in name else 0.0 if name == "norm.weight" else 1.0
        moved, reference = factored.parameters[name] - start, plain.parameters[name] - start
        torch.testing.assert_close(moved, factor * reference, rtol=1e-4, atol=1e-7, msg=name)


def test_unmatched_patterns_are_named_with_their_setting() -> None:
    for setting in ("lr_factors", "clip_per_group"):
        with pytest.raises(ConfigError, match=rf"optimizer.{setting}: '\*.wk1' matches no.*Did you mean '\*.wk'"):
            lane(**{setting: {"*.wk1": 1.0}})


WIDE = ModelConfig(vocab=128, dim=64, layers=1, heads=2, ffn=128, sequence=8)


def wide(**settings: Any) -> TrainState:
    """A state with matrices of 4096 elements and more, which the tier is for."""
    return TrainState("bf16", build(WIDE, seed=0), OptimizerConfig(**settings), autocast=False)


@pytest.mark.parametrize("name", ["lion", "muon"])
@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_other_rules_learn(name: str, states: str) -> None:
    trained = wide(name=name, states=states)
    losses = [float(trained.step(*batch(step % 2), step=step, lr=1e-3).loss) for step in range(1, 13)]
    assert losses[-1] < losses[0] - 0.2
    rules = [group.get("rule", "lion") for group in trained.optimizer.param_groups]
    assert set(rules) == ({"muon", "adamw"} if name == "muon" else {"lion"})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_in_fp8_are_clipped_by_the_optimizer_and_their_norm_is_measured(accumulate: int) -> None:
    settings: dict[str, Any] = {"states": "fp8", "clip": 1e-2}
    one, plain = wide(gradients="fp8", **settings), wide(**settings)
    for step in range(1, 4):
        a = one.step(*batch(step), step=step, lr=1e-3, accumulate=accumulate)
        b = plain.step(*batch(step), step=step, lr=1e-3, accumulate=accumulate)
        assert float(a.gradient_norm) == pytest.approx(float(b.gradient_norm), rel=0.01)
        assert float(a.loss) == pytest.approx(float(b.loss), rel=0.01)
        assert float(a.gradient_norm) > 1e-2


def test_gradients_in_fp8_that_are_not_finite_are_named() -> None:
    trained = wide(gradients="fp8")
    with torch.no_grad():
        trained.parameters["layers.0.feed_forward.w1.weight"][0, 0] = float("nan")
    trained.step(*batch(), step=1, lr=1e-3)
    with pytest.raises(RunError, match="no longer finite at step 1"):
        trained.check("unused")


@pytest.mark.parametrize("settings", [{"loss_scale": "dynamic"}, {"clip_per_group": {"*": 1.0}}], ids=str)
def test_gradients_in_fp8_go_not_with_what_changes_gradients(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"does not go with optimizer\.loss_scale or optimizer\.clip_per_group"):
        wide(gradients="fp8", **settings)


def test_the_tier_is_that_of_large_matrices_while_norms_embeddings_and_heads_stay_wider() -> None:
    trained = wide(states="fp8")
    trained.step(*batch(), step=1, lr=1e-3)
    found = {name: trained.optimizer.state[p]["exp_avg"].dtype for name, p in trained.parameters.items()}
    assert found["layers.0.attention.wq.weight"] == torch.float8_e4m3fn
    assert found["norm.weight"] == torch.float32
    assert found["lm_head.weight"] == found["tok_embeddings.weight"] == torch.bfloat16
    assert isinstance(trained.optimizer, AdamW)
    report = trained.optimizer.report()
    assert trained.state_bytes() == pytest.approx(report["first"] + report["second"])
    assert report["master"] == 0


def test_settings_and_clipping_reach_the_tiers_as_they_reach_torch() -> None:
    settings: dict[str, Any] = {
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.5,
        "clip": 1e-2,
        "clip_per_group": {"*.w2": 1e-3},
        "lr_factors": {"*.wq": 0.5, "norm": 0.0},
    }
    torch_s, tiered = wide(**settings), wide(**settings, states="exact")
    start = {name: p.detach().clone() for name, p in torch_s.parameters.items()}
    for step in range(3):
        norms = [trained.step(*batch(step), step=step, lr=1e-2).gradient_norm for trained in (torch_s, tiered)]
        torch.testing.assert_close(*norms, rtol=1e-2, atol=0)
    for name, before in start.items():
        expected, seen = (one.parameters[name].detach() - before for one in (torch_s, tiered))
        # BF16 moments: 2 ** -8 of each.
        assert float((expected - seen).norm()) <= 2e-2 * float(expected.norm()), name


def test_an_overflow_is_skipped_by_a_tier_too() -> None:
    trained = wide(states="fp8", loss_scale="dynamic")
    trained.step(*batch(), step=1, lr=1e-3)
    before = copy.deepcopy([(p.detach(), trained.optimizer.state[p]) for p in trained.parameters.values()])
    hook = trained.parameters["norm.weight"].register_hook(lambda gradient: gradient * float("inf"))
    trained.step(*batch(), step=2, lr=1e-3)
    for (weight, state), (name, parameter) in zip(before, trained.parameters.items(), strict=True):
        assert torch.equal(parameter, weight), name
        for key, value in trained.optimizer.state[parameter].items():
            assert torch.equal(value.view(-1).view(torch.uint8), state[key].view(-1).view(torch.uint8)), (name, key)
    assert int(trained.loss_scale.overflows) == 1
    hook.remove()
    trained.step(*batch(), step=3, lr=1e-3)
    assert not torch.equal(trained.parameters["norm.weight"], before[list(trained.parameters).index("norm.weight")][0])
    trained.check("unused")


def test_a_probe_leaves_what_the_reduction_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, scheme = lane(), reduction("fp8-lm")
    learned = {"unit.mu": torch.tensor(2.0), "unit.saturated": torch.tensor(0.0)}
    scheme.load_state_dict(learned)
    watched.reduction, plain = scheme, watched._forward_backward

    def reducing(*args: Any, **options: Any) -> Tensor:  # as the hooks of FSDP2 do while it goes backward
        scheme.load_state_dict({"unit.mu": torch.tensor(1.0), "unit.saturated": torch.tensor(1.0)})
        return plain(*args, **options)

    monkeypatch.setattr(watched, "_forward_backward", reducing)
    watched.probe(*batch())
    assert scheme.state_dict() == learned
