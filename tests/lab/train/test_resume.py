from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reporters import Listener, interrupt

from octavo._util import config_reader
from octavo.errors import CheckpointError
from octavo.lab.guard import Alarm, GuardEvent
from octavo.lab.guard.rules import AlarmRules
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.events import Event, Logged, Started
from octavo.lab.train.files import read_metrics
from octavo.lab.train.guarding import GuardedRun
from octavo.lab.train.resume import FREE, check_same_run
from octavo.lab.train.train_state import TrainState


def tiny(**run: object) -> RunConfig:
    return assemble(load_preset("tiny", cuda=False), ("test", {"run": run}))


def test_how_a_run_is_watched_and_kept_may_change() -> None:
    saved = config_reader.to_dict(tiny())
    check_same_run(
        saved,
        tiny(out="elsewhere", keep=9, log_every=1, eval_every=2, checkpoint_every=1, steps=99),
        Path("c"),
    )
    check_same_run(saved, tiny(tracker="mlflow", tracker_tensors=10, price_per_kwh=0.3, telemetry_every=2), Path("c"))
    for key in ("seed", "memory", "weights"):  # of the same section, and not free
        changed = {"seed": 7, "memory": "low", "weights": "bf16"}[key]
        with pytest.raises(CheckpointError, match=rf"run\.{key} is .* there and {changed!r} here"):
            check_same_run(saved, tiny(out="elsewhere", **{key: changed}), Path("c"))


def test_what_decides_the_numbers_may_not() -> None:
    saved = config_reader.to_dict(tiny())
    with pytest.raises(
        CheckpointError, match=r"c: this is the checkpoint of another run: run.batch is 4 there and 8 here"
    ):
        check_same_run(saved, tiny(batch=8), Path("c"))


def test_a_checkpoint_without_a_recipe_is_of_the_default_of_its_time() -> None:
    saved = config_reader.to_dict(tiny())
    del saved["run"]["recipe"]
    check_same_run(saved, tiny(recipe="folded"), Path("c"))
    with pytest.raises(CheckpointError, match=r"run\.recipe is 'folded' there and 'rotated' here"):
        check_same_run(saved, tiny(), Path("c"))


def test_a_key_that_this_version_does_not_know() -> None:
    saved = config_reader.to_dict(tiny())
    saved["run"]["magic"] = 1
    with pytest.raises(CheckpointError, match=r"run.magic"):
        check_same_run(saved, tiny(), Path("c"))


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *(("run", "last_share"), ("optimizer", "decay"), ("guard", "layer_shift"), ("lora", "layers")),
        *(("model", "qk_norm"), ("model", "rope_scaling"), ("model", "kv_heads")),
    ],
)
def test_a_key_that_the_checkpoint_does_not_know_had_its_default(section: str, key: str) -> None:
    saved = config_reader.to_dict(tiny())
    default = saved[section].pop(key)
    check_same_run(saved, tiny(), Path("c"))
    saved[section][key] = "another"
    if f"{section}.{key}" in FREE:
        check_same_run(saved, tiny(), Path("c"))
        return
    with pytest.raises(CheckpointError, match=re.escape(f"{section}.{key} is 'another' there and {default!r} here")):
        check_same_run(saved, tiny(), Path("c"))


@pytest.mark.parametrize("table", ["lr_factors", "clip_per_group"])
def test_a_run_with_a_table_of_patterns_resumes_with_the_same_table(table: str) -> None:
    def patterns(given: dict[str, float]) -> RunConfig:
        return assemble(load_preset("tiny", cuda=False), ("test", {"optimizer": {table: given}}))

    saved = config_reader.to_dict(patterns({"*.wq": 0.5}))
    check_same_run(saved, patterns({"*.wq": 0.5}), Path("c"))
    for other in ({}, {"*.wq": 0.25}, {"*.wq": 0.5, "*.wk": 0.5}):
        with pytest.raises(CheckpointError, match=rf"optimizer\.{table} is {{'\*\.wq': 0\.5}} there and {{"):
            check_same_run(saved, patterns(other), Path("c"))


def test_every_free_key_exists() -> None:
    settings = config_reader.to_dict(tiny())
    assert {f"{section}.{key}" for section, keys in settings.items() for key in keys} >= FREE


