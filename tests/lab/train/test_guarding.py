"""Guardrails over a training run: rollbacks are exact in both models, the files and the store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reporters import Listener

import octavo
from octavo import recipes
from octavo.errors import ConfigError, RunError
from octavo.lab.guard import Alarm, GuardEvent
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import RunConfig
from octavo.lab.train.events import TensorsMeasured
from octavo.lab.train.files import read_metrics
from octavo.lab.train.parallel import ranks_of
from octavo.lab.train.run import Trainer, train
from octavo.lab.train.setup import set_up
from octavo_bench.fault_cases import Fault
from octavo_bench.faults import Struck

Configure = Callable[..., RunConfig]
STEPS, EVERY, AT = 12, 4, 9
"""Steps of a run and between its snapshots, and the step that is struck."""
LAST = "rowwise_bf16_fprop"


def backs(keeper: Listener) -> list[int]:
    """Return the steps that the run was rolled back to."""
    return [event.back_to for event in keeper.of(GuardEvent) if event.back_to is not None]


def guarded(configure: Configure, out: str, **sections: dict[str, Any]) -> RunConfig:
    run = {"out": out, "steps": STEPS, "log_every": 1, "baseline": False, **sections.pop("run", {})}
    guard = {"mode": "act", "snapshot_every": EVERY, "shadow_every": 0, "patience": 1000, **sections.pop("guard", {})}
    return configure(run=run, guard=guard, **sections)


def carry_out(config: RunConfig, strike: Callable[[Struck], None] | None = None) -> tuple[dict[str, Any], Listener]:
    """Train, struck once before step `AT`."""
    keeper = Listener()
    with ranks_of(config) as ranks:
        run = Struck(set_up(config, ranks), [keeper])
        if strike is not None:
            run.prepare(Fault("", "weights", "sudden", "", strike=lambda run, _: strike(run), at=(0,)), AT)
        return run.run(), keeper


def test_a_check_waits_for_its_own_step_alone(configure, monkeypatch):
    """The step after it is queued already: to wait for that one would leave a GPU idle after every step."""
    with ranks_of(guarded(configure, "lag")) as ranks:
        run = Trainer(set_up(guarded(configure, "lag"), ranks), [])
        for step in (1, 2, 3):
            run.state._measured(step, np.full((1, 1), step))
        monkeypatch.setattr(run.state.telemetry, "wait", lambda: pytest.fail("all queued steps were waited for"))
        for step in (1, 2):
            assert run.state.telemetry_at(step) == step
        assert [*run.state._values] == [3]


def test_steps_in_bf16_or_for_histograms_alone_are_not_checked(configure: Configure, tmp_path: Any) -> None:
    """Values of some tensors only, or of none, would break the history of the others."""
    run = {"telemetry_every": 2, "histograms_every": 3, "bf16_first_steps": 5, "steps": 12}
    trainer = Trainer(set_up(guarded(configure, str(tmp_path / "run"), run=run)), [keeper := Listener()])
    checked: list[int] = []
    trainer.guard._rules.check = lambda seen: checked.extend([seen.step] if seen.values is not None else [])  # type: ignore[method-assign,func-returns-value,assignment]
    trainer.run()
    assert checked == [6, 8, 10, 12]
    assert [event.step for event in keeper.of(TensorsMeasured)] == [2, 3, 4, 6, 8, 9, 10, 12]


@pytest.mark.parametrize("mode", ["off", "watch"])
def test_telemetry_is_kept_only_until_its_step_is_checked(configure: Configure, tmp_path: Any, mode: str) -> None:
    """Without guardrails nothing checks a step: a long run would keep the telemetry of all its steps in memory."""
    run = {"telemetry_every": 1, "steps": 4}
    trainer = Trainer(set_up(guarded(configure, str(tmp_path / "run"), run=run, guard={"mode": mode})), [])
    trainer.run()
    assert not trainer.state._values


@pytest.fixture(scope="module")
def untouched() -> dict[str, Any]:
    """The summary of a run that nothing happens to, once a test has trained it."""
    return {}


def heldout(untouched: dict[str, Any], configure: Configure, tmp_path: Any) -> float:
    if not untouched:
        untouched.update(carry_out(guarded(configure, str(tmp_path / "untouched")))[0])
    return float(untouched["heldout_loss_fp8"])


def nan_in_a_norm(run: Struck) -> None:
    run.weight("norm").fill_(torch.nan)


def row_times_1000(run: Struck) -> None:
    run.weight("layers.0.attention.wo")[1] *= 1000


SETTINGS = {
    "stored scales": {"run": {"recipe": "delayed", "baseline": True}},
    "master, states, loss scale, and scales begin": {
        "run": {
            "weights": "bf16",
            "recipe": "tensorwise",
            "last_share": 0.5,
            "last_recipe": "delayed",
            "baseline": True,
        },
        "optimizer": {"states": "fp8", "loss_scale": "dynamic"},
    },
    "all fp8": {"run": {"weights": "fp8"}, "optimizer": {"states": "fp8-min", "gradients": "fp8"}},
    "muon": {"optimizer": {"name": "muon"}, "run": {"accumulate": 2}},
    "last recipe": {"run": {"last_share": 0.4}},  # it goes back from the last recipe to its own
    "scales end": {"run": {"recipe": "delayed", "last_share": 0.4}},
    "moe": {
        "model": {"architecture": "moe"},
        "run": {"recipe": "delayed"},
        "guard": {"shadow_every": 2},
    },
    "plateau": {
        "optimizer": {"lr_schedule": "plateau", "patience": 1, "lr": 1e-9, "warmup": 0.0},
        "run": {"eval_every": 3},
    },
}
COVERED = ("stored scales", "last recipe", "scales end")  # by "moe" and the case in which scales begin


@pytest.mark.parametrize(
    "settings",
    [pytest.param(SETTINGS[name], id=name, marks=pytest.mark.slow if name in COVERED else ()) for name in SETTINGS],
)
def test_a_fault_that_does_not_come_back_leaves_no_trace(configure: Configure, tmp_path: Any, settings: Any) -> None:
    plain, _ = carry_out(guarded(configure, str(tmp_path / "plain"), **{k: {**v} for k, v in settings.items()}))
    config = guarded(configure, str(tmp_path / "struck"), **{k: {**v} for k, v in settings.items()})
    struck, keeper = carry_out(config, nan_in_a_norm)
    for key in ("heldout_loss_fp8", "heldout_loss_bf16"):
        assert struck[key] == plain[key]
    assert backs(keeper) == [EVERY]
    assert [event.cause for event in keeper.of(GuardEvent) if event.cause] == ["transient"]
    lines = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("plain", "struck")]
    for key in ("loss_fp8", "lr"):
        assert [line.get(key) for line in lines[0]] == [line.get(key) for line in lines[1]]
    steps = [line["step"] for line in read_metrics(tmp_path / "struck" / "metrics.jsonl") if "lr" in line]
    assert steps == [*range(1, STEPS + 1)]


def test_steps_that_overflow_are_skipped_and_counted(configure: Configure, tmp_path: Any) -> None:
    loss_scale = {"loss_scale": "dynamic", "loss_scale_start": 2.0**126, "states": "fp8"}
    summary, keeper = carry_out(
        guarded(configure, str(tmp_path / "run"), optimizer=loss_scale, run={"weights": "bf16"})
    )
    assert summary["skipped_steps"]["fp8"] >= 1
    measured = [event.step for event in keeper.of(TensorsMeasured)]
    assert measured == [*range(1, STEPS + 1)]


def test_the_store_forgets_the_steps_and_keeps_the_reason(configure: Configure, tmp_path: Any) -> None:
    carry_out(guarded(configure, str(tmp_path / "run")), row_times_1000)
    run = RunReader(tmp_path / "run")
    assert run.last_step == STEPS
    events = [event for event in run.events() if event.rule == "weight jump"]
    assert [event.step for event in events] == [AT, AT]
    assert events[1].text.startswith("transient: ")
    assert events[1].layer == "layers.0.attention.wo"
    assert len(run.scalar("loss_fp8")) == STEPS


def test_before_the_first_snapshot_is_the_beginning(configure: Configure, tmp_path: Any, untouched: Any) -> None:
    config = guarded(configure, str(tmp_path / "run"), guard={"snapshot_every": 50})
    struck, keeper = carry_out(config, row_times_1000)
    assert backs(keeper)[0] == 0
    assert struck["heldout_loss_fp8"] == heldout(untouched, configure, tmp_path)


def test_a_layer_that_changed_its_recipe_goes_back_with_the_others(configure: Configure, tmp_path: Any) -> None:
    def strike(run: Struck) -> None:
        alarm = Alarm(AT, "saturated", "layers.0.feed_forward.w2", "input", 1.0, 0.5)
        assert run.guard._refinement.up(alarm.layer, alarm)
        assert run.guard._refinement.up(alarm.layer, alarm)
        row_times_1000(run)

    config = guarded(configure, str(tmp_path / "run"), run={"recipe": "delayed", "baseline": True})
    summary, keeper = carry_out(config, strike)
    causes = [event.cause for event in keeper.of(GuardEvent) if event.cause]
    assert causes == ["precision", "precision", "transient"]
    plan = RunReader(tmp_path / "run").plan
    assert {row["name"]: row["recipe"] for row in plan["layers"]}["layers.0.feed_forward.w2"] == "folded"
    assert summary["heldout_loss_fp8"] == pytest.approx(summary["heldout_loss_bf16"], rel=0.01)


@pytest.mark.parametrize("layer", ["layers.0.feed_forward.w2", "*"])
def test_layers_of_a_run_with_static_scales_take_another_recipe(
    configure: Configure, tmp_path: Any, layer: str
) -> None:
    carry_out(guarded(configure, str(tmp_path / "delayed"), run={"recipe": "delayed", "steps": 2}))
    scales = tmp_path / "delayed" / "scales.json"

    def strike(run: Struck) -> None:
        alarm = Alarm(AT, "flushed", layer, "input", 1.0, 0.5)
        assert run.guard._refinement.up(alarm.layer, alarm)
        assert (octavo.scales(run.setup.states[0].model) is None) == (layer == "*")

    static = guarded(configure, str(tmp_path / "run"), run={"recipe": "static", "scales": str(scales)})
    _, keeper = carry_out(static, strike)
    plan = RunReader(tmp_path / "run").plan
    assert {row["name"]: row["recipe"] for row in plan["layers"]}["layers.0.feed_forward.w2"] == "folded"
    assert [event.step for event in keeper.of(TensorsMeasured)][-1] == STEPS


def test_a_layer_that_left_fp8_stays_in_bf16_to_the_end(configure: Configure, tmp_path: Any) -> None:
    def strike(run: Struck) -> None:
        alarm = Alarm(AT, "saturated", "layers.0.feed_forward.w2", "input", 1.0, 0.5)
        while run.guard._refinement.up(alarm.layer, alarm):
            pass

    run = {"recipe": "tensorwise", "last_share": 0.2, "checkpoint_every": STEPS - 1}
    config = guarded(configure, str(tmp_path / "run"), run=run)
    carry_out(config, strike)
    recipe_of = {row["name"]: row["recipe"] for row in RunReader(tmp_path / "run").plan["layers"]}
    assert recipe_of["layers.0.feed_forward.w2"] == "bf16" and recipe_of["layers.0.feed_forward.w1"] == LAST
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000012")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert train(config, resume=True)["heldout_loss_fp8"] == summary["heldout_loss_fp8"]
    assert {row["name"]: row["recipe"] for row in RunReader(tmp_path / "run").plan["layers"]} == recipe_of


def test_steps_that_are_checked_late_may_be_followed_by_another_recipe(configure: Configure, tmp_path: Any) -> None:
    """As on a GPU, where a step is checked once the next one is queued."""
    config = guarded(configure, str(tmp_path / "run"), run={"last_share": 0.3, "recipe": "tensorwise"})
    trainer = Trainer(set_up(config), [keeper := Listener()])
    trainer.state.lag = 1

    def refine() -> bool:
        return trainer.guard._refinement.up("layers.0.feed_forward.w2", Alarm(5, "saturated", "", "", 1.0, 0.5))

    before = trainer.guard.before_step

    def refine_before() -> bool:
        rolled_back = before()
        if trainer.state.done == 5:
            for _ in range(3):
                refine()
        return rolled_back

    trainer.guard.before_step = refine_before  # type: ignore[method-assign]
    trainer.run()
    assert [event.step for event in keeper.of(TensorsMeasured)] == [*range(1, STEPS + 1)]
    assert len({len(event.values) for event in keeper.of(TensorsMeasured)}) == 3


def test_a_layer_that_cannot_be_refined_is_measured_on(
    configure: Configure, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("not today")

    def strike(run: Struck) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("octavo.lab.train.guarding.convert_as", refused)
            assert run.state.change_recipe(recipes.load("block")) == "not today"

    _, keeper = carry_out(guarded(configure, str(tmp_path / "run")), strike)
    assert keeper.of(TensorsMeasured)[-1].step == STEPS
    assert all(np.isfinite(event.values[:, 0]).all() for event in keeper.of(TensorsMeasured))


def test_a_layer_whose_weight_is_stored_in_fp8_keeps_its_recipe(configure: Configure, tmp_path: Any) -> None:
    config = guarded(configure, str(tmp_path / "run"), run={"weights": "fp8"}, optimizer={"states": "fp8"})
    trainer = Trainer(set_up(config), [keeper := Listener()])
    layer = "layers.0.feed_forward.w2"
    assert not trainer.guard._refinement.up(layer, Alarm(1, "saturated", layer, "input", 1.0, 0.5))
    (event,) = keeper.of(GuardEvent)
    assert event.text.endswith("cannot leave folded: its weight is stored in FP8, in the format of its recipe")
    assert trainer.guard.state_dict()["ladder"] == {}


def test_watching_notes_and_a_nan_still_stops_the_run(configure: Configure, tmp_path: Any) -> None:
    config = guarded(configure, str(tmp_path / "run"), guard={"mode": "watch"})
    keeper = Listener()
    with ranks_of(config) as ranks, pytest.raises(RunError, match="no longer finite"):
        run = Struck(set_up(config, ranks), [keeper])
        run.prepare(Fault("", "weights", "sudden", "", strike=lambda run, _: nan_in_a_norm(run), at=(0,)), AT)
        run.run()
    assert keeper.of(GuardEvent)[0].rule == "nonfinite"
    assert backs(keeper) == []


def test_a_nan_in_the_baseline_ends_it_and_not_the_run(configure: Configure, tmp_path: Any, untouched: Any) -> None:
    def strike(run: Struck) -> None:
        run.setup.states[1].model.get_parameter("norm.weight").data.fill_(torch.nan)

    watched = {"checkpoint_every": STEPS - 1, "baseline": True}
    config = guarded(configure, str(tmp_path / "run"), run=watched)
    summary, keeper = carry_out(config, strike)
    (event,) = [event for event in keeper.of(GuardEvent) if event.rule == "baseline"]
    assert event.step == AT and "goes on without its BF16 baseline" in event.text
    assert summary["heldout_loss_fp8"] > 0 and summary["heldout_loss_bf16"] is None
    assert summary["heldout_loss_fp8"] == heldout(untouched, configure, tmp_path)
    longer = guarded(configure, str(tmp_path / "run"), run={**watched, "steps": STEPS + 2})
    assert train(longer, resume=True)["heldout_loss_bf16"] is None


def test_batches_passed_over_stay_so_after_a_resume(configure: Configure, tmp_path: Any) -> None:
    config = guarded(configure, str(tmp_path / "run"), run={"checkpoint_every": 6})
    batch = config.run.batch

    def skip(run: Struck) -> None:
        run.guard._skipped.append(run.state.position + 2 * batch)

    carry_out(config, skip)
    with ranks_of(config) as ranks:
        run = Struck(set_up(config, ranks), [])
        run.resume()
        assert run.guard._skipped == [(AT + 1) * batch]
        run.state._seek((AT + 1) * batch)
        run.guard.before_step()
        assert run.state.position == (AT + 2) * batch


def test_weights_that_are_not_those_saved_are_named_at_resume(configure: Configure, tmp_path: Any) -> None:
    config = guarded(configure, str(tmp_path / "run"), run={"checkpoint_every": 6})
    carry_out(config)
    keeper = Listener()
    with ranks_of(config) as ranks:
        run = Struck(set_up(config, ranks), [keeper])
        run.resume()
        row_times_1000(run)
        run.guard.before_step()
    assert [event.layer for event in keeper.of(GuardEvent)] == ["layers.0.attention.wo"]


def test_a_resumed_run_goes_on_with_the_recipes_that_layers_had(configure: Configure, tmp_path: Any) -> None:
    sections: dict[str, Any] = {
        "model": {"layers": 2},  # so many that some have not climbed before the run is stopped
        "run": {"recipe": "tensorwise", "checkpoint_every": 6, "keep": 9},
        "guard": {"flushed_gradient": 1e-9, "flushed": 1e-9, "patience": 1, "quiet": 1000},
    }
    whole = train(guarded(configure, str(tmp_path / "whole"), **{k: {**v} for k, v in sections.items()}))

    def stop(_: Struck) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(guarded(configure, str(tmp_path / "parts"), **{k: {**v} for k, v in sections.items()}), stop)
    keeper = Listener()
    config = guarded(configure, str(tmp_path / "parts"), **sections)
    resumed = train(config, reporters=[keeper], resume=True)
    moved = [event for event in keeper.of(GuardEvent) if event.cause == "precision"]
    assert moved  # the limits are impossible, so that layers climb all the time
    steps = {"whole": [], "parts": []}  # type: ignore[var-annotated]
    for name in steps:
        steps[name] = [(e.step, e.layer, e.action) for e in RunReader(tmp_path / name).events() if e.rule == "flushed"]
    assert steps["whole"] == steps["parts"]
    for key in ("heldout_loss_fp8", "heldout_loss_bf16"):
        assert resumed[key] == whole[key]


def test_a_probe_counts_no_tokens_of_experts(configure: Configure) -> None:
    trainer = Trainer(set_up(guarded(configure, "probed", model={"architecture": "moe"})), [])
    before = [(name, buffer.clone()) for name, buffer in trainer.setup.states[0].model.named_buffers()]
    trainer.state.probe()
    trainer.state.locate()
    for (name, old), new in zip(before, trainer.setup.states[0].model.buffers(), strict=True):
        assert torch.equal(new, old), name


def test_layers_go_back_to_the_rungs_that_they_had_before_the_last_recipe(configure: Configure, tmp_path: Any) -> None:
    """A rollback to before the switch of recipes makes the same steps again, with the same refinements."""
    layer = "layers.0.feed_forward.w2"

    def recipes_of(trainer: Trainer) -> dict[str, str]:
        assert trainer.setup.plan is not None
        return {row.name: row.recipe for row in trainer.setup.plan.layers if row.name.startswith("layers.0")}

    run = {"recipe": "delayed", "last_share": 0.4}
    (tmp_path / "run").mkdir()
    trainer = Trainer(set_up(guarded(configure, str(tmp_path / "run"), run=run)), [])
    for _ in range(6):
        trainer.loop.step()
    assert trainer.guard._refinement.up(layer, Alarm(6, "flushed", layer, "input", 1.0, 0.5))
    refined, snapshot = recipes_of(trainer), trainer.state.snapshot()
    assert refined[layer] == "folded"
    state = trainer.guard.state_dict()["ladder"]
    while trainer.state.recipe == "delayed":
        trainer.loop.step()
    assert recipes_of(trainer) != refined
    trainer.state.restore(snapshot)
    assert recipes_of(trainer) == refined
    assert trainer.guard.state_dict()["ladder"] == state
    for name, stored in octavo.scales(trainer.setup.states[0].model).state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(stored, snapshot.scales[0][name]), name
    while trainer.state.recipe == "delayed":
        trainer.loop.step()
    assert set(recipes_of(trainer).values()) == {LAST}