class Killed(Listener):
    """Kills a run in the retry after a rollback, when it logs a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def report(self, event: Event) -> None:
        super().report(event)
        if isinstance(event, Logged) and event.step == self._at and self.of(GuardEvent):
            interrupt()


@pytest.mark.parametrize(
    ("keep", "killed_at", "left"),
    [(2, 7, [5]), (1, 7, [10]), (1, 8, [7])],
    ids=["from before", "none from before yet", "none from before"],
)
def test_a_run_that_was_rolled_back_resumes_without_the_fault(
    configure: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: int,
    killed_at: int,
    left: list[int],
) -> None:
    """Weights are struck in step 9 and saved after step 10; an alarm of step 12 rolls the run back to step 6."""

    def make(name: str) -> RunConfig:
        run = {"steps": 14, "checkpoint_every": 5, "log_every": 1, "baseline": False, "keep": keep}
        return configure(
            run={**run, "out": str(tmp_path / name)}, guard={"mode": "act", "snapshot_every": 3, "shadow_every": 0}
        )

    clean, check, whole = train(make("clean")), AlarmRules.check, TrainState.step
    struck: list[int] = []

    def alarmed(self: AlarmRules, seen: Any) -> Alarm | None:
        if seen.step == 12 and 12 not in struck:
            struck.append(12)
            return Alarm(12, "loss drift", "", "", 9.0, 1.0)
        return None if len(struck) < 2 else check(self, seen)  # no rule finds the fault earlier

    def strike(self: TrainState, *batch: Any, step: int, **more: Any) -> Any:
        result = whole(self, *batch, step=step, **more)
        if step == 9 and 9 not in struck:
            struck.append(9)
            next(iter(self.parameters.values())).data[:64].add_(0.05)
        return result

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(AlarmRules, "check", alarmed)
        patched.setattr(TrainState, "step", strike)
        train(make("struck"), reporters=[killed := Killed(killed_at)])
    assert [event.back_to for event in killed.of(GuardEvent)] == [6]
    found = [path.name for path in checkpoint.find(tmp_path / "struck/checkpoints")]
    assert found == [checkpoint.name_of(step) for step in left]
    summary = train(make("struck"), reporters=[resumed := Listener()], resume=True)
    assert [event.first_step for event in resumed.of(Started)] == left
    if left == [10]:  # better than none; the line of step 7 was of the retry
        steps = [line["step"] for line in read_metrics(tmp_path / "struck/metrics.jsonl") if "lr" in line]
        assert steps == [*range(1, 7), *range(11, 15)]
        with RunReader(tmp_path / "struck") as run:
            said = [event.text for event in run.events() if event.rule == "rollback"]
            assert run.scalars()["loss_fp8"].first.tolist() == steps
        assert len(said) == 1 and "from that of step 10" in said[0] and "lacks steps 7 to 10" in said[0]
        return
    assert summary["heldout_loss_fp8"] == clean["heldout_loss_fp8"]
    steps = [line["step"] for line in read_metrics(tmp_path / "struck/metrics.jsonl") if "lr" in line]
    assert steps == [*range(1, 15)]


def test_a_run_that_went_on_from_an_abandoned_checkpoint_is_not_said_to_have_ended_there(
    configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """It resumed from step 4 after a rollback to step 2, saved step 8, and lost that checkpoint."""
    out = tmp_path / "run"
    config = configure(run={"steps": 8, "checkpoint_every": 4, "log_every": 1, "baseline": False, "out": str(out)})
    train(config)
    early, late = checkpoint.find(out / "checkpoints")
    shutil.rmtree(late)
    (early / "rolled-back.json").write_text('{"step": 2}\n', encoding="utf-8")
    train(config, reporters=[resumed := Listener()], resume=True)
    (said,) = (event.text for event in resumed.of(GuardEvent) if event.rule == "rollback")
    assert "ended" not in said
    assert "no checkpoint of its retry" in said and "lacks steps 3 to 4" in said


def fp8_layers(out: Path) -> set[str]:
    layers = json.loads((out / "plan.json").read_text(encoding="utf-8"))["layers"]
    return {layer["name"] for layer in layers if "fp8" in layer["precision"]}


def test_the_plan_of_a_run_stays_when_it_resumes(configure: Callable[..., RunConfig]) -> None:
    """With other parts of a batch, and on a device on which other layers would be in FP8."""
    config = configure(run={"steps": 2, "baseline": False})
    train(config)
    plan = config.run.out / "plan.json"
    began, layers = json.loads(plan.read_text(encoding="utf-8")), fp8_layers(config.run.out)
    train(config.with_run(steps=3, accumulate=2), resume=True)
    again = json.loads(plan.read_text(encoding="utf-8"))
    assert again["tokens"] == began["tokens"] and again["layers"] == began["layers"]

    gone = sorted(layers)[0]
    for layer in again["layers"]:
        layer["precision"] = "bf16" if layer["name"] == gone else layer["precision"]
    plan.write_text(json.dumps(again), encoding="utf-8")
    train(config.with_run(steps=4), resume=True, reporters=[listener := Listener()])
    assert fp8_layers(config.run.out) == layers - {gone}
    assert [event.rule for event in listener.of(GuardEvent) if "began with" in event.text] == ["plan"]
    train(config.with_run(steps=5), overwrite=True)
    assert fp8_layers(config.run.out) == layers  # a new run has a new plan


def test_a_layer_that_cannot_be_in_fp8_here_is_named(configure: Callable[..., RunConfig]) -> None:
    config = configure(run={"steps": 2, "baseline": False})
    train(config)
    plan = config.run.out / "plan.json"
    began = json.loads(plan.read_text(encoding="utf-8"))
    began["layers"].append({"name": "layers.9.attention.wq", "precision": "fp8"})
    plan.write_text(json.dumps(began), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"plan\.json: layer .layers\.9\.attention\.wq. .*: the model has no"):
        train(config.with_run(steps=3), resume=True)


def test_snapshots_of_a_resumed_run_are_of_the_same_steps_and_it_says_what_may_differ(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    snapshot = GuardedRun.snapshot
    monkeypatch.setattr(GuardedRun, "snapshot", lambda run: taken.append(run.done) or snapshot(run))
    run = {"steps": 11, "baseline": False, "checkpoint_every": 5, "keep": 9}
    config = configure(run=run, guard={"mode": "act", "snapshot_every": 3})
    train(config)
    assert taken == [0, 3, 6, 9]
    taken.clear()
    shutil.rmtree(config.run.out / "checkpoints" / "step-000011")
    shutil.rmtree(config.run.out / "checkpoints" / "step-000010")
    train(config, resume=True, reporters=[listener := Listener()])
    assert taken == [5, 6, 9]
    assert ["new snapshot after step 5" in event.text for event in listener.of(GuardEvent)] == [True]
